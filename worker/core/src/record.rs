//! Record of a scheduler's inputs: a compact log, from which its plans are reproduced offline bit by bit.

use std::hash::{Hash as _, Hasher};
use std::time::Duration;

use inflight_contract::{BlockHash, CostCoefficients, Service};

use crate::policy::Policy;
use crate::{
    CostPrior, DraftKind, Iteration, IterationOutcome, LatencyObjectives, NewSequence, SchedulerLimits,
    SequenceId, StepTarget, StepWork, Time, TransferId,
};

/// First bytes of a log, including the format version.
pub(crate) const MAGIC: &[u8; 8] = b"inflrec9";

/// Record type: one scheduler input. The values are part of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RecordKind {
    Submit = 1,
    Cancel,
    Plan,
    Commit,
    Fail,
    TransferDone,
    Step,
    Copy,
    Preempt,
    Draft,
    ForcedDraft,
    Discard,
    PredictedDraft,
    Predictions,
}

/// Log of a scheduler's inputs, with the bytes not drained yet.
#[derive(Debug, Default)]
pub(crate) struct RecordLog {
    bytes: Vec<u8>,
}

impl RecordLog {
    /// Creates a log that starts with the scheduler's configuration.
    pub fn new(limits: &SchedulerLimits, policy: Policy, prior: &CostPrior) -> Self {
        let mut log = Self { bytes: MAGIC.to_vec() };
        log.number(limits.shape.block_tokens().into());
        log.number(limits.shape.groups().len() as u64);
        for group in limits.shape.groups() {
            log.number(group.blocks.into());
            log.option(group.window.map(u64::from));
        }
        log.number(limits.shape.state_blocks().into());
        let snapshot = limits.snapshot.map_or([0, 0], |snapshot| [snapshot.blocks, snapshot.every]);
        snapshot.into_iter().for_each(|value| log.number(value.into()));
        for value in [
            limits.blocks,
            limits.host_blocks,
            limits.running_max,
            limits.waiting_max,
            limits.iteration_tokens,
            limits.sequence_tokens,
            limits.watermark_blocks,
            limits.min_decode_tokens,
            limits.depth,
            limits.bypass_max,
            limits.preemption_threshold,
            limits.iteration_scores,
            limits.drafts_max,
            limits.predicted_max,
            limits.iteration_samples,
        ] {
            log.number(value.into());
        }
        log.number(limits.cooldown_steps);
        log.number(limits.prefix_cache.into());
        log.number(limits.govern_drafts.into());
        log.step_target(limits.step_target);
        log.text(&policy.to_string());
        let CostPrior { cost, trust } = *prior;
        let CostCoefficients {
            step_s,
            token_s,
            prefill_key_s,
            decode_key_s,
            sequence_s,
            copy_s,
            copy_block_s,
        } = cost;
        for value in [step_s, token_s, decode_key_s, prefill_key_s, sequence_s, copy_s, copy_block_s, trust] {
            log.number(value.to_bits());
        }
        log
    }

    pub fn submit(&mut self, new: &NewSequence<'_>, now: Time) {
        self.kind(RecordKind::Submit);
        self.number(now.as_nanos());
        self.number(new.known_tokens.into());
        self.number(new.max_tokens.into());
        self.number((i64::from(new.priority) as u64).rotate_left(1));
        self.option(new.deadline.map(Time::as_nanos));
        self.text(new.tenant);
        self.number(u64::from((new.weight.get() as f32).to_bits()));
        self.number(new.hashes.len() as u64);
        new.hashes.iter().for_each(|hash| self.hash(*hash));
        self.option(new.group);
        self.option(new.virtual_start_time.map(Service::thousandths));
        self.number(new.charged_tokens.into());
        self.number(new.scored.start.into());
        self.number(new.scored.end.into());
    }

    pub fn draft(&mut self, id: SequenceId, count: u32, kind: DraftKind) {
        let kind = match kind {
            DraftKind::Guessed => RecordKind::Draft,
            DraftKind::Predicted => RecordKind::PredictedDraft,
            DraftKind::Forced => RecordKind::ForcedDraft,
        };
        self.of_sequence(kind, id);
        self.number(count.into());
    }

    pub fn predictions(&mut self, took: Duration) {
        self.kind(RecordKind::Predictions);
        self.number(nanos(took));
    }

    pub fn plan(&mut self, plan: &Iteration, now: Time) {
        self.kind(RecordKind::Plan);
        self.number(now.as_nanos());
        self.bytes.extend_from_slice(&digest(plan).to_le_bytes());
    }

    pub fn commit(&mut self, iteration: u64, outcome: &IterationOutcome<'_>) {
        self.kind(RecordKind::Commit);
        self.number(iteration);
        self.number(nanos(outcome.took));
        self.number(outcome.verdicts.len() as u64);
        for verdict in outcome.verdicts {
            self.bytes.push(u8::from(verdict.stop) | u8::from(verdict.hash.is_some()) << 1);
            verdict.hash.into_iter().for_each(|hash| self.hash(hash));
        }
        self.number(outcome.accepted.len() as u64);
        outcome.accepted.iter().for_each(|count| self.number((*count).into()));
    }

    pub fn fail(&mut self, iteration: u64) {
        self.kind(RecordKind::Fail);
        self.number(iteration);
    }

    pub fn transfer_done(&mut self, id: TransferId, succeeded: bool, took: Duration, now: Time) {
        self.kind(RecordKind::TransferDone);
        self.number(id.0);
        self.number(succeeded.into());
        self.number(nanos(took));
        self.number(now.as_nanos());
    }

    pub fn step(&mut self, work: &StepWork, took: Duration) {
        self.kind(RecordKind::Step);
        self.number(work.tokens.into());
        self.number(work.keys);
        self.number(work.prefill_keys);
        self.number(work.sequences.into());
        self.number(nanos(took));
    }

    pub fn copy(&mut self, blocks: u32, took: Duration) {
        self.kind(RecordKind::Copy);
        self.number(blocks.into());
        self.number(nanos(took));
    }

    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Appends a record that consists of a sequence.
    pub fn of_sequence(&mut self, kind: RecordKind, id: SequenceId) {
        self.kind(kind);
        self.number(id.index.into());
        self.number(id.generation.into());
    }

    fn kind(&mut self, kind: RecordKind) {
        self.bytes.push(kind as u8);
    }

    /// Appends an unsigned LEB128 integer.
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn option(&mut self, value: Option<u64>) {
        self.bytes.push(value.is_some().into());
        value.into_iter().for_each(|value| self.number(value));
    }

    fn step_target(&mut self, target: StepTarget) {
        match target {
            StepTarget::Unbounded => self.number(0),
            StepTarget::Fixed(target) => {
                self.number(1);
                self.number(nanos(target));
            }
            StepTarget::Adaptive(LatencyObjectives { first_token, gap }) => {
                self.number(2);
                self.option(first_token.map(nanos));
                self.option(gap.map(nanos));
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn hash(&mut self, hash: BlockHash) {
        self.bytes.extend_from_slice(&hash.raw().to_le_bytes());
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the FNV-1a digest of all fields of a plan.
pub(crate) fn digest(plan: &Iteration) -> u64 {
    struct Fnv(u64);
    impl Hasher for Fnv {
        fn finish(&self) -> u64 {
            self.0
        }

        fn write(&mut self, bytes: &[u8]) {
            for byte in bytes {
                self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    let mut hasher = Fnv(0xcbf2_9ce4_8422_2325);
    plan.hash(&mut hasher);
    hasher.finish()
}
