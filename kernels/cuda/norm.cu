// The residual stream between products: the sum with what a product yielded, and its RMS norm, in one pass; for the
// head, only of the rows that are sampled.
#include "params.h"

constexpr uint32_t NORM_THREADS = 256;

// Four numbers at a time, and as many of these that are loaded before the first is used: the time of a short batch is
// that of waiting for memory.
constexpr uint32_t NORM_AHEAD = 4;

template <typename T> DEVICE void add(Float4 &x, const Vec8 &four) {
    x.x += to_float(T{(uint16_t)four.word[0]});
    x.y += to_float(T{(uint16_t)(four.word[0] >> 16)});
    x.z += to_float(T{(uint16_t)four.word[1]});
    x.w += to_float(T{(uint16_t)(four.word[1] >> 16)});
}

// Four numbers of the output.
template <typename T> DEVICE Vec8 scaled(const Float4 &x, float scale, const Float4 &w) {
    return Vec8{{pack<T>(x.x * scale * w.x, x.y * scale * w.y), pack<T>(x.z * scale * w.z, x.w * scale * w.w)}};
}

// The sum over a block, the same in every thread, in one order.
DEVICE float block_sum(float sum) {
    sum = warp_sum(sum);
    float *sums = (float *)shared_memory();
    if (lane() == 0) {
        sums[warp()] = sum;
    }
    barrier();
    float total = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < NORM_THREADS / WARP; i++) {
        total += sums[i];
    }
    return total;
}

// One block a row, whatever its width, so that the order of the sum depends on the width alone. A row of up to 4096
// numbers stays in registers; a wider one is read twice, the second time from a cache. width is a multiple of 8.
template <typename T> DEVICE void norm(const NormParams &p) {
    for (uint32_t i = 32 * thread_index(); i < p.width; i += 32 * NORM_THREADS) {
        prefetch(p.weight + i);
    }
    await_kernel_before();
    uint32_t at = block_index();
    uint32_t row = p.pick ? p.pick[at] : at;
    uint64_t start = (uint64_t)row * p.width;
    Float4 *residual = (Float4 *)(p.residual + start);
    const Vec8 *delta = p.delta ? (const Vec8 *)((const uint16_t *)p.delta + start) : nullptr;
    const Float4 *weight = (const Float4 *)p.weight;
    uint32_t fours = p.width / 4;
    float sum = 0.0f;
    Float4 x[NORM_AHEAD];
    for (uint32_t first = thread_index(); first < fours; first += NORM_THREADS * NORM_AHEAD) {
        Vec8 more[NORM_AHEAD];
        UNROLL
        for (uint32_t j = 0; j < NORM_AHEAD; j++) {
            uint32_t i = first + j * NORM_THREADS;
            x[j] = i < fours ? residual[i] : Float4{0.0f, 0.0f, 0.0f, 0.0f};
            more[j] = delta && i < fours ? delta[i] : Vec8{{0, 0}};
        }
        UNROLL
        for (uint32_t j = 0; j < NORM_AHEAD; j++) {
            uint32_t i = first + j * NORM_THREADS;
            if (i < fours) {
                if (delta) {
                    add<T>(x[j], more[j]);
                    if (!p.pick) {
                        residual[i] = x[j];
                    }
                }
                sum = fma_exact(x[j].x, x[j].x, sum);
                sum = fma_exact(x[j].y, x[j].y, sum);
                sum = fma_exact(x[j].z, x[j].z, sum);
                sum = fma_exact(x[j].w, x[j].w, sum);
            }
        }
    }
    // Under way while the sum is made.
    bool in_registers = fours <= NORM_THREADS * NORM_AHEAD;
    Float4 w[NORM_AHEAD];
    if (in_registers) {
        UNROLL
        for (uint32_t j = 0; j < NORM_AHEAD; j++) {
            uint32_t i = thread_index() + j * NORM_THREADS;
            w[j] = i < fours ? weight[i] : Float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
    }
    float scale = norm_scale(block_sum(sum) / (float)p.width + p.eps);
    Vec8 *out = (Vec8 *)((uint16_t *)p.out + (uint64_t)at * p.width);
    if (in_registers) {
        UNROLL
        for (uint32_t j = 0; j < NORM_AHEAD; j++) {
            uint32_t i = thread_index() + j * NORM_THREADS;
            if (i < fours) {
                out[i] = scaled<T>(x[j], scale, w[j]);
            }
        }
        return;
    }
    for (uint32_t first = thread_index(); first < fours; first += NORM_THREADS * NORM_AHEAD) {
        Vec8 more[NORM_AHEAD];
        UNROLL
        for (uint32_t j = 0; j < NORM_AHEAD; j++) {
            uint32_t i = first + j * NORM_THREADS;
            x[j] = i < fours ? residual[i] : Float4{0.0f, 0.0f, 0.0f, 0.0f};
            w[j] = i < fours ? weight[i] : Float4{0.0f, 0.0f, 0.0f, 0.0f};
            more[j] = delta && p.pick && i < fours ? delta[i] : Vec8{{0, 0}};
        }
        UNROLL
        for (uint32_t j = 0; j < NORM_AHEAD; j++) {
            uint32_t i = first + j * NORM_THREADS;
            if (i < fours) {
                if (delta && p.pick) {
                    add<T>(x[j], more[j]);
                }
                out[i] = scaled<T>(x[j], scale, w[j]);
            }
        }
    }
}

// The norm behind a part of a layer: residual += norm(delta) * weight. One block a row, which is read twice, the second time
// from a cache.
template <typename T> DEVICE void norm_after(const NormParams &p) {
    for (uint32_t i = 32 * thread_index(); i < p.width; i += 32 * NORM_THREADS) {
        prefetch(p.weight + i);
    }
    await_kernel_before();
    uint64_t start = (uint64_t)block_index() * p.width;
    const Vec8 *delta = (const Vec8 *)((const uint16_t *)p.delta + start);
    Float4 *residual = (Float4 *)(p.residual + start);
    const Float4 *weight = (const Float4 *)p.weight;
    float sum = 0.0f;
    for (uint32_t i = thread_index(); i < p.width / 4; i += NORM_THREADS) {
        Float4 x = Float4{0.0f, 0.0f, 0.0f, 0.0f};
        add<T>(x, delta[i]);
        sum = fma_exact(x.x, x.x, sum);
        sum = fma_exact(x.y, x.y, sum);
        sum = fma_exact(x.z, x.z, sum);
        sum = fma_exact(x.w, x.w, sum);
    }
    float scale = norm_scale(block_sum(sum) / (float)p.width + p.eps);
    for (uint32_t i = thread_index(); i < p.width / 4; i += NORM_THREADS) {
        Float4 x = Float4{0.0f, 0.0f, 0.0f, 0.0f}, w = weight[i], r = residual[i];
        add<T>(x, delta[i]);
        residual[i] = Float4{fma_exact(x.x * scale, w.x, r.x), fma_exact(x.y * scale, w.y, r.y),
                             fma_exact(x.z * scale, w.z, r.z), fma_exact(x.w * scale, w.w, r.w)};
    }
}

EARLY_KERNEL(norm_bf16, NormParams, NORM_THREADS, 4) { norm<Bf16>(p); }
EARLY_KERNEL(norm_f16, NormParams, NORM_THREADS, 4) { norm<F16>(p); }
EARLY_KERNEL(norm_after_bf16, NormParams, NORM_THREADS, 4) { norm_after<Bf16>(p); }
EARLY_KERNEL(norm_after_f16, NormParams, NORM_THREADS, 4) { norm_after<F16>(p); }
