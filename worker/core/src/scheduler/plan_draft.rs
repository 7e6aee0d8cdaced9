//! Budgets and bound of the iteration that is planned, and what its chunks leave of them.

use super::kv_memory::KvMemory;
use super::step_bounds::StepBound;
use crate::cost::{CostModel, StepWork};
use crate::sequence::Sequence;

/// Plan under construction.
#[derive(Debug, Default)]
pub(super) struct PlanDraft {
    /// Remaining token budget.
    pub budget: u32,
    /// Remaining positions whose logits may be computed beside the sampled ones.
    pub scores: u32,
    /// Work planned so far.
    pub work: StepWork,
    /// Start position and tokens reserved for the first prefill in policy order.
    pub reserved_prefill: Option<(u32, u32)>,
    /// Bound of the step's duration; `None`: unbounded.
    pub bound: Option<StepBound>,
    /// Blocks that become free at fences, less those that stalled sequences wait for.
    pub incoming: u32,
    /// Highest priority preempted in this step; sequences up to this priority are not admitted.
    pub preempted: Option<i32>,
    /// Sequences whose blocks are used by block copies, once per copy.
    pub sources: Vec<u32>,
}

impl PlanDraft {
    /// Returns true if the step may have another prefill chunk.
    pub fn has_tokens_left(&self, cost: &CostModel) -> bool {
        self.budget > 0 && self.bound.is_none_or(|bound| cost.chunk_within(&self.work, 0, 1, bound.all) > 0)
    }

    /// Returns the maximum chunk length of a prefill, regardless of the step target.
    pub fn chunk_max(&self, sequence: &Sequence, memory: &KvMemory) -> u32 {
        let scored = sequence.scored.chunk_max(sequence.computed_tokens, self.scores);
        let most = sequence.uncomputed().min(self.budget).min(scored).min(memory.room(sequence));
        most.min(memory.until_snapshot(sequence))
    }

    /// Returns the chunk length of a prefill within budgets and step target.
    pub fn prefill_len(&self, sequence: &Sequence, memory: &KvMemory, cost: &CostModel) -> u32 {
        let (start, max) = (sequence.computed_tokens, self.chunk_max(sequence, memory));
        let Some(bound) = self.bound else { return max };
        let mut work = self.work;
        if let Some((start, len)) = self.reserved_prefill {
            work.add(start, len);
        }
        cost.chunk_within(&work, start, max, bound.all)
    }

    /// Takes a prefill chunk of `len` tokens out of the budgets; no-op for 0.
    pub fn take(&mut self, sequence: &Sequence, len: u32) {
        if len > 0 {
            self.budget -= len;
            self.work.add(sequence.computed_tokens, len);
            self.scores -= scores(sequence, len);
        }
    }

    /// Reserves `len` tokens for the first prefill in policy order.
    pub fn reserve(&mut self, sequence: &Sequence, len: u32) {
        self.budget -= len;
        self.scores -= scores(sequence, len);
        self.reserved_prefill = Some((sequence.computed_tokens, len));
    }

    /// Gives the tokens back that are reserved for a prefill.
    pub fn unreserve(&mut self, sequence: &Sequence, len: u32) {
        self.budget += len;
        self.scores += scores(sequence, len);
        self.reserved_prefill = None;
    }
}

/// Returns the number of positions scored in the next chunk of a prefill, of `len` tokens.
fn scores(sequence: &Sequence, len: u32) -> u32 {
    sequence.scored.within(sequence.computed_tokens, len).len()
}
