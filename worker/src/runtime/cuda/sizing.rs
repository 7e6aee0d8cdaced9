//! How much memory goes where: pure arithmetic, so that it is tested without a device.

use inflight_kernels::cuda::{KvStore, SamplingResult};

use super::slots::{adjustment_bytes, history_bytes};
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
/// Left to the driver: its context, our kernels, graphs, and what collectives take beyond what they took at load.
pub(super) const RESERVE_BYTES: u64 = 512 << 20;
/// The driver maps memory in pieces of so many bytes; allocations of at least half of it get pieces of their own.
const PIECE_BYTES: u64 = 2 << 20;
/// Smaller allocations begin at multiples of so many bytes.
const SMALL_ALIGN: u64 = 512;

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

    /// Everything that is allocated beside weights and KV pool, all of it at load.
    pub(super) fn parts(&self, extent: &Extent) -> Vec<Part> {
        let Extent { rows, samples, slots, context, metadata } = *extent;
        let half = |width: u64| rows * width * 2;
        let partial = self.partial_bytes();
        let activations = [
            half(2 * self.hidden), // the residual, in f32
            half(self.hidden),
            half(self.qkv()),
            half(self.heads * self.head_dim),
            half(self.hidden),
            half(2 * self.inner),
            half(self.inner),
        ];
        let logits = [
            samples * self.logits * 4,
            samples * self.gathered * 4,
            samples * self.hidden * 2,
            samples * size_of::<SamplingResult>() as u64,
            samples * 4,
        ];
        let sampling = [adjustment_bytes(slots), context * 4];
        let attention = [partial.0, partial.1, u64::from(PARTIALS) * self.kv_heads * 4];
        let part =
            |name, lever, of: &[u64]| Part { name, lever, bytes: of.iter().copied().map(taken_bytes).sum() };
        vec![
            part("activations", "--max-batch-tokens", &activations),
            part("logits", "--max-sequences", &logits),
            part("biases", "--max-sequences", &sampling),
            // Of the padded vocabulary, which is a little more.
            part("penalties", "--max-sequences", &[history_bytes(slots, self.logits)]),
            part("metadata", "--max-sequences", &[metadata]),
            part("angles", "--max-context-tokens", &[context * self.head_dim * 4]),
            part("attention", "", &attention),
            part("workspace", "", &[WORKSPACE_BYTES]),
            part("driver", "", &[RESERVE_BYTES]),
        ]
    }
}

/// Bytes that the driver takes for an allocation, at most.
pub(super) fn taken_bytes(bytes: u64) -> u64 {
    match bytes {
        0..PIECE_HALF => bytes.next_multiple_of(SMALL_ALIGN),
        _ => bytes.next_multiple_of(PIECE_BYTES),
    }
}

const PIECE_HALF: u64 = PIECE_BYTES / 2;

/// How much of everything there is at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// Rows of the largest batch.
    pub(super) rows: u64,
    /// Rows of logits.
    pub(super) samples: u64,
    /// Sequences attached.
    pub(super) slots: u64,
    /// Tokens of a sequence.
    pub(super) context: u64,
    /// Bytes of a step's metadata.
    pub(super) metadata: u64,
}

/// What some of the device's memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) name: &'static str,
    /// The option that makes it smaller; empty: none does.
    pub(super) lever: &'static str,
    pub(super) bytes: u64,
}

/// Bytes of all parts.
pub(super) fn sum(parts: &[Part]) -> u64 {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes))
}

/// What each part takes, the largest first, in MiB.
pub(super) fn table(parts: &[Part]) -> String {
    let largest_first =
        by_size(parts).into_iter().map(|part| format!("{} {}", part.name, mebibytes(part.bytes)));
    largest_first.collect::<Vec<_>>().join(", ")
}

/// Options to lower, the one with the largest effect first, with what it is about.
pub(super) fn levers(parts: &[Part]) -> String {
    let mut levers: Vec<Part> = Vec::new();
    for part in parts.iter().filter(|part| !part.lever.is_empty()) {
        match levers.iter_mut().find(|known| known.lever == part.lever) {
            Some(known) => known.bytes += part.bytes,
            None => levers.push(*part),
        }
    }
    let levers =
        by_size(&levers).into_iter().map(|part| format!("{} ({} MiB)", part.lever, mebibytes(part.bytes)));
    levers.collect::<Vec<_>>().join(", ")
}

fn by_size(parts: &[Part]) -> Vec<&Part> {
    let mut parts: Vec<&Part> = parts.iter().filter(|part| part.bytes > 0).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    parts
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
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

impl Budget {
    /// What the process may use, of which some is taken. Another process on the GPU has its own part.
    pub(super) fn allowed(&self, utilization: f32) -> u64 {
        ((self.total as f64 * f64::from(utilization)) as u64).min(self.free)
    }
}

/// Blocks of the KV pool: what `utilization` of the GPU's memory leaves after what is taken and all other parts, or `limit`
/// bytes if that is less.
pub(super) fn pool_blocks(
    budget: Budget,
    utilization: f32,
    parts: &[Part],
    block_bytes: u64,
    limit: Option<u64>,
) -> PoolSize {
    let allowed = budget.allowed(utilization);
    let needed = budget.taken.saturating_add(sum(parts));
    let left = allowed.saturating_sub(needed);
    // The pool is one allocation, of whole pieces.
    let left = left - left % PIECE_BYTES;
    let left = limit.map_or(left, |limit| left.min(limit));
    match u32::try_from(left / block_bytes).unwrap_or(u32::MAX) {
        0 => {
            let needed = needed.saturating_add(block_bytes.next_multiple_of(PIECE_BYTES));
            PoolSize::Missing(needed.saturating_sub(allowed).max(1))
        }
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
    const LARGE: Extent =
        Extent { rows: 8192, samples: 256, slots: 256, context: 131_072, metadata: 12 << 20 };

    #[test]
    fn a_block_of_llama_8b_is_two_mebibytes_and_in_8_bits_half_of_it_and_the_scales() {
        assert_eq!(LLAMA_8B.block_bytes(16, KvStore::Half), 2 << 20);
        assert_eq!(LLAMA_8B.block_bytes(16, KvStore::Fp8), (1 << 20) + 32 * 2 * 8 * 16 * 4);
    }

    #[test]
    fn an_h200_holds_most_of_its_memory_in_kv_blocks() {
        let (total, weights) = (141u64 << 30, 16u64 << 30);
        let parts = LLAMA_8B.parts(&LARGE);
        let buffers = sum(&parts);
        assert!(buffers < 4 << 30, "{buffers}");
        let budget = Budget { total, free: total, taken: weights };
        let PoolSize::Blocks(blocks) = pool_blocks(budget, 0.9, &parts, 2 << 20, None) else {
            panic!("nothing is left");
        };
        assert!((50_000..56_000).contains(&blocks), "{blocks}");
    }

    #[test]
    fn what_is_in_the_way_is_named_by_size_and_with_what_to_lower() {
        let parts = LLAMA_8B.parts(&LARGE);
        let (table, levers) = (table(&parts), levers(&parts));
        assert!(table.starts_with("activations 1"), "{table}");
        for clue in ["logits 1", "penalties 126", "driver 512", "workspace 32"] {
            assert!(table.contains(clue), "{table} has no {clue}");
        }
        let order = ["--max-batch-tokens", "--max-sequences", "--max-context-tokens"]
            .map(|lever| levers.find(lever).unwrap());
        assert!(order.is_sorted() && levers.matches("--max-sequences").count() == 1, "{levers}");
    }

    fn shapes() -> impl Strategy<Value = Shapes> {
        let heads = (1u64..64, 1u64..17, prop::sample::select(vec![64u64, 96, 128, 256]));
        let widths = (1u64..1024, 1u64..4096, 1u64..100, 1u64..40_000, any::<bool>());
        (heads, widths).prop_map(
            |((group, kv_heads, head_dim), (hidden, inner, layers, vocabulary, gathers))| Shapes {
                hidden: hidden * 8,
                inner: inner * 8,
                layers,
                heads: group * kv_heads,
                kv_heads,
                head_dim,
                logits: vocabulary * 8,
                gathered: if gathers { vocabulary * 8 + 512 } else { 0 },
            },
        )
    }

    proptest! {
        #[test]
        fn all_parts_and_the_pool_stay_within_what_is_allowed_or_what_is_missing_would_do(
            shapes in shapes(), sizes in (1u64..65_536, 1u64..4096, 2u64..1 << 20, 1u64..1 << 26),
            total in 1u64 << 32..200 << 30, others in 0u64..1 << 36, taken in 0u64..1 << 37, utilization in 0.05f32..1.0,
            block_tokens in 0u32..9, fp8 in any::<bool>(), limit in prop::option::of(1u64 << 30..1 << 37),
        ) {
            let (rows, slots, context, metadata) = sizes;
            let samples = slots.max(u64::from(largest_bucket(slots as u32)));
            let parts = shapes.parts(&Extent { rows: rows.max(samples), samples, slots, context, metadata });
            let store = if fp8 { KvStore::Fp8 } else { KvStore::Half };
            let block = shapes.block_bytes(1 << block_tokens, store);
            let budget = Budget { total, free: total.saturating_sub(others), taken };
            let allowed = budget.allowed(utilization);
            prop_assert!(allowed <= budget.free && allowed as f64 <= total as f64 * f64::from(utilization) + 1.0);
            let of = |budget| pool_blocks(budget, utilization, &parts, block, limit);
            match of(budget) {
                PoolSize::Blocks(blocks) => {
                    let pool = u64::from(blocks) * block;
                    prop_assert!(taken_bytes(pool) + taken + sum(&parts) <= allowed || limit.is_some_and(|limit| pool <= limit));
                    prop_assert!(pool + taken + sum(&parts) <= allowed);
                    prop_assert!(limit.is_none_or(|limit| pool <= limit));
                    // No memory for another one is left lying about.
                    let more = taken_bytes(pool + block) + taken + sum(&parts);
                    prop_assert!(more > allowed || blocks == u32::MAX || limit.is_some_and(|limit| pool + block > limit));
                }
                PoolSize::Missing(bytes) if limit.is_none_or(|limit| limit >= block) => {
                    prop_assert!(bytes > 0);
                    // So much less taken is exactly enough.
                    if bytes <= taken {
                        let enough = of(Budget { taken: taken - bytes, ..budget });
                        prop_assert!(matches!(enough, PoolSize::Blocks(1..)));
                        let short = of(Budget { taken: taken - bytes + 1, ..budget });
                        prop_assert_eq!(short, PoolSize::Missing(1));
                    }
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
