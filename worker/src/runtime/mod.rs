//! The runtime contract: one forward pass over a ragged batch, sampling included.
//!
//! A runtime owns the weights, the KV pool and a table of **slots**, one for each running sequence, which hold
//! what sampling needs between steps (parameters, key, token counts). The engine owns everything else.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::SamplingParams;
use inflight_worker_core::{Transfer, TransferId};

mod batch;
pub mod collective;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod decoder;
pub mod sharding;
pub mod sim;

pub use batch::{Batch, BlockCopy, Feedback, SampleRow};

/// Index of a sequence's place in the runtime's slot table; below [`Capabilities::slots`].
pub type Slot = u32;

/// Index of a KV block in the pool; below [`Capabilities::blocks`].
pub type Block = u32;

/// What a runtime was built with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Tokens in the vocabulary.
    pub vocab_size: u32,
    /// Most tokens of one sequence.
    pub context_tokens: u32,
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// Blocks in the KV pool.
    pub blocks: u32,
    /// Blocks in the host pool behind it; 0 if there is none.
    pub host_blocks: u32,
    /// Slots: sequences that may be attached at once.
    pub slots: u32,
    /// Most tokens in one batch.
    pub batch_tokens: u32,
    /// Steps that may be launched before the first of them is completed: 1, or 2 where steps run beside the caller.
    pub depth: u32,
    /// Digest of everything that decides a token's bits: weights, dtypes, instruction set, kernel version,
    /// number of tensor-parallel ranks. Not the number of threads.
    pub fingerprint: String,
}

/// What sampling knows of a sequence before its first step here.
#[derive(Debug, Clone)]
pub struct SlotSetup<'a> {
    /// How its tokens are chosen.
    pub sampling: Arc<SamplingParams>,
    /// Which of the request's choices it is: part of the random key.
    pub choice: u32,
    /// Its prompt.
    pub prompt: &'a [u32],
    /// What it generated before, on another worker or before it was preempted.
    pub generated: &'a [u32],
    /// The model's end-of-sequence tokens: masked until `min_tokens` are generated, as are the stop ids.
    pub eos_token_ids: &'a [u32],
}

/// A token with its natural-log probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Logarithm of its probability after penalties, bias and masks, before temperature and truncation.
    pub logprob: f32,
}

/// Log probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct PositionLogprobs {
    /// The chosen token.
    pub chosen: TokenLogprob,
    /// The most probable ones, most probable first, ties by lower id.
    pub top: Vec<TokenLogprob>,
}

/// What one [`SampleRow`] yielded.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The chosen token.
    pub token: u32,
    /// Set if the slot's parameters ask for it.
    pub logprobs: Option<Box<PositionLogprobs>>,
}

/// A transfer between device and host that reached its fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferDone {
    /// Which.
    pub id: TransferId,
    /// Whether the blocks arrived.
    pub succeeded: bool,
    /// How long the copy ran.
    pub took: Duration,
}

/// Why a step failed. The batch's effects on the KV pool and on slots are then undefined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller broke the contract of [`Batch`].
    #[error("the batch is malformed: {0}")]
    Malformed(String),
    /// The device failed; the runtime can't be used any more.
    #[error("the device failed: {0}")]
    Device(String),
}

/// One device, or one group of devices that works as one.
pub trait Runtime: Send {
    /// What it was built with.
    fn capabilities(&self) -> &Capabilities;

    /// Gives a slot to a sequence, replacing whatever was there.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the slot is out of range.
    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error>;

    /// Frees what a slot holds. Detaching a free slot does nothing.
    fn detach(&mut self, slot: Slot);

    /// Begins one step: block copies, then the forward pass, which writes keys and values of all the batch's
    /// tokens, then sampling. Calls to `attach` and `detach` before it are effective in it, those after it are not.
    /// The batch's content is the runtime's afterwards: the caller gets buffers to fill again.
    ///
    /// # Errors
    /// [`Error::Malformed`] before anything ran; other errors come with [`Runtime::complete`].
    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error>;

    /// Waits for the oldest step launched. `sampled` is cleared and gets one entry for each of its batch's sample
    /// rows, in order; each sampled token is counted in its slot's history. Returns how long the step took.
    ///
    /// # Errors
    /// [`Error::Malformed`] if no step was launched, [`Error::Device`] if it failed.
    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error>;

    /// Launches a step and waits for it.
    ///
    /// # Errors
    /// As `launch` and `complete`.
    fn execute(&mut self, batch: &mut Batch, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        self.launch(batch)?;
        self.complete(sampled)
    }

    /// Starts to copy blocks between the device's pool and the host's, in the background: steps go on meanwhile,
    /// and none of them touches these blocks before the transfer was reported as finished.
    ///
    /// # Errors
    /// [`Error::Malformed`] if a block is out of its pool.
    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error>;

    /// Appends the transfers that finished since the last call.
    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>);

    /// Returns when a transfer has finished that was not reported yet; at once if none is under way.
    ///
    /// # Errors
    /// [`Error::Device`] if none of those under way will ever finish.
    fn wait_for_transfer(&mut self) -> Result<(), Error>;
}
