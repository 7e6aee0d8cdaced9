//! Simulated device: takes the time that a [`DeviceProfile`] says and generates deterministic, meaningless
//! tokens.
//!
//! For tests and load tests of routers: scheduler, sessions, prefix cache and limits are the real ones, a
//! core serves hundreds of thousands of tokens per second, and tokens are a pure function of prompt, seed and
//! choice, so streams can be compared byte for byte across workers.

mod profile;
mod tokens;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use inflight_runtime::{
    Batch, Capabilities, DRAFT_ROWS, Error, PromptLogprobs, Runtime, RuntimeFacts, Sampled, ScoreRow, Slot,
    SlotSetup, TokenMasks, TransferDone,
};
use inflight_worker_core::{DeviceProfile, MemoryShape, StepWork, Transfer, TransferId};
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

/// Tokens of a sequence, which the steps in flight share with its slot.
type SharedChain = Arc<Mutex<TokenChain>>;

fn lock(chain: &SharedChain) -> MutexGuard<'_, TokenChain> {
    chain.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sample row of a launched step.
struct PendingRow {
    chain: SharedChain,
    /// Whether it has a token mask.
    masked: bool,
    /// Its input token, if that is a draft.
    draft: Option<u32>,
}

/// Launched step: its results and the time at which it completes.
struct PendingStep {
    took: Duration,
    ends: Instant,
    rows: Vec<PendingRow>,
    masks: TokenMasks,
    /// Whether the masks were not supplied yet.
    lacks_masks: bool,
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
    slots: Vec<Option<SharedChain>>,
    steps: VecDeque<PendingStep>,
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
            shape: MemoryShape::uniform(block_tokens),
            block_bytes: 0,
            blocks,
            host_blocks: profile.host_tokens / block_tokens,
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            sample_rows: options.slots.saturating_add(DRAFT_ROWS),
            snapshot: None,
            sequence_drafts: u32::MAX,
            predicted_drafts: 0,
            depth: if options.overlap { 2 } else { 1 },
            fingerprint,
            facts: RuntimeFacts { device: "simulated".to_owned(), ranks: 1, ..RuntimeFacts::default() },
        };
        Ok(Self {
            profile,
            slots: (0..options.slots).map(|_| None).collect(),
            steps: VecDeque::new(),
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

    /// Returns the sample rows, whose input tokens must match their sequences unless they are drafts.
    fn sample_rows(&self, batch: &Batch) -> Result<Vec<PendingRow>, Error> {
        let mut rows = Vec::with_capacity(batch.samples.len());
        let mut feedback = batch.feedback.iter().peekable();
        for sample in &batch.samples {
            let slot = sample.slot;
            let Some(chain) = &self.slots[slot as usize] else {
                return Err(Error::Malformed(format!("slot {slot} is sampled from but free")));
            };
            while feedback.next_if(|fed| fed.row < sample.row).is_some() {}
            let fed = feedback.peek().is_some_and(|fed| fed.row == sample.row);
            // A real device would continue from this token, so an engine that feeds a wrong one must fail
            // here.
            let row = batch.tokens[sample.row as usize];
            let draft = sample.drafted.then_some(row);
            let last = lock(chain).last();
            if !fed && draft.is_none() && row != last {
                return Err(Error::Malformed(format!(
                    "slot {slot} continues from token {row}, but its newest is {last}"
                )));
            }
            rows.push(PendingRow { chain: Arc::clone(chain), masked: sample.masked, draft });
        }
        Ok(rows)
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
        *entry = Some(Arc::new(Mutex::new(TokenChain::new(setup, vocab_size))));
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
        let rows = self.sample_rows(batch)?;
        let lacks_masks = batch.masked_rows() > 0;
        let vocab_size = self.capabilities.vocab_size;
        let score = |row: &ScoreRow| tokens::score(row, batch.positions[row.row as usize], vocab_size);
        let scores = batch.scores.iter().map(score).collect();
        let ends = begins + took;
        let masks = TokenMasks::none(vocab_size);
        self.steps.push_back(PendingStep { took, ends, rows, masks, lacks_masks, scores });
        Ok(())
    }

    fn supply_masks(&mut self, masks: &mut TokenMasks) -> Result<(), Error> {
        let step = self.steps.iter_mut().find(|step| step.lacks_masks);
        let step = step.ok_or_else(Error::no_step_lacks_masks)?;
        let rows = step.rows.iter().filter(|row| row.masked).count();
        if masks.rows() != rows {
            return Err(Error::Malformed(format!("{} masks were supplied for {rows} rows", masks.rows())));
        }
        step.masks = std::mem::take(masks);
        step.lacks_masks = false;
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        sampled.clear();
        if self.steps.front().is_some_and(|step| step.lacks_masks) {
            return Err(Error::Malformed("the step lacks its token masks".to_owned()));
        }
        let Some(step) = self.steps.pop_front() else {
            return Err(Error::Malformed("no step was launched".to_owned()));
        };
        std::thread::sleep(step.ends.saturating_duration_since(Instant::now()));
        // A step may be launched before the tokens of the previous one are known: they are drawn in the order of the steps.
        let (mut next_mask, mut counts) = (0, true);
        for PendingRow { chain, masked, draft } in &step.rows {
            let mask = masked.then(|| step.masks.row(next_mask));
            next_mask += usize::from(*masked);
            let mut chain = lock(chain);
            counts = draft.is_none_or(|draft| counts && draft == chain.last());
            sampled.push(if counts { chain.sample(mask) } else { Sampled::REJECTED });
        }
        self.scores = step.scores;
        Ok(step.took)
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let Capabilities { blocks, host_blocks, shape, .. } = self.capabilities;
        if !transfer.blocks.iter().all(|(device, host)| *device < blocks && *host < host_blocks) {
            return Err(Error::Malformed("a transferred block is out of its pool".to_owned()));
        }
        let took = self.profile.copy_time(transfer.blocks.len() as u64 * u64::from(shape.block_tokens()));
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
