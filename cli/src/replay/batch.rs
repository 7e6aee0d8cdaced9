//! What each plan of a recorded worker changed in its batch, with sequences numbered in the order of their submission.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use inflight_worker::{Iteration, Preemption, ReplayEvent, SequenceId};

/// Number of a sequence, from 1 in the order of submissions.
pub type Number = u64;

/// Sequence that was submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// Number of the sequence.
    pub number: Number,
    /// Tenant.
    pub tenant: String,
    /// Tokens known at submission.
    pub known_tokens: u32,
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
}

/// Sequence that got a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// Number of the sequence.
    pub number: Number,
    /// Slot of the sequence.
    pub slot: u32,
    /// Kind of the preceding preemption; `None`: admitted from the queue for the first time.
    pub after: Option<Preemption>,
}

/// Sequence that lost its slot and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Victim {
    /// Number of the sequence.
    pub number: Number,
    /// Slot it lost.
    pub slot: Option<u32>,
    /// Recompute or swap.
    pub kind: Preemption,
    /// Sequence for which it was preempted; may be the victim itself.
    pub beneficiary: Number,
}

/// Work of one sequence in an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Number of the sequence.
    pub number: Number,
    /// Slot of the sequence.
    pub slot: u32,
    /// Position of the first token.
    pub start: u32,
    /// Tokens, drafts included.
    pub tokens: u32,
    /// Drafted tokens.
    pub drafts: u32,
    /// Prefill: computes prompt tokens, or recomputes what a preemption dropped.
    pub prefill: bool,
}

/// Changes of the batch by one plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// Number of the iteration; `None`: the plan computes nothing, so it is not executed.
    pub iteration: Option<u64>,
    /// Time of the plan.
    pub at: Duration,
    /// Submitted since the previous plan.
    pub joined: Vec<Joined>,
    /// Sequences that ended since the previous plan, with their finish reasons.
    pub ended: Vec<(Number, &'static str)>,
    /// Got a slot.
    pub admitted: Vec<Admitted>,
    /// Lost their slots.
    pub preempted: Vec<Victim>,
    /// Victims that are preempted after the iterations in flight, with the beneficiaries.
    pub marked: Vec<(Number, Number)>,
    /// Chunks computed by the iteration.
    pub work: Vec<Work>,
    /// Sequences with a slot for which nothing is computed, by slot.
    pub held: Vec<(u32, Number)>,
    /// Sequences in the waiting queue after the plan.
    pub waiting: usize,
    /// Sequences on the host, or on the way there, after the plan.
    pub swapped: usize,
}

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the waiting queue; after a preemption by recompute, again.
    Waiting { again: bool },
    /// In a slot.
    Slot(u32),
    /// On the host.
    Swapped,
}

/// Follows the events of a replay and reports what each plan changed.
#[derive(Debug, Default)]
pub struct BatchTracker {
    sequences: BTreeMap<SequenceId, (Number, Place)>,
    submitted: Number,
    joined: Vec<Joined>,
    ended: Vec<(Number, &'static str)>,
}

impl BatchTracker {
    /// Observes an event; returns the changes if it is a plan.
    pub fn observe(&mut self, event: &ReplayEvent<'_>) -> Option<Changes> {
        match event {
            ReplayEvent::Submitted { id, tenant, known_tokens, max_tokens, .. } => {
                self.submitted += 1;
                let number = self.submitted;
                self.sequences.insert(*id, (number, Place::Waiting { again: false }));
                let (known_tokens, max_tokens) = (*known_tokens, *max_tokens);
                self.joined.push(Joined { number, tenant: (*tenant).to_owned(), known_tokens, max_tokens });
                None
            }
            ReplayEvent::Ended { id, reason } => {
                let (number, _) = self.sequences.remove(id)?;
                self.ended.push((number, reason.label()));
                None
            }
            ReplayEvent::Created { .. } | ReplayEvent::Committed { .. } => None,
            ReplayEvent::Planned { plan, at } => Some(self.plan(plan, Duration::from_nanos(at.as_nanos()))),
        }
    }

    /// Returns the sequences that ended after the last plan, with the reasons.
    pub fn into_ended(self) -> Vec<(Number, &'static str)> {
        self.ended
    }

    /// Returns the number of a sequence; 0 if it has ended.
    fn number(&self, id: SequenceId) -> Number {
        self.sequences.get(&id).map_or(0, |(number, _)| *number)
    }

    /// Moves a sequence; returns its number and where it was.
    fn place(&mut self, id: SequenceId, place: Place) -> Option<(Number, Place)> {
        let (number, now) = self.sequences.get_mut(&id)?;
        Some((*number, std::mem::replace(now, place)))
    }

    fn plan(&mut self, plan: &Iteration, at: Duration) -> Changes {
        let mut changes = Changes {
            iteration: (!plan.chunks.is_empty()).then_some(plan.number),
            at,
            joined: std::mem::take(&mut self.joined),
            ended: std::mem::take(&mut self.ended),
            ..Changes::default()
        };
        for preempted in &plan.preempted {
            let place = match preempted.kind {
                Preemption::Recompute => Place::Waiting { again: true },
                Preemption::Swap => Place::Swapped,
            };
            let beneficiary = self.number(preempted.beneficiary);
            let Some((number, from)) = self.place(preempted.id, place) else { continue };
            let slot = if let Place::Slot(slot) = from { Some(slot) } else { None };
            changes.preempted.push(Victim { number, slot, kind: preempted.kind, beneficiary });
        }
        for (id, slot) in &plan.admitted {
            let Some((number, from)) = self.place(*id, Place::Slot(*slot)) else { continue };
            let after = match from {
                Place::Waiting { again: false } => None,
                Place::Waiting { again: true } | Place::Slot(_) => Some(Preemption::Recompute),
                Place::Swapped => Some(Preemption::Swap),
            };
            changes.admitted.push(Admitted { number, slot: *slot, after });
        }
        changes.marked =
            plan.marked.iter().map(|(victim, other)| (self.number(*victim), self.number(*other))).collect();
        changes.work = plan
            .chunks
            .iter()
            .enumerate()
            .map(|(at, chunk)| Work {
                number: self.number(chunk.id),
                slot: chunk.slot,
                start: chunk.start,
                tokens: chunk.len,
                drafts: chunk.drafts,
                prefill: at >= plan.decodes as usize,
            })
            .collect();
        let works: BTreeSet<Number> = changes.work.iter().map(|work| work.number).collect();
        for (number, place) in self.sequences.values() {
            match place {
                Place::Waiting { .. } => changes.waiting += 1,
                Place::Swapped => changes.swapped += 1,
                Place::Slot(slot) if !works.contains(number) => changes.held.push((*slot, *number)),
                Place::Slot(_) => {}
            }
        }
        changes.held.sort_unstable();
        changes
    }
}
