#include "device.cuh"
#include "checks.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

namespace harness {

static const Kernel *&kernels() {
    static const Kernel *first = nullptr;
    return first;
}

Kernel::Kernel(const char *name, size_t bytes, uint32_t threads, void (*body)(const void *))
    : name(name), bytes(bytes), threads(threads), body(body), next(kernels()) {
    kernels() = this;
}

__thread Place place;
__thread Mutant mutant = Mutant::None;

static const Kernel *find(const char *name) {
    const Kernel *kernel = kernels();
    while (kernel && strcmp(kernel->name, name) != 0) {
        kernel = kernel->next;
    }
    return kernel;
}

// Switches stacks: what the calling convention lets a function keep is saved on the stack that is left.
extern "C" void inflight_harness_switch(void **save, void *load);
#if defined(__x86_64__)
asm(R"(
.text
.globl inflight_harness_switch
.type inflight_harness_switch, @function
inflight_harness_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size inflight_harness_switch, .-inflight_harness_switch
.section .note.GNU-stack,"",@progbits
.text
)");
constexpr size_t SAVED_WORDS = 6;
#elif defined(__aarch64__)
// Every pair of registers at its place on the stack: to it with `stp`, from it with `ldp`.
#define EACH_SAVED(MOVE)                                                                                             \
    MOVE " x29, x30, [sp]\n" MOVE " x19, x20, [sp, #16]\n" MOVE " x21, x22, [sp, #32]\n" MOVE                        \
         " x23, x24, [sp, #48]\n" MOVE " x25, x26, [sp, #64]\n" MOVE " x27, x28, [sp, #80]\n" MOVE                   \
         " d8, d9, [sp, #96]\n" MOVE " d10, d11, [sp, #112]\n" MOVE " d12, d13, [sp, #128]\n" MOVE                   \
         " d14, d15, [sp, #144]\n"
asm(R"(
.text
.globl inflight_harness_switch
.type inflight_harness_switch, %function
inflight_harness_switch:
    sub sp, sp, #160
)" EACH_SAVED("stp") R"(
    mov x9, sp
    str x9, [x0]
    mov sp, x1
)" EACH_SAVED("ldp") R"(
    add sp, sp, #160
    ret
.size inflight_harness_switch, .-inflight_harness_switch
.section .note.GNU-stack,"",%progbits
.text
)");
#else
#error "the harness switches stacks on x86-64 and aarch64 only"
#endif

constexpr size_t STACK_BYTES = 64 << 10;

struct Copy {
    uint8_t *to;
    const uint8_t *from;
    bool valid;
};

enum class State { Ready, Waiting, Done };

struct Fiber {
    std::unique_ptr<uint8_t[]> stack;
    void *sp = nullptr;
    State state = State::Done;
    Op op = Op::Barrier;
    const void *in = nullptr;
    void *out = nullptr;
    uint32_t argument = 0;
    bool awaited = false;
    uint32_t barriers = 0;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

struct Machine {
    std::vector<Fiber> fibers;
    Fiber *running = nullptr;
    void *scheduler = nullptr;
    const Kernel *kernel = nullptr;
    const void *params = nullptr;
    std::vector<uint8_t> shared;
    std::vector<Range> global;
    // Whether the kernel before is not complete until it is waited for, and what memory then holds while hidden.
    bool overlapping = false, hidden = false;
    std::vector<std::vector<uint8_t>> behind;
    char error[256] = "";
};
// Of this thread, from its first launch on. A pointer, for what has a constructor is looked at anew wherever it is named.
static __thread Machine *machine = nullptr;

static void fail(const char *what) {
    if (!machine->error[0]) {
        snprintf(machine->error, sizeof machine->error, "%s: %s (block %u, %u; thread %u)", machine->kernel->name, what,
                 place.block, place.row, place.thread);
    }
}

static void yield() {
    Fiber *self = machine->running;
    inflight_harness_switch(&self->sp, machine->scheduler);
}

// A fiber that found an error never goes on: the scheduler gives up.
[[noreturn]] void stop(const char *what) {
    fail(what);
    machine->running->state = State::Waiting;
    for (;;) {
        yield();
    }
}

static bool in_shared(const void *at, size_t bytes) {
    const uint8_t *p = (const uint8_t *)at;
    return p >= place.shared && p + bytes <= place.shared + place.shared_bytes;
}

void meet(Op op, const void *in, void *out, uint32_t argument) {
    Fiber *self = machine->running;
    if ((op == Op::LoadMatrices || op == Op::LoadMatricesTransposed) &&
        (!in_shared(in, 16) || (uintptr_t)in % 16 != 0)) {
        stop("a matrix row is outside of shared memory or not aligned");
    }
    if (op == Op::LoadMatrices || op == Op::LoadMatricesTransposed) {
        checks_touch(in, 16, Touch::Read);
    }
    self->op = op;
    self->in = in;
    self->out = out;
    self->argument = argument;
    self->state = State::Waiting;
    yield();
}

bool misses_barrier() { return machine->running->barriers++ == 1; }

void begin_atomic(const void *at, size_t bytes) {
    checks_touch(at, bytes, Touch::Atomic);
    checks_pause(true);
}
void end_atomic() { checks_pause(false); }

void await_kernel_before() {
    Fiber *self = machine->running;
    if (self->awaited) {
        stop("a thread waits twice for the kernel before");
    }
    self->awaited = true;
    if (machine->overlapping) {
        meet(Op::KernelBefore, nullptr, nullptr, 0);
    }
}

// Takes from kernels what earlier kernels write, as long as these are not complete.
static void hide() {
    machine->behind.clear();
    for (const Range &range : machine->global) {
        if (!range.constant) {
            machine->behind.emplace_back(range.from, range.to);
            memset(range.from, 0xff, (size_t)(range.to - range.from));
        }
    }
    machine->hidden = true;
}

static void show() {
    size_t next = 0;
    for (const Range &range : machine->global) {
        if (!range.constant) {
            for (const uint8_t *p = range.from; p < range.to; p++) {
                if (*p != 0xff) {
                    fail("memory was written to before the kernel before was complete");
                    break;
                }
            }
            memcpy(range.from, machine->behind[next].data(), machine->behind[next].size());
            next++;
        }
    }
    machine->hidden = false;
}

static bool in_global(const void *at, size_t bytes) {
    return range_of(machine->global.data(), machine->global.size(), (const uint8_t *)at, bytes) != nullptr;
}

void check_load(const void *from) {
    if (!in_global(from, 16) || (uintptr_t)from % 16 != 0) {
        stop("what is loaded is outside of global memory or not aligned");
    }
}

void copy_later(void *to, const void *from, bool valid) {
    if (!in_shared(to, 16) || (uintptr_t)to % 16 != 0) {
        stop("a copy's target is outside of shared memory or not aligned");
    }
    if (valid && (!in_global(from, 16) || (uintptr_t)from % 16 != 0)) {
        stop("a copy's source is outside of global memory or not aligned");
    }
    checks_copy(to, true);
    memset(to, 0xff, 16);
    machine->running->open.push_back({(uint8_t *)to, (const uint8_t *)from, valid});
}

void commit() {
    Fiber *self = machine->running;
    self->groups.push_back(std::move(self->open));
    self->open.clear();
}

void wait(uint32_t groups) {
    Fiber *self = machine->running;
    while (self->groups.size() > groups) {
        for (const Copy &copy : self->groups.front()) {
            checks_copy(copy.to, false);
            if (copy.valid) {
                memcpy(copy.to, copy.from, 16);
            } else {
                memset(copy.to, 0, 16);
            }
        }
        self->groups.pop_front();
    }
}

static float widen(uint16_t bits, bool brain) { return brain ? to_float(Bf16{bits}) : to_float(F16{bits}); }

// c += a * b for a whole warp. The hardware's order of summation within 16 products is not documented; here
// it ascends, in double, rounded once.
static void multiply(Fiber *warp, bool brain) {
    float a[16][16], b[16][8];
    double sums[16][8];
    for (uint32_t l = 0; l < WARP; l++) {
        const MmaInput *in = (const MmaInput *)warp[l].in;
        uint32_t g = l / 4, t = l % 4;
        for (uint32_t r = 0; r < 4; r++) {
            for (uint32_t half = 0; half < 2; half++) {
                float x = widen((uint16_t)(in->a[r] >> 16 * half), brain);
                a[g + r % 2 * 8][2 * t + half + r / 2 * 8] = x;
            }
        }
        for (uint32_t r = 0; r < 2; r++) {
            for (uint32_t half = 0; half < 2; half++) {
                b[2 * t + half + r * 8][g] = widen((uint16_t)(in->b[r] >> 16 * half), brain);
            }
        }
        for (uint32_t i = 0; i < 4; i++) {
            sums[g + i / 2 * 8][2 * t + i % 2] = in->c[i];
        }
    }
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t k = 0; k < 16; k++) {
            // Columns side by side: a sum alone waits for itself.
            for (uint32_t column = 0; column < 8; column++) {
                sums[row][column] += (double)a[row][k] * b[k][column];
            }
        }
    }
    for (uint32_t l = 0; l < WARP; l++) {
        float *out = (float *)warp[l].out;
        for (uint32_t i = 0; i < 4; i++) {
            out[i] = (float)sums[l / 4 + i / 2 * 8][2 * (l % 4) + i % 2];
        }
    }
}

static void load(Fiber *warp, bool transposed) {
    uint16_t rows[4][8][8];
    for (uint32_t l = 0; l < WARP; l++) {
        memcpy(rows[l / 8][l % 8], warp[l].in, 16);
    }
    for (uint32_t l = 0; l < WARP; l++) {
        uint32_t *out = (uint32_t *)warp[l].out;
        uint32_t i = l / 4, j = 2 * (l % 4);
        for (uint32_t m = 0; m < 4; m++) {
            uint16_t low = transposed ? rows[m][j][i] : rows[m][i][j];
            uint16_t high = transposed ? rows[m][j + 1][i] : rows[m][i][j + 1];
            out[m] = (uint32_t)high << 16 | low;
        }
    }
}

static void shuffle(Fiber *warp, bool up) {
    uint64_t in[WARP];
    for (uint32_t l = 0; l < WARP; l++) {
        in[l] = *(const uint64_t *)warp[l].in;
    }
    for (uint32_t l = 0; l < WARP; l++) {
        uint32_t argument = warp[l].argument;
        uint32_t from = up ? (l >= argument ? l - argument : l) : l ^ argument;
        *(uint64_t *)warp[l].out = in[from % WARP];
    }
}

// All lanes of a warp wait: lets them through if they wait for the same thing and need nobody else.
static bool pass(Fiber *warp) {
    Op op = warp[0].op;
    for (uint32_t l = 1; l < WARP; l++) {
        if (warp[l].op != op) {
            fail("lanes of a warp wait for different things");
            return false;
        }
    }
    switch (op) {
    case Op::Barrier:
    case Op::KernelBefore:
        return false;
    case Op::WarpBarrier:
        checks_warp_barrier((uint32_t)(warp - machine->fibers.data()) / WARP);
        break;
    case Op::ShuffleXor:
    case Op::ShuffleUp:
        shuffle(warp, op == Op::ShuffleUp);
        break;
    case Op::LoadMatrices:
    case Op::LoadMatricesTransposed:
        load(warp, op == Op::LoadMatricesTransposed);
        break;
    case Op::MmaBf16:
    case Op::MmaF16:
        multiply(warp, op == Op::MmaBf16);
        break;
    }
    for (uint32_t l = 0; l < WARP; l++) {
        warp[l].state = State::Ready;
    }
    return true;
}

static void enter() {
    machine->kernel->body(machine->params);
    if (!machine->running->awaited) {
        fail("a thread ended without waiting for the kernel before");
    }
    machine->running->state = State::Done;
    for (;;) {
        yield();
    }
}

static void prepare(Fiber &fiber) {
    if (!fiber.stack) {
        fiber.stack.reset(new uint8_t[STACK_BYTES]);
    }
    uintptr_t top = ((uintptr_t)fiber.stack.get() + STACK_BYTES) / 16 * 16;
    void **sp = (void **)top;
#if defined(__x86_64__)
    // Where `enter` begins, the stack is as after a call: 8 short of a multiple of 16.
    *--sp = nullptr;
    *--sp = (void *)enter;
    for (size_t i = 0; i < SAVED_WORDS; i++) {
        *--sp = nullptr;
    }
#else
    sp -= 20;
    memset(sp, 0, 160);
    sp[1] = (void *)enter;
#endif
    fiber.sp = sp;
    fiber.state = State::Ready;
    fiber.awaited = false;
    fiber.barriers = 0;
    fiber.open.clear();
    fiber.groups.clear();
}

// Runs one block to its end. BACKWARDS turns the order of warps round, in which nothing may depend.
static bool run_block(uint32_t threads, bool backwards) {
    Fiber *fibers = machine->fibers.data();
    uint32_t warps = threads / WARP;
    memset(machine->shared.data(), 0xff, machine->shared.size());
    checks_block();
    for (uint32_t i = 0; i < threads; i++) {
        prepare(fibers[i]);
    }
    for (;;) {
        bool moved = false;
        uint32_t at_barrier = 0, done = 0;
        for (uint32_t i = 0; i < warps; i++) {
            Fiber *warp = fibers + (backwards ? warps - 1 - i : i) * WARP;
            for (;;) {
                uint32_t ended = 0;
                for (uint32_t l = 0; l < WARP; l++) {
                    if (warp[l].state == State::Ready) {
                        machine->running = &warp[l];
                        place.thread = (uint32_t)(warp - fibers) + l;
                        checks_stack(warp[l].stack.get(), STACK_BYTES);
                        inflight_harness_switch(&machine->scheduler, warp[l].sp);
                        if (machine->error[0]) {
                            return false;
                        }
                        moved = true;
                    }
                    ended += warp[l].state == State::Done;
                }
                if (ended == WARP) {
                    done++;
                    break;
                }
                if (ended > 0) {
                    fail("some lanes of a warp have ended while others wait");
                    return false;
                }
                if (!pass(warp)) {
                    at_barrier++;
                    break;
                }
                moved = true;
            }
            if (machine->error[0]) {
                return false;
            }
        }
        if (done == warps) {
            return true;
        }
        if (at_barrier == warps) {
            for (uint32_t w = 1; w < warps; w++) {
                if (fibers[w * WARP].op != fibers[0].op) {
                    fail("some warps wait for the kernel before while others wait at a barrier");
                    return false;
                }
            }
            if (fibers[0].op == Op::KernelBefore) {
                show();
                if (machine->error[0]) {
                    return false;
                }
            }
            // Waiting for another kernel, threads do not wait for each other.
            if (fibers[0].op == Op::Barrier) {
                checks_barrier();
            }
            for (uint32_t i = 0; i < threads; i++) {
                fibers[i].state = State::Ready;
            }
            backwards = !backwards;
            continue;
        }
        if (!moved) {
            fail("some warps have ended while others wait at a barrier");
            return false;
        }
    }
}

} // namespace harness

using namespace harness;

extern "C" {

// Runs a kernel. GLOBAL is COUNT ranges of memory, all there is. OVERLAPPING: the kernel before is complete once it is
// waited for. Returns null, or what went wrong, valid until the next call of this thread.
const char *inflight_harness_launch(const char *name, uint32_t blocks_x, uint32_t blocks_y, uint32_t threads,
                                    uint32_t shared_bytes, const void *params, size_t bytes, const Range *global,
                                    size_t count, uint32_t backwards, uint32_t overlapping) {
    static thread_local Machine of_thread;
    machine = &of_thread;
    machine->error[0] = 0;
    const Kernel *kernel = find(name);
    if (!kernel) {
        snprintf(machine->error, sizeof machine->error, "no kernel is called %s", name);
        return machine->error;
    }
    if (kernel->bytes != bytes || threads % WARP != 0 || threads == 0 || threads > kernel->threads) {
        snprintf(machine->error, sizeof machine->error, "%s: %zu bytes of parameters, not %zu; or %u threads of %u", name,
                 bytes, kernel->bytes, threads, kernel->threads);
        return machine->error;
    }
    machine->kernel = kernel;
    machine->params = params;
    machine->global.assign(global, global + count);
    std::sort(machine->global.begin(), machine->global.end(), [](const Range &a, const Range &b) { return a.from < b.from; });
    machine->overlapping = overlapping != 0;
    if (machine->fibers.size() < threads) {
        machine->fibers.resize(threads);
    }
    // As large as it was asked for, at an address that is aligned as on the device.
    machine->shared.assign(shared_bytes + 128, 0xff);
    uint8_t *start = (uint8_t *)(((uintptr_t)machine->shared.data() + 127) / 128 * 128);
    checks_launch(params, bytes, machine->global.data(), machine->global.size(), shared_bytes);
    place = Place{0, threads, 0, 0, blocks_x, start, shared_bytes};
    for (uint32_t y = 0; y < blocks_y; y++) {
        for (uint32_t x = 0; x < blocks_x; x++) {
            place.block = x;
            place.row = y;
            if (machine->overlapping) {
                hide();
            }
            bool ran = run_block(threads, (backwards + x + y) % 2 == 1);
            if (machine->hidden) {
                show();
            }
            if (!ran || machine->error[0]) {
                return machine->error;
            }
        }
    }
    return nullptr;
}

// Bytes of a kernel's parameters; 0: there is no such kernel.
size_t inflight_harness_parameter_bytes(const char *name) {
    const Kernel *kernel = find(name);
    return kernel ? kernel->bytes : 0;
}

// Puts a fault into the kernels that this thread runs; 0 takes it out.
void inflight_harness_mutate(uint32_t which) { mutant = (Mutant)which; }

// Turns the memory and race checks of this process on or off, before its first launch.
void inflight_harness_check(uint32_t on) { checks_enable(on != 0); }

// What the harness makes of a number, for tests against a library.
uint32_t inflight_harness_narrow(float x, uint32_t brain) { return brain ? bf16_bits(x) : f16_bits(held(x)); }
uint32_t inflight_harness_to_e4m3(float x) { return to_e4m3(x); }
float inflight_harness_from_e4m3(uint32_t byte) { return from_e4m3(byte).x; }
float inflight_harness_widen(uint32_t bits, uint32_t brain) { return widen((uint16_t)bits, brain != 0); }
}
