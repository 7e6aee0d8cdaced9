//! Options of the CUDA runtime.

use inflight_kernels::cuda::KvStore;
use inflight_models::CacheDirectory;

/// Configuration of a [`CudaRuntime`](crate::CudaRuntime).
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// GPU ordinals by rank, all different and of one model; more than one form a tensor-parallel group.
    pub gpus: Vec<usize>,
    /// A single GPU runs NCCL collectives too, as a group of one; changes no bit. For tests.
    pub lone_communicator: bool,
    /// Fraction of each GPU's memory to use, in (0, 1]: weights, buffers, and the KV pool in the rest.
    pub utilization: f32,
    /// Upper limit of each GPU's KV pool in bytes.
    pub kv_bytes: Option<u64>,
    /// Bytes of the host KV pool for swapped sequences, over all ranks; 0 disables swapping.
    pub host_bytes: u64,
    /// Tokens per KV block; a power of two.
    pub block_tokens: u32,
    /// Maximum number of attached sequences.
    pub slots: u32,
    /// Maximum number of drafts in one batch; 0: the runtime takes none, and needs no memory for their logits.
    pub draft_rows: u32,
    /// Maximum number of tokens in one batch.
    pub batch_tokens: u32,
    /// Maximum number of tokens of one sequence; `None`: the model's limit.
    pub context_tokens: Option<u32>,
    /// Storage format of keys and values.
    pub kv_store: KvStore,
    /// Batch-invariant kernels: output bits do not depend on the batch, at some cost in speed.
    pub deterministic: bool,
    /// Also takes models, and releases KV blocks that a window has passed, with kernels that were tested in emulation only.
    pub experimental: bool,
    /// Decode steps, and the layers of other small ones, run as captured CUDA graphs.
    pub graphs: bool,
    /// Metadata and results are copied on streams of their own, beside the steps before and after; changes no bit.
    pub copy_streams: bool,
    /// GEMM algorithms are timed at load and the fastest is used.
    pub autotune: bool,
    /// Directory that keeps the chosen GEMM algorithms for later starts; `None`: each start times them.
    pub gemm_cache: Option<CacheDirectory>,
    /// Programmatic dependent launch where GPU and driver support it (compute capability 9.0); changes no
    /// bit.
    pub overlap: bool,
}

impl CudaOptions {
    /// Maximum sample rows of a batch: one for each slot, and one behind each draft.
    pub(crate) fn sample_rows(&self) -> u32 {
        self.slots.saturating_add(self.draft_rows)
    }
}
