// Attention of a ragged batch over keys and values in blocks: the kernels. The host cuts a batch into items once a step
// (src/cuda/plan.rs); blocks go through items and key heads with a fixed grid, so a captured graph serves any lengths.
#include "attention_rows.cuh"
#include "attention_split.cuh"

// Decoding alone: less shared memory and fewer registers, so more blocks a multiprocessor.
template <typename T, uint32_t D> DEVICE void attention_decode(const AttentionParams &p) {
    uint32_t units = *p.item_count * p.kv_heads;
    for (uint32_t unit = block_index(); unit < units; unit += blocks()) {
        AttentionItem item = p.items[unit / p.kv_heads];
        attend_split<T, D>(p, item, unit % p.kv_heads);
    }
}

// A batch of prefill chunks and decodes, in one launch.
template <typename T, uint32_t D> DEVICE void attention_mixed(const AttentionParams &p) {
    for (uint32_t unit = block_index(); unit < *p.item_count * p.kv_heads; unit += blocks()) {
        AttentionItem item = p.items[unit / p.kv_heads];
        if (item.whole) {
            attend_rows<T, D>(p, item, unit);
        } else {
            attend_split<T, D>(p, item, unit % p.kv_heads);
        }
    }
}

#define ATTENTION(T, NAME, D)                                                                                        \
    KERNEL(attention_decode_##NAME##_##D, AttentionParams, ATTENTION_THREADS, 2) { attention_decode<T, D>(p); }      \
    KERNEL(attention_mixed_##NAME##_##D, AttentionParams, ATTENTION_THREADS, (D <= 128 ? 2 : 1)) {                   \
        attention_mixed<T, D>(p);                                                                                    \
    }

ATTENTION(Bf16, bf16, 64)
ATTENTION(Bf16, bf16, 96)
ATTENTION(Bf16, bf16, 128)
ATTENTION(Bf16, bf16, 256)
ATTENTION(F16, f16, 64)
ATTENTION(F16, f16, 96)
ATTENTION(F16, f16, 128)
ATTENTION(F16, f16, 256)
