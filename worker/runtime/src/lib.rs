//! Runtime interface: one forward pass over a ragged batch, sampling included.
//!
//! A runtime owns the weights, the KV block pool and a table of **slots**, one per running sequence, with the
//! sampling state that outlives a step (parameters, random key, token counts). The engine owns everything
//! else.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::SamplingParams;
pub use inflight_contract::{PositionLogprobs, PromptLogprobs, TokenLogprob};
use inflight_worker_core::{MemoryShape, SnapshotShape, Transfer, TransferId};

mod batch;
pub mod collective;
mod command_thread;
mod host_memory;
mod kv_plan;
mod memory_ledger;
mod memory_needs;
mod non_finite_rows;
mod predictions;
mod recent_tokens;
pub mod recurrent;
pub mod sharding;
mod token_masks;

pub use batch::{
    Batch, BatchTables, BlockCopy, DRAFT_ROWS, Feedback, Prediction, SCORES_MAX, SampleRow, ScoreRow,
};
pub use command_thread::{CommandQueue, CommandThread, CommandThreadOptions, ThreadEnded};
pub use host_memory::{HostMemory, MemoryGroup, MemoryLimit, Readable};
pub use kv_plan::{GroupMemory, KvPlan, KvPlanError, LayerPlace, LayerRows, StatePlace};
pub use memory_ledger::{MemoryLedger, OverLimit, PROMISED_BYTES};
pub use memory_needs::MemoryNeeds;
pub use non_finite_rows::NonFiniteRows;
pub use predictions::Predictions;
pub use recent_tokens::{RECENT_TOKENS, RecentTokens};
pub use token_masks::TokenMasks;

/// Name of the gauge of commands queued for a GPU's device thread.
pub const DEVICE_COMMANDS: &str = "inflight_worker_device_queue_commands";
/// Name of the gauge of a GPU's fast paths: 1 for each that is in use, else 0, by label `path`.
pub const GPU_PATH: &str = "inflight_worker_gpu_path";
/// Name of the counter of GEMM algorithms that rejected a number of rows they had been chosen for.
pub const GEMM_REJECTIONS: &str = "inflight_worker_gemm_rejections_total";

/// Index in the runtime's slot table; below [`Capabilities::slots`].
pub type Slot = u32;

/// Index of a KV block in the block pool; below [`Capabilities::blocks`].
pub type Block = u32;

/// Limits and identity of a runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Maximum tokens per sequence.
    pub context_tokens: u32,
    /// Groups of layers, and tokens of a span.
    pub shape: MemoryShape,
    /// Bytes of a KV block, over all ranks; 0 for simulated devices.
    pub block_bytes: u64,
    /// Blocks in the KV block pool.
    pub blocks: u32,
    /// Blocks in the host pool; 0 if there is none.
    pub host_blocks: u32,
    /// Slots: maximum attached sequences.
    pub slots: u32,
    /// Maximum tokens per batch.
    pub batch_tokens: u32,
    /// Maximum sample rows per batch; at least `slots`. If it equals `slots`, the runtime takes no drafts.
    pub sample_rows: u32,
    /// What of a recurrent state can be kept to resume from; `None` without recurrent layers.
    pub snapshot: Option<SnapshotShape>,
    /// Maximum drafts of a sequence in a batch, if the runtime takes drafts.
    pub sequence_drafts: u32,
    /// Maximum tokens that the MTP layer predicts for a sequence in a batch; 0 without one.
    pub predicted_drafts: u32,
    /// Maximum steps launched and not completed: 1, or 2 if steps run asynchronously.
    pub depth: u32,
    /// Numerics fingerprint: digest of weights, dtypes, instruction set or GPU architecture, kernel version
    /// and tensor-parallel degree, but not of the number of threads.
    pub fingerprint: String,
    /// Device and memory, for operators.
    pub facts: RuntimeFacts,
}

/// Device and memory of a runtime, shown to operators; nothing is decided by them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeFacts {
    /// Name of the device.
    pub device: String,
    /// Memory of the device in bytes, over all ranks; of a CPU what the process may use. 0 if unknown.
    pub memory_bytes: u64,
    /// Size of the weights in bytes, over all ranks; 0 if unknown.
    pub weight_bytes: u64,
    /// Encoding of the weights in memory.
    pub weight_encoding: String,
    /// Encoding of keys and values.
    pub kv_encoding: String,
    /// Number of ranks.
    pub ranks: u32,
    /// KV memory of each group of layers, of one rank; empty if all layers keep all positions.
    pub groups: Vec<GroupMemory>,
}

impl Capabilities {
    /// Checks that a slot is in range.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it is not.
    pub fn check_slot(&self, slot: Slot) -> Result<(), Error> {
        let slots = self.slots;
        if slot < slots {
            return Ok(());
        }
        Err(Error::Malformed(format!("slot {slot} is out of range: there are {slots}")))
    }
}

/// Initial sampling state of a sequence.
#[derive(Debug, Clone)]
pub struct SlotSetup<'a> {
    /// Sampling parameters.
    pub sampling: Arc<SamplingParams>,
    /// Index of the choice within the request; part of the random key.
    pub choice: u32,
    /// Prompt token ids.
    pub prompt: &'a [u32],
    /// Output token ids generated earlier, on another worker or before a preemption.
    pub generated: &'a [u32],
    /// EOS token ids; masked, like the stop ids, until `min_tokens` are generated.
    pub eos_token_ids: &'a [u32],
}

/// [`SlotSetup`] that owns its tokens, to be sent to another thread.
#[derive(Debug, Clone)]
pub struct OwnedSlotSetup {
    sampling: Arc<SamplingParams>,
    choice: u32,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    eos_token_ids: Vec<u32>,
}

impl OwnedSlotSetup {
    /// Returns the setup with borrowed tokens.
    pub fn borrow(&self) -> SlotSetup<'_> {
        let Self { sampling, choice, prompt, generated, eos_token_ids } = self;
        SlotSetup { sampling: Arc::clone(sampling), choice: *choice, prompt, generated, eos_token_ids }
    }
}

impl From<&SlotSetup<'_>> for OwnedSlotSetup {
    fn from(setup: &SlotSetup<'_>) -> Self {
        Self {
            sampling: Arc::clone(&setup.sampling),
            choice: setup.choice,
            prompt: setup.prompt.to_vec(),
            generated: setup.generated.to_vec(),
            eos_token_ids: setup.eos_token_ids.to_vec(),
        }
    }
}

/// Result of one [`SampleRow`].
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Sampled token.
    pub token: u32,
    /// Log probabilities, if the slot's parameters request them.
    pub logprobs: Option<Box<PositionLogprobs>>,
}

impl Sampled {
    /// Entry of a drafted row whose sample does not count.
    pub const REJECTED: Self = Self { token: 0, logprobs: None };
}

/// Finished transfer between device and host pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferDone {
    /// Id of the transfer.
    pub id: TransferId,
    /// Whether the blocks were copied.
    pub succeeded: bool,
    /// Duration of the copy.
    pub took: Duration,
}

/// Error of a step. Its effects on KV blocks and slots are undefined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The input violates the contract of [`Batch`] or [`Runtime`].
    #[error("the batch is malformed: {0}")]
    Malformed(String),
    /// The device failed, and the runtime can't be used any more.
    #[error("the device failed: {0}")]
    Device(String),
}

impl Error {
    /// Returns the error of [`Runtime::supply_masks`] without a step that lacks masks.
    pub fn no_step_lacks_masks() -> Self {
        Self::Malformed("token masks were supplied, but no launched step lacks them".to_owned())
    }
}

/// Device, or group of devices that works as one.
pub trait Runtime: Send {
    /// Limits and identity of the runtime.
    fn capabilities(&self) -> &Capabilities;

    /// Attaches a sequence to a slot, replacing a previous one.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the slot is out of range.
    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error>;

    /// Frees a slot. Detaching a free slot has no effect.
    fn detach(&mut self, slot: Slot);

    /// Launches a step: block copies, then the forward pass, which writes keys and values of all tokens of
    /// the batch, then sampling. The step sees the calls of `attach` and `detach` before it and none after
    /// it. The content of `batch` is consumed; its buffers can be reused. A step with masked sample rows then waits for
    /// [`Runtime::supply_masks`] before it samples.
    ///
    /// # Errors
    /// [`Error::Malformed`] before anything runs; other errors are returned by [`Runtime::complete`].
    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error>;

    /// Supplies the token masks of the oldest launched step that has masked sample rows and lacks them: one for each of
    /// these rows. Its forward pass runs meanwhile; its sampling, and later steps, wait for them. The content of
    /// `masks` is consumed; its buffer can be reused.
    ///
    /// # Errors
    /// [`Error::Malformed`] if no launched step lacks masks, or their number is wrong; other errors are returned by
    /// [`Runtime::complete`].
    fn supply_masks(&mut self, masks: &mut TokenMasks) -> Result<(), Error>;

    /// Waits for the oldest launched step and returns its duration. `sampled` is cleared and filled with one
    /// entry per sample row, in order. Each sampled token that counts is added to its slot's history; the entry
    /// of a drafted row that does not count is arbitrary.
    ///
    /// # Errors
    /// [`Error::Malformed`] if no step is launched or it lacks its masks, [`Error::Device`] if the step failed.
    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error>;

    /// Moves the results of the scored rows of the step completed last to `scores`, in order. They are those
    /// of the model's logits, without penalties, biases and masks.
    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>);

    /// Moves the rows of the step completed last whose logits are not all finite to `rows`, which is cleared. A runtime that does not
    /// examine its logits reports none.
    fn take_non_finite(&mut self, rows: &mut NonFiniteRows) {
        rows.clear();
    }

    /// Moves the tokens that the MTP layer predicted in the step completed last to `predictions`, which is cleared.
    fn take_predictions(&mut self, predictions: &mut Predictions) {
        predictions.clear();
    }

    /// Launches a step and waits for it.
    ///
    /// # Errors
    /// Those of [`Runtime::launch`] and [`Runtime::complete`].
    fn execute(&mut self, batch: &mut Batch, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        self.launch(batch)?;
        self.complete(sampled)
    }

    /// Starts an asynchronous copy of blocks between the device's block pool and the host pool. Steps
    /// continue meanwhile; the caller launches none that accesses these blocks before the transfer is
    /// reported as finished.
    ///
    /// # Errors
    /// [`Error::Malformed`] if a block index is out of range.
    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error>;

    /// Appends the transfers that finished since the last call to `finished`.
    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>);

    /// Blocks until a transfer finishes that was not reported yet; returns immediately if none is in flight.
    ///
    /// # Errors
    /// [`Error::Device`] if no transfer in flight can finish any more.
    fn wait_for_transfer(&mut self) -> Result<(), Error>;
}
