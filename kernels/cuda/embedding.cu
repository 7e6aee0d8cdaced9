// Rows of the embedding, widened to f32: the beginning of the residual stream.
#include "params.h"

constexpr uint32_t EMBEDDING_THREADS = 128;

// One block a row; 8 numbers a thread and turn. width is a multiple of 8.
template <typename T, bool SCALED> DEVICE void embedding(const EmbeddingParams &p) {
    uint32_t row = block_index();
    uint32_t token = p.tokens[row];
    if (token >> 31) {
        token = p.sampled[token & 0x7fffffff];
    }
    const Vec16 *from = (const Vec16 *)p.table + (uint64_t)token * (p.width / 8);
    Float4 *to = (Float4 *)(p.hidden + (uint64_t)row * p.width);
    for (uint32_t i = thread_index(); i < p.width / 8; i += EMBEDDING_THREADS) {
        Vec16 eight = from[i];
        float x[8];
        UNROLL
        for (uint32_t j = 0; j < 8; j++) {
            x[j] = to_float(T{(uint16_t)(eight.word[j / 2] >> 16 * (j % 2))});
            if (SCALED) {
                x[j] = multiply_exact(x[j], p.scale);
            }
        }
        to[2 * i] = Float4{x[0], x[1], x[2], x[3]};
        to[2 * i + 1] = Float4{x[4], x[5], x[6], x[7]};
    }
}

KERNEL(embedding_bf16, EmbeddingParams, EMBEDDING_THREADS, 8) { embedding<Bf16, false>(p); }
KERNEL(embedding_f16, EmbeddingParams, EMBEDDING_THREADS, 8) { embedding<F16, false>(p); }
KERNEL(embedding_scaled_bf16, EmbeddingParams, EMBEDDING_THREADS, 8) { embedding<Bf16, true>(p); }
KERNEL(embedding_scaled_f16, EmbeddingParams, EMBEDDING_THREADS, 8) { embedding<F16, true>(p); }
