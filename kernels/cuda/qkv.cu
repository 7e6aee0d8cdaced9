// Everything between the QKV product and attention, in one pass: norms of queries and keys where the model has them,
// rotation of both to their positions, and keys and values into the pool.
#include "params.h"

constexpr uint32_t QKV_THREADS = 128;
constexpr uint32_t HEAD_DIM_MAX = 256;

// One warp a head of a row: heads queries, then kv_heads keys, then kv_heads values. head_dim is even, at most 256.
// Queries are finished in place; keys and values are written to the pool alone, which is where attention reads them.
template <typename T, bool FP8> DEVICE void finish_qkv(const QkvParams &p) {
    uint32_t all = p.heads + 2 * p.kv_heads;
    uint64_t unit = (uint64_t)block_index() * (QKV_THREADS / WARP) + warp();
    uint32_t row = (uint32_t)(unit / all), head = (uint32_t)(unit % all);
    // Known before the step begins, and far away: on their way while the product before this kernel ends.
    uint32_t place = unit < (uint64_t)p.rows * all ? p.places[row] : ~0u;
    const float *angles = p.angles + (uint64_t)(place != ~0u ? p.positions[row] : 0) * p.head_dim;
    const float *weight = head < p.heads ? p.q_norm : p.k_norm;
    if (32 * lane() < p.head_dim) {
        prefetch(angles + 32 * lane());
        if (weight) {
            prefetch(weight + 32 * lane());
        }
    }
    await_kernel_before();
    if (place == ~0u) {
        return;
    }
    uint32_t half = p.head_dim / 2;
    T *x = (T *)p.qkv + ((uint64_t)row * all + head) * p.head_dim;
    bool query = head < p.heads, value = head >= p.heads + p.kv_heads;
    uint32_t block = place / p.block_tokens, offset = place % p.block_tokens;
    // Where in the layer's part of the block; of no meaning for queries.
    uint64_t layer = (uint64_t)block * p.block_numbers + p.layer_offset;
    uint64_t line = (uint64_t)(head - p.heads) * p.block_tokens + offset;
    T *to = query || FP8 ? x : (T *)p.kv + layer + line * p.head_dim;
    // Each lane has the numbers i and i + half for i = lane, lane + 32, ...
    constexpr uint32_t PAIRS = HEAD_DIM_MAX / 2 / WARP;
    float low[PAIRS], high[PAIRS];
    float sum = 0.0f;
    UNROLL
    for (uint32_t j = 0; j < PAIRS; j++) {
        uint32_t i = lane() + j * WARP;
        low[j] = i < half ? to_float(x[i]) : 0.0f;
        high[j] = i < half ? to_float(x[i + half]) : 0.0f;
        sum = fma_exact(low[j], low[j], sum);
        sum = fma_exact(high[j], high[j], sum);
    }
    float scale = 1.0f;
    if (!value && weight) {
        scale = root_inverse(warp_sum(sum) / (float)p.head_dim + p.eps);
    }
    float largest = 0.0f;
    UNROLL
    for (uint32_t j = 0; j < PAIRS; j++) {
        uint32_t i = lane() + j * WARP;
        if (i < half) {
            float a = low[j], b = high[j];
            if (!value) {
                if (weight) {
                    a = a * scale * weight[i];
                    b = b * scale * weight[i + half];
                }
                float cosine = angles[2 * i], sine = angles[2 * i + 1];
                float turned = a * cosine - b * sine;
                b = b * cosine + a * sine;
                a = turned;
            }
            if (FP8 && !query) {
                low[j] = a;
                high[j] = b;
                largest = fmaxf(largest, fmaxf(fabsf(a), fabsf(b)));
            } else {
                to[i] = narrow<T>(a);
                to[i + half] = narrow<T>(b);
            }
        }
    }
    if (FP8 && !query) {
        largest = warp_max(largest);
        // Within the range of T, so that what is made of it again needs no bounds.
        largest = fminf(largest, T::LARGEST);
        float unit = largest > 0.0f ? divide_exact(largest, E4M3_MAX) : 1.0f;
        uint8_t *bytes = (uint8_t *)p.kv + layer;
        if (lane() == 0) {
            float *scales = (float *)(bytes + 2ull * p.kv_heads * p.block_tokens * p.head_dim);
            scales[line] = unit;
        }
        bytes += line * p.head_dim;
        UNROLL
        for (uint32_t j = 0; j < PAIRS; j++) {
            uint32_t i = lane() + j * WARP;
            if (i < half) {
                bytes[i] = (uint8_t)to_e4m3(divide_exact(low[j], unit));
                bytes[i + half] = (uint8_t)to_e4m3(divide_exact(high[j], unit));
            }
        }
    }
}

EARLY_KERNEL(finish_qkv_bf16, QkvParams, QKV_THREADS, 8) { finish_qkv<Bf16, false>(p); }
EARLY_KERNEL(finish_qkv_f16, QkvParams, QKV_THREADS, 8) { finish_qkv<F16, false>(p); }
EARLY_KERNEL(finish_qkv_bf16_fp8, QkvParams, QKV_THREADS, 8) { finish_qkv<Bf16, true>(p); }
EARLY_KERNEL(finish_qkv_f16_fp8, QkvParams, QKV_THREADS, 8) { finish_qkv<F16, true>(p); }
