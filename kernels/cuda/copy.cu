// Copies of whole blocks within the KV pool: what copy-on-write comes to.
#include "params.h"

constexpr uint32_t COPY_THREADS = 256;

// The grid's rows are the pairs, its columns share a block. No pair writes what another one reads or writes.
DEVICE void copy(const CopyParams &p) {
    const uint32_t *pair = p.pairs + 2 * block_row();
    const Vec16 *from = (const Vec16 *)(p.pool + pair[0] * p.block_bytes);
    Vec16 *to = (Vec16 *)(p.pool + pair[1] * p.block_bytes);
    uint64_t stride = (uint64_t)blocks() * COPY_THREADS;
    for (uint64_t i = (uint64_t)block_index() * COPY_THREADS + thread_index(); i < p.block_bytes / 16; i += stride) {
        to[i] = from[i];
    }
}

KERNEL(copy_blocks, CopyParams, COPY_THREADS, 4) { copy(p); }
