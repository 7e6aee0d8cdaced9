//! Parameter blocks of `kernels/cuda/params.h`, field by field; addresses are of device memory, 0 means
//! absent.
#![allow(missing_docs, reason = "the header documents each field's meaning and shape")]

/// Maximum number of `top_logprobs` in a result.
pub const TOP_MAX: usize = 20;
/// Generated tokens kept for bad words, as a ring.
pub const RECENT_TOKENS: usize = 32;
/// Bytes of the `SamplingSplit` of a row.
pub const SAMPLING_SPLIT_BYTES: usize = 2048 * 8 + 3 * SAMPLING_PARTS_MAX as usize * 8 + 8 + DRAFTS_MAX * 8;
/// Maximum parts that a row of logits is split into for sampling.
pub const SAMPLING_PARTS_MAX: u32 = 32;
/// Maximum drafts of a slot in a batch.
pub const DRAFTS_MAX: usize = 512;

/// Returns the bytes of a parameter block.
pub fn as_bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `Plain` types have no padding, so all bytes of the value are initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Types without padding for which every bit pattern is valid.
///
/// # Safety
/// The type is `repr(C)`, its fields are integers, floats or `Plain`, and its size is the sum of theirs.
pub unsafe trait Plain: Copy {}

macro_rules! blocks {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq)]
            #[repr(C)]
            pub struct $name { $(pub $field: $kind),* }

            const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$kind>())*, "a parameter block has padding");
            // SAFETY: fields are integers, floats or arrays of them; the assertion rules out padding.
            unsafe impl Plain for $name {}

            impl Default for $name {
                fn default() -> Self {
                    // SAFETY: integers and floats are valid with all bits zero.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*
    };
}

blocks! {
    /// Parameters of `embedding`.
    EmbeddingParams { table: u64, tokens: u64, sampled: u64, hidden: u64, rows: u32, width: u32, scale: f32, unused: u32 }
    /// Parameters of `norm` and `norm_after`.
    NormParams {
        residual: u64, delta: u64, weight: u64, out: u64, pick: u64, rows: u32, width: u32, eps: f32, unused: u32,
    }
    /// Parameters of `finish_qkv`.
    QkvParams {
        qkv: u64, q_norm: u64, k_norm: u64, angles: u64, positions: u64, places: u64, kv: u64,
        block_numbers: u64, layer_offset: u64,
        rows: u32, heads: u32, kv_heads: u32, head_dim: u32, block_tokens: u32, eps: f32,
    }
    /// Parameters of `swiglu` and `geglu`.
    SwigluParams { gate_up: u64, out: u64, rows: u32, width: u32 }
    /// Work item of attention: a tile of query rows over a range of key splits.
    AttentionItem {
        row: u32, tokens: u32, position: u32, table: u32, split: u32, split_end: u32, first_split: u32, splits: u32,
        partial: u32, counter: u32, pieces: u32, split_keys: u32,
    }
    /// Parameters of `attention`.
    AttentionParams {
        qkv: u64, out: u64, kv: u64, items: u64, item_count: u64, tables: u64,
        partial_sums: u64, partial_tops: u64, counters: u64, block_numbers: u64, layer_offset: u64,
        heads: u32, kv_heads: u32, block_shift: u32, window: u32, stages: u32, scale: f32,
    }
    /// Parameters of `output_gate`.
    OutputGateParams { x: u64, gates: u64, elements: u64 }
    /// Rows of a sequence in a batch, for recurrent layers.
    DeltaSequence { row: u32, rows: u32, position: u32, drafts: u32, table: u32 }
    /// Place of a piece of a recurrent state: index of its block, and bytes from the start of the block.
    DeltaPlace { part: u32, offset: u32 }
    /// Parameters of the kernels of a recurrent layer.
    DeltaParams {
        projected: u64, convolved: u64, factors: u64, out: u64, convolution: u64, decay: u64, decay_bias: u64, norm: u64,
        pool: u64, sequences: u64, sequence_count: u64, row_sequences: u64, tables: u64, places: u64, block_bytes: u64,
        rows: u32, stride: u32, key_heads: u32, value_heads: u32, key_dim: u32, value_dim: u32,
        tiled: u32, taps: u32, log: u32, inputs: u32, norm_eps: f32, unused: u32,
    }
    /// Parameters of `gemm`.
    GemmParams { x: u64, weight: u64, bias: u64, out: u64, m: u32, n: u32, k: u32, stride: u32 }
    /// Parameters of `copy_blocks`.
    CopyParams { pool: u64, pairs: u64, block_bytes: u64 }
    /// Sampling parameters of one row of logits.
    SamplingRow {
        history: u64, adjustments: u64, allowed: u64, words: u64, output: u64, seed: u64, biases: u32, masked: u32, choice: u32, position: u32,
        temperature: f32, top_p: f32, min_p: f32, top_k: u32, repetition: f32, frequency: f32, presence: f32,
        logprobs: u32, rows: u32, nth: u32, draft: u32, word_count: u32, min_tokens: u32, fallback: u32,
    }
    /// Output of a slot's sequence, as far as masks depend on it.
    SlotOutput { generated: u32, recent: [u32; RECENT_TOKENS] }
    /// Sampled token of one row, with its logprobs.
    SamplingResult {
        token: u32, logprob: f32, top: u32, rank: u32, non_finite: u32, tokens: [u32; TOP_MAX], logprobs: [f32; TOP_MAX],
    }
    /// Parameters of `sample`, of the kernels before it where rows are split, and of `accept_drafts`.
    SamplingParams {
        logits: u64, rows: u64, results: u64, sampled: u64, tokens: u64, split: u64,
        vocabulary: u32, stride: u32, parts: u32, part_tokens: u32,
    }
    /// Token whose log probability is wanted of a row of logits.
    ScoreRow { token: u32, top: u32 }
    /// Parameters of `score`.
    ScoreParams { logits: u64, rows: u64, results: u64, vocabulary: u32, stride: u32 }
    /// Parameters of `count_history`.
    HistoryParams { history: u64, tokens: u64, vocabulary: u32, prompt: u32, generated: u32, unused: u32 }
}

/// Sampling kernels that run before `sample` if rows of logits are split over several thread blocks, besides `sample_best`, which
/// always runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitKernels {
    /// `sample_measure`: some row is drawn from, or its log probabilities are wanted.
    pub measure: bool,
    /// `sample_collect`: some row has top-k or top-p.
    pub collect: bool,
}

impl SplitKernels {
    /// Both kernels, for any rows.
    pub const ALL: Self = Self { measure: true, collect: true };

    /// Returns the kernels that at least one of these rows needs.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a SamplingRow>, vocabulary: u32) -> Self {
        rows.into_iter().fold(Self { measure: false, collect: false }, |needed, row| Self {
            measure: needed.measure || row.is_measured(),
            collect: needed.collect || row.truncates(vocabulary),
        })
    }
}

impl SamplingRow {
    /// Returns whether the row's token is drawn from those that top-k or top-p keeps, as the kernels decide it.
    pub fn truncates(&self, vocabulary: u32) -> bool {
        let top_k = self.top_k > 0 && self.top_k < vocabulary;
        self.temperature > 0.0 && (top_k || self.top_p < 1.0)
    }

    /// Returns whether the row is drawn from, or its log probabilities are wanted.
    pub fn is_measured(&self) -> bool {
        self.temperature > 0.0 || self.logprobs > 0
    }
}
