// The names of device.cuh on the host: every thread of a block is a fiber, collectives of a warp are meeting points
// where the last one to come computes for all, with the exact fragment layouts of the hardware.
//
// A launch may be such that the kernel before it is not complete until all threads of a block have waited for it: all
// memory but what no kernel writes is then NaN before that, and none may have written to it.
//
// What it checks beyond results: shared memory and the targets of asynchronous copies hold NaN until written or waited
// for; addresses of matrix loads and copies are aligned and within bounds; lanes of a warp meet at the same
// collective; nobody misses a barrier; every thread waits for the kernel before its own, once; and of every load and store what checks.h says.
// What it cannot show: bank conflicts, speed, races in global memory.
#pragma once

#include <math.h>
#include <string.h>

#define DEVICE static inline
#define MEMBER inline
#define SUBROUTINE static
#define UNROLL
#define UNROLL_BY(N)
// Defines the kernel and enters it into the table of kernels by name.
#define KERNEL_THAT(BEGINS, NAME, PARAMS, THREADS, MIN_BLOCKS)                                                       \
    static void NAME##_body(const PARAMS &p);                                                                        \
    static const harness::Kernel NAME##_entry(#NAME, sizeof(PARAMS), THREADS, [](const void *p) {                    \
        BEGINS;                                                                                                      \
        NAME##_body(*(const PARAMS *)p);                                                                             \
    });                                                                                                              \
    static void NAME##_body(const PARAMS &p)
#define KERNEL(NAME, PARAMS, THREADS, MIN_BLOCKS)                                                                    \
    KERNEL_THAT(await_kernel_before(), NAME, PARAMS, THREADS, MIN_BLOCKS)
#define EARLY_KERNEL(NAME, PARAMS, THREADS, MIN_BLOCKS) KERNEL_THAT((void)0, NAME, PARAMS, THREADS, MIN_BLOCKS)

namespace harness {

struct Kernel {
    const char *name;
    size_t bytes;
    uint32_t threads;
    void (*body)(const void *params);
    const Kernel *next;
    Kernel(const char *name, size_t bytes, uint32_t threads, void (*body)(const void *));
};

enum class Op {
    Barrier,
    WarpBarrier,
    KernelBefore,
    ShuffleXor,
    ShuffleUp,
    LoadMatrices,
    LoadMatricesTransposed,
    MmaBf16,
    MmaF16,
};

// Faults that tests put in, to see that other tests find them; src/lib.rs has the same list.
enum class Mutant : uint32_t {
    None,
    MissingWait,
    BlockEdge,
    WindowEdge,
    CausalEdge,
    MergeMaximum,
    MergeOrder,
    ScaleLine,
    DrawPosition,
    NoKernelWait,
    EarlyRead,
    LastWarp,
    LastChunk,
    MissedBarrier,
    DraftPenalty,
    DraftWord,
    RejectedCounts,
    DraftMinimum,
    SplitParts,
    SplitBins,
    SplitMasses,
    InfiniteKeys,
    NonFiniteLogits,
    DraftState,
    LogSlot,
    ResumedInputs,
};
extern __thread Mutant mutant;

// Where the running fiber is.
struct Place {
    uint32_t thread, threads, block, row, blocks;
    uint8_t *shared;
    uint32_t shared_bytes;
};
extern __thread Place place;

// Stops the running fiber until its warp, or for a barrier its block, has come to the same operation.
void meet(Op op, const void *in, void *out, uint32_t argument);
void await_kernel_before();
// The address may be read from: it is in global memory, and aligned.
void check_load(const void *from);
void copy_later(void *to, const void *from, bool valid);
void commit();
void wait(uint32_t groups);
// Whether the second barrier of the running fiber is this one.
bool misses_barrier();
// Around an operation on memory that nothing of other threads comes between.
void begin_atomic(const void *at, size_t bytes);
void end_atomic();
struct Atomic {
    Atomic(const void *at, size_t bytes) { begin_atomic(at, bytes); }
    ~Atomic() { end_atomic(); }
};

struct MmaInput {
    float c[4];
    uint32_t a[4], b[2];
};

} // namespace harness

#define MUTANT(NAME, BROKEN, RIGHT) (harness::mutant == harness::Mutant::NAME ? (BROKEN) : (RIGHT))

DEVICE uint32_t thread_index() { return harness::place.thread; }
DEVICE uint32_t threads() { return harness::place.threads; }
DEVICE uint32_t block_index() { return harness::place.block; }
DEVICE uint32_t block_row() { return harness::place.row; }
DEVICE uint32_t blocks() { return harness::place.blocks; }
DEVICE uint32_t lane() { return harness::place.thread % WARP; }
DEVICE uint32_t warp() { return harness::place.thread / WARP; }
DEVICE uint8_t *shared_memory() { return harness::place.shared; }

DEVICE void await_kernel_before() {
    if (MUTANT(NoKernelWait, false, true)) {
        harness::await_kernel_before();
    }
}
DEVICE void prefetch(const void *) {}
DEVICE Vec16 load_constant(const void *from, bool valid) {
    Vec16 v = {};
    if (valid) {
        harness::check_load(from);
        memcpy(&v, from, sizeof v);
    }
    return v;
}

DEVICE uint32_t not_kept(uint32_t value) { return value; }

DEVICE void barrier() {
    if (MUTANT(MissedBarrier, !harness::misses_barrier(), true)) {
        harness::meet(harness::Op::Barrier, nullptr, nullptr, 0);
    }
}
DEVICE void warp_barrier() { harness::meet(harness::Op::WarpBarrier, nullptr, nullptr, 0); }

template <typename V> DEVICE V shuffle(harness::Op op, V value, uint32_t argument) {
    uint64_t in = 0, out = 0;
    memcpy(&in, &value, sizeof value);
    harness::meet(op, &in, &out, argument);
    memcpy(&value, &out, sizeof value);
    return value;
}
template <typename V> DEVICE V shuffle_xor(V value, uint32_t mask) {
    return shuffle(harness::Op::ShuffleXor, value, mask);
}
template <typename V> DEVICE V shuffle_up(V value, uint32_t delta) {
    return shuffle(harness::Op::ShuffleUp, value, delta);
}

DEVICE void cp_async16(void *to, const void *from, bool valid) { harness::copy_later(to, from, valid); }
DEVICE void cp_async_commit() { harness::commit(); }
template <int N> DEVICE void cp_async_wait() { harness::wait(N); }

DEVICE void load_matrices(uint32_t (&r)[4], const void *row) {
    harness::meet(harness::Op::LoadMatrices, row, r, 0);
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void *row) {
    harness::meet(harness::Op::LoadMatricesTransposed, row, r, 0);
}

template <typename T> struct MmaOp;
template <> struct MmaOp<Bf16> {
    static constexpr harness::Op OP = harness::Op::MmaBf16;
};
template <> struct MmaOp<F16> {
    static constexpr harness::Op OP = harness::Op::MmaF16;
};
template <typename T> DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    harness::MmaInput in = {{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    harness::meet(MmaOp<T>::OP, &in, c, 0);
}

DEVICE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
DEVICE uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
DEVICE float exp2_approximate(float x) { return exp2f(x); }
DEVICE float fma_exact(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float multiply_exact(float a, float b) { return a * b; }
DEVICE float divide_exact(float a, float b) { return a / b; }
DEVICE float round_even(float a) { return rintf(a); }
DEVICE float root_inverse(float x) { return 1.0f / sqrtf(x); }
DEVICE double log_double(double x) { return log(x); }
DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }

DEVICE float to_float(Bf16 x) { return bits_to_float((uint32_t)x.bits << 16); }
DEVICE float to_float(F16 x) {
    uint32_t magnitude = (uint32_t)(x.bits & 0x7fff) << 13;
    // Scaling by 2^112 moves the exponent's bias and normalises subnormals, all exactly.
    uint32_t scaled = float_to_bits(bits_to_float(magnitude) * bits_to_float(0x77800000));
    uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 : 0;
    return bits_to_float(scaled | special | (uint32_t)(x.bits & 0x8000) << 16);
}
DEVICE uint16_t bf16_bits(float x) {
    uint32_t bits = float_to_bits(x);
    if (x != x) {
        return 0x7fff;
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE uint16_t f16_bits(float x) {
    uint16_t sign = (uint16_t)(float_to_bits(x) >> 16 & 0x8000);
    if (x != x) {
        return 0x7fff;
    }
    float magnitude = fabsf(x);
    if (magnitude >= 65520.0f) {
        return sign | 0x7c00;
    }
    // Rounded at the place of the last bit that is kept, which for subnormals is 2^-24.
    int exponent;
    frexpf(magnitude, &exponent);
    float unit = ldexpf(1.0f, exponent - 11 < -24 ? -24 : exponent - 11);
    float rounded = rintf(magnitude / unit) * unit;
    if (rounded < ldexpf(1.0f, -14)) {
        return sign | (uint16_t)ldexpf(rounded, 24);
    }
    uint32_t bits = float_to_bits(rounded);
    return sign | (uint16_t)(((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff));
}
template <typename T> DEVICE uint32_t pack(float low, float high);
template <> inline uint32_t pack<Bf16>(float low, float high) {
    return (uint32_t)bf16_bits(high) << 16 | bf16_bits(low);
}
DEVICE float held(float x) { return x - x == 0.0f ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x; }
template <> inline uint32_t pack<F16>(float low, float high) {
    return (uint32_t)f16_bits(held(high)) << 16 | f16_bits(held(low));
}

template <typename T> DEVICE uint32_t pack_small(float low, float high);
template <> inline uint32_t pack_small<Bf16>(float low, float high) { return pack<Bf16>(low, high); }
template <> inline uint32_t pack_small<F16>(float low, float high) {
    return (uint32_t)f16_bits(high) << 16 | f16_bits(low);
}

// Fibers do not run at once, so plain operations are atomic.
template <typename V> DEVICE V atomic_add(V *at, V value) {
    harness::Atomic atomic(at, sizeof *at);
    V before = *at;
    *at += value;
    return before;
}
DEVICE void atomic_add_wide(uint64_t *at, uint64_t value) {
    harness::Atomic atomic(at, sizeof *at);
    *at += value;
}
DEVICE uint32_t atomic_or(uint32_t *at, uint32_t value) {
    harness::Atomic atomic(at, sizeof *at);
    uint32_t before = *at;
    *at |= value;
    return before;
}
DEVICE uint32_t atomic_min(uint32_t *at, uint32_t value) {
    harness::Atomic atomic(at, sizeof *at);
    uint32_t before = *at;
    *at = value < before ? value : before;
    return before;
}
DEVICE void device_fence() {}
template <typename V> DEVICE V load_shared_by_device(const V *from) { return *from; }
