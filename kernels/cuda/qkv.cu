// Everything between the QKV product and attention, in one pass: norms of queries and keys where the model has them,
// rotation of both to their positions, and keys and values into the pool.
#include "params.h"

constexpr uint32_t QKV_THREADS = 128;
// Elements that a lane has of each half of a head.
constexpr uint32_t EIGHT = 8;

// Elements of 16 bits as floats.
template <typename T> DEVICE void widen(const Vec16 &from, float (&to)[EIGHT]) {
    UNROLL
    for (uint32_t j = 0; j < EIGHT; j++) {
        to[j] = to_float(T{(uint16_t)(from.word[j / 2] >> 16 * (j % 2))});
    }
}
template <typename T> DEVICE Vec16 narrow_all(const float (&from)[EIGHT]) {
    Vec16 to;
    UNROLL
    for (uint32_t j = 0; j < EIGHT / 2; j++) {
        to.word[j] = pack<T>(from[2 * j], from[2 * j + 1]);
    }
    return to;
}
DEVICE void load_eight(const float *from, float (&to)[EIGHT]) {
    UNROLL
    for (uint32_t j = 0; j < EIGHT / 4; j++) {
        Float4 four = ((const Float4 *)from)[j];
        to[4 * j] = four.x, to[4 * j + 1] = four.y, to[4 * j + 2] = four.z, to[4 * j + 3] = four.w;
    }
}
DEVICE Vec8 eight_e4m3(const float (&from)[EIGHT], float unit) {
    Vec8 to = {{0, 0}};
    UNROLL
    for (uint32_t j = 0; j < EIGHT; j++) {
        to.word[j / 4] |= (to_e4m3(divide_exact(from[j], unit)) & 0xff) << 8 * (j % 4);
    }
    return to;
}

// Grid: x divides the heads of a row, y the rows; one row per warp. A row is p.heads queries, then p.kv_heads keys, then p.kv_heads values.
// Each lane loads eight consecutive elements of the first half of a head and the eight that RoPE pairs with them, so a warp
// processes several heads at once. head_dim is a multiple of 16, at most 512. Queries are written in place, keys and values to the KV
// pool only, where attention reads them.
template <typename T, bool FP8> DEVICE void finish_qkv(const QkvParams &p) {
    uint32_t all = p.heads + 2 * p.kv_heads, half = p.head_dim / 2;
    uint32_t row = block_row() * (QKV_THREADS / WARP) + warp();
    // Lanes of a head: a power of two, so that they find sums among themselves.
    uint32_t lanes = 1;
    while (lanes * EIGHT < half) {
        lanes *= 2;
    }
    uint32_t at_once = WARP / lanes, own = lane() / lanes, i = lane() % lanes * EIGHT;
    uint32_t passes = (all + at_once - 1) / at_once, each = (passes + blocks() - 1) / blocks() * at_once;
    uint32_t first = block_index() * each, end = smaller(first + each, all);
    bool inside = i < half;
    // What no kernel writes is loaded while the GEMM before this kernel ends: where the row's token goes, and the angles of its
    // position. Weights, which all rows share, are brought nearer. Places and positions are written by a copy between two steps; before
    // the wait for the kernel before, the first-level cache may still have those of the step before, so they are read past it.
    uint32_t place = row < p.rows && first < end ? load_shared_by_device(p.places + row) : ~0u;
    float turns[2][EIGHT] = {};
    if (place != ~0u && inside) {
        const float *angles = p.angles + (uint64_t)load_shared_by_device(p.positions + row) * p.head_dim + 2 * i;
        load_eight(angles, turns[0]);
        load_eight(angles + EIGHT, turns[1]);
        if (p.q_norm && own < 2) {
            const float *weight = (own == 0 ? p.q_norm : p.k_norm) + i;
            prefetch(weight);
            prefetch(weight + half);
        }
    }
    await_kernel_before();
    if (place == ~0u) {
        return;
    }
    T *line = (T *)p.qkv + (uint64_t)row * all * p.head_dim;
    uint32_t block = place / p.block_tokens, offset = place % p.block_tokens;
    uint64_t layer = (uint64_t)block * p.block_numbers + p.layer_offset;
    auto load = [&](uint32_t head, Vec16 &low, Vec16 &high) {
        bool some = inside && head < end;
        const T *x = line + (uint64_t)head * p.head_dim + i;
        low = some ? *(const Vec16 *)x : Vec16{{0, 0, 0, 0}};
        high = some ? *(const Vec16 *)(x + half) : Vec16{{0, 0, 0, 0}};
    };
    Vec16 next_low, next_high;
    load(first + own, next_low, next_high);
    for (uint32_t begin = first; begin < end; begin += at_once) {
        uint32_t head = begin + own;
        float low[EIGHT], high[EIGHT];
        widen<T>(next_low, low);
        widen<T>(next_high, high);
        // The next heads are on their way while these are treated.
        load(head + at_once, next_low, next_high);
        bool query = head < p.heads, value = head >= p.heads + p.kv_heads;
        const float *weight = query ? p.q_norm : p.k_norm;
        float sum = 0.0f;
        UNROLL
        for (uint32_t j = 0; j < EIGHT; j++) {
            sum = fma_exact(low[j], low[j], sum);
            sum = fma_exact(high[j], high[j], sum);
        }
        for (uint32_t mask = lanes / 2; mask > 0; mask /= 2) {
            sum += shuffle_xor(sum, mask);
        }
        if (!value && weight && inside) {
            float scale = norm_scale(sum / (float)p.head_dim + p.eps);
            float w[EIGHT];
            load_eight(weight + i, w);
            UNROLL
            for (uint32_t j = 0; j < EIGHT; j++) {
                low[j] = low[j] * scale * w[j];
            }
            load_eight(weight + half + i, w);
            UNROLL
            for (uint32_t j = 0; j < EIGHT; j++) {
                high[j] = high[j] * scale * w[j];
            }
        }
        if (!value) {
            UNROLL
            for (uint32_t j = 0; j < EIGHT; j++) {
                float cosine = turns[j / 4][2 * j % EIGHT], sine = turns[j / 4][2 * j % EIGHT + 1];
                float turned = low[j] * cosine - high[j] * sine;
                high[j] = high[j] * cosine + low[j] * sine;
                low[j] = turned;
            }
        }
        // A head with an element that is not finite becomes NaN as a whole: a score of minus infinity would leave its position out, and
        // e4m3 has no infinities. Compared as bits, since the greater of two numbers drops NaN.
        uint32_t magnitude = 0;
        UNROLL
        for (uint32_t j = 0; j < EIGHT; j++) {
            magnitude = larger(magnitude, larger(float_to_bits(fabsf(low[j])), float_to_bits(fabsf(high[j]))));
        }
        for (uint32_t mask = lanes / 2; mask > 0; mask /= 2) {
            magnitude = larger(magnitude, shuffle_xor(magnitude, mask));
        }
        float largest = bits_to_float(magnitude);
        bool finite = MUTANT(InfiniteKeys, true, largest < INFINITE);
        bool stored = inside && head < end;
        // Where in the layer's part of the block; of no meaning for queries.
        uint64_t at = (uint64_t)(head - p.heads) * p.block_tokens + offset;
        if (FP8) {
            if (stored && !query) {
                // Within the range of T, so that what is made of it again needs no bounds.
                largest = fminf(largest, T::LARGEST);
                float unit = largest > 0.0f ? divide_exact(largest, E4M3_MAX) : 1.0f;
                unit = finite ? unit : NOT_A_NUMBER;
                uint8_t *bytes = (uint8_t *)p.kv + layer;
                if (i == 0) {
                    float *scales = (float *)(bytes + 2ull * p.kv_heads * p.block_tokens * p.head_dim);
                    scales[at] = unit;
                }
                bytes += at * p.head_dim + i;
                *(Vec8 *)bytes = eight_e4m3(low, unit);
                *(Vec8 *)(bytes + half) = eight_e4m3(high, unit);
            }
        }
        if (stored && (query || !FP8)) {
            UNROLL
            for (uint32_t j = 0; j < EIGHT; j++) {
                low[j] = finite ? low[j] : NOT_A_NUMBER;
                high[j] = finite ? high[j] : NOT_A_NUMBER;
            }
            T *to = query ? line + (uint64_t)head * p.head_dim : (T *)p.kv + layer + at * p.head_dim;
            *(Vec16 *)(to + i) = narrow_all<T>(low);
            *(Vec16 *)(to + i + half) = narrow_all<T>(high);
        }
    }
}

EARLY_KERNEL(finish_qkv_bf16, QkvParams, QKV_THREADS, 6) { finish_qkv<Bf16, false>(p); }
EARLY_KERNEL(finish_qkv_f16, QkvParams, QKV_THREADS, 6) { finish_qkv<F16, false>(p); }
EARLY_KERNEL(finish_qkv_bf16_fp8, QkvParams, QKV_THREADS, 6) { finish_qkv<Bf16, true>(p); }
EARLY_KERNEL(finish_qkv_f16_fp8, QkvParams, QKV_THREADS, 6) { finish_qkv<F16, true>(p); }
