//! How much memory goes where: pure arithmetic, so that it is tested without a device.

use inflight_kernels::cuda::KvStore;

use crate::models::ModelConfig;
use crate::runtime::sharding::Shard;

/// Buckets of rows for which decoding is captured as a graph.
const BUCKETS: [u32; 13] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256];
/// Partial results of split attention that there is room for, at most.
pub(super) const PARTIALS: u32 = 1024;
/// Bytes of a row of partial results beside its numbers: maximum and sum.
const PARTIAL_TOPS_BYTES: u64 = 8;
const SPLIT_ROWS: u64 = 16;
/// What a product may use as scratch; Hopper's libraries want as much.
pub(super) const WORKSPACE_BYTES: u64 = 32 << 20;
/// Left to the driver, its modules and graphs.
const RESERVE_BYTES: u64 = 512 << 20;

/// The smallest bucket for so many rows; `None` if no graph is that large.
pub(super) fn bucket(rows: u32, slots: u32) -> Option<u32> {
    BUCKETS.into_iter().find(|bucket| *bucket >= rows).filter(|bucket| *bucket <= largest_bucket(slots))
}

/// The largest bucket that is of use with so many slots.
pub(super) fn largest_bucket(slots: u32) -> u32 {
    BUCKETS.into_iter().find(|bucket| *bucket >= slots).unwrap_or(BUCKETS[BUCKETS.len() - 1])
}

/// All buckets of use with so many slots, largest first.
pub(super) fn buckets(slots: u32) -> impl Iterator<Item = u32> {
    BUCKETS.into_iter().rev().filter(move |bucket| *bucket <= largest_bucket(slots))
}

/// Shapes that memory depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shapes {
    pub(super) hidden: u64,
    pub(super) inner: u64,
    pub(super) layers: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    /// Numbers from one row of logits to the next.
    pub(super) logits: u64,
    /// Where ranks share the head: numbers of a row of all their logits before they are brought together.
    pub(super) gathered: u64,
}

/// Numbers from one row of logits to the next.
fn logits_stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(8)
}

/// Numbers of a row of all ranks' logits, each rank's part as long as the largest.
fn gathered_stride(shards: &[Shard]) -> usize {
    let widest = shards.iter().map(|shard| shard.vocabulary.len()).max().unwrap_or(0);
    match shards.len() {
        // The product of a group of one is that of none, in all that an algorithm may be chosen by.
        1 => logits_stride(widest),
        // Every part begins where a product may write.
        ranks => ranks * widest.next_multiple_of(64),
    }
}

impl Shapes {
    /// Of what one of the ranks computes; `shards`: all of them, if they are a group.
    pub(super) fn of(config: &ModelConfig, shards: Option<&[Shard]>) -> Self {
        Self {
            gathered: shards.map_or(0, |shards| gathered_stride(shards) as u64),
            hidden: config.hidden_size as u64,
            inner: config.intermediate_size as u64,
            layers: config.layers as u64,
            heads: config.heads as u64,
            kv_heads: config.kv_heads as u64,
            head_dim: config.head_dim as u64,
            logits: logits_stride(config.vocab_size) as u64,
        }
    }

    /// Numbers of a row of the QKV product.
    pub(super) fn qkv(&self) -> u64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Bytes of a KV block.
    pub(super) fn block_bytes(&self, block_tokens: u32, store: KvStore) -> u64 {
        self.layers * store.layer_bytes(self.kv_heads, u64::from(block_tokens), self.head_dim)
    }

    /// Bytes of the partial results of attention.
    pub(super) fn partial_bytes(&self) -> (u64, u64) {
        let rows = u64::from(PARTIALS) * self.kv_heads * SPLIT_ROWS;
        (rows * self.head_dim * 4, rows * PARTIAL_TOPS_BYTES)
    }

    /// Bytes of all buffers of a step, for the largest batch, and of the tables beside the weights.
    pub(super) fn buffer_bytes(&self, rows: u64, samples: u64, context: u64) -> u64 {
        let row = self.hidden * 4
            + 2 * (2 * self.hidden + self.qkv() + self.heads * self.head_dim + 3 * self.inner);
        let partial = self.partial_bytes();
        let sampling = samples * ((self.logits + self.gathered) * 4 + self.hidden * 2 + 512);
        rows * row + sampling + partial.0 + partial.1 + context * self.head_dim * 4 + WORKSPACE_BYTES
    }
}

/// What is left for the KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PoolSize {
    /// So many blocks fit.
    Blocks(u32),
    /// So many bytes are missing for a single one.
    Missing(u64),
}

/// Memory of the GPU as it was found, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    /// All there is.
    pub(super) total: u64,
    /// What other processes had left.
    pub(super) free: u64,
    /// What this process has taken since.
    pub(super) taken: u64,
}

/// Blocks of the KV pool: what `utilization` of the GPU's memory leaves after what is taken and what the steps need, or
/// `limit` bytes if that is less. Another process on the GPU has its own part.
pub(super) fn pool_blocks(
    budget: Budget,
    utilization: f32,
    buffers: u64,
    block_bytes: u64,
    limit: Option<u64>,
) -> PoolSize {
    let allowed = ((budget.total as f64 * f64::from(utilization)) as u64).min(budget.free);
    let needed = budget.taken.saturating_add(buffers).saturating_add(RESERVE_BYTES);
    let left = allowed.saturating_sub(needed);
    let left = limit.map_or(left, |limit| left.min(limit));
    match u32::try_from(left / block_bytes).unwrap_or(u32::MAX) {
        0 => PoolSize::Missing((needed + block_bytes).saturating_sub(allowed).max(1)),
        blocks => PoolSize::Blocks(blocks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LLAMA_8B: Shapes = Shapes {
        hidden: 4096,
        inner: 14336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        logits: 128_256,
        gathered: 0,
    };

    #[test]
    fn a_block_of_llama_8b_is_two_mebibytes_and_in_8_bits_half_of_it_and_the_scales() {
        assert_eq!(LLAMA_8B.block_bytes(16, KvStore::Half), 2 << 20);
        assert_eq!(LLAMA_8B.block_bytes(16, KvStore::Fp8), (1 << 20) + 32 * 2 * 8 * 16 * 4);
    }

    #[test]
    fn an_h200_holds_most_of_its_memory_in_kv_blocks() {
        let (total, weights) = (141u64 << 30, 16u64 << 30);
        let buffers = LLAMA_8B.buffer_bytes(8192, 256, 131_072);
        assert!(buffers < 4 << 30, "{buffers}");
        let budget = Budget { total, free: total, taken: weights };
        let PoolSize::Blocks(blocks) = pool_blocks(budget, 0.9, buffers, 2 << 20, None) else {
            panic!("nothing is left");
        };
        assert!((50_000..56_000).contains(&blocks), "{blocks}");
    }

    proptest! {
        #[test]
        fn the_pool_stays_within_what_is_allowed_or_says_what_is_missing(
            total in 1u64 << 30..200 << 30, others in 0u64..1 << 37, taken in 0u64..1 << 37, utilization in 0.05f32..1.0,
            buffers in 0u64..8 << 30, block in 1u64 << 10..8 << 20, limit in prop::option::of(0u64..1 << 37),
        ) {
            let budget = Budget { total, free: total.saturating_sub(others), taken };
            let allowed = ((total as f64 * f64::from(utilization)) as u64).min(budget.free);
            match pool_blocks(budget, utilization, buffers, block, limit) {
                PoolSize::Blocks(blocks) => {
                    let pool = u64::from(blocks) * block;
                    prop_assert!(pool + taken + buffers <= allowed);
                    prop_assert!(limit.is_none_or(|limit| pool <= limit));
                }
                PoolSize::Missing(bytes) => prop_assert!(bytes > 0),
            }
        }

        #[test]
        fn a_bucket_is_the_smallest_that_holds_the_rows(rows in 1u32..400, slots in 1u32..4096) {
            match bucket(rows, slots) {
                Some(bucket) => {
                    prop_assert!(bucket >= rows);
                    prop_assert!(BUCKETS.iter().all(|other| *other < rows || *other >= bucket));
                    prop_assert!(buckets(slots).any(|b| b == bucket));
                }
                None => prop_assert!(rows > 256 || rows > largest_bucket(slots)),
            }
        }
    }
}
