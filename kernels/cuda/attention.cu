// Attention of a ragged batch over keys and values in blocks: the kernels. The host cuts a batch into items once a step
// (src/cuda/plan.rs); blocks go through items and key heads with a fixed grid, so a captured graph serves any lengths.
#include "attention_rows.cuh"
#include "attention_split.cuh"

// The block's unit of work in a round. Units are sorted, longest first, so every other round goes backwards: who had the
// longest of one round has the shortest of the next.
DEVICE uint32_t unit_of(uint32_t round) {
    return round * blocks() + (round % 2 == 0 ? block_index() : blocks() - 1 - block_index());
}

// An item, by loads past the first-level cache.
DEVICE AttentionItem load_item(const AttentionItem *from) {
    union {
        AttentionItem item;
        Float4 part[sizeof(AttentionItem) / sizeof(Float4)];
    } loaded;
    static_assert(sizeof loaded.part == sizeof(AttentionItem), "an item is whole parts");
    UNROLL
    for (uint32_t i = 0; i < sizeof loaded.part / sizeof(Float4); i++) {
        loaded.part[i] = load_shared_by_device((const Float4 *)from + i);
    }
    return loaded.item;
}

// Decoding alone: less shared memory and fewer registers, so more blocks a multiprocessor.
template <typename T, uint32_t D, bool FP8> DEVICE void attention_decode(const AttentionParams &p) {
    // The plan is there before the step begins; the first item comes while the kernel before this one ends. It is read past
    // the first-level cache, which may still hold what the step before this one read there.
    uint32_t units = load_shared_by_device(p.item_count) * p.kv_heads, unit = unit_of(0);
    AttentionItem item = {};
    if (unit < units) {
        item = load_item(p.items + unit / p.kv_heads);
        prefetch(p.tables + item.table + (item.split * item.split_keys >> p.block_shift));
    }
    await_kernel_before();
    for (uint32_t round = 1; unit < units; round++) {
        attend_split<T, D, FP8>(p, item, unit % p.kv_heads);
        unit = unit_of(round);
        if (unit < units) {
            item = p.items[unit / p.kv_heads];
        }
    }
}

// A batch of prefill chunks and decodes, in one launch.
template <typename T, uint32_t D, bool FP8> DEVICE void attention_mixed(const AttentionParams &p) {
    for (uint32_t round = 0; unit_of(round) < *p.item_count * p.kv_heads; round++) {
        uint32_t unit = unit_of(round);
        AttentionItem item = p.items[unit / p.kv_heads];
        if (item.split_keys == 0) {
            attend_rows<T, D, FP8>(p, item, unit);
        } else {
            attend_split<T, D, FP8>(p, item, unit % p.kv_heads);
        }
    }
}

// NAME: of T. STORE: how keys and values are stored, empty for as T.
#define ATTENTION(T, NAME, D, STORE, FP8)                                                                            \
    EARLY_KERNEL(attention_decode_##NAME##_##D##STORE, AttentionParams, ATTENTION_THREADS, 2) {                            \
        attention_decode<T, D, FP8>(p);                                                                              \
    }                                                                                                                \
    KERNEL(attention_mixed_##NAME##_##D##STORE, AttentionParams, ATTENTION_THREADS, 2) {                             \
        attention_mixed<T, D, FP8>(p);                                                                               \
    }
#define ATTENTION_OF(D)                                                                                              \
    ATTENTION(Bf16, bf16, D, , false)                                                                                \
    ATTENTION(F16, f16, D, , false)                                                                                  \
    ATTENTION(Bf16, bf16, D, _fp8, true)                                                                             \
    ATTENTION(F16, f16, D, _fp8, true)

// Head sizes of the supported models: 64 (Llama 3.2 1B, Qwen2.5 0.5B), 128 (other Llama 1/2/3.x, Mistral, Qwen2/2.5, Qwen3, Gemma
// 3 27B), 256 (other Gemma 3). Each is 8 kernels; one more also goes into `HEAD_DIMS` in `../src/cuda/launch.rs`.
ATTENTION_OF(64)
ATTENTION_OF(128)
ATTENTION_OF(256)
