//! Replay of a scheduler's recorded inputs, which reproduces its plans bit by bit.

use std::time::Duration;

use inflight_contract::{
    BlockHash, CostCoefficients, FinishReason, GROUPS_MAX, LayerGroup, MemoryShape, Service, TokenCost,
    VirtualTokenCounters, Weight,
};

use crate::policy::Policy;
use crate::record::{MAGIC, RecordKind, digest};
use crate::{
    CostModel, CostPrior, DraftKind, Ended, Iteration, IterationOutcome, LatencyObjectives, NewSequence,
    Scheduler, SchedulerLimits, ScoredRange, SequenceId, SnapshotShape, StepTarget, StepWork, Time,
    TokenVerdict, TransferId,
};

/// Maximum blocks of a pool, and maximum running sequences, of a replay: more than any device has, so that a damaged
/// log cannot allocate without bound.
const BLOCKS_MAX: u32 = 1 << 24;
const RUNNING_MAX: u32 = 1 << 20;
/// Maximum drafts of a sequence and iteration of a replay: a damaged log cannot make a plan take long.
const DRAFTS_MAX: u32 = 1 << 10;

/// Reason why a log cannot be replayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// Not a log, or a damaged one.
    #[error("the log is malformed at byte {at}: {what}")]
    Malformed {
        /// Byte offset.
        at: usize,
        /// Expected content.
        what: &'static str,
    },
    /// The scheduler makes a different plan than at recording time, most likely because its version differs.
    #[error("plan {plan} (at byte {at}) is not the one that was recorded")]
    Diverged {
        /// Number of plans replayed before.
        plan: u64,
        /// Byte offset.
        at: usize,
    },
}

/// Event of a replay.
#[derive(Debug, Clone, Copy)]
pub enum ReplayEvent<'a> {
    /// The scheduler was created; the first event.
    Created {
        /// Its limits.
        limits: &'a SchedulerLimits,
    },
    /// A sequence was submitted and not rejected.
    Submitted {
        /// The sequence.
        id: SequenceId,
        /// Time of the submission.
        at: Time,
        /// Tenant of the sequence.
        tenant: &'a str,
        /// Tokens of the prompt and, for a sequence resumed from another worker, the tokens generated there.
        known_tokens: u32,
        /// Maximum number of tokens to generate.
        max_tokens: u32,
    },
    /// A sequence ended: before the next plan, or while that plan was made (past its deadline).
    Ended {
        /// The sequence.
        id: SequenceId,
        /// Reason of the end.
        reason: FinishReason,
    },
    /// An iteration was planned, as it was recorded.
    Planned {
        /// The plan; without chunks, it is not executed.
        plan: &'a Iteration,
        /// Time of the plan.
        at: Time,
    },
    /// An iteration was committed.
    Committed {
        /// Number of the iteration.
        number: u64,
        /// Measured duration.
        took: Duration,
    },
}

/// Record of a log that was applied.
enum Applied {
    Submitted {
        id: SequenceId,
        at: Time,
        tenant: String,
        known_tokens: u32,
        max_tokens: u32,
    },
    /// Time and recorded digest.
    Planned(Time, u64),
    Committed(u64, Duration),
    Other,
}

/// Replays a log and calls `each` with every event. Returns the number of plans. A log truncated in the middle
/// of a record, as by a killed process, is replayed up to that record.
///
/// # Errors
/// [`ReplayError`]; the events passed to `each` before are correct.
pub fn replay(bytes: &[u8], mut each: impl FnMut(ReplayEvent<'_>)) -> Result<u64, ReplayError> {
    let mut reader = RecordReader { bytes, at: 0 };
    let mut scheduler = reader.header()?;
    each(ReplayEvent::Created { limits: scheduler.limits() });
    let mut plans = 0;
    while reader.at < bytes.len() {
        let at = reader.at;
        match reader.record(&mut scheduler) {
            Ok(Applied::Other) => {}
            Ok(Applied::Submitted { id, at, tenant, known_tokens, max_tokens }) => {
                each(ReplayEvent::Submitted { id, at, tenant: &tenant, known_tokens, max_tokens });
            }
            Ok(Applied::Committed(number, took)) => each(ReplayEvent::Committed { number, took }),
            Ok(Applied::Planned(now, recorded)) => {
                report_ended(&mut scheduler, &mut each);
                let plan = scheduler.iteration();
                if digest(plan) != recorded {
                    return Err(ReplayError::Diverged { plan: plans, at });
                }
                each(ReplayEvent::Planned { plan, at: now });
                plans += 1;
            }
            Err(ReplayError::Malformed { at, .. }) if at >= bytes.len() => break,
            Err(error) => return Err(error),
        }
        report_ended(&mut scheduler, &mut each);
        scheduler.drain_freed_slots().for_each(drop);
        scheduler.drain_cache_events().for_each(drop);
    }
    Ok(plans)
}

fn report_ended(scheduler: &mut Scheduler, each: &mut impl FnMut(ReplayEvent<'_>)) {
    scheduler.drain_ended().for_each(|Ended { id, reason }| each(ReplayEvent::Ended { id, reason }));
}

/// Cursor over a log.
struct RecordReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl RecordReader<'_> {
    fn header(&mut self) -> Result<Scheduler, ReplayError> {
        if self.take(MAGIC.len())? != MAGIC {
            return Err(ReplayError::Malformed { at: 0, what: "the log of a scheduler of this version" });
        }
        let limits = SchedulerLimits {
            shape: self.shape()?,
            snapshot: self.snapshot()?,
            blocks: self.at_most(BLOCKS_MAX)?,
            host_blocks: self.at_most(BLOCKS_MAX)?,
            running_max: self.at_most(RUNNING_MAX)?,
            waiting_max: self.small()?,
            iteration_tokens: self.small()?,
            sequence_tokens: self.small()?,
            watermark_blocks: self.small()?,
            min_decode_tokens: self.small()?,
            depth: self.small()?,
            bypass_max: self.small()?,
            preemption_threshold: self.small()?,
            iteration_scores: self.small()?,
            drafts_max: self.at_most(DRAFTS_MAX)?,
            predicted_max: self.at_most(DRAFTS_MAX)?,
            iteration_samples: self.small()?,
            cooldown_steps: self.number()?,
            prefix_cache: self.number()? != 0,
            govern_drafts: self.number()? != 0,
            step_target: self.step_target()?,
        };
        let policy: Policy = self.text()?.parse().map_err(|_| self.malformed("a scheduling policy"))?;
        let mut real = || self.number().map(f64::from_bits);
        // Struct fields are evaluated in source order, which is the order of the log.
        let cost = CostCoefficients {
            step_s: real()?,
            token_s: real()?,
            decode_key_s: real()?,
            prefill_key_s: real()?,
            sequence_s: real()?,
            copy_s: real()?,
            copy_block_s: real()?,
        };
        let prior = CostPrior { cost, trust: real()? };
        let tenants = VirtualTokenCounters::new(TokenCost::default(), Scheduler::TENANTS_MAX);
        Scheduler::new(limits, policy.build(), CostModel::new(prior), tenants)
            .map_err(|_| self.malformed("limits that agree with each other"))
    }

    fn shape(&mut self) -> Result<MemoryShape, ReplayError> {
        let (block_tokens, count) = (self.small()?, self.at_most(GROUPS_MAX as u32)?);
        let mut groups = Vec::new();
        for _ in 0..count {
            let blocks = self.small()?;
            let window = self.option()?.map(u32::try_from).transpose();
            groups.push(LayerGroup { blocks, window: window.map_err(|_| self.malformed("a window"))? });
        }
        let state = self.small()?;
        let shape = MemoryShape::new(block_tokens, &groups).and_then(|shape| shape.with_state(state));
        shape.map_err(|_| self.malformed("groups of layers"))
    }

    fn snapshot(&mut self) -> Result<Option<SnapshotShape>, ReplayError> {
        let snapshot = SnapshotShape { blocks: self.small()?, every: self.small()? };
        Ok((snapshot.blocks > 0).then_some(snapshot))
    }

    fn sequence_id(&mut self) -> Result<SequenceId, ReplayError> {
        Ok(SequenceId { index: self.small()?, generation: self.small()? })
    }

    fn draft(&mut self, scheduler: &mut Scheduler, kind: DraftKind) -> Result<(), ReplayError> {
        let id = self.sequence_id()?;
        scheduler.draft(id, self.small()?, kind);
        Ok(())
    }

    /// Applies one record to the scheduler.
    fn record(&mut self, scheduler: &mut Scheduler) -> Result<Applied, ReplayError> {
        match self.take(1)?[0] {
            kind if kind == RecordKind::Submit as u8 => return self.submit(scheduler),
            kind if kind == RecordKind::Cancel as u8 => scheduler.cancel(self.sequence_id()?),
            kind if kind == RecordKind::Preempt as u8 => scheduler.preempt(self.sequence_id()?),
            kind if kind == RecordKind::Discard as u8 => scheduler.discard(self.sequence_id()?),
            kind if kind == RecordKind::Draft as u8 => self.draft(scheduler, DraftKind::Guessed)?,
            kind if kind == RecordKind::PredictedDraft as u8 => {
                self.draft(scheduler, DraftKind::Predicted)?
            }
            kind if kind == RecordKind::ForcedDraft as u8 => self.draft(scheduler, DraftKind::Forced)?,
            kind if kind == RecordKind::Predictions as u8 => scheduler.observe_predictions(self.duration()?),
            kind if kind == RecordKind::Plan as u8 => {
                let now = Time::from_nanos(self.number()?);
                let digest = self.fixed::<8>().map(u64::from_le_bytes)?;
                if scheduler.in_flight() >= scheduler.limits().depth as usize {
                    return Err(self.malformed("a commit before the next plan"));
                }
                scheduler.plan(now);
                return Ok(Applied::Planned(now, digest));
            }
            kind if kind == RecordKind::Commit as u8 => {
                let (number, took) = (self.number()?, self.duration()?);
                let mut verdicts = Vec::new();
                for _ in 0..self.number()? {
                    let flags = self.take(1)?[0];
                    let hash = if flags & 2 != 0 { Some(self.hash()?) } else { None };
                    verdicts.push(TokenVerdict { stop: flags & 1 != 0, hash });
                }
                let mut accepted = Vec::new();
                for _ in 0..self.number()? {
                    accepted.push(self.small()?);
                }
                let outcome = IterationOutcome { verdicts: &verdicts, accepted: &accepted, took };
                let done = scheduler.commit(number, outcome);
                done.map_err(|_| self.malformed("the commit of the iteration in flight"))?;
                return Ok(Applied::Committed(number, took));
            }
            kind if kind == RecordKind::Fail as u8 => {
                let number = self.number()?;
                scheduler
                    .fail(number)
                    .map_err(|_| self.malformed("the failure of the iteration in flight"))?;
            }
            kind if kind == RecordKind::TransferDone as u8 => {
                let (id, succeeded) = (TransferId(self.number()?), self.number()? != 0);
                let (took, now) = (self.duration()?, Time::from_nanos(self.number()?));
                let done = scheduler.transfer_done(id, succeeded, took, now);
                done.map_err(|_| self.malformed("the end of a transfer in flight"))?;
            }
            kind if kind == RecordKind::Step as u8 => {
                let (tokens, keys) = (self.small()?, self.number()?);
                let (prefill_keys, sequences) = (self.number()?, self.small()?);
                scheduler.observe_step(&StepWork { tokens, keys, prefill_keys, sequences }, self.duration()?);
            }
            kind if kind == RecordKind::Copy as u8 => {
                let blocks = self.small()?;
                scheduler.observe_copy(blocks, self.duration()?);
            }
            _ => return Err(self.malformed("the kind of a record")),
        }
        Ok(Applied::Other)
    }

    fn submit(&mut self, scheduler: &mut Scheduler) -> Result<Applied, ReplayError> {
        let now = Time::from_nanos(self.number()?);
        let (known_tokens, max_tokens) = (self.small()?, self.small()?);
        let priority = self.number()?.rotate_right(1) as i64 as i32;
        let deadline = self.option()?.map(Time::from_nanos);
        let tenant = self.text()?;
        let weight = Weight::try_from(f32::from_bits(self.small()?));
        let weight = weight.map_err(|_| self.malformed("a weight"))?;
        let mut hashes = Vec::new();
        for _ in 0..self.number()? {
            hashes.push(self.hash()?);
        }
        let group = self.option()?;
        let virtual_start_time = self.option()?.map(Service::from_thousandths);
        let charged_tokens = self.small()?;
        let scored = ScoredRange { start: self.small()?, end: self.small()? };
        let new = NewSequence {
            known_tokens,
            max_tokens,
            priority,
            deadline,
            tenant: &tenant,
            weight,
            hashes: &hashes,
            group,
            virtual_start_time,
            charged_tokens,
            scored,
        };
        // A submission that was rejected at recording time is rejected again.
        let Ok(id) = scheduler.submit(new, now) else { return Ok(Applied::Other) };
        Ok(Applied::Submitted { id, at: now, tenant, known_tokens, max_tokens })
    }

    fn malformed(&self, what: &'static str) -> ReplayError {
        ReplayError::Malformed { at: self.at.min(self.bytes.len().saturating_sub(1)), what }
    }

    fn take(&mut self, len: usize) -> Result<&[u8], ReplayError> {
        let end = self.at.saturating_add(len);
        match self.bytes.get(self.at..end) {
            Some(taken) => {
                self.at = end;
                Ok(taken)
            }
            None => Err(ReplayError::Malformed { at: self.bytes.len(), what: "more bytes" }),
        }
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], ReplayError> {
        let mut fixed = [0; N];
        fixed.copy_from_slice(self.take(N)?);
        Ok(fixed)
    }

    fn number(&mut self) -> Result<u64, ReplayError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.malformed("a number of at most 64 bits"))
    }

    fn small(&mut self) -> Result<u32, ReplayError> {
        u32::try_from(self.number()?).map_err(|_| self.malformed("a number of at most 32 bits"))
    }

    fn at_most(&mut self, most: u32) -> Result<u32, ReplayError> {
        let number = self.small()?;
        if number <= most { Ok(number) } else { Err(self.malformed("the limits of a device")) }
    }

    fn step_target(&mut self) -> Result<StepTarget, ReplayError> {
        match self.number()? {
            0 => Ok(StepTarget::Unbounded),
            1 => self.duration().map(StepTarget::Fixed),
            2 => {
                let first_token = self.option()?.map(Duration::from_nanos);
                let gap = self.option()?.map(Duration::from_nanos);
                Ok(StepTarget::Adaptive(LatencyObjectives { first_token, gap }))
            }
            _ => Err(self.malformed("a step target")),
        }
    }

    fn option(&mut self) -> Result<Option<u64>, ReplayError> {
        if self.take(1)?[0] == 0 { Ok(None) } else { self.number().map(Some) }
    }

    fn duration(&mut self) -> Result<Duration, ReplayError> {
        self.number().map(Duration::from_nanos)
    }

    fn text(&mut self) -> Result<String, ReplayError> {
        let len = self.small()? as usize;
        let text = self.take(len)?.to_vec();
        String::from_utf8(text).map_err(|_| self.malformed("text in UTF-8"))
    }

    fn hash(&mut self) -> Result<BlockHash, ReplayError> {
        self.fixed::<16>().map(|raw| BlockHash::from_raw(u128::from_le_bytes(raw)))
    }
}
