// The residual stream between products: the sum with what a product yielded, and its RMS norm, in one pass; for the
// head, only of the rows that are sampled.
#include "params.h"

constexpr uint32_t NORM_THREADS = 256;

// One block a row, whatever its width, so that the order of the sum depends on the width alone. The row is read twice,
// the second time from a cache. width is a multiple of 8.
template <typename T> DEVICE void norm(const NormParams &p) {
    uint32_t at = block_index();
    uint32_t row = p.pick ? p.pick[at] : at;
    uint64_t start = (uint64_t)row * p.width;
    float *residual = p.residual + start;
    const uint32_t *delta = p.delta ? (const uint32_t *)p.delta + start / 2 : nullptr;
    float sum = 0.0f;
    for (uint32_t i = thread_index() * 4; i < p.width; i += NORM_THREADS * 4) {
        Float4 x = *(const Float4 *)(residual + i);
        if (delta) {
            uint32_t low = delta[i / 2], high = delta[i / 2 + 1];
            x.x += to_float(T{(uint16_t)low});
            x.y += to_float(T{(uint16_t)(low >> 16)});
            x.z += to_float(T{(uint16_t)high});
            x.w += to_float(T{(uint16_t)(high >> 16)});
            if (!p.pick) {
                *(Float4 *)(residual + i) = x;
            }
        }
        sum = fma_exact(x.x, x.x, sum);
        sum = fma_exact(x.y, x.y, sum);
        sum = fma_exact(x.z, x.z, sum);
        sum = fma_exact(x.w, x.w, sum);
    }
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
    float scale = root_inverse(total / (float)p.width + p.eps);
    uint32_t *out = (uint32_t *)p.out + (uint64_t)at * p.width / 2;
    for (uint32_t i = thread_index() * 4; i < p.width; i += NORM_THREADS * 4) {
        Float4 x = *(const Float4 *)(residual + i);
        if (delta && p.pick) {
            uint32_t low = delta[i / 2], high = delta[i / 2 + 1];
            x.x += to_float(T{(uint16_t)low});
            x.y += to_float(T{(uint16_t)(low >> 16)});
            x.z += to_float(T{(uint16_t)high});
            x.w += to_float(T{(uint16_t)(high >> 16)});
        }
        Float4 w = *(const Float4 *)(p.weight + i);
        out[i / 2] = pack<T>(x.x * scale * w.x, x.y * scale * w.y);
        out[i / 2 + 1] = pack<T>(x.z * scale * w.z, x.w * scale * w.w);
    }
}

KERNEL(norm_bf16, NormParams, NORM_THREADS, 4) { norm<Bf16>(p); }
KERNEL(norm_f16, NormParams, NORM_THREADS, 4) { norm<F16>(p); }
