//! Simulated device: takes the time that a [`DeviceProfile`] says and generates deterministic, meaningless
//! tokens.
//!
//! For tests and load tests of routers: scheduler, sessions, prefix cache and limits are the real ones, a
//! core serves hundreds of thousands of tokens per second, and tokens are a pure function of prompt, seed and
//! choice, so streams can be compared byte for byte across workers.

mod profile;
mod tokens;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use inflight_runtime::{
    Batch, Capabilities, DRAFT_ROWS, Error, PromptLogprobs, Runtime, Sampled, ScoreRow, Slot, SlotSetup,
    TransferDone,
};
use inflight_worker_core::{DeviceProfile, StepWork, Transfer, TransferId};
use sha2::{Digest as _, Sha256};

pub use profile::{SpecError, read_profile};
use tokens::TokenChain;

/// Configuration of a [`SimRuntime`].
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// Costs of steps and copies, and sizes of the pools.
    pub profile: DeviceProfile,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Maximum tokens per sequence.
    pub context_tokens: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// Maximum attached sequences.
    pub slots: u32,
    /// Maximum tokens per batch.
    pub batch_tokens: u32,
    /// Allows launching a step while another runs, as on an accelerator.
    pub overlap: bool,
}

/// Launched step: its results and the time at which it completes.
struct PendingStep {
    took: Duration,
    ends: Instant,
    sampled: Vec<Sampled>,
    scores: Vec<PromptLogprobs>,
}

/// Started transfer and the time at which it finishes.
struct PendingCopy {
    id: TransferId,
    took: Duration,
    ends: Instant,
}

/// Simulated device.
///
/// Steps are serialized, and so are copies, which overlap with steps. Waiting sleeps, so a worker uses the
/// CPU only for scheduling and sending.
pub struct SimRuntime {
    capabilities: Capabilities,
    profile: DeviceProfile,
    slots: Vec<Option<TokenChain>>,
    steps: VecDeque<PendingStep>,
    spare: Vec<Vec<Sampled>>,
    copies: VecDeque<PendingCopy>,
    /// Scores of the step completed last.
    scores: Vec<PromptLogprobs>,
}

impl SimRuntime {
    /// Creates a device with empty pools.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the block pool can't hold one block.
    pub fn new(options: &SimOptions) -> Result<Self, Error> {
        let SimOptions { profile, block_tokens, .. } = *options;
        let blocks = profile.pool_tokens / block_tokens.max(1);
        if blocks == 0 {
            let tokens = profile.pool_tokens;
            return Err(Error::Malformed(format!(
                "a simulated pool of {tokens} tokens can't hold one block of {block_tokens}; raise pool_tokens"
            )));
        }
        // Costs are not part of the fingerprint: tokens do not depend on the profile.
        let mut hash = Sha256::new();
        hash.update(b"inflight simulated tokens 1");
        hash.update(options.vocab_size.to_le_bytes());
        let fingerprint = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let capabilities = Capabilities {
            vocab_size: options.vocab_size,
            context_tokens: options.context_tokens,
            block_tokens,
            blocks,
            host_blocks: profile.host_tokens / block_tokens,
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            sample_rows: options.slots.saturating_add(DRAFT_ROWS),
            depth: if options.overlap { 2 } else { 1 },
            fingerprint,
        };
        Ok(Self {
            profile,
            slots: (0..options.slots).map(|_| None).collect(),
            steps: VecDeque::new(),
            spare: Vec::new(),
            copies: VecDeque::new(),
            scores: Vec::new(),
            capabilities,
        })
    }

    /// Returns the prefill and the decode work of a batch; a sequence with a single row past position 0 is a
    /// decode, and drafts are rows of a prefill.
    fn work(batch: &Batch) -> (StepWork, StepWork) {
        let (mut prefill, mut decode) = (StepWork::default(), StepWork::default());
        let mut samples = batch.samples.iter().peekable();
        for rows in batch.starts.windows(2) {
            let (len, position) = (rows[1] - rows[0], batch.positions[rows[0] as usize]);
            let mut drafts = 0;
            while let Some(sample) = samples.next_if(|sample| sample.row < rows[1]) {
                drafts += u32::from(sample.drafted);
            }
            if len == 1 + drafts && position > 0 {
                decode.add(position, 1);
                if drafts > 0 {
                    prefill.add(position + 1, drafts);
                }
            } else {
                prefill.add(position, len);
            }
        }
        (prefill, decode)
    }

    /// Samples a token for each sample row, and checks that input tokens match the sequence.
    fn sample(&mut self, batch: &Batch, sampled: &mut Vec<Sampled>) -> Result<(), Error> {
        let mut feedback = batch.feedback.iter().peekable();
        let mut counted = true;
        for sample in &batch.samples {
            let slot = sample.slot;
            let Some(chain) = &mut self.slots[slot as usize] else {
                return Err(Error::Malformed(format!("slot {slot} is sampled from but free")));
            };
            while feedback.next_if(|fed| fed.row < sample.row).is_some() {}
            let fed = feedback.peek().is_some_and(|fed| fed.row == sample.row);
            // A real device would continue from this token, so an engine that feeds a wrong one must fail
            // here.
            let row = batch.tokens[sample.row as usize];
            counted = !sample.drafted || counted && batch.counts(sample, chain.last());
            if !counted {
                sampled.push(Sampled::REJECTED);
                continue;
            }
            if !fed && row != chain.last() {
                let last = chain.last();
                return Err(Error::Malformed(format!(
                    "slot {slot} continues from token {row}, but its newest is {last}"
                )));
            }
            sampled.push(chain.sample());
        }
        Ok(())
    }
}

impl Runtime for SimRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        let (slots, vocab_size) = (self.slots.len(), self.capabilities.vocab_size);
        let Some(entry) = self.slots.get_mut(slot as usize) else {
            return Err(Error::Malformed(format!("slot {slot} is out of range: there are {slots}")));
        };
        *entry = Some(TokenChain::new(setup, vocab_size));
        Ok(())
    }

    fn detach(&mut self, slot: Slot) {
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            *entry = None;
        }
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error> {
        batch.check(&self.capabilities)?;
        if self.steps.len() as u32 >= self.capabilities.depth {
            return Err(Error::Malformed("as many steps are launched as there may be".to_owned()));
        }
        let (prefill, decode) = Self::work(batch);
        let took = self.profile.step_time(&prefill, &decode);
        let now = Instant::now();
        let begins = self.steps.back().map_or(now, |step| step.ends.max(now));
        let mut sampled = self.spare.pop().unwrap_or_default();
        sampled.clear();
        self.sample(batch, &mut sampled)?;
        let vocab_size = self.capabilities.vocab_size;
        let score = |row: &ScoreRow| tokens::score(row, batch.positions[row.row as usize], vocab_size);
        let scores = batch.scores.iter().map(score).collect();
        self.steps.push_back(PendingStep { took, ends: begins + took, sampled, scores });
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        sampled.clear();
        let Some(mut step) = self.steps.pop_front() else {
            return Err(Error::Malformed("no step was launched".to_owned()));
        };
        std::thread::sleep(step.ends.saturating_duration_since(Instant::now()));
        sampled.append(&mut step.sampled);
        self.scores = step.scores;
        self.spare.push(step.sampled);
        Ok(step.took)
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let Capabilities { blocks, host_blocks, block_tokens, .. } = self.capabilities;
        if !transfer.blocks.iter().all(|(device, host)| *device < blocks && *host < host_blocks) {
            return Err(Error::Malformed("a transferred block is out of its pool".to_owned()));
        }
        let took = self.profile.copy_time(transfer.blocks.len() as u64 * u64::from(block_tokens));
        let now = Instant::now();
        let begins = self.copies.back().map_or(now, |copy| copy.ends.max(now));
        self.copies.push_back(PendingCopy { id: transfer.id, took, ends: begins + took });
        Ok(())
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        let now = Instant::now();
        while let Some(copy) = self.copies.pop_front_if(|copy| copy.ends <= now) {
            finished.push(TransferDone { id: copy.id, succeeded: true, took: copy.took });
        }
    }

    fn wait_for_transfer(&mut self) -> Result<(), Error> {
        if let Some(copy) = self.copies.front() {
            std::thread::sleep(copy.ends.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }
}
