// What kernels use of the device, and nothing else of CUDA: under nvcc these are PTX, under a plain C++ compiler the
// same names come from harness/harness.h, which runs every thread as a fiber. Kernels written over this file are
// therefore tested, line by line as they are, on machines without a GPU.
#pragma once

#include <stdint.h>

// Storage of numbers; arithmetic is in float.
struct Bf16 {
    static constexpr float LARGEST = 3.3895314e38f;
    uint16_t bits;
};
struct F16 {
    static constexpr float LARGEST = 65504.0f;
    uint16_t bits;
};

// 16 bytes that move as one.
struct alignas(16) Vec16 {
    uint32_t word[4];
};
struct alignas(16) Float4 {
    float x, y, z, w;
};
struct alignas(8) Float2 {
    float x, y;
};
struct alignas(8) Vec8 {
    uint32_t word[2];
};

constexpr uint32_t WARP = 32;

#ifdef __CUDACC__

#define DEVICE static __device__ __forceinline__
// The same for a function of a struct.
#define MEMBER __device__ __forceinline__
// A function too large to be copied to each place that calls it.
#define SUBROUTINE static __device__ __noinline__
#define UNROLL _Pragma("unroll")
#define PRAGMA(TEXT) _Pragma(#TEXT)
#define UNROLL_BY(N) PRAGMA(unroll N)

// Waits for the kernel before this one in the stream, and lets the next one begin. A launch may ask that a kernel begins
// while the one before it ends (programmatic dependent launch, from sm_90 on); nothing that an earlier kernel of
// the step writes or reads may be touched before this. It returns once that kernel is complete, which had itself waited: so all before are.
DEVICE void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// A kernel takes one parameter block by value. MIN_BLOCKS is how many should fit a multiprocessor at once.
#define KERNEL_THAT(BEGINS, NAME, PARAMS, THREADS, MIN_BLOCKS)                                                       \
    DEVICE void NAME##_body(const PARAMS &p);                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) NAME(const __grid_constant__ PARAMS p) {       \
        BEGINS;                                                                                                      \
        NAME##_body(p);                                                                                              \
    }                                                                                                                \
    DEVICE void NAME##_body(const PARAMS &p)
#define KERNEL(NAME, PARAMS, THREADS, MIN_BLOCKS)                                                                    \
    KERNEL_THAT(await_kernel_before(), NAME, PARAMS, THREADS, MIN_BLOCKS)
// A kernel that calls await_kernel_before itself, in every thread, once it has begun to load what no kernel writes: weights,
// or a step's metadata, which are there before its first kernel begins.
#define EARLY_KERNEL(NAME, PARAMS, THREADS, MIN_BLOCKS) KERNEL_THAT((void)0, NAME, PARAMS, THREADS, MIN_BLOCKS)

DEVICE uint32_t thread_index() { return threadIdx.x; }
DEVICE uint32_t threads() { return blockDim.x; }
DEVICE uint32_t block_index() { return blockIdx.x; }
DEVICE uint32_t block_row() { return blockIdx.y; }
DEVICE uint32_t blocks() { return gridDim.x; }
DEVICE uint32_t lane() { return threadIdx.x % WARP; }
DEVICE uint32_t warp() { return threadIdx.x / WARP; }

// All shared memory is dynamic, so that a launch says how much there is.
DEVICE uint8_t *shared_memory() {
    extern __shared__ __align__(128) uint8_t memory[];
    return memory;
}

// The harness can swap the right expression for a broken one, to see that its tests find out; here there is no choice.
#define MUTANT(NAME, BROKEN, RIGHT) (RIGHT)

// The same number; what is computed from it in a loop is computed there, not once before it and kept in registers.
DEVICE uint32_t not_kept(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// All threads of the block.
DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }

// Collectives of a whole warp.
DEVICE float shuffle_xor(float value, uint32_t mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE uint32_t shuffle_xor(uint32_t value, uint32_t mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE uint64_t shuffle_xor(uint64_t value, uint32_t mask) {
    return __shfl_xor_sync(~0u, (unsigned long long)value, mask);
}
// The value of the lane DELTA below; the first DELTA lanes get their own.
DEVICE uint32_t shuffle_up(uint32_t value, uint32_t delta) { return __shfl_up_sync(~0u, value, delta); }
DEVICE uint64_t shuffle_up(uint64_t value, uint32_t delta) {
    return __shfl_up_sync(~0u, (unsigned long long)value, delta);
}

// Starts to copy 16 bytes from global to shared memory; zeros where not VALID, and nothing is read then.
DEVICE void cp_async16(void *to, const void *from, bool valid) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from), "r"(bytes)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most N of this thread's groups are still under way.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// 16 bytes that no kernel writes and that are read once: past the first-level cache. Zeros where not VALID, and nothing is
// read then. As an ordinary load: one by the way of constants (.nc) is moved behind await_kernel_before by the assembler.
DEVICE Vec16 load_constant(const void *from, bool valid) {
    Vec16 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
                 : "=&r"(v.word[0]), "=&r"(v.word[1]), "=&r"(v.word[2]), "=&r"(v.word[3])
                 : "l"(from), "r"((uint32_t)valid)
                 : "memory");
    return v;
}

// Brings a line of 128 bytes nearer, for a load to come.
DEVICE void prefetch(const void *from) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from) : "memory"); }

// Four 8x8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8. Each lane gets the
// numbers (lane / 4, 2 * (lane % 4)) and the next one of each matrix, or of its transpose.
DEVICE void load_matrices(uint32_t (&r)[4], const void *row) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void *row) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c[16, 8] += a[16, 16] * b[16, 8]. With g = lane / 4 and t = lane % 4 a lane holds, of a, rows g and g + 8 (r0, r1)
// at columns 2t, 2t + 1 and again at columns 8 further (r2, r3); of b, rows 2t, 2t + 1 (r0) and 8 further (r1)
// at column g; of c, row g at columns 2t, 2t + 1 and row g + 8 at the same.
template <typename T> DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void mma<Bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<F16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x to about two units in the last place; 2^-infinity is 0.
DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Named, so that the compiler neither fuses nor splits them.
DEVICE float fma_exact(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float multiply_exact(float a, float b) { return __fmul_rn(a, b); }
DEVICE float divide_exact(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float round_even(float a) { return rintf(a); }
DEVICE float root_inverse(float x) { return 1.0f / __fsqrt_rn(x); }
DEVICE double log_double(double x) { return log(x); }
DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t float_to_bits(float x) { return __float_as_uint(x); }
DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) { return __umul64hi(a, b); }

DEVICE float to_float(Bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
DEVICE float to_float(F16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
// Two numbers in one word, the first in the lower half; to nearest, ties to even.
template <typename T> DEVICE uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<Bf16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
// Finite values beyond the range of f16 are held at its end. What is infinite or NaN stays so.
DEVICE float held(float x) { return x - x == 0.0f ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x; }
template <> __device__ __forceinline__ uint32_t pack<F16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(held(high)), "f"(held(low)));
    return word;
}

// The same for numbers that are in range.
template <typename T> DEVICE uint32_t pack_small(float low, float high);
template <> __device__ __forceinline__ uint32_t pack_small<Bf16>(float low, float high) { return pack<Bf16>(low, high); }
template <> __device__ __forceinline__ uint32_t pack_small<F16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// In shared or global memory; they return what was there.
DEVICE uint32_t atomic_add(uint32_t *at, uint32_t value) { return atomicAdd(at, value); }
// The sum is whole once all who add have met at a barrier. Shared memory adds 32 bits by itself, but 64 only in a loop that
// begins anew whenever another thread was faster; carries are exact, so two additions make the same sum.
DEVICE void atomic_add_wide(uint64_t *at, uint64_t value) {
    uint32_t *half = (uint32_t *)at;
    uint32_t low = (uint32_t)value, high = (uint32_t)(value >> 32);
    high += atomicAdd(half, low) > ~low ? 1 : 0;
    if (high > 0) {
        atomicAdd(half + 1, high);
    }
}
DEVICE uint32_t atomic_or(uint32_t *at, uint32_t value) { return atomicOr(at, value); }
DEVICE uint32_t atomic_min(uint32_t *at, uint32_t value) { return atomicMin(at, value); }
// What this thread wrote before is seen by all threads of the device before what it writes after.
DEVICE void device_fence() { __threadfence(); }
// Reads past the first-level cache, which does not see what other multiprocessors write.
DEVICE Float4 load_shared_by_device(const Float4 *from) {
    float4 v = __ldcg((const float4 *)from);
    return Float4{v.x, v.y, v.z, v.w};
}
DEVICE Float2 load_shared_by_device(const Float2 *from) {
    float2 v = __ldcg((const float2 *)from);
    return Float2{v.x, v.y};
}
DEVICE uint32_t load_shared_by_device(const uint32_t *from) { return __ldcg(from); }

#else
#include "harness/harness.h"
#endif

constexpr float INFINITE = __builtin_huge_valf();
constexpr float NOT_A_NUMBER = __builtin_nanf("");

// e4m3: a sign, four bits of exponent (bias 7), three of mantissa; the largest is 448. From sm_89 on there are
// instructions for it; elsewhere, and on the host, the same comes of operations on bits. The byte of NaN is never stored.
constexpr float E4M3_MAX = 448.0f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// To nearest, ties to even, held at the largest; so is NaN, which the instruction would keep.
DEVICE uint32_t to_e4m3(float x) {
    float held = copysignf(fminf(fabsf(x), E4M3_MAX), x);
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(held));
    return pair;
}
// The numbers of the lowest two bytes, lower one first.
DEVICE Float2 from_e4m3(uint32_t bytes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)bytes));
    return Float2{to_float(F16{(uint16_t)halves}), to_float(F16{(uint16_t)(halves >> 16)})};
}
#else
DEVICE uint32_t to_e4m3(float x) {
    uint32_t sign = float_to_bits(x) >> 24 & 0x80;
    float magnitude = fminf(fabsf(x), E4M3_MAX);
    if (magnitude < 0.015625f) { // 2^-6: below it steps are 2^-9
        return sign | (uint32_t)round_even(multiply_exact(magnitude, 512.0f));
    }
    uint32_t bits = float_to_bits(magnitude);
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | ((bits >> 20) - ((127 - 7) << 3));
}
DEVICE float one_from_e4m3(uint32_t byte) {
    // Scaling by 2^120 moves the exponent's bias and normalises subnormals, all exactly.
    float magnitude = multiply_exact(bits_to_float((byte & 0x7f) << 20), bits_to_float(0x7b800000));
    return bits_to_float(float_to_bits(magnitude) | (byte & 0x80) << 24);
}
DEVICE Float2 from_e4m3(uint32_t bytes) { return Float2{one_from_e4m3(bytes), one_from_e4m3(bytes >> 8)}; }
#endif

// The factor of an RMS norm by the mean of squares; NaN where squares have overflowed, since 0 would hide it.
DEVICE float norm_scale(float mean) { return mean < INFINITE ? root_inverse(mean) : mean - mean; }

template <typename T> DEVICE T narrow(float x) { return T{(uint16_t)pack<T>(x, 0.0f)}; }

DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Waits until at most COUNT groups are under way; COUNT is the same in all threads and at most 2.
DEVICE void cp_async_wait_for(uint32_t count) {
    if (count == 0) {
        cp_async_wait<0>();
    } else if (count == 1) {
        cp_async_wait<1>();
    } else {
        cp_async_wait<2>();
    }
}

// Sums, maxima and minima over a warp, the same in every lane, in one fixed order.
DEVICE float warp_sum(float value) {
    UNROLL
    for (uint32_t mask = WARP / 2; mask > 0; mask /= 2) {
        value += shuffle_xor(value, mask);
    }
    return value;
}
DEVICE float warp_max(float value) {
    UNROLL
    for (uint32_t mask = WARP / 2; mask > 0; mask /= 2) {
        value = fmaxf(value, shuffle_xor(value, mask));
    }
    return value;
}
DEVICE uint64_t warp_sum(uint64_t value) {
    UNROLL
    for (uint32_t mask = WARP / 2; mask > 0; mask /= 2) {
        value += shuffle_xor(value, mask);
    }
    return value;
}
DEVICE uint32_t warp_sum(uint32_t value) {
    UNROLL
    for (uint32_t mask = WARP / 2; mask > 0; mask /= 2) {
        value += shuffle_xor(value, mask);
    }
    return value;
}
DEVICE uint32_t warp_min(uint32_t value) {
    UNROLL
    for (uint32_t mask = WARP / 2; mask > 0; mask /= 2) {
        value = smaller(value, shuffle_xor(value, mask));
    }
    return value;
}

// Tiles of 16-bit numbers in shared memory: rows of COLUMNS numbers, in chunks of 16 bytes placed such that the
// eight rows of a matrix load fall into different banks. By exclusive or where a row is a multiple of 128 bytes, else
// by a chunk of padding behind each row.
template <uint32_t COLUMNS> struct Tile {
    static constexpr uint32_t CHUNKS = COLUMNS / 8;
    static constexpr bool SWIZZLED = COLUMNS % 64 == 0;
    static constexpr uint32_t ROW_BYTES = SWIZZLED ? COLUMNS * 2 : COLUMNS * 2 + 16;

    static constexpr uint32_t bytes(uint32_t rows) { return rows * ROW_BYTES; }

    MEMBER static uint32_t offset(uint32_t row, uint32_t chunk) {
        uint32_t place = SWIZZLED ? chunk ^ (row % 8) : chunk;
        return row * ROW_BYTES + place * 16;
    }

    // The offset CHUNKS further to the right, an even number, from that of a row's first or second chunk.
    MEMBER static uint32_t further(uint32_t offset, uint32_t chunks) {
        return SWIZZLED ? offset ^ chunks * 16 : offset + chunks * 16;
    }

    MEMBER static uint8_t *at(uint8_t *tile, uint32_t row, uint32_t chunk) {
        return tile + offset(row, chunk);
    }
};
