//! Simulated device: stores token ids in place of KV and derives each next token from the whole context.

use std::collections::VecDeque;
use std::time::Duration;

use inflight_runtime::{
    Batch, Capabilities, Error, PromptLogprobs, Runtime, RuntimeFacts, Sampled, Slot, SlotSetup,
    TokenLogprob, TokenMasks, TransferDone,
};
use inflight_worker_core::{MemoryShape, Transfer};

pub const VOCAB: u32 = 285;
pub const BLOCK_TOKENS: u32 = 4;
pub const CONTEXT_TOKENS: u32 = 160;
/// End-of-sequence tokens of the model.
pub const EOS: [u32; 2] = [3, 77];
const SLOTS: u32 = 8;
/// KV blocks; too few for all slots at full length, so that preemption occurs.
const BLOCKS: u32 = 160;
/// Number of plain-text tokens, the first ids of the vocabulary.
const TEXT_TOKENS: u64 = 256;

/// Returns the next token: a hash of the whole context, so that one wrong token changes all that follow.
pub fn next_token(context: &[u32], seed: u64, choice: u32) -> u32 {
    let mut hash = seed ^ (u64::from(choice) << 32) ^ 0x9e37_79b9_7f4a_7c15;
    for token in context {
        hash = (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    }
    ((hash >> 20) % TEXT_TOKENS) as u32
}

/// Returns the rank of a prompt token: a hash of the context and the token.
pub fn rank(context: &[u32], token: u32) -> u32 {
    1 + next_token(context, u64::from(token), 0)
}

/// Runtime whose KV cache holds token ids; it reads each context back through the block table and hashes it.
pub struct ContextHashRuntime {
    capabilities: Capabilities,
    /// Token id at each KV position, `BLOCK_TOKENS` per block.
    memory: Vec<Option<u32>>,
    /// Seed and choice of each attached slot.
    slots: Vec<Option<(u64, u32)>>,
    in_flight: VecDeque<Batch>,
    /// Scores of the step completed last.
    scores: Vec<PromptLogprobs>,
}

impl ContextHashRuntime {
    pub fn new() -> Self {
        let capabilities = Capabilities {
            vocab_size: VOCAB,
            context_tokens: CONTEXT_TOKENS,
            shape: MemoryShape::uniform(BLOCK_TOKENS),
            block_bytes: 0,
            blocks: BLOCKS,
            host_blocks: 0,
            slots: SLOTS,
            sample_rows: SLOTS,
            snapshot: None,
            sequence_drafts: u32::MAX,
            predicted_drafts: 0,
            batch_tokens: 64,
            depth: 1,
            fingerprint: "remembering".to_owned(),
            facts: RuntimeFacts::default(),
        };
        let memory = vec![None; (BLOCKS * BLOCK_TOKENS) as usize];
        let slots = vec![None; SLOTS as usize];
        Self { capabilities, memory, slots, in_flight: VecDeque::new(), scores: Vec::new() }
    }
}

impl Runtime for ContextHashRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.slots[slot as usize] = Some((setup.sampling.seed, setup.choice));
        Ok(())
    }

    fn detach(&mut self, slot: Slot) {
        self.slots[slot as usize] = None;
    }

    fn start_transfer(&mut self, _: &Transfer) -> Result<(), Error> {
        Err(Error::Malformed("there is no host pool".to_owned()))
    }

    fn finished_transfers(&mut self, _: &mut Vec<TransferDone>) {}

    fn wait_for_transfer(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error> {
        batch.check(&self.capabilities)?;
        self.in_flight.push_back(std::mem::take(batch));
        Ok(())
    }

    fn supply_masks(&mut self, _: &mut TokenMasks) -> Result<(), Error> {
        Err(Error::no_step_lacks_masks())
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        let missing = |what: &str| Error::Malformed(what.to_owned());
        let batch = self.in_flight.pop_front().ok_or_else(|| missing("nothing was launched"))?;
        sampled.clear();
        let size = BLOCK_TOKENS as usize;
        let address = |sequence: usize, position: usize| {
            let table = batch.tables[0].of(sequence);
            table[position / size] as usize * size + position % size
        };
        for copy in &batch.copies {
            let from = copy.from as usize * size;
            self.memory.copy_within(from..from + size, copy.to as usize * size);
        }
        for sequence in 0..batch.sequences() {
            for row in batch.starts[sequence] as usize..batch.starts[sequence + 1] as usize {
                self.memory[address(sequence, batch.positions[row] as usize)] = Some(batch.tokens[row]);
            }
        }
        self.scores.clear();
        for score in &batch.scores {
            let sequence = batch.starts.partition_point(|start| *start <= score.row) - 1;
            let read = |position| self.memory[address(sequence, position)];
            let context: Option<Vec<u32>> =
                (0..=batch.positions[score.row as usize] as usize).map(read).collect();
            let rank = rank(&context.ok_or_else(|| missing("a position was never computed"))?, score.token);
            let token = TokenLogprob { token: score.token, logprob: -(rank as f32) };
            self.scores.push(PromptLogprobs { token, rank, top: vec![token; score.top as usize] });
        }
        for sample in &batch.samples {
            let sequence = batch.starts.partition_point(|start| *start <= sample.row) - 1;
            let read = |position| self.memory[address(sequence, position)];
            // Calibration samples at positions that were never computed; its tokens are discarded.
            let context: Vec<u32> =
                (0..sample.position as usize).map(|position| read(position).unwrap_or(0)).collect();
            let (seed, choice) = self.slots[sample.slot as usize].ok_or_else(|| missing("a free slot"))?;
            sampled.push(Sampled { token: next_token(&context, seed, choice), logprobs: None });
        }
        Ok(Duration::from_micros(2_000 + 50 * batch.rows() as u64 + 20 * batch.sequences() as u64))
    }
}
