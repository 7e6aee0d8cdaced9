// What both ways of attention share: where keys and values lie, how tiles of them come to shared memory, and the
// online softmax of a tile of scores.
//
// Rows of a tile of queries are (token, head of the group) pairs: row r is token r / group, head r % group, so that all
// queries which read a key head share what is loaded. Scores are kept in units of log2: scale holds log2(e).
#pragma once

#include "params.h"

constexpr uint32_t ATTENTION_THREADS = 128;
constexpr uint32_t ATTENTION_WARPS = ATTENTION_THREADS / WARP;

// The keys and values of one key head, as blocks in a table. All in bytes.
struct Keys {
    const uint8_t *pool; // keys of the layer and head in block 0
    uint64_t block_bytes;
    uint32_t values_after; // from keys to values
    const uint32_t *tables;
    uint32_t table, shift;
};

template <uint32_t D> DEVICE Keys keys_of(const AttentionParams &p, uint32_t table, uint32_t kv_head) {
    const uint8_t *layer = (const uint8_t *)p.kv + p.layer_offset * 2;
    return Keys{layer + (kv_head << p.block_shift) * D * 2, p.block_numbers * 2, (p.kv_heads << p.block_shift) * D * 2,
                p.tables, table, p.block_shift};
}

// Starts to load the keys and values of positions first..first + COUNT; zeros from END on.
template <uint32_t D, uint32_t COUNT>
DEVICE void load_tile(const Keys &keys, uint32_t first, uint32_t end, uint8_t *key_tile, uint8_t *value_tile) {
    using Shape = Tile<D>;
    constexpr uint32_t CHUNKS = COUNT * Shape::CHUNKS;
    static_assert(CHUNKS % ATTENTION_THREADS == 0, "every thread loads as many chunks");
    UNROLL
    for (uint32_t i = 0; i < CHUNKS / ATTENTION_THREADS; i++) {
        uint32_t at = i * ATTENTION_THREADS + thread_index();
        uint32_t row = at / Shape::CHUNKS, chunk = at % Shape::CHUNKS;
        uint32_t position = first + row;
        bool valid = position < end;
        // What is not loaded has an address in block 0: one rule for all is less arithmetic than two.
        uint32_t entry = keys.table + (MUTANT(BlockEdge, position + 1, position) >> keys.shift);
        uint32_t block = valid ? keys.tables[entry] : 0;
        uint32_t offset = position & ((1u << keys.shift) - 1);
        const uint8_t *from = keys.pool + ((uint64_t)block * keys.block_bytes + (offset * D * 2 + chunk * 16));
        cp_async16(Shape::at(key_tile, row, chunk), from, valid);
        cp_async16(Shape::at(value_tile, row, chunk), from + keys.values_after, valid);
    }
}

// The same of a pool of 8-bit numbers. They come to shared memory as they are, keys before values, and the scales of both
// behind them; a second step makes a tile of 16-bit numbers of that.
template <uint32_t D> struct SmallKeys {
    const uint8_t *keys; // of the layer and head in block 0
    const uint8_t *scales; // of these keys
    uint64_t block_bytes;
    uint32_t values_after, value_scales_after; // from keys to values, and from scales to scales
    const uint32_t *table;
    uint32_t shift;
};

template <uint32_t D>
DEVICE SmallKeys<D> small_keys_of(const AttentionParams &p, uint32_t table, uint32_t kv_head) {
    const uint8_t *layer = (const uint8_t *)p.kv + p.layer_offset;
    uint32_t all = p.kv_heads << p.block_shift, own = kv_head << p.block_shift;
    return SmallKeys<D>{layer + (uint64_t)own * D, layer + (uint64_t)all * 2 * D + (uint64_t)own * 4, p.block_numbers, all * D,
                        all * 4, p.tables + table, p.block_shift};
}

constexpr uint32_t small_bytes(uint32_t head_dim, uint32_t keys) { return 2 * keys * (head_dim + 4); }

template <uint32_t D, uint32_t COUNT>
DEVICE void load_small(const SmallKeys<D> &keys, uint32_t first, uint32_t end, uint8_t *stage) {
    constexpr uint32_t CHUNKS = D / 16, NUMBERS = COUNT * CHUNKS, SCALES = COUNT / 4;
    static_assert(D % 16 == 0 && COUNT % 4 == 0 && 2 * SCALES <= ATTENTION_THREADS, "rows and scales are whole chunks");
    // Where the position's line lies, from the first line of block 0 on, in bytes of so many a line.
    auto place = [&](uint32_t position, bool valid, uint32_t line_bytes) {
        uint32_t block = valid ? keys.table[MUTANT(BlockEdge, position + 1, position) >> keys.shift] : 0;
        return (uint64_t)block * keys.block_bytes + (position & ((1u << keys.shift) - 1)) * line_bytes;
    };
    UNROLL
    for (uint32_t turn = 0; turn < NUMBERS; turn += ATTENTION_THREADS) {
        uint32_t at = turn + thread_index();
        if (NUMBERS % ATTENTION_THREADS != 0 && at >= NUMBERS) {
            break;
        }
        uint32_t row = at / CHUNKS, chunk = at % CHUNKS;
        bool valid = first + row < end;
        const uint8_t *from = keys.keys + (place(first + row, valid, D) + chunk * 16);
        uint8_t *to = stage + row * D + chunk * 16;
        cp_async16(to, from, valid);
        cp_async16(to + COUNT * D, from + keys.values_after, valid);
    }
    // Scales come for four lines at once, by one thread for keys and another for values.
    if (thread_index() < 2 * SCALES) {
        bool value = thread_index() >= SCALES;
        uint32_t row = (thread_index() - (value ? SCALES : 0)) * 4;
        bool valid = first + row < end;
        const uint8_t *from = keys.scales + place(first + row, valid, 4) + (value ? keys.value_scales_after : 0);
        cp_async16(stage + 2 * COUNT * D + ((value ? COUNT : 0) + row) * 4, from, valid);
    }
}

// Makes a tile of keys and the tile of values behind it; positions from END on are zeros. The product with the scale is
// rounded to T, so that both ways of attention see the same numbers.
template <typename T, uint32_t D, uint32_t COUNT>
DEVICE void widen_small(const uint8_t *stage, uint8_t *tile, uint32_t first, uint32_t end) {
    constexpr uint32_t CHUNKS = D / 16;
    static_assert(2 * COUNT * CHUNKS % ATTENTION_THREADS == 0, "every thread widens as many chunks");
    const float *scales = (const float *)(stage + 2 * COUNT * D);
    // More at once would be more code, and registers that attention of many rows does not have.
    UNROLL_BY(2)
    for (uint32_t turn = 0; turn < 2 * COUNT * CHUNKS; turn += ATTENTION_THREADS) {
        uint32_t at = turn + thread_index(), line = at / CHUNKS, chunk = at % CHUNKS;
        float scale = first + line % COUNT < end ? scales[MUTANT(ScaleLine, line ^ 1, line)] : 0.0f;
        Vec16 small = *(const Vec16 *)(stage + line * D + chunk * 16);
        UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            Vec16 wide;
            UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                Float2 two = from_e4m3(small.word[2 * half + i / 2] >> 16 * (i % 2));
                wide.word[i] = pack_small<T>(multiply_exact(two.x, scale), multiply_exact(two.y, scale));
            }
            *(Vec16 *)Tile<D>::at(tile, line, 2 * chunk + half) = wide;
        }
    }
}

// Starts to load ROWS rows of queries; zeros beyond the item's.
template <typename T, uint32_t D, uint32_t ROWS>
DEVICE void load_queries(const AttentionParams &p, const AttentionItem &item, uint32_t kv_head, uint8_t *tile) {
    using Shape = Tile<D>;
    constexpr uint32_t CHUNKS = ROWS * Shape::CHUNKS;
    uint32_t group = p.heads / p.kv_heads;
    uint64_t width = (uint64_t)(p.heads + 2 * p.kv_heads) * D;
    for (uint32_t at = thread_index(); at < CHUNKS; at += ATTENTION_THREADS) {
        uint32_t row = at / Shape::CHUNKS, chunk = at % Shape::CHUNKS;
        bool valid = row < item.tokens * group;
        const T *from = (const T *)p.qkv;
        if (valid) {
            from += (item.row + row / group) * width + (uint64_t)(kv_head * group + row % group) * D + chunk * 8;
        }
        cp_async16(Shape::at(tile, row, chunk), from, valid);
    }
}

// Where a lane's row of a 16 x 16 operand lies in a tile: A row-major or B as rows, and B as rows of its columns. With the
// chunks of Tile::further that is one operation for each step through a row; what is added to it is a multiple of eight rows.
template <uint32_t D> DEVICE uint32_t part_of_a(uint32_t row) {
    return Tile<D>::offset(row + lane() % 16, lane() / 16);
}
template <uint32_t D> DEVICE uint32_t part_of_b(uint32_t column) {
    return Tile<D>::offset(column + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
}
// The operand ROWS rows below PART and K numbers to the right of it.
template <uint32_t D> DEVICE void load_part(uint32_t (&r)[4], uint8_t *tile, uint32_t part, uint32_t rows, uint32_t k) {
    load_matrices(r, tile + Tile<D>::bytes(rows) + Tile<D>::further(part, k / 8));
}
template <uint32_t D>
DEVICE void load_part_transposed(uint32_t (&r)[4], uint8_t *tile, uint32_t part, uint32_t rows, uint32_t k) {
    load_matrices_transposed(r, tile + Tile<D>::bytes(rows) + Tile<D>::further(part, k / 8));
}

// What this lane's rows, g and g + 8 of an operand, see of the keys: positions from LOW to before HIGH.
struct Sight {
    uint32_t low[2], high[2];
};

// From how far each of the item's ROWS rows sees on, for all threads: 0 for rows that are not there.
DEVICE void write_highs(const AttentionParams &p, const AttentionItem &item, uint32_t rows, uint32_t *highs) {
    uint32_t group = p.heads / p.kv_heads;
    for (uint32_t row = thread_index(); row < rows; row += ATTENTION_THREADS) {
        uint32_t token = row / group;
        highs[row] = token < item.tokens ? item.position + token + MUTANT(CausalEdge, 0, 1) : 0;
    }
}

// Read anew for each tile that needs it, which costs less than the registers to keep it.
DEVICE Sight sight_of(const uint32_t *highs, uint32_t first_row, uint32_t window) {
    Sight sight;
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t high = highs[first_row + lane() / 4 + 8 * i];
        sight.high[i] = high;
        sight.low[i] = window && high > window ? high - MUTANT(WindowEdge, window - 1, window) : 0;
    }
    return sight;
}

// The running state of an online softmax over rows g and g + 8 of an operand.
template <uint32_t D> struct Softmax {
    float top[2], sum[2]; // sum: this lane's part
    float out[D / 8][4];

    MEMBER void clear() {
        UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            top[i] = -INFINITE;
            sum[i] = 0.0f;
        }
        UNROLL
        for (uint32_t j = 0; j < D / 8; j++) {
            UNROLL
            for (uint32_t i = 0; i < 4; i++) {
                out[j][i] = 0.0f;
            }
        }
    }
};

// Scores of keys from FIRST on that are out of sight become minus infinity.
template <uint32_t N> DEVICE void hide(float (&scores)[N][4], const Sight &sight, uint32_t first) {
    UNROLL
    for (uint32_t n = 0; n < N; n++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t key = first + n * 8 + 2 * (lane() % 4) + i % 2;
            bool seen = key >= sight.low[i / 2] && key < sight.high[i / 2];
            scores[n][i] = seen ? scores[n][i] : -INFINITE;
        }
    }
}

// Takes scores of N * 8 keys, not yet scaled, into the softmax and leaves weights in their place.
template <uint32_t D, uint32_t N> DEVICE void soften(Softmax<D> &state, float (&scores)[N][4], float scale) {
    float tops[2] = {-INFINITE, -INFINITE};
    UNROLL
    for (uint32_t n = 0; n < N; n++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            tops[i / 2] = fmaxf(tops[i / 2], scores[n][i]);
        }
    }
    float decay[2];
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        tops[i] = fmaxf(tops[i], shuffle_xor(tops[i], 1));
        tops[i] = fmaxf(tops[i], shuffle_xor(tops[i], 2));
        tops[i] = fmaxf(state.top[i], multiply_exact(tops[i], scale));
        // Where nothing was seen yet, any finite reference gives weights of 0.
        float reference = tops[i] == -INFINITE ? 0.0f : tops[i];
        decay[i] = exp2_approximate(state.top[i] - reference);
        state.top[i] = tops[i];
        tops[i] = reference;
        state.sum[i] = multiply_exact(state.sum[i], decay[i]);
    }
    UNROLL
    for (uint32_t n = 0; n < N; n++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            scores[n][i] = exp2_approximate(fma_exact(scores[n][i], scale, -tops[i / 2]));
            state.sum[i / 2] += scores[n][i];
        }
    }
    UNROLL
    for (uint32_t j = 0; j < D / 8; j++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            state.out[j][i] = multiply_exact(state.out[j][i], decay[i / 2]);
        }
    }
}

// Weights of 16 keys, those of two n-tiles, as an operand.
template <typename T, uint32_t N> DEVICE void pack_weights(uint32_t (&a)[4], const float (&weights)[N][4], uint32_t n) {
    a[0] = pack_small<T>(weights[n][0], weights[n][1]);
    a[1] = pack_small<T>(weights[n][2], weights[n][3]);
    a[2] = pack_small<T>(weights[n + 1][0], weights[n + 1][1]);
    a[3] = pack_small<T>(weights[n + 1][2], weights[n + 1][3]);
}

// The sum of a row over the four lanes that share it.
DEVICE float row_sum(float part) {
    part += shuffle_xor(part, 1);
    return part + shuffle_xor(part, 2);
}
