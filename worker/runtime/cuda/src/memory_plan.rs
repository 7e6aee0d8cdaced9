//! GPU memory plan: bytes per component and blocks of the KV pool. Pure arithmetic, tested without a device.

use super::buffers;
use super::shapes::{BufferLimits, ModelShapes};

/// Bytes of cuBLASLt workspace, as recommended for Hopper.
pub(super) const WORKSPACE_BYTES: u64 = 32 << 20;
/// Bytes left to the driver for its context, kernels, graphs and collectives' later allocations.
pub(super) const RESERVE_BYTES: u64 = 512 << 20;
/// Granularity of the driver's mappings in bytes; allocations of at least half of it are mapped separately.
const MAPPING_BYTES: u64 = 2 << 20;
/// Alignment of smaller allocations in bytes.
const SMALL_ALIGN: u64 = 512;

impl ModelShapes {
    /// Sums all allocations beside weights and KV pool by component; all are made at load.
    pub(super) fn components(&self, limits: &BufferLimits) -> Vec<MemoryComponent> {
        let mut components: Vec<MemoryComponent> = Vec::new();
        for spec in buffers::specs() {
            let bytes = allocated_bytes(spec.bytes(self, limits)) * u64::from(spec.copies);
            let (name, option) = spec.component;
            match components.iter_mut().find(|known| known.name == name) {
                Some(known) => known.bytes += bytes,
                None => components.push(MemoryComponent { name, option, bytes }),
            }
        }
        let workspace = allocated_bytes(WORKSPACE_BYTES);
        components.push(MemoryComponent { name: "workspace", option: "", bytes: workspace });
        components.push(MemoryComponent { name: "driver", option: "", bytes: RESERVE_BYTES });
        components
    }
}

/// Returns the maximum bytes that the driver uses for an allocation.
pub(super) fn allocated_bytes(bytes: u64) -> u64 {
    match bytes {
        0..MAPPING_HALF => bytes.next_multiple_of(SMALL_ALIGN),
        _ => bytes.next_multiple_of(MAPPING_BYTES),
    }
}

const MAPPING_HALF: u64 = MAPPING_BYTES / 2;

/// Component of the memory plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryComponent {
    pub(super) name: &'static str,
    /// CLI option that reduces it; empty: none.
    pub(super) option: &'static str,
    pub(super) bytes: u64,
}

/// Returns the total bytes of all components.
pub(super) fn total_bytes(components: &[MemoryComponent]) -> u64 {
    components.iter().fold(0, |sum, component| sum.saturating_add(component.bytes))
}

/// Formats the components' names and MiB, largest first.
pub(super) fn component_table(components: &[MemoryComponent]) -> String {
    let largest_first = by_size(components)
        .into_iter()
        .map(|component| format!("{} {}", component.name, mebibytes(component.bytes)));
    largest_first.collect::<Vec<_>>().join(", ")
}

/// Formats the CLI options to lower with the MiB each affects, largest first.
pub(super) fn options_to_lower(components: &[MemoryComponent]) -> String {
    let mut options: Vec<MemoryComponent> = Vec::new();
    for component in components.iter().filter(|component| !component.option.is_empty()) {
        match options.iter_mut().find(|known| known.option == component.option) {
            Some(known) => known.bytes += component.bytes,
            None => options.push(*component),
        }
    }
    let options = by_size(&options)
        .into_iter()
        .map(|component| format!("{} ({} MiB)", component.option, mebibytes(component.bytes)));
    options.collect::<Vec<_>>().join(", ")
}

fn by_size(components: &[MemoryComponent]) -> Vec<&MemoryComponent> {
    let mut components: Vec<&MemoryComponent> =
        components.iter().filter(|component| component.bytes > 0).collect();
    components.sort_by_key(|component| std::cmp::Reverse(component.bytes));
    components
}

/// Returns the MiB of `bytes`, rounded up.
pub(super) fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Size of the KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PoolSize {
    /// Number of blocks that fit.
    Blocks(u32),
    /// Bytes missing for a single block.
    Missing(u64),
}

/// State of the GPU's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryBudget {
    /// Total memory.
    pub(super) total: u64,
    /// Memory that was free when this process started.
    pub(super) free: u64,
    /// Memory that this process has allocated since.
    pub(super) taken: u64,
}

impl MemoryBudget {
    /// Returns the bytes that this process may use, including those it has allocated; memory of other
    /// processes is excluded.
    pub(super) fn allowed(&self, utilization: f32) -> u64 {
        ((self.total as f64 * f64::from(utilization)) as u64).min(self.free)
    }
}

/// Returns the blocks of the KV pool: what `utilization` of the GPU's memory leaves beside allocated memory
/// and all components, capped at `limit` bytes; at least `least_blocks`.
pub(super) fn pool_blocks(
    budget: MemoryBudget,
    utilization: f32,
    components: &[MemoryComponent],
    block_bytes: u64,
    least_blocks: u32,
    limit: Option<u64>,
) -> PoolSize {
    let allowed = budget.allowed(utilization);
    let needed = budget.taken.saturating_add(total_bytes(components));
    let left = allowed.saturating_sub(needed);
    // The pool is one allocation of whole mappings.
    let left = left - left % MAPPING_BYTES;
    let left = limit.map_or(left, |limit| left.min(limit));
    match u32::try_from(left / block_bytes).unwrap_or(u32::MAX) {
        blocks if blocks < least_blocks => {
            let least = block_bytes.saturating_mul(least_blocks.into());
            let needed = needed.saturating_add(least.next_multiple_of(MAPPING_BYTES));
            PoolSize::Missing(needed.saturating_sub(allowed).max(1))
        }
        blocks => PoolSize::Blocks(blocks),
    }
}

#[cfg(test)]
mod tests {
    use inflight_kernels::cuda::KvStore;

    use super::super::step_graph::StepGraphs;
    use super::*;
    use proptest::prelude::*;

    const LLAMA_8B: ModelShapes = ModelShapes {
        hidden: 4096,
        inner: 14336,
        ropes: 1,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        logits: 128_256,
        gathered: 0,
        output_gate: false,
        recurrent: None,
    };
    const LARGE: BufferLimits =
        BufferLimits { rows: 8192, samples: 256, slots: 256, context: 131_072, metadata: 12 << 20 };

    #[test]
    fn an_h200_holds_most_of_its_memory_in_kv_blocks() {
        let (total, weights) = (141u64 << 30, 16u64 << 30);
        let components = LLAMA_8B.components(&LARGE);
        let buffers = total_bytes(&components);
        assert!(buffers < 4 << 30, "{buffers}");
        let budget = MemoryBudget { total, free: total, taken: weights };
        let PoolSize::Blocks(blocks) = pool_blocks(budget, 0.9, &components, 2 << 20, 1, None) else {
            panic!("nothing is left");
        };
        assert!((50_000..56_000).contains(&blocks), "{blocks}");
    }

    #[test]
    fn components_are_listed_by_size_with_the_options_to_lower() {
        let components = LLAMA_8B.components(&LARGE);
        let (table, options) = (component_table(&components), options_to_lower(&components));
        assert!(table.starts_with("activations 1"), "{table}");
        for clue in ["logits 1", "penalties 126", "driver 512", "workspace 32"] {
            assert!(table.contains(clue), "{table} has no {clue}");
        }
        let order = ["--max-batch-tokens", "--max-sequences", "--max-context-tokens"]
            .map(|option| options.find(option).unwrap());
        assert!(order.is_sorted() && options.matches("--max-sequences").count() == 1, "{options}");
    }

    fn shapes() -> impl Strategy<Value = ModelShapes> {
        let heads = (1u64..64, 1u64..17, prop::sample::select(vec![64u64, 96, 128, 256]));
        let widths = (1u64..1024, 1u64..4096, 1u64..3, 1u64..40_000, any::<bool>());
        (heads, widths).prop_map(
            |((group, kv_heads, head_dim), (hidden, inner, ropes, vocabulary, gathers))| ModelShapes {
                hidden: hidden * 8,
                inner: inner * 8,
                ropes,
                heads: group * kv_heads,
                kv_heads,
                head_dim,
                logits: vocabulary * 8,
                gathered: if gathers { vocabulary * 8 + 512 } else { 0 },
                output_gate: gathers,
                recurrent: None,
            },
        )
    }

    proptest! {
        #[test]
        fn components_and_pool_fit_the_budget_or_the_reported_missing_bytes_would_do(
            shapes in shapes(), sizes in (1u64..65_536, 1u64..4096, 2u64..1 << 20, 1u64..1 << 26),
            total in 1u64 << 32..200 << 30, others in 0u64..1 << 36, taken in 0u64..1 << 37, utilization in 0.05f32..1.0,
            (layers, block_tokens, fp8) in (1u64..100, 0u32..9, any::<bool>()), least in 1u32..9,
            limit in prop::option::of(1u64 << 30..1 << 37),
        ) {
            let (rows, slots, context, metadata) = sizes;
            let graphs = StepGraphs { sample_rows: slots as u32, batch_tokens: rows as u32 };
            let limits = BufferLimits::new(graphs, slots as u32, context as u32, metadata as usize);
            let components = shapes.components(&limits);
            let store = if fp8 { KvStore::Fp8 } else { KvStore::Half };
            let block = layers * store.layer_bytes(shapes.kv_heads, 1 << block_tokens, shapes.head_dim);
            let budget = MemoryBudget { total, free: total.saturating_sub(others), taken };
            let allowed = budget.allowed(utilization);
            prop_assert!(allowed <= budget.free && allowed as f64 <= total as f64 * f64::from(utilization) + 1.0);
            let of = |budget| pool_blocks(budget, utilization, &components, block, least, limit);
            match of(budget) {
                PoolSize::Blocks(blocks) => {
                    prop_assert!(blocks >= least);
                    let pool = u64::from(blocks) * block;
                    let used = taken + total_bytes(&components);
                    let limited = limit.is_some_and(|limit| pool <= limit);
                    prop_assert!(allocated_bytes(pool) + used <= allowed || limited);
                    prop_assert!(pool + used <= allowed);
                    prop_assert!(limit.is_none_or(|limit| pool <= limit));
                    // There is no memory for another block.
                    let more = allocated_bytes(pool + block) + used;
                    prop_assert!(more > allowed || blocks == u32::MAX || limit.is_some_and(|limit| pool + block > limit));
                }
                PoolSize::Missing(bytes) if limit.is_none_or(|limit| limit >= u64::from(least) * block) => {
                    prop_assert!(bytes > 0);
                    // Exactly this many bytes less suffice.
                    if bytes <= taken {
                        let enough = of(MemoryBudget { taken: taken - bytes, ..budget });
                        prop_assert!(matches!(enough, PoolSize::Blocks(1..)));
                        let short = of(MemoryBudget { taken: taken - bytes + 1, ..budget });
                        prop_assert_eq!(short, PoolSize::Missing(1));
                    }
                }
                PoolSize::Missing(bytes) => prop_assert!(bytes > 0),
            }
        }
    }
}
