// Attention of many rows (tokens times heads of a group) of one sequence: prefill. A block has a tile of queries, each
// warp 16 or 32 rows of it, and goes through all keys that any of them sees, in tiles at absolute multiples.
//
// A row's bits depend on its position and the keys before it, not on the chunk it came in or the rows beside it: rows of
// an operand do not mix, and tiles that a row does not see change nothing of it.
#pragma once

#include "attention.cuh"

// Rows of 16 that a warp has, and keys of a tile: as many as registers and shared memory of every GPU allow.
constexpr uint32_t row_tiles(uint32_t head_dim) { return head_dim <= 128 ? 2 : 1; }
constexpr uint32_t row_keys(uint32_t head_dim) { return head_dim <= 64 ? 64 : 32; }
constexpr uint32_t rows_of(uint32_t head_dim) { return ATTENTION_WARPS * 16 * row_tiles(head_dim); }

template <typename T, uint32_t D, bool FP8>
DEVICE void attend_rows(const AttentionParams &p, const AttentionItem &item, uint32_t unit) {
    uint32_t kv_head = unit % p.kv_heads;
    using Shape = Tile<D>;
    constexpr uint32_t TILES = row_tiles(D), KEYS = row_keys(D), ROWS = rows_of(D);
    constexpr uint32_t STAGE = FP8 ? small_bytes(D, KEYS) : Shape::bytes(2 * KEYS);
    uint8_t *queries = shared_memory();
    uint8_t *stages = queries + Shape::bytes(ROWS);
    uint8_t *wide = stages + 2 * STAGE;
    uint32_t *highs = (uint32_t *)(wide + (FP8 ? Shape::bytes(2 * KEYS) : 0));

    uint32_t end = item.position + item.tokens;
    uint32_t seen = p.window && item.position + 1 > p.window ? item.position + 1 - p.window : 0;
    // Conditions below are computed anew for each tile from as few numbers as can be: registers are what is short here.
    uint32_t tile = seen / KEYS;

    load_queries<T, D, ROWS>(p, item, kv_head, queries);
    // The head is computed anew each time.
    auto load = [&](uint32_t of, uint32_t tile) {
        uint8_t *stage = stages + tile % 2 * STAGE;
        if constexpr (FP8) {
            load_small<D, KEYS>(small_keys_of<D>(p, item, of % p.kv_heads), tile * KEYS, end, stage);
        } else {
            Keys<T, D> keys = keys_of<T, D>(p, item, of % p.kv_heads);
            load_tile<T, D, KEYS>(keys, tile * KEYS, end, stage, stage + STAGE / 2);
        }
    };
    load(unit, tile);
    cp_async_commit();

    uint32_t first_row = warp() * 16 * TILES;
    write_highs(p, item, ROWS, highs);
    Softmax<D> state[TILES];
    UNROLL
    for (uint32_t m = 0; m < TILES; m++) {
        state[m].clear();
    }
    for (; tile * KEYS < end; tile++) {
        if (MUTANT(MissingWait, false, true)) {
            cp_async_wait<0>();
        }
        barrier();
        if ((tile + 1) * KEYS < end) {
            load(not_kept(unit), tile + 1);
        }
        cp_async_commit();
        uint8_t *key_tile = stages + tile % 2 * STAGE;
        if constexpr (FP8) {
            widen_small<T, D, KEYS>(key_tile, wide, tile * KEYS, end);
            key_tile = wide;
            barrier();
        }
        uint8_t *value_tile = key_tile + Shape::bytes(KEYS);
        float scores[TILES][KEYS / 8][4];
        UNROLL
        for (uint32_t m = 0; m < TILES; m++) {
            UNROLL
            for (uint32_t n = 0; n < KEYS / 8; n++) {
                UNROLL
                for (uint32_t i = 0; i < 4; i++) {
                    scores[m][n][i] = 0.0f;
                }
            }
        }
        UNROLL
        for (uint32_t k = 0; k < D; k += 16) {
            uint32_t a[TILES][4];
            UNROLL
            for (uint32_t m = 0; m < TILES; m++) {
                load_a<D>(a[m], queries, first_row + 16 * m, k);
            }
            UNROLL
            for (uint32_t n = 0; n < KEYS / 8; n += 2) {
                uint32_t b[4];
                load_b<D>(b, key_tile, n * 8, k);
                UNROLL
                for (uint32_t m = 0; m < TILES; m++) {
                    mma<T>(scores[m][n], a[m], b[0], b[1]);
                    mma<T>(scores[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
        // Some key of the tile is out of some row's sight: ahead of the first row, or too far behind the last one.
        bool ahead = (tile + 1) * KEYS + item.tokens > end + 1;
        bool masked = ahead || (p.window && tile * KEYS + p.window < end);
        UNROLL
        for (uint32_t m = 0; m < TILES; m++) {
            Sight sight = {};
            if (masked) {
                sight = sight_of(highs, first_row + 16 * m, p.window);
            }
            soften<D, KEYS / 8>(state[m], scores[m], p.scale, masked, sight, tile * KEYS);
        }
        UNROLL
        for (uint32_t n = 0; n < KEYS / 8; n += 2) {
            uint32_t a[TILES][4];
            UNROLL
            for (uint32_t m = 0; m < TILES; m++) {
                a[m][0] = pack_small<T>(scores[m][n][0], scores[m][n][1]);
                a[m][1] = pack_small<T>(scores[m][n][2], scores[m][n][3]);
                a[m][2] = pack_small<T>(scores[m][n + 1][0], scores[m][n + 1][1]);
                a[m][3] = pack_small<T>(scores[m][n + 1][2], scores[m][n + 1][3]);
            }
            UNROLL
            for (uint32_t j = 0; j < D / 16; j++) {
                uint32_t b[4];
                load_b_rows<D>(b, value_tile, n * 8, j * 16);
                UNROLL
                for (uint32_t m = 0; m < TILES; m++) {
                    mma<T>(state[m].out[2 * j], a[m], b[0], b[1]);
                    mma<T>(state[m].out[2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
    // Read again, for the same reason.
    unit = not_kept(unit);
    kv_head = unit % p.kv_heads;
    uint32_t first_token = p.items[unit / p.kv_heads].row, tokens = p.items[unit / p.kv_heads].tokens;
    uint32_t group = p.heads / p.kv_heads;
    UNROLL
    for (uint32_t m = 0; m < TILES; m++) {
        UNROLL
        for (uint32_t i = 0; i < 2; i++) {
            float sum = row_sum(state[m].sum[i]);
            float scale = sum > 0.0f ? divide_exact(1.0f, sum) : 0.0f;
            uint32_t row = first_row + 16 * m + lane() / 4 + 8 * i;
            if (row < tokens * group) {
                uint64_t line = (uint64_t)(first_token + row / group) * p.heads + kv_head * group + row % group;
                uint32_t *to = (uint32_t *)p.out + line * (D / 2) + lane() % 4;
                UNROLL
                for (uint32_t j = 0; j < D / 8; j++) {
                    to[4 * j] = pack_small<T>(state[m].out[j][2 * i] * scale, state[m].out[j][2 * i + 1] * scale);
                }
            }
        }
    }
    cp_async_wait<0>();
    // The next item overwrites shared memory.
    barrier();
}
