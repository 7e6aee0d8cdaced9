//! Breakdown of the time to first token of recorded sequences.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::{ReplayEvent, SequenceId, Time};

/// Parts of a sequence's time to first token at its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstTokenParts {
    /// From submission to the end of the iteration in flight, when the next one is planned.
    pub iteration: Duration,
    /// From there until an iteration has tokens for it: waiting for admission, or for others' prefills.
    pub wait: Duration,
    /// From there to the end of the iteration that samples its first token, those of other sequences in the
    /// same iterations included.
    pub compute: Duration,
}

impl FirstTokenParts {
    /// Returns the sum of the parts.
    pub fn total(&self) -> Duration {
        self.iteration + self.wait + self.compute
    }
}

/// Sequence without a first token.
#[derive(Debug)]
struct Pending {
    submitted: Time,
    planned: Option<Time>,
    computed: Option<Time>,
}

/// Iteration that has not been committed.
#[derive(Debug)]
struct Launched {
    number: u64,
    planned: Time,
    samples: Vec<SequenceId>,
}

/// Collects the parts from the events of a replay.
#[derive(Debug, Default)]
pub struct FirstTokens {
    pending: BTreeMap<SequenceId, Pending>,
    launched: VecDeque<Launched>,
    /// End of the last committed iteration.
    ended: Time,
    parts: Vec<FirstTokenParts>,
}

impl FirstTokens {
    /// Observes an event.
    pub fn observe(&mut self, event: &ReplayEvent<'_>) {
        match event {
            ReplayEvent::Created { .. } => {}
            ReplayEvent::Submitted { id, at, .. } => {
                self.pending.insert(*id, Pending { submitted: *at, planned: None, computed: None });
            }
            ReplayEvent::Planned { plan, at } => {
                for pending in self.pending.values_mut() {
                    pending.planned.get_or_insert(*at);
                }
                for chunk in &plan.chunks {
                    if let Some(pending) = self.pending.get_mut(&chunk.id) {
                        pending.computed.get_or_insert(*at);
                    }
                }
                if !plan.chunks.is_empty() {
                    let samples = plan.chunks.iter().filter(|chunk| chunk.samples).map(|chunk| chunk.id);
                    let samples = samples.filter(|id| self.pending.contains_key(id)).collect();
                    self.launched.push_back(Launched { number: plan.number, planned: *at, samples });
                }
            }
            ReplayEvent::Committed { number, took } => self.commit(*number, *took),
            // If it has a first token, that was committed before.
            ReplayEvent::Ended { id, .. } => drop(self.pending.remove(id)),
        }
    }

    fn commit(&mut self, number: u64, took: Duration) {
        let Some(launched) = self.launched.pop_front_if(|launched| launched.number == number) else { return };
        // With two iterations in flight, the second begins when the first ends.
        self.ended = self.ended.max(launched.planned).after(took);
        for id in launched.samples {
            let Some(Pending { submitted, planned: Some(planned), computed: Some(computed) }) =
                self.pending.remove(&id)
            else {
                continue;
            };
            self.parts.push(FirstTokenParts {
                iteration: planned.since(submitted),
                wait: computed.since(planned),
                compute: self.ended.since(computed),
            });
        }
    }

    /// Returns the parts of all sequences with a first token, in the order of their first tokens.
    pub fn parts(&self) -> &[FirstTokenParts] {
        &self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Chunk, Iteration};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn the_parts_are_the_iteration_in_flight_the_wait_and_the_computation() {
        let id = |index| SequenceId { index, generation: 0 };
        let plan = |number, chunks: &[(u32, bool)]| {
            let chunk = |(index, samples): &(u32, bool)| Chunk {
                id: id(*index),
                slot: *index,
                start: 0,
                len: 1,
                samples: *samples,
                drafts: 0,
                predictions: 0,
            };
            Iteration { number, chunks: chunks.iter().map(chunk).collect(), ..Iteration::default() }
        };
        let mut found = FirstTokens::default();
        let plans = [(0, plan(1, &[(0, true)])), (10, plan(2, &[(0, true)])), (30, plan(3, &[(1, false)]))];
        let submitted = |index, ms| ReplayEvent::Submitted {
            id: id(index),
            at: at(ms),
            tenant: "",
            known_tokens: 1,
            max_tokens: 9,
        };
        found.observe(&submitted(0, 0));
        found.observe(&ReplayEvent::Planned { plan: &plans[0].1, at: at(0) });
        // Arrives while the first iteration runs; the second has no tokens for it.
        found.observe(&submitted(1, 3));
        found.observe(&ReplayEvent::Committed { number: 1, took: ms(10) });
        for (now, plan) in &plans[1..] {
            found.observe(&ReplayEvent::Planned { plan, at: at(*now) });
            found.observe(&ReplayEvent::Committed { number: plan.number, took: ms(20) });
        }
        let last = plan(4, &[(1, true)]);
        found.observe(&ReplayEvent::Planned { plan: &last, at: at(50) });
        found.observe(&ReplayEvent::Committed { number: 4, took: ms(5) });
        let second = FirstTokenParts { iteration: ms(7), wait: ms(20), compute: ms(25) };
        let first = FirstTokenParts { iteration: ms(0), wait: ms(0), compute: ms(10) };
        assert_eq!(found.parts(), [first, second]);
        assert_eq!(second.total(), ms(52));
    }
}
