// The parameter blocks of kernels, one for each family; src/cuda/params.rs has the same in Rust, and a test compares
// sizes. Pointers are to global memory. Rows are tokens of the batch unless said otherwise.
#pragma once

#include "device.cuh"

// hidden[rows, width] = table[token], or that times a factor
struct EmbeddingParams {
    const void *table;       // [vocabulary, width]
    const uint32_t *tokens;  // [rows]; with the top bit set: index into `sampled` in the lower bits
    const uint32_t *sampled; // what the step before sampled
    float *hidden;           // [rows, width]
    uint32_t rows, width;
    float scale;             // factor of the rows; only of the kernels with it
};

// `norm`: residual += delta, and out = norm(residual) * weight. `norm_after`: residual += norm(delta) * weight
struct NormParams {
    float *residual;      // [rows, width]
    const void *delta;    // [rows, width], or null
    const float *weight;  // [width]
    void *out;            // [rows, width], or [picked, width]; only of `norm`
    const uint32_t *pick; // rows to normalise, where `residual` is not written; or null for all
    uint32_t rows;        // of `out`, or of `residual`
    uint32_t width;
    float eps;
};

// Finishes rows of the QKV product, see qkv.cu.
struct QkvParams {
    void *qkv;                 // [rows, (heads + 2 * kv_heads) * head_dim]
    const float *q_norm;       // [head_dim], or null
    const float *k_norm;       // [head_dim], or null
    const float *angles;       // [context, head_dim / 2, (cos, sin)]
    const uint32_t *positions; // [rows]
    const uint32_t *places;    // [rows]: block * block_tokens + offset; ~0: the row is padding
    void *kv;                  // the pool, see Kv
    uint64_t block_numbers;    // numbers from one block to the next; bytes, if stored in 8 bits
    uint64_t layer_offset;     // likewise, from a block's start to the layer's keys
    uint32_t rows, heads, kv_heads, head_dim, block_tokens;
    float eps;
};

// out[rows, width] = silu(gate) * up, or gelu(gate) * up
struct SwigluParams {
    const void *gate_up; // [rows, 2 * width]: first the gates, then the ups
    void *out;           // [rows, width]
    uint32_t rows, width;
};

// A piece of work for attention: queries of neighbouring tokens of one sequence, over some of their keys.
struct AttentionItem {
    uint32_t row;      // first token's row in the batch
    uint32_t tokens;   // tokens
    uint32_t position; // of the first token
    uint32_t table;    // where the sequence's block table begins
    uint32_t split, split_end; // splits of keys that this item treats; absolute
    uint32_t first_split, splits; // those of all items for these tokens
    uint32_t partial;  // index of the first split's partial result, over all key heads
    uint32_t counter;  // index of these tokens' counter
    uint32_t pieces;   // items for these tokens; 1: this one writes the result itself
    uint32_t split_keys; // positions of a split, a power of two from 64 to 4096; 0: many rows, all keys at once
};

struct AttentionParams {
    const void *qkv;     // [rows, (heads + 2 * kv_heads) * head_dim], queries rotated
    void *out;           // [rows, heads * head_dim]
    const void *kv;      // the pool, see Kv
    const AttentionItem *items;
    const uint32_t *item_count;
    const uint32_t *tables;
    float *partial_sums; // [partials, kv_heads, 16, head_dim]
    float *partial_tops; // [partials, kv_heads, 16, 2]: maximum, sum
    uint32_t *counters;  // [counters, kv_heads]; 0 before and after
    uint64_t block_numbers, layer_offset;
    uint32_t heads, kv_heads, block_shift; // tokens in a block: 1 << block_shift
    uint32_t window;     // positions up to its own that a token sees; 0: all
    uint32_t stages;     // of the pipeline over keys: 2 or 3
    float scale;         // of the scores, times log2(e); 1 / sqrt(head_dim) in most models
};

// Multiplies the output of attention with the sigmoid of its gates.
struct OutputGateParams {
    void *x;             // [elements]
    const void *gates;   // [elements]
    uint64_t elements;   // a multiple of 8
};

// Rows of a sequence in a batch, for recurrent layers.
struct DeltaSequence {
    uint32_t row, rows; // the first row in the batch; rows
    uint32_t position;  // of the first row
    uint32_t drafts;    // the last ones of the rows
    uint32_t table;     // where the blocks of its state begin in `tables`
};

// Where a piece of a state is: the block among those of the state, and bytes from its start.
struct DeltaPlace {
    uint32_t part, offset;
};

// Of the kernels of a recurrent layer, see delta.cu.
struct DeltaParams {
    const void *projected;    // [rows, stride]: inputs of the convolution, gates, inputs of betas, inputs of decays
    float *convolved;         // [rows, channels]: queries, keys and values of all heads; then outputs in place of the values
    float *factors;           // [rows, 2 * value_heads]: betas, decays
    void *out;                // [rows, value_heads * value_dim]
    const float *convolution; // [taps, channels]
    const float *decay;       // [value_heads]: rates, above 0
    const float *decay_bias;  // [value_heads]
    const float *norm;        // [value_dim]
    uint8_t *pool;
    const DeltaSequence *sequences;
    const uint32_t *sequence_count;
    const uint32_t *row_sequences; // [rows]: index of the row's sequence; ~0: the row is padding
    const uint32_t *tables;
    // Of the key heads and of the value heads: position and inputs of the state; of the value heads: the matrix; of both: the log.
    const DeltaPlace *places;
    uint64_t block_bytes;
    uint32_t rows, stride;
    uint32_t key_heads, value_heads, key_dim, value_dim; // value_dim: a multiple of 32
    uint32_t tiled;  // 1: the value heads of a key head are as many apart as there are key heads; 0: they are consecutive
    uint32_t taps;   // positions that the convolution sees, the own included; at least 2
    uint32_t log;    // positions of the log
    uint32_t inputs; // positions whose inputs of the convolution are kept
    float norm_eps;
};

// out[m, n] = x[m, k] * weight[n, k]^T + bias
struct GemmParams {
    const void *x;
    const void *weight;
    const float *bias; // [n], or null
    void *out;         // [m, stride]
    uint32_t m, n, k;
    uint32_t stride;   // at least n
};

// Copies of blocks within the pool, (from, to) each.
struct CopyParams {
    uint8_t *pool;
    const uint32_t *pairs; // [pairs, 2]
    uint64_t block_bytes;  // a multiple of 16
};

constexpr uint32_t RECENT_TOKENS = 32;

// A sequence's output, as far as masks depend on it.
struct SlotOutput {
    uint32_t generated;             // tokens that count
    uint32_t recent[RECENT_TOKENS]; // the last of them, as a ring
};

// How a row's token is chosen. The rows of a slot are neighbours: the first, then one behind each of its drafts. A draft is
// the input token of its row.
struct SamplingRow {
    uint32_t *history; // [vocabulary]: how often generated, top bit: in the prompt; or null
    const uint32_t *adjustments; // [biases + masked, (token, bias as bits)]
    const uint32_t *allowed;     // [vocabulary / 32] bits of the tokens allowed; or null: all
    const uint32_t *words;       // bad words: [word_count + 1] starts, then their tokens; or null
    SlotOutput *output;          // or null, without bad words and min_tokens
    uint64_t seed;
    uint32_t biases, masked;     // `masked` counts until `min_tokens` are generated
    uint32_t choice, position;
    float temperature, top_p, min_p; // temperature 0: the most probable
    uint32_t top_k;                  // 0: all
    float repetition, frequency, presence;
    uint32_t logprobs; // 0: none; else one more than the number of alternatives
    uint32_t rows;     // of the slot in this batch; 0: the row is padding
    uint32_t nth;      // this row among them: as many drafts precede it, at most DRAFTS_MAX
    uint32_t draft;    // place in `tokens` of the slot's first draft
    uint32_t word_count;
    uint32_t min_tokens;
    uint32_t fallback; // chosen where all tokens are masked; ~0: none
};

// Drafts of a slot: a thread of its row's block holds one each.
constexpr uint32_t DRAFTS_MAX = 512;

constexpr uint32_t TOP_MAX = 20;

struct SamplingResult {
    uint32_t token;
    float logprob;
    uint32_t top;  // entries of the two lists
    uint32_t rank;       // the token's place among all, from 1; only of `score`
    uint32_t non_finite; // 1: logits of the row are not all finite, before masks, and the rest has no meaning; else 0
    uint32_t tokens[TOP_MAX];
    float logprobs[TOP_MAX];
};

constexpr uint32_t SAMPLING_THREADS = 512;
constexpr uint32_t SAMPLING_BINS = 2048;
// Most parts that a row is split into.
constexpr uint32_t SAMPLING_PARTS_MAX = 32;

// What the parts of a row hand on to the kernels after them.
struct SamplingSplit {
    uint64_t bins[SAMPLING_BINS];       // measures by distance from the best
    uint64_t tops[SAMPLING_PARTS_MAX];  // the best token of each part
    uint64_t masses[SAMPLING_PARTS_MAX]; // of the tokens of each part that may be drawn; without top-k and top-p
    uint64_t totals[SAMPLING_PARTS_MAX]; // of all tokens of each part at temperature 1; with log probabilities
    uint32_t count;                     // candidates; if more than there is room for, they are not all there
    uint32_t unused;
    uint32_t ids[SAMPLING_THREADS];
    float logits[SAMPLING_THREADS];
};

// Of `sample`, the kernels before it where rows are split, and `accept_drafts`.
struct SamplingParams {
    float *logits;           // [rows, stride]; changed where a row asks for adjustments
    const SamplingRow *rows;
    SamplingResult *results; // [rows]
    uint32_t *sampled;       // [rows]
    const uint32_t *tokens;  // of the batch's rows
    SamplingSplit *split;    // [rows]; or null: one block treats a row alone
    uint32_t vocabulary;
    uint32_t stride;         // a multiple of 4
    uint32_t parts;          // of each row; 0: not split
    uint32_t part_tokens;    // tokens of a part, a multiple of 4; the last one may have fewer
};

// Token whose log probability is wanted of a row of logits.
struct ScoreRow {
    uint32_t token, top; // alternatives
};

struct ScoreParams {
    const float *logits;     // [rows, stride]
    const ScoreRow *rows;
    SamplingResult *results; // [rows]
    uint32_t vocabulary;
    uint32_t stride;         // a multiple of 4
};

// Sets up the history of a sequence.
struct HistoryParams {
    uint32_t *history;        // [vocabulary]
    const uint32_t *tokens;   // prompt, then generated
    uint32_t vocabulary, prompt, generated;
};

// A block of the KV pool is contiguous over all layers: [layers, (keys, values), kv_heads, block_tokens, head_dim]. Stored in
// 8 bits, a layer of it is that in e4m3 and then the scales, [(keys, values), kv_heads, block_tokens] in f32: each token's
// head has its own, so that what is stored of a token does not depend on its neighbours. block_tokens is then at least 4.
