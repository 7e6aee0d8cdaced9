// Attention of a ragged batch over keys and values in blocks: the kernels. The host cuts a batch into items once a step
// (src/cuda/plan.rs); blocks go through items and key heads with a fixed grid, so a captured graph serves any lengths.
#include "attention_rows.cuh"
#include "attention_split.cuh"

// Decoding alone: less shared memory and fewer registers, so more blocks a multiprocessor.
template <typename T, uint32_t D, bool FP8> DEVICE void attention_decode(const AttentionParams &p) {
    uint32_t units = *p.item_count * p.kv_heads;
    for (uint32_t unit = block_index(); unit < units; unit += blocks()) {
        AttentionItem item = p.items[unit / p.kv_heads];
        attend_split<T, D, FP8>(p, item, unit % p.kv_heads);
    }
}

// A batch of prefill chunks and decodes, in one launch.
template <typename T, uint32_t D, bool FP8> DEVICE void attention_mixed(const AttentionParams &p) {
    for (uint32_t unit = block_index(); unit < *p.item_count * p.kv_heads; unit += blocks()) {
        AttentionItem item = p.items[unit / p.kv_heads];
        if (item.whole) {
            attend_rows<T, D, FP8>(p, item, unit);
        } else {
            attend_split<T, D, FP8>(p, item, unit % p.kv_heads);
        }
    }
}

// NAME: of T. STORE: how keys and values are stored, empty for as T.
#define ATTENTION(T, NAME, D, STORE, FP8)                                                                            \
    KERNEL(attention_decode_##NAME##_##D##STORE, AttentionParams, ATTENTION_THREADS, 2) {                            \
        attention_decode<T, D, FP8>(p);                                                                              \
    }                                                                                                                \
    KERNEL(attention_mixed_##NAME##_##D##STORE, AttentionParams, ATTENTION_THREADS, (D <= 128 ? 2 : 1)) {            \
        attention_mixed<T, D, FP8>(p);                                                                               \
    }
#define ATTENTION_OF(D)                                                                                              \
    ATTENTION(Bf16, bf16, D, , false)                                                                                \
    ATTENTION(F16, f16, D, , false)                                                                                  \
    ATTENTION(Bf16, bf16, D, _fp8, true)                                                                             \
    ATTENTION(F16, f16, D, _fp8, true)

ATTENTION_OF(64)
ATTENTION_OF(96)
ATTENTION_OF(128)
ATTENTION_OF(256)
