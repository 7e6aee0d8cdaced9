// Attention of up to 16 rows (tokens times heads of a group) over long keys: decoding, short chunks, and in the
// deterministic mode everything.
//
// Keys are cut into splits of 64 to 4096 positions, a power of two, at absolute multiples. Within a split the warps of a block take 16
// keys each of every tile, with a softmax of their own, and are merged in the order of the warps; splits are merged in
// their order, by this block if it has all of them, else by the block that comes last. So with one length of splits the
// bits of a row depend neither on how many splits one block treats, nor on what else is in the batch, nor on which rows
// share its tile. The host takes 256 in the deterministic mode, and otherwise those that take the least time.
#pragma once

#include "attention.cuh"

constexpr uint32_t SPLIT_ROWS = 16;

// Keys of a tile. Wide heads have half as many, that a block still fits smaller GPUs; two warps then only load.
constexpr uint32_t split_keys(uint32_t head_dim) { return head_dim <= 128 ? 64 : 32; }

// Shared memory: queries, stages of (keys, values), those of a stage in 16 bits if they are stored in 8, the block's sums, tops and sums of the warps, what rows see.

// Numbers from one row of the block's sums to the next: rows the eight rows that a warp adds at once fall into different banks.
constexpr uint32_t sums_stride(uint32_t head_dim) { return head_dim + 8; }

// A thread's share of a merged row: PARTS times four columns.
template <uint32_t PARTS> struct Merged {
    float top, sum;
    Float4 out[PARTS];
};
// While eight threads share a row: row thread / 8, columns 4 * (thread % 8) + 32 * j.
constexpr uint32_t parts_of_eight(uint32_t head_dim) { return head_dim / 32; }

// Takes a further partial result of the same row in. Exact operations, since two places must agree on every bit.
template <uint32_t PARTS> DEVICE void fold(Merged<PARTS> &all, float top, float sum, const Float4 *out) {
    float tops = fmaxf(all.top, top);
    float reference = tops == -INFINITE ? 0.0f : tops;
    float a = exp2_approximate(all.top - reference);
    float b = MUTANT(MergeMaximum, 1.0f, exp2_approximate(top - reference));
    all.top = tops;
    all.sum = fma_exact(sum, b, multiply_exact(all.sum, a));
    UNROLL
    for (uint32_t j = 0; j < PARTS; j++) {
        all.out[j].x = fma_exact(out[j].x, b, multiply_exact(all.out[j].x, a));
        all.out[j].y = fma_exact(out[j].y, b, multiply_exact(all.out[j].y, a));
        all.out[j].z = fma_exact(out[j].z, b, multiply_exact(all.out[j].z, a));
        all.out[j].w = fma_exact(out[j].w, b, multiply_exact(all.out[j].w, a));
    }
}

template <uint32_t PARTS> DEVICE void clear(Merged<PARTS> &all) {
    all.top = -INFINITE;
    all.sum = 0.0f;
    UNROLL
    for (uint32_t j = 0; j < PARTS; j++) {
        all.out[j] = Float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
}

// Writes a row's result: STEP columns apart, from COLUMN on.
template <typename T, uint32_t D, uint32_t STEP, uint32_t PARTS>
DEVICE void write_merged(const AttentionParams &p, const AttentionItem &item, uint32_t kv_head, uint32_t row,
                         uint32_t column, const Merged<PARTS> &all) {
    uint32_t group = p.heads / p.kv_heads;
    float scale = all.sum > 0.0f ? divide_exact(1.0f, all.sum) : 0.0f;
    uint64_t line = (uint64_t)(item.row + row / group) * p.heads + kv_head * group + row % group;
    uint32_t *to = (uint32_t *)p.out + line * (D / 2) + column / 2;
    UNROLL
    for (uint32_t j = 0; j < PARTS; j++) {
        to[STEP / 2 * j] = pack<T>(multiply_exact(all.out[j].x, scale), multiply_exact(all.out[j].y, scale));
        to[STEP / 2 * j + 1] = pack<T>(multiply_exact(all.out[j].z, scale), multiply_exact(all.out[j].w, scale));
    }
}

// Merges what the warps have of a split: afterwards each thread has its share of the block's result.
template <uint32_t D>
DEVICE void merge_warps(Softmax<D> &state, uint32_t compute_warps, uint32_t rows, float *sums, float *warp_tops,
                        float *warp_sums, Merged<parts_of_eight(D)> &merged) {
    uint32_t g = lane() / 4, t = lane() % 4;
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        float sum = row_sum(state.sum[i]);
        if (t == 0) {
            warp_tops[warp() * SPLIT_ROWS + g + 8 * i] = state.top[i];
            warp_sums[warp() * SPLIT_ROWS + g + 8 * i] = sum;
        }
    }
    barrier();
    float scales[2];
    UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        float top = -INFINITE;
        for (uint32_t w = 0; w < compute_warps; w++) {
            top = fmaxf(top, warp_tops[w * SPLIT_ROWS + g + 8 * i]);
        }
        scales[i] = exp2_approximate(state.top[i] - (top == -INFINITE ? 0.0f : top));
    }
    for (uint32_t w = 0; w < compute_warps; w++) {
        if (warp() == w) {
            UNROLL
            for (uint32_t i = 0; i < 2; i++) {
                // Of rows that are not there, nothing is read.
                if (g + 8 * i >= rows) {
                    continue;
                }
                Float2 *at = (Float2 *)(sums + (g + 8 * i) * sums_stride(D) + 2 * t);
                UNROLL
                for (uint32_t j = 0; j < D / 8; j++) {
                    float low = multiply_exact(state.out[j][2 * i], scales[i]);
                    float high = multiply_exact(state.out[j][2 * i + 1], scales[i]);
                    Float2 before = w == 0 ? Float2{0.0f, 0.0f} : at[4 * j];
                    at[4 * j] = w == 0 ? Float2{low, high} : Float2{before.x + low, before.y + high};
                }
            }
        }
        barrier();
    }
    uint32_t row = thread_index() / 8;
    merged.top = -INFINITE;
    for (uint32_t w = 0; w < compute_warps; w++) {
        merged.top = fmaxf(merged.top, warp_tops[w * SPLIT_ROWS + row]);
    }
    float reference = merged.top == -INFINITE ? 0.0f : merged.top;
    merged.sum = 0.0f;
    for (uint32_t w = 0; w < compute_warps; w++) {
        float scale = exp2_approximate(warp_tops[w * SPLIT_ROWS + row] - reference);
        merged.sum = fma_exact(warp_sums[w * SPLIT_ROWS + row], scale, merged.sum);
    }
    UNROLL
    for (uint32_t j = 0; j < parts_of_eight(D); j++) {
        const float *from = sums + row * sums_stride(D) + 4 * (thread_index() % 8) + 32 * j;
        merged.out[j] = row < rows ? *(const Float4 *)from : Float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    barrier();
}

// Leaves a split's result for the block that comes last.
template <uint32_t D>
DEVICE void write_partial(const AttentionParams &p, uint64_t partial, uint32_t rows,
                          const Merged<parts_of_eight(D)> &merged) {
    uint32_t row = thread_index() / 8;
    if (row >= rows) {
        return;
    }
    uint64_t line = partial * SPLIT_ROWS + row;
    if (thread_index() % 8 == 0) {
        p.partial_tops[2 * line] = merged.top;
        p.partial_tops[2 * line + 1] = merged.sum;
    }
    UNROLL
    for (uint32_t j = 0; j < parts_of_eight(D); j++) {
        *(Float4 *)(p.partial_sums + line * D + 4 * (thread_index() % 8) + 32 * j) = merged.out[j];
    }
}

// Merges the splits of an item's tokens in their order, and writes the result. All threads take part: each has four
// columns of a row at a time, and loads some splits before it takes the first of them in.
template <typename T, uint32_t D>
DEVICE void merge_partials(const AttentionParams &p, const AttentionItem &item, uint32_t kv_head, uint32_t rows) {
    constexpr uint32_t FOURS = D / 4, AHEAD = 8;
    for (uint32_t at = thread_index(); at < rows * FOURS; at += ATTENTION_THREADS) {
        uint32_t row = at / FOURS, column = at % FOURS * 4;
        Merged<1> all;
        clear(all);
        for (uint32_t first = 0; first < item.splits; first += AHEAD) {
            Float2 tops[AHEAD];
            Float4 out[AHEAD];
            UNROLL
            for (uint32_t i = 0; i < AHEAD; i++) {
                uint32_t s = smaller(first + i, item.splits - 1);
                uint32_t partial = item.partial + MUTANT(MergeOrder, item.splits - 1 - s, s);
                uint64_t line = ((uint64_t)partial * p.kv_heads + kv_head) * SPLIT_ROWS + row;
                out[i] = load_shared_by_device((const Float4 *)(p.partial_sums + line * D + column));
                tops[i] = load_shared_by_device((const Float2 *)p.partial_tops + line);
            }
            UNROLL
            for (uint32_t i = 0; i < AHEAD; i++) {
                if (first + i < item.splits) {
                    fold(all, tops[i].x, tops[i].y, out + i);
                }
            }
        }
        write_merged<T, D, 4>(p, item, kv_head, row, column, all);
    }
}

template <typename T, uint32_t D, bool FP8>
DEVICE void attend_split(const AttentionParams &p, const AttentionItem &item, uint32_t kv_head) {
    using Shape = Tile<D>;
    constexpr uint32_t KEYS = split_keys(D);
    constexpr uint32_t COMPUTE_WARPS = KEYS / 16;
    constexpr uint32_t STAGE = FP8 ? small_bytes(D, KEYS) : Shape::bytes(2 * KEYS);
    // A power of two.
    uint32_t tiles_per_split = item.split_keys / KEYS;
    uint8_t *queries = shared_memory();
    uint8_t *stages = queries + Shape::bytes(SPLIT_ROWS);
    uint8_t *wide = stages + p.stages * STAGE;
    float *sums = (float *)(wide + (FP8 ? Shape::bytes(2 * KEYS) : 0));
    float *warp_tops = sums + SPLIT_ROWS * sums_stride(D);
    float *warp_sums = warp_tops + ATTENTION_WARPS * SPLIT_ROWS;
    uint32_t *highs = (uint32_t *)(warp_sums + ATTENTION_WARPS * SPLIT_ROWS);
    uint32_t *last = highs + SPLIT_ROWS;

    uint32_t rows = item.tokens * (p.heads / p.kv_heads);
    auto load = [&](uint32_t first, uint32_t end, uint8_t *stage) {
        if constexpr (FP8) {
            load_small<D, KEYS>(small_keys_of<D>(p, item.table, kv_head), first, end, stage);
        } else {
            load_tile<D, KEYS>(keys_of<D>(p, item.table, kv_head), first, end, stage, stage + STAGE / 2);
        }
    };
    // Positions that some row sees, and tiles at absolute multiples that hold them.
    uint32_t end = smaller(item.split_end * item.split_keys, item.position + item.tokens);
    uint32_t seen = p.window && item.position + 1 > p.window ? item.position + 1 - p.window : 0;
    uint32_t tile = larger(item.split * item.split_keys, seen) / KEYS;
    uint32_t tile_end = (end + KEYS - 1) / KEYS;

    for (uint32_t s = 0; s + 1 < p.stages; s++) {
        if (tile + s < tile_end) {
            load((tile + s) * KEYS, end, stages + s * STAGE);
        }
        // Behind the first keys, which take longer to come.
        if (s == 0) {
            load_queries<T, D, SPLIT_ROWS>(p, item, kv_head, queries);
        }
        cp_async_commit();
    }
    write_highs(p, item, SPLIT_ROWS, highs);
    Softmax<D> state;
    state.clear();
    Merged<parts_of_eight(D)> all;
    clear(all);
    uint32_t slot = 0;
    for (; tile < tile_end; tile++) {
        if (MUTANT(MissingWait, false, true)) {
            cp_async_wait_for(p.stages - 2);
        }
        barrier();
        // Into the slot that all warps have left behind.
        uint32_t ahead = tile + p.stages - 1, free = slot == 0 ? p.stages - 1 : slot - 1;
        if (ahead < tile_end) {
            load(ahead * KEYS, end, stages + free * STAGE);
        }
        cp_async_commit();
        uint8_t *tiles = stages;
        uint32_t keys_at = slot * STAGE;
        if constexpr (FP8) {
            widen_small<T, D, KEYS>(stages + keys_at, wide, tile * KEYS, end);
            tiles = wide;
            keys_at = 0;
            barrier();
        }
        slot = slot + 1 == p.stages ? 0 : slot + 1;
        if (warp() < COMPUTE_WARPS) {
            uint32_t first = warp() * 16;
            uint32_t query_part = not_kept(part_of_a<D>(0));
            uint32_t key_part = not_kept(keys_at + part_of_b<D>(first));
            uint32_t value_part = not_kept(keys_at + part_of_a<D>(first));
            float scores[2][4] = {};
            UNROLL
            for (uint32_t k = 0; k < D; k += 16) {
                uint32_t a[4], b[4];
                load_part<D>(a, queries, query_part, 0, k);
                load_part<D>(b, tiles, key_part, 0, k);
                mma<T>(scores[0], a, b[0], b[1]);
                mma<T>(scores[1], a, b[2], b[3]);
            }
            hide<2>(scores, sight_of(highs, 0, p.window), tile * KEYS + first);
            soften<D, 2>(state, scores, p.scale);
            uint32_t a[4];
            pack_weights<T, 2>(a, scores, 0);
            UNROLL
            for (uint32_t j = 0; j < D / 16; j++) {
                uint32_t b[4];
                load_part_transposed<D>(b, tiles, value_part, KEYS, j * 16);
                mma<T>(state.out[2 * j], a, b[0], b[1]);
                mma<T>(state.out[2 * j + 1], a, b[2], b[3]);
            }
        }
        if (((tile + 1) & (tiles_per_split - 1)) == 0 || tile + 1 == tile_end) {
            Merged<parts_of_eight(D)> merged;
            merge_warps<D>(state, COMPUTE_WARPS, rows, sums, warp_tops, warp_sums, merged);
            state.clear();
            if (item.pieces == 1) {
                fold(all, merged.top, merged.sum, merged.out);
            } else {
                uint32_t split = tile / tiles_per_split;
                uint64_t partial = (uint64_t)(item.partial + split - item.first_split) * p.kv_heads + kv_head;
                write_partial<D>(p, partial, rows, merged);
            }
        }
    }
    cp_async_wait<0>();
    if (item.pieces > 1) {
        device_fence();
        barrier();
        if (thread_index() == 0) {
            uint32_t *counter = p.counters + (uint64_t)item.counter * p.kv_heads + kv_head;
            bool is_last = atomic_add(counter, 1u) + 1 == item.pieces;
            if (is_last) {
                *counter = 0;
            }
            *last = is_last;
        }
        barrier();
        if (!*last) {
            barrier();
            return;
        }
        device_fence();
        merge_partials<T, D>(p, item, kv_head, rows);
    } else if (thread_index() / 8 < rows) {
        write_merged<T, D, 32>(p, item, kv_head, thread_index() / 8, thread_index() % 8 * 4, all);
    }
    // The next item overwrites shared memory.
    barrier();
}
