#ifdef HARNESS_CHECKED
#include "device.cuh"
#include "checks.h"

#include <link.h>
#include <stdio.h>

#include <atomic>
#include <vector>

namespace harness {

// Where the library or the program is that the kernels are part of: their constants are there.
struct Image {
    const uint8_t *from = nullptr, *to = nullptr;
};

static Image own_image() {
    Image image;
    dl_iterate_phdr(
        [](struct dl_phdr_info *info, size_t, void *found) {
            Image all;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto &segment = info->dlpi_phdr[i];
                if (segment.p_type == PT_LOAD) {
                    const uint8_t *from = (const uint8_t *)(info->dlpi_addr + segment.p_vaddr);
                    all.from = !all.from || from < all.from ? from : all.from;
                    all.to = from + segment.p_memsz > all.to ? from + segment.p_memsz : all.to;
                }
            }
            const uint8_t *own = (const uint8_t *)&own_image;
            if (own < all.from || own >= all.to) {
                return 0;
            }
            *(Image *)found = all;
            return 1;
        },
        &image);
    return image;
}

// A byte of shared memory: who touched it since when. Epochs count barriers; what is of another epoch is over.
struct Cell {
    uint32_t write_epoch, write_warp_epoch;
    uint32_t read_epoch, read_warp_epoch;
    // Warps that have read it in the epoch; of the one that did last, lanes in its own.
    uint32_t read_warps, read_lanes;
    // The block in which a copy to it is under way.
    uint32_t copied;
    uint16_t writer, reader_warp;
    bool atomic;
};
constexpr size_t COPY_BYTES = 16;

struct Checks {
    std::vector<Cell> cells;
    uint32_t epoch = 1, block = 0;
    uint32_t warp_epochs[WARP] = {};
    const uint8_t *stack = nullptr, *stack_end = nullptr;
    const uint8_t *params = nullptr, *params_end = nullptr;
    const Range *global = nullptr;
    size_t count = 0;
    // The one of them that was touched last.
    const Range *last = nullptr;
    bool paused = false;
};
static __thread Checks *checks = nullptr;
static const Image image = own_image();
static std::atomic<bool> enabled_flag{true};
static inline bool enabled() { return enabled_flag.load(std::memory_order_relaxed); }

void checks_enable(bool on) { enabled_flag.store(on); }

void checks_launch(const void *params, size_t bytes, const Range *global, size_t count, uint32_t shared_bytes) {
    static thread_local Checks of_thread;
    if (!enabled()) {
        checks = nullptr;
        return;
    }
    checks = &of_thread;
    checks->params = (const uint8_t *)params;
    checks->params_end = checks->params + bytes;
    checks->global = global;
    checks->count = count;
    checks->last = nullptr;
    checks->paused = false;
    if (checks->cells.size() < shared_bytes) {
        checks->cells.resize(shared_bytes);
    }
}

void checks_block() {
    if (enabled()) {
        checks->block++;
        checks->epoch++;
    }
}
void checks_barrier() {
    if (enabled()) {
        checks->epoch++;
    }
}
void checks_warp_barrier(uint32_t warp) {
    if (enabled()) {
        checks->warp_epochs[warp]++;
    }
}
void checks_stack(const void *from, size_t bytes) {
    if (enabled()) {
        checks->stack = (const uint8_t *)from;
        checks->stack_end = checks->stack + bytes;
    }
}
void checks_pause(bool paused) {
    if (enabled()) {
        checks->paused = paused;
    }
}

static bool within(const uint8_t *p, size_t bytes, const void *from, const void *to) {
    return p >= (const uint8_t *)from && p + bytes <= (const uint8_t *)to;
}

static const char *word(Touch touch) { return touch == Touch::Read ? "reads" : "writes"; }

[[noreturn]] static void race(size_t byte, Touch touch, const char *other_did, uint32_t other) {
    static __thread char text[160];
    snprintf(text, sizeof text, "a race in shared memory: it %s byte %zu, which %s %u has %s, and no barrier is between",
             word(touch), byte, other_did[0] == 'w' ? "thread" : "warp", other, other_did);
    stop(text);
}

static void touched_shared(const void *at, size_t bytes, Touch touch) {
    const uint32_t thread = place.thread, warp = thread / WARP, lane = thread % WARP;
    const uint32_t epoch = checks->epoch, warp_epoch = checks->warp_epochs[warp];
    const size_t first = (size_t)((const uint8_t *)at - place.shared);
    for (size_t byte = first; byte < first + bytes; byte++) {
        Cell &cell = checks->cells[byte];
        if (cell.copied == checks->block) {
            static __thread char text[160];
            snprintf(text, sizeof text, "a race in shared memory: it %s byte %zu, and a copy to it was not waited for",
                     word(touch), byte);
            stop(text);
        }
        bool unordered = cell.writer / WARP != warp || cell.write_warp_epoch == warp_epoch;
        if (cell.write_epoch == epoch && cell.writer != thread && unordered &&
            !(touch == Touch::Atomic && cell.atomic)) {
            race(byte, touch, "written", cell.writer);
        }
        if (touch == Touch::Read) {
            if (cell.read_epoch != epoch) {
                cell.read_epoch = epoch;
                cell.read_warps = 0;
            }
            if (cell.read_warps == 0 || cell.reader_warp != warp || cell.read_warp_epoch != warp_epoch) {
                cell.reader_warp = (uint16_t)warp;
                cell.read_warp_epoch = warp_epoch;
                cell.read_lanes = 0;
            }
            cell.read_warps |= 1u << warp;
            cell.read_lanes |= 1u << lane;
            continue;
        }
        if (cell.read_epoch == epoch) {
            uint32_t others = cell.read_warps & ~(1u << warp);
            bool beside = cell.reader_warp == warp && cell.read_warp_epoch == warp_epoch &&
                          (cell.read_lanes & ~(1u << lane)) != 0;
            if (others != 0 || beside) {
                race(byte, touch, "read", others != 0 ? (uint32_t)__builtin_ctz(others) : warp);
            }
        }
        cell.write_epoch = epoch;
        cell.write_warp_epoch = warp_epoch;
        cell.writer = (uint16_t)thread;
        cell.atomic = touch == Touch::Atomic;
    }
}

// The range of global memory around these bytes, or null.
static const Range *global_range(Checks *c, const uint8_t *p, size_t bytes) {
    if (c->last && within(p, bytes, c->last->from, c->last->to)) {
        return c->last;
    }
    const Range *range = range_of(c->global, c->count, p, bytes);
    c->last = range ? range : c->last;
    return range;
}

// A load or a store of the kernel that runs.
static void touched(const void *at, size_t bytes, Touch touch, bool aligned) {
    const uint8_t *p = (const uint8_t *)at;
    Checks *c = checks;
    if (!c || c->paused || within(p, bytes, c->stack, c->stack_end)) {
        return;
    }
    // Indices of threads and blocks, and parameters: what kernels read most.
    if (touch == Touch::Read && (within(p, bytes, &place, &place + 1) || within(p, bytes, c->params, c->params_end) ||
                                  within(p, bytes, &mutant, &mutant + 1))) {
        return;
    }
    static __thread char text[160];
    bool shared = within(p, bytes, place.shared, place.shared + place.shared_bytes);
    const Range *global = shared ? nullptr : global_range(c, p, bytes);
    if (global && touch != Touch::Read && global->constant) {
        stop("memory is written to that no kernel writes to");
    }
    if ((shared || global) && aligned && (uintptr_t)p % bytes != 0) {
        snprintf(text, sizeof text, "%zu bytes are moved at an address that is not a multiple of it", bytes);
        stop(text);
    }
    if (shared) {
        touched_shared(at, bytes, touch);
        return;
    }
    bool constant = within(p, bytes, image.from, image.to);
    if (!global && (!constant || touch != Touch::Read)) {
        snprintf(text, sizeof text, "it %s %zu bytes outside of shared and global memory", word(touch), bytes);
        stop(text);
    }
}

void checks_touch(const void *at, size_t bytes, Touch touch) {
    if (enabled()) {
        touched(at, bytes, touch, true);
    }
}

void checks_copy(const void *to, bool begins) {
    if (!enabled()) {
        return;
    }
    const size_t first = (size_t)((const uint8_t *)to - place.shared);
    if (begins) {
        touched_shared(to, COPY_BYTES, Touch::Write);
    }
    for (size_t byte = first; byte < first + COPY_BYTES; byte++) {
        checks->cells[byte].copied = begins ? checks->block : 0;
    }
    if (!begins) {
        touched_shared(to, COPY_BYTES, Touch::Write);
    }
}

} // namespace harness

using harness::Touch;

// Inlined into each of the functions below, so that an access costs a call and a branch where checks are off.
static inline void accessed(const void *at, size_t bytes, Touch touch, bool aligned) {
    if (harness::enabled()) {
        harness::touched(at, bytes, touch, aligned);
    }
}

// What the compiler calls: the interface of its thread sanitizer, whose library is not linked.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_read_range(void *at, size_t bytes) { accessed(at, bytes, Touch::Read, false); }
void __tsan_write_range(void *at, size_t bytes) { accessed(at, bytes, Touch::Write, false); }
// Some compilers leave copies of structures to these.
void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    accessed(from, bytes, Touch::Read, false);
    accessed(to, bytes, Touch::Write, false);
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes) {
    accessed(from, bytes, Touch::Read, false);
    accessed(to, bytes, Touch::Write, false);
    return memmove(to, from, bytes);
}
void *__tsan_memset(void *to, int byte, size_t bytes) {
    accessed(to, bytes, Touch::Write, false);
    return memset(to, byte, bytes);
}
#define OF_SIZE(BYTES)                                                                                               \
    void __tsan_read##BYTES(void *at) { accessed(at, BYTES, Touch::Read, true); }                                     \
    void __tsan_write##BYTES(void *at) { accessed(at, BYTES, Touch::Write, true); }                                   \
    void __tsan_unaligned_read##BYTES(void *at) { accessed(at, BYTES, Touch::Read, false); }                          \
    void __tsan_unaligned_write##BYTES(void *at) { accessed(at, BYTES, Touch::Write, false); }
OF_SIZE(1)
OF_SIZE(2)
OF_SIZE(4)
OF_SIZE(8)
OF_SIZE(16)
}
#endif
