//! Observation of the engine: a collector on its thread, and a bounded feed for each observer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inflight_proto::v1;
use inflight_proto::v1::observed_change::Change;
use inflight_worker_core::{BlockedBy, Preemption, SequenceId, SequencePhase, SequenceStatus, Time};
use tokio::sync::Notify;

use super::engine_thread::RouterName;
use crate::engine::{ChangeKind, ChunkOwner, Engine, SequenceChange, SessionId, StepReport};

/// Iterations that a feed keeps for its observer.
const ITERATIONS_MAX: usize = 256;
/// Changes that a feed keeps for its observer.
const CHANGES_MAX: usize = 4096;
/// Sequences in a state.
const SEQUENCES_MAX: usize = 4096;
/// Minimum time between two states.
const STATE_INTERVAL: Duration = Duration::from_millis(100);

/// Completed iteration, shared by all feeds.
struct Completed {
    iteration: v1::ObservedIteration,
    /// Sequences of its work.
    sequences: Vec<Arc<v1::ObservedSequence>>,
}

/// Admission or preemption, shared by all feeds.
struct Changed {
    change: v1::ObservedChange,
    /// The sequence, and the one that it was preempted for.
    sequences: Vec<Arc<v1::ObservedSequence>>,
}

/// State of all sequences, shared by all feeds.
struct State {
    state: v1::ObservedState,
    /// Sequences of the worker.
    sequences: Vec<Arc<v1::ObservedSequence>>,
}

/// Observations that one observer has not read, written by the engine's thread and taken by the observer's response stream.
pub(crate) struct Feed {
    unread: Mutex<Unread>,
    changed: Notify,
}

#[derive(Default)]
struct Unread {
    iterations: VecDeque<Arc<Completed>>,
    dropped: u64,
    changes: VecDeque<Arc<Changed>>,
    dropped_changes: u64,
    /// Time of the newest event.
    now_us: u64,
    state: Option<Arc<State>>,
    closed: bool,
    /// Sequences that the observer knows.
    known: BTreeSet<u64>,
}

impl Feed {
    pub(super) fn new() -> Self {
        Self { unread: Mutex::default(), changed: Notify::new() }
    }

    fn unread(&self) -> MutexGuard<'_, Unread> {
        // Every critical section leaves the state consistent, so poisoning can be ignored.
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_change(&self, changed: &Arc<Changed>) {
        let mut unread = self.unread();
        if unread.changes.len() == CHANGES_MAX {
            unread.changes.pop_front();
            unread.dropped_changes += 1;
        }
        unread.now_us = unread.now_us.max(changed.change.at_us);
        unread.changes.push_back(changed.clone());
        drop(unread);
        self.changed.notify_one();
    }

    fn push(&self, completed: &Arc<Completed>) {
        let mut unread = self.unread();
        unread.now_us = unread.now_us.max(completed.iteration.completed_us);
        if unread.iterations.len() == ITERATIONS_MAX {
            unread.iterations.pop_front();
            unread.dropped += 1;
            crate::metrics::iteration_dropped();
        }
        unread.iterations.push_back(completed.clone());
        drop(unread);
        self.changed.notify_one();
    }

    fn set_state(&self, state: &Arc<State>, now_us: u64) {
        let mut unread = self.unread();
        unread.now_us = unread.now_us.max(now_us);
        unread.state = Some(state.clone());
        drop(unread);
        self.changed.notify_one();
    }

    /// Ends the feed.
    pub(super) fn close(&self) {
        self.unread().closed = true;
        self.changed.notify_one();
    }

    fn is_closed(&self) -> bool {
        self.unread().closed
    }

    /// Waits until there is something to read.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Takes what is unread; `None` once the feed is closed.
    pub(super) fn take(&self) -> Option<v1::ObserveResponse> {
        let mut unread = self.unread();
        if unread.closed {
            return None;
        }
        let (iterations, state) = (std::mem::take(&mut unread.iterations), unread.state.take());
        let changes = std::mem::take(&mut unread.changes);
        let dropped_iterations = std::mem::take(&mut unread.dropped);
        let dropped_changes = std::mem::take(&mut unread.dropped_changes);
        let now_us = unread.now_us;
        let mut known = std::mem::take(&mut unread.known);
        // The engine's thread does not wait for the rest.
        drop(unread);
        let of_iterations = iterations.iter().flat_map(|completed| &completed.sequences);
        let of_state = state.iter().flat_map(|state| &state.sequences);
        let of_changes = changes.iter().flat_map(|changed| &changed.sequences);
        let fresh = of_iterations
            .chain(of_changes)
            .chain(of_state)
            .filter(|sequence| known.insert(sequence.sequence));
        let joined: Vec<_> = fresh.map(|sequence| (**sequence).clone()).collect();
        if let Some(state) = &state {
            // Those that have ended are named no more. The state may be older than those that join beside it.
            let present = state.sequences.iter().map(|sequence| sequence.sequence);
            known = present.chain(joined.iter().map(|sequence| sequence.sequence)).collect();
        }
        self.unread().known = known;
        Some(v1::ObserveResponse {
            joined,
            iterations: iterations.iter().map(|completed| completed.iteration.clone()).collect(),
            dropped_iterations,
            state: state.map(|state| state.state.clone()),
            changes: changes.iter().map(|changed| changed.change).collect(),
            dropped_changes,
            now_us,
        })
    }
}

/// Collects observations on the engine's thread while there are observers.
pub(super) struct Collector {
    feeds: Vec<Arc<Feed>>,
    /// Sequences named to the feeds.
    known: BTreeMap<u64, Arc<v1::ObservedSequence>>,
    /// Time of the last state.
    state_at: Option<Time>,
    /// Size of a KV block in bytes.
    block_bytes: u64,
}

impl Collector {
    pub(super) fn new(block_bytes: u64) -> Self {
        Self { feeds: Vec::new(), known: BTreeMap::new(), state_at: None, block_bytes }
    }

    /// Adds an observer.
    pub(super) fn add(&mut self, feed: Arc<Feed>) {
        self.feeds.push(feed);
    }

    /// Removes the observers that have left. Returns whether any is left.
    pub(super) fn prune(&mut self) -> bool {
        self.feeds.retain(|feed| !feed.is_closed());
        !self.feeds.is_empty()
    }

    /// Ends all feeds.
    pub(super) fn close(&self) {
        self.feeds.iter().for_each(|feed| feed.close());
    }

    /// Collects the changes of a step, the iteration that it has completed, and the state if it is due. Returns whether there are observers.
    pub(super) fn step(
        &mut self,
        engine: &mut Engine,
        routers: &BTreeMap<SessionId, RouterName>,
        step: &StepReport,
        now: Time,
    ) -> bool {
        for change in engine.take_changes() {
            self.change(engine, routers, &change);
        }
        let engine = &*engine;
        if step.tokens > 0
            && let Some((number, preempted)) = engine.completed_iteration()
        {
            self.iteration(engine, routers, step, (number, now), preempted);
        }
        if step.idle || self.state_at.is_none_or(|at| now.since(at) >= STATE_INTERVAL) {
            self.state(engine, routers, now);
            return self.prune();
        }
        true
    }

    fn change(
        &mut self,
        engine: &Engine,
        routers: &BTreeMap<SessionId, RouterName>,
        changed: &SequenceChange,
    ) {
        let mut sequences = vec![self.sequence(engine, routers, changed.id, &changed.owner)];
        let change = match changed.kind {
            ChangeKind::Admitted { slot, cached_tokens, resumed } => {
                Change::Admitted(v1::SequenceAdmitted { slot, cached_tokens, resumed })
            }
            ChangeKind::Preempted { preempted, beneficiary } => {
                let beneficiary =
                    beneficiary.map(|owner| self.sequence(engine, routers, preempted.beneficiary, &owner));
                let number = beneficiary.as_ref().map_or(0, |sequence| sequence.sequence);
                sequences.extend(beneficiary);
                Change::Preempted(v1::SequencePreempted {
                    swapped: preempted.kind == Preemption::Swap,
                    kv_blocks: preempted.blocks,
                    bytes: u64::from(preempted.blocks) * self.block_bytes,
                    tokens: preempted.tokens,
                    recompute_us: preempted.predicted.recompute_us,
                    swap_us: preempted.predicted.swap_us,
                    could_swap: preempted.predicted.can_swap,
                    beneficiary: number,
                })
            }
        };
        let change = v1::ObservedChange {
            sequence: changed.id.number(),
            iteration: changed.iteration,
            at_us: since_start(changed.at),
            change: Some(change),
        };
        let changed = Arc::new(Changed { change, sequences });
        self.feeds.iter().for_each(|feed| feed.push_change(&changed));
    }

    fn iteration(
        &mut self,
        engine: &Engine,
        routers: &BTreeMap<SessionId, RouterName>,
        step: &StepReport,
        (number, now): (u64, Time),
        (preempted, swapped): (u32, u32),
    ) {
        let summary = engine.history().iter().rev().find(|summary| summary.number == number);
        let bound = summary.and_then(|summary| summary.bound);
        let mut sequences = Vec::new();
        let mut work = Vec::new();
        for done in engine.completed_work() {
            let sequence = self.sequence(engine, routers, done.id, &done.owner);
            work.push(v1::ObservedWork {
                sequence: sequence.sequence,
                slot: done.slot,
                prefill_tokens: done.prefill_tokens,
                drafted_tokens: done.drafted_tokens,
                generated_tokens: done.generated_tokens,
            });
            sequences.push(sequence);
        }
        let iteration = v1::ObservedIteration {
            iteration: number,
            duration_us: micros(step.took),
            predicted_us: micros(step.predicted),
            target_us: bound.map_or(0, micros),
            work,
            preempted_sequences: preempted,
            swapped_sequences: swapped,
            tokens: step.tokens,
            generated_tokens: step.sampled,
            completed_us: since_start(now),
        };
        let completed = Arc::new(Completed { iteration, sequences });
        self.feeds.iter().for_each(|feed| feed.push(&completed));
    }

    /// Collects the state of all sequences and of the pool.
    pub(super) fn state(&mut self, engine: &Engine, routers: &BTreeMap<SessionId, RouterName>, now: Time) {
        self.state_at = Some(now);
        let (mut states, mut sequences, mut omitted) = (Vec::new(), Vec::new(), 0);
        let plan = engine.last_plan();
        let considered: BTreeMap<SequenceId, &str> =
            plan.not_admitted.iter().map(|blocked| (blocked.id, blocked.by.label())).collect();
        let waiting_for = |status: &SequenceStatus| match (status.slot, status.phase) {
            (Some(_), _) => "",
            // On the way to the host.
            (None, SequencePhase::Swapped) if status.blocks > 0 => BlockedBy::Fence.label(),
            (None, _) => match considered.get(&status.id) {
                Some(by) => by,
                None if plan.not_admitted.is_empty() => "arrival",
                None => "order",
            },
        };
        for live in engine.live_sequences() {
            if states.len() == SEQUENCES_MAX {
                omitted += 1;
                continue;
            }
            let status = live.status;
            let sequence = self.sequence(engine, routers, status.id, &live.owner);
            states.push(v1::SequenceState {
                sequence: sequence.sequence,
                phase: phase(status.phase).into(),
                slot: status.slot,
                kv_blocks: status.blocks,
                tokens: status.tokens,
                waiting_for: waiting_for(&status).to_owned(),
            });
            sequences.push(sequence);
        }
        // Those that have ended are forgotten.
        self.known = sequences.iter().map(|sequence| (sequence.sequence, sequence.clone())).collect();
        let blocked = engine.last_plan().blocked.filter(|_| engine.load().waiting > 0);
        let state = v1::ObservedState {
            sequences: states,
            omitted_sequences: omitted,
            kv_blocks_cached: engine.cold_blocks(),
            blocked_sequence: blocked.map_or(0, |blocked| blocked.id.number()),
            blocked_by: blocked.map_or("", |blocked| blocked.by.label()).to_owned(),
        };
        let state = Arc::new(State { state, sequences });
        self.feeds.iter().for_each(|feed| feed.set_state(&state, since_start(now)));
    }

    /// Returns the identity of a sequence.
    fn sequence(
        &mut self,
        engine: &Engine,
        routers: &BTreeMap<SessionId, RouterName>,
        id: SequenceId,
        owner: &ChunkOwner,
    ) -> Arc<v1::ObservedSequence> {
        let known = self.known.entry(id.number()).or_insert_with(|| {
            let router = routers.get(&owner.key.session);
            Arc::new(v1::ObservedSequence {
                sequence: id.number(),
                router_id: router.map_or_else(String::new, |router| router.id.clone()),
                incarnation: router.map_or_else(String::new, |router| router.incarnation.clone()),
                submission_id: owner.key.request,
                attempt: owner.attempt,
                choice: owner.choice,
                tenant: owner.tenant.map_or("", |tenant| engine.tenant_name(tenant)).to_owned(),
            })
        });
        known.clone()
    }
}

/// Returns a time of the worker's clock in microseconds, at least 1.
fn since_start(now: Time) -> u64 {
    (now.as_nanos() / 1000).max(1)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn phase(phase: SequencePhase) -> v1::SequencePhase {
    match phase {
        SequencePhase::Waiting => v1::SequencePhase::Waiting,
        SequencePhase::Prefill => v1::SequencePhase::Prefill,
        SequencePhase::Decode => v1::SequencePhase::Decode,
        SequencePhase::Preempted => v1::SequencePhase::Preempted,
        SequencePhase::Swapped => v1::SequencePhase::Swapped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(number: u64) -> Arc<v1::ObservedSequence> {
        Arc::new(v1::ObservedSequence { sequence: number, ..v1::ObservedSequence::default() })
    }

    fn completed(number: u64) -> Arc<Completed> {
        let iteration = v1::ObservedIteration { iteration: number, ..v1::ObservedIteration::default() };
        Arc::new(Completed { iteration, sequences: vec![sequence(7), sequence(number)] })
    }

    #[test]
    fn a_slow_observer_loses_the_oldest_iterations_and_only_those() {
        let feed = Feed::new();
        let last = ITERATIONS_MAX as u64 + 100;
        (1..=last).for_each(|number| feed.push(&completed(number)));
        let response = feed.take().unwrap();
        let numbers: Vec<u64> = response.iterations.iter().map(|iteration| iteration.iteration).collect();
        assert_eq!(numbers, (101..=last).collect::<Vec<_>>());
        assert_eq!(response.dropped_iterations, 100);
        feed.push(&completed(last + 1));
        let response = feed.take().unwrap();
        assert_eq!((response.iterations.len(), response.dropped_iterations), (1, 0));
    }

    #[test]
    fn every_sequence_is_introduced_once_until_it_has_ended() {
        let feed = Feed::new();
        let joined = |feed: &Feed| {
            let response = feed.take().unwrap();
            response.joined.iter().map(|sequence| sequence.sequence).collect::<Vec<_>>()
        };
        feed.push(&completed(1));
        feed.push(&completed(2));
        assert_eq!(joined(&feed), [7, 1, 2]);
        feed.push(&completed(2));
        let state = v1::ObservedState::default();
        feed.set_state(&Arc::new(State { state, sequences: vec![sequence(7), sequence(8)] }), 1);
        assert_eq!(joined(&feed), [8]);
        feed.push(&completed(2));
        assert_eq!(joined(&feed), [2], "it was not in the last state, so it counts as new");
        let state = v1::ObservedState::default();
        feed.set_state(&Arc::new(State { state, sequences: vec![sequence(7)] }), 1);
        feed.push(&completed(9));
        assert_eq!(joined(&feed), [9]);
        feed.push(&completed(9));
        assert!(joined(&feed).is_empty(), "the state was older than it");
        feed.close();
        assert!(feed.take().is_none());
    }
}
