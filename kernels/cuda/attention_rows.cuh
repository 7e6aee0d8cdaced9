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
    // Whose keys are loaded: the key head and the beginning of the block table.
    uint32_t *source = highs + ROWS;

    uint32_t end = item.position + item.tokens;
    uint32_t seen = p.window && item.position + 1 > p.window ? item.position + 1 - p.window : 0;
    // Conditions below are computed anew for each tile from as few numbers as can be: registers are what is short here.
    uint32_t tile = seen / KEYS;

    load_queries<T, D, ROWS>(p, item, kv_head, queries);
    auto load = [&](uint32_t kv_head, uint32_t table, uint32_t tile) {
        uint8_t *stage = stages + tile % 2 * STAGE;
        if constexpr (FP8) {
            load_small<D, KEYS>(small_keys_of<D>(p, table, kv_head), tile * KEYS, end, stage);
        } else {
            load_tile<D, KEYS>(keys_of<D>(p, table, kv_head), tile * KEYS, end, stage, stage + STAGE / 2);
        }
    };
    load(kv_head, item.table, tile);
    cp_async_commit();
    if (thread_index() == 0) {
        source[0] = kv_head;
        source[1] = item.table;
    }

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
            load(source[0], source[1], tile + 1);
        }
        cp_async_commit();
        uint8_t *tiles = stages;
        uint32_t keys_at = tile % 2 * STAGE;
        if constexpr (FP8) {
            widen_small<T, D, KEYS>(stages + keys_at, wide, tile * KEYS, end);
            tiles = wide;
            keys_at = 0;
            barrier();
        }
        uint32_t query_part = not_kept(part_of_a<D>(first_row));
        uint32_t key_part = not_kept(keys_at + part_of_b<D>(0));
        uint32_t value_part = not_kept(keys_at + part_of_a<D>(0));
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
                load_part<D>(a[m], queries, query_part, 16 * m, k);
            }
            UNROLL
            for (uint32_t n = 0; n < KEYS / 8; n += 2) {
                uint32_t b[4];
                load_part<D>(b, tiles, key_part, n * 8, k);
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
        if (masked) {
            UNROLL
            for (uint32_t m = 0; m < TILES; m++) {
                hide<KEYS / 8>(scores[m], sight_of(highs, first_row + 16 * m, p.window), tile * KEYS);
            }
        }
        UNROLL
        for (uint32_t m = 0; m < TILES; m++) {
            soften<D, KEYS / 8>(state[m], scores[m], p.scale);
        }
        UNROLL
        for (uint32_t n = 0; n < KEYS / 8; n += 2) {
            uint32_t a[TILES][4];
            UNROLL
            for (uint32_t m = 0; m < TILES; m++) {
                pack_weights<T, KEYS / 8>(a[m], scores[m], n);
            }
            UNROLL
            for (uint32_t j = 0; j < D / 16; j++) {
                uint32_t b[4];
                load_part_transposed<D>(b, tiles, value_part, KEYS + n * 8, j * 16);
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
                    to[4 * j] = pack<T>(state[m].out[j][2 * i] * scale, state[m].out[j][2 * i + 1] * scale);
                }
            }
        }
    }
    cp_async_wait<0>();
    // The next item overwrites shared memory.
    barrier();
}
