//! What is observed of a worker's iterations, joined with this router's requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use inflight_router_core::SubmissionId;

use super::life::SequenceEvent;
use super::request::LiveRequest;
use super::view::{IterationView, SlotView, SlotWork, State, TenantBlocks};
use super::worker_clock::WorkerClock;

/// Iterations kept of a worker, for viewers that are a little behind.
const ITERATIONS_MAX: usize = 512;
/// Entries of work kept with them, whatever the worker reports.
const WORK_MAX: usize = 1 << 18;
/// Sequences kept of a worker, whatever it reports.
const SEQUENCES_MAX: usize = 8192;
/// Longest name taken from a worker, in bytes.
const NAME_BYTES_MAX: usize = 128;
/// Tenants whose blocks are listed.
const TENANTS_MAX: usize = 16;

/// State of a worker as reported by its Observe stream.
#[derive(Debug, Default)]
pub(crate) struct Observation {
    /// Sequences that are named for the first time.
    pub(crate) joined: Vec<JoinedSequence>,
    pub(crate) iterations: Vec<ObservedIteration>,
    /// Iterations that the worker left out before these.
    pub(crate) dropped_iterations: u64,
    pub(crate) state: Option<ObservedState>,
    /// Admissions and preemptions, oldest first.
    pub(crate) changes: Vec<ObservedChange>,
    /// Time of the worker's clock at the newest event, in microseconds; 0 for a worker that reports no changes.
    pub(crate) now_us: u64,
}

/// Admission or preemption of a sequence.
#[derive(Debug)]
pub(crate) struct ObservedChange {
    pub(crate) sequence: u64,
    /// Iteration before which it happened.
    pub(crate) iteration: u64,
    /// Time of the worker's clock, in microseconds.
    pub(crate) at_us: u64,
    pub(crate) kind: ObservedChangeKind,
}

/// What happened to a sequence.
#[derive(Debug)]
pub(crate) enum ObservedChangeKind {
    /// It received a slot.
    Admitted { slot: u32, cached_tokens: u32, resumed: bool },
    /// It lost its slot and KV blocks.
    Preempted(ObservedPreemption),
}

/// Preemption of a sequence.
#[derive(Debug)]
pub(crate) struct ObservedPreemption {
    pub(crate) swapped: bool,
    pub(crate) kv_blocks: u32,
    pub(crate) bytes: u64,
    pub(crate) tokens: u32,
    pub(crate) recompute_us: u64,
    pub(crate) swap_us: u64,
    pub(crate) could_swap: bool,
    /// Sequence that lacked blocks or a slot; 0: it has ended.
    pub(crate) beneficiary: u64,
}

/// Sequence of a worker.
#[derive(Debug)]
pub(crate) struct JoinedSequence {
    /// Number by which the worker names it.
    pub(crate) sequence: u64,
    /// Submission of this router; `None` for another router's.
    pub(crate) submission: Option<SubmissionId>,
    pub(crate) attempt: u32,
    pub(crate) choice: u32,
    pub(crate) tenant: String,
}

/// Completed iteration.
#[derive(Debug)]
pub(crate) struct ObservedIteration {
    pub(crate) number: u64,
    pub(crate) duration_us: u64,
    pub(crate) predicted_us: u64,
    pub(crate) target_us: u64,
    pub(crate) work: Vec<ObservedWork>,
    pub(crate) preempted: u32,
    pub(crate) swapped: u32,
    /// Time of the worker's clock at its completion, in microseconds; 0: unknown.
    pub(crate) completed_us: u64,
}

/// Work of one sequence in an iteration.
#[derive(Debug)]
pub(crate) struct ObservedWork {
    pub(crate) sequence: u64,
    pub(crate) slot: u32,
    pub(crate) prefill_tokens: u32,
    pub(crate) drafted_tokens: u32,
    pub(crate) generated_tokens: u32,
}

/// State of all sequences of a worker.
#[derive(Debug, Default)]
pub(crate) struct ObservedState {
    pub(crate) sequences: Vec<SequenceState>,
    pub(crate) kv_blocks_cached: u32,
    /// First waiting sequence, and why it was not admitted.
    pub(crate) blocked: Option<(u64, String)>,
}

/// State of a sequence.
#[derive(Debug)]
pub(crate) struct SequenceState {
    pub(crate) sequence: u64,
    pub(crate) state: State,
    pub(crate) slot: Option<u32>,
    pub(crate) kv_blocks: u32,
    pub(crate) tokens: u32,
    /// Why it has no slot; empty if it has one.
    pub(crate) waiting_for: String,
}

/// Last iterations and present sequences of a worker.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    /// Completed iterations, oldest first.
    iterations: VecDeque<Arc<IterationView>>,
    /// Entries of their work.
    work: usize,
    /// Place of the first kept iteration among all that were observed or left out.
    first: u64,
    sequences: BTreeMap<u64, Sequence>,
    pub(super) kv_blocks_cached: u32,
    /// Bound of the last iteration.
    pub(super) step_target_us: u64,
    clock: WorkerClock,
    /// Whether the worker reports admissions and preemptions; an older one's are seen in its states.
    reports_changes: bool,
}

#[derive(Debug)]
struct Sequence {
    /// Number by which the worker names it.
    id: u64,
    request: Option<Arc<LiveRequest>>,
    tenant: Arc<str>,
    attempt: u32,
    choice: u32,
    state: State,
    slot: Option<u32>,
    kv_blocks: u32,
    tokens: u32,
    /// Tokens that it was seen to compute.
    computed: u32,
    /// Whether the sequence has been observed in an iteration.
    admitted: bool,
    /// Whether it was seen to generate a token.
    generated: bool,
    waiting_for: Arc<str>,
}

/// Sequences of one request at a worker, together.
#[derive(Debug, Clone, Default)]
pub(super) struct Together {
    /// State of the one that is furthest.
    pub(super) state: State,
    pub(super) kv_blocks: u32,
    pub(super) computed_tokens: u32,
    pub(super) waiting_reason: Arc<str>,
}

impl Sequence {
    /// Number of its request at this router; 0 for another router's.
    fn number(&self) -> u64 {
        self.request.as_ref().map_or(0, |request| request.number)
    }

    /// Adds an event to the life of its request. `at`: when it happened; `iteration`: in which it happened, or before which.
    fn event(&self, at: Instant, iteration: u64, kind: &'static str, detail: String) {
        let Some(request) = &self.request else { return };
        request.observed(SequenceEvent {
            at_us: request.age_us(at),
            attempt: self.attempt,
            choice: self.choice,
            sequence: self.id,
            after_output: self.generated,
            iteration,
            kind,
            detail,
        });
    }

    /// Follows a state. With `in_life`, it may be a change in the life of its request, at an unknown iteration.
    fn follow(&mut self, state: &SequenceState, in_life: bool, now: Instant) {
        let before = std::mem::replace(&mut self.state, state.state);
        let (blocks, tokens) = (self.kv_blocks, self.tokens);
        (self.slot, self.kv_blocks, self.tokens) = (state.slot, state.kv_blocks, state.tokens);
        if *self.waiting_for != *state.waiting_for {
            self.waiting_for = name(state.waiting_for.clone());
        }
        if !in_life {
            return;
        }
        let runs = |state| matches!(state, State::Prefill | State::Decode);
        match (before, state.state) {
            (before, State::Preempted) if before != State::Preempted => {
                let dropped =
                    format!("{blocks} KV blocks were dropped; {tokens} tokens are computed again later");
                self.event(now, 0, "preempted", dropped);
            }
            (before, State::Swapped) if before != State::Swapped => {
                self.event(now, 0, "swapped", format!("{blocks} KV blocks are copied to the host"));
            }
            (State::Preempted | State::Swapped, after) if runs(after) => {
                self.event(now, 0, "resumed", slot_text(state.slot));
            }
            _ => {}
        }
    }
}

fn slot_text(slot: Option<u32>) -> String {
    slot.map_or_else(String::new, |slot| format!("in slot {slot}"))
}

/// Returns a size in KiB or MiB.
fn size(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    match bytes as f64 / KIB {
        kib if kib < KIB => format!("{kib:.1} KiB"),
        kib => format!("{:.1} MiB", kib / KIB),
    }
}

/// Returns a worker's word; nothing if it is longer than any that workers use.
fn name(word: String) -> Arc<str> {
    if word.len() > NAME_BYTES_MAX { Arc::default() } else { Arc::from(word) }
}

fn micros(micros: u64) -> u32 {
    u32::try_from(micros).unwrap_or(u32::MAX)
}

impl Observed {
    /// Adds what a worker has reported. `request_of` returns the request of a submission.
    pub(crate) fn apply(
        &mut self,
        observation: Observation,
        request_of: impl Fn(SubmissionId) -> Option<Arc<LiveRequest>>,
        now: Instant,
    ) {
        let mut joined_now = BTreeSet::new();
        for joined in observation.joined {
            if self.sequences.len() >= SEQUENCES_MAX {
                break;
            }
            joined_now.insert(joined.sequence);
            let request = joined.submission.and_then(&request_of);
            let tenant = request.as_ref().map_or_else(|| name(joined.tenant), |own| own.tenant.name.clone());
            let sequence = Sequence {
                id: joined.sequence,
                request,
                tenant,
                attempt: joined.attempt,
                choice: joined.choice,
                state: State::Waiting,
                slot: None,
                kv_blocks: 0,
                tokens: 0,
                computed: 0,
                admitted: false,
                generated: false,
                waiting_for: Arc::default(),
            };
            self.sequences.insert(joined.sequence, sequence);
        }
        self.first += observation.dropped_iterations;
        self.reports_changes |= observation.now_us > 0;
        self.clock.observe(observation.now_us, now);
        let mut changes = observation.changes.into_iter().peekable();
        for iteration in observation.iterations {
            while let Some(change) = changes.next_if(|change| change.iteration <= iteration.number) {
                self.change(&change, now);
            }
            self.push(iteration, now);
        }
        changes.for_each(|change| self.change(&change, now));
        if let Some(state) = observation.state {
            self.follow(state, &joined_now, now);
        }
    }

    /// Adds an admission or a preemption to the life of its request.
    fn change(&mut self, change: &ObservedChange, now: Instant) {
        let (at, number) = (self.clock.at(change.at_us, now), change.iteration);
        let (kind, detail) = match &change.kind {
            ObservedChangeKind::Admitted { slot, cached_tokens, resumed } => {
                let detail = format!(
                    "in slot {slot}, before iteration {number}, with {cached_tokens} tokens in the KV cache"
                );
                (if *resumed { "resumed" } else { "admitted" }, detail)
            }
            ObservedChangeKind::Preempted(preemption) => {
                let kind = if preemption.swapped { "swapped" } else { "preempted" };
                (kind, self.preemption_text(change, preemption))
            }
        };
        if let Some(sequence) = self.sequences.get_mut(&change.sequence) {
            sequence.admitted = true;
            sequence.event(at, number, kind, detail);
        }
    }

    /// Returns how a sequence was preempted, for whom, and at which costs.
    fn preemption_text(&self, change: &ObservedChange, preemption: &ObservedPreemption) -> String {
        let ObservedPreemption { kv_blocks, bytes, tokens, recompute_us, swap_us, .. } = *preemption;
        let beneficiary = match self.sequences.get(&preemption.beneficiary) {
            _ if preemption.beneficiary == change.sequence => "as no other one goes after it".to_owned(),
            Some(Sequence { request: Some(request), .. }) => format!("for request {}", request.number),
            Some(other) => format!("for a request of tenant {:?} at another router", &*other.tenant),
            None => "for a request that has ended since".to_owned(),
        };
        let done = if preemption.swapped { "copied to the host" } else { "dropped, to be computed again" };
        let room = match preemption.could_swap {
            true => "",
            false => ", for which the host has no room",
        };
        let millis = |us: u64| us as f64 / 1e3;
        format!(
            "before iteration {}, {beneficiary}: {kv_blocks} KV blocks of {tokens} tokens, {}, are {done}; predicted cost \
             {:.1} ms by recompute, {:.1} ms by swap{room}",
            change.iteration,
            size(bytes),
            millis(recompute_us),
            millis(swap_us)
        )
    }

    fn push(&mut self, iteration: ObservedIteration, now: Instant) {
        let number = iteration.number;
        let at = self.clock.at(iteration.completed_us, now);
        let reports_changes = self.reports_changes;
        let work = iteration.work.into_iter().take(SEQUENCES_MAX).map(|work| {
            let ObservedWork { sequence, slot, prefill_tokens, drafted_tokens, generated_tokens } = work;
            let mut view =
                SlotWork { slot, prefill_tokens, drafted_tokens, generated_tokens, ..SlotWork::default() };
            let Some(sequence) = self.sequences.get_mut(&sequence) else { return view };
            let first = !std::mem::replace(&mut sequence.admitted, true);
            if first && !reports_changes && sequence.state == State::Waiting {
                sequence.event(at, number, "admitted", slot_text(Some(slot)));
            }
            if prefill_tokens > 0 {
                sequence.computed = sequence.computed.saturating_add(prefill_tokens);
                let detail = format!("{prefill_tokens} tokens in iteration {number}");
                sequence.event(at, number, "chunk", detail);
            }
            sequence.generated |= generated_tokens > 0;
            view.request = sequence.number();
            if view.request == 0 {
                view.tenant = sequence.tenant.clone();
            }
            view
        });
        let view = IterationView {
            number,
            duration_us: micros(iteration.duration_us),
            predicted_us: micros(iteration.predicted_us),
            target_us: micros(iteration.target_us),
            work: work.collect(),
            preempted: iteration.preempted,
            swapped: iteration.swapped,
        };
        self.step_target_us = iteration.target_us;
        self.work += view.work.len();
        self.iterations.push_back(Arc::new(view));
        while self.iterations.len() > ITERATIONS_MAX || self.work > WORK_MAX {
            let oldest = self.iterations.pop_front();
            self.work -= oldest.map_or(0, |oldest| oldest.work.len());
            self.first += 1;
        }
    }

    /// Follows a state. A sequence that it does not have has ended, unless it has joined since the state was taken.
    fn follow(&mut self, state: ObservedState, joined: &BTreeSet<u64>, now: Instant) {
        let mut before = std::mem::take(&mut self.sequences);
        for now_state in state.sequences.iter().take(SEQUENCES_MAX) {
            if let Some(mut sequence) = before.remove(&now_state.sequence) {
                sequence.follow(now_state, !self.reports_changes, now);
                self.sequences.insert(now_state.sequence, sequence);
            }
        }
        before.retain(|sequence, _| joined.contains(sequence));
        self.sequences.append(&mut before);
        self.kv_blocks_cached = state.kv_blocks_cached;
        // Of an older worker, which has a reason for the first one only.
        if let Some((sequence, by)) = state.blocked.filter(|_| !self.reports_changes)
            && let Some(sequence) = self.sequences.get_mut(&sequence)
        {
            sequence.waiting_for = name(by);
        }
    }

    /// Forgets everything: the worker is no longer observed.
    pub(crate) fn clear(&mut self) {
        let first = self.first + self.iterations.len() as u64;
        *self = Self { first, ..Self::default() };
    }

    /// Returns the iterations from `cursor` on, and moves it behind them: at most `most`, the newest; with the number of
    /// those left out.
    pub(super) fn iterations_since(&self, cursor: &mut u64, most: usize) -> (Vec<Arc<IterationView>>, u64) {
        let end = self.first + self.iterations.len() as u64;
        let since = (*cursor).min(end);
        let begin = since.max(self.first).max(end.saturating_sub(most as u64));
        let fresh = self.iterations.iter().skip((begin - self.first) as usize).cloned().collect();
        *cursor = end;
        (fresh, begin - since)
    }

    /// Returns the sequences in slots, by slot, and those preempted after they ran.
    pub(super) fn slots(&self) -> Vec<SlotView> {
        let shown = self.sequences.values().filter(|sequence| sequence.state != State::Waiting);
        let slots = shown.map(|sequence| SlotView {
            slot: sequence.slot,
            request: sequence.number(),
            tenant: sequence.tenant.clone(),
            choice: sequence.choice,
            state: sequence.state,
            kv_blocks: sequence.kv_blocks,
            tokens: sequence.tokens,
        });
        let mut slots: Vec<_> = slots.collect();
        slots.sort_by_key(|slot| (slot.slot.is_none(), slot.slot, slot.request, slot.choice));
        slots
    }

    /// Returns the KV blocks of all tenants.
    pub(super) fn blocks_by_tenant(&self) -> BTreeMap<Arc<str>, u32> {
        let mut blocks: BTreeMap<Arc<str>, u32> = BTreeMap::new();
        for sequence in self.sequences.values().filter(|sequence| sequence.kv_blocks > 0) {
            let sum = blocks.entry(sequence.tenant.clone()).or_default();
            *sum = sum.saturating_add(sequence.kv_blocks);
        }
        blocks
    }

    /// Returns the KV blocks of the tenants that have most.
    pub(super) fn top_tenants(&self) -> Vec<TenantBlocks> {
        let blocks = self.blocks_by_tenant().into_iter();
        let mut top: Vec<_> = blocks.map(|(tenant, blocks)| TenantBlocks { tenant, blocks }).collect();
        top.sort_by(|a, b| b.blocks.cmp(&a.blocks).then_with(|| a.tenant.cmp(&b.tenant)));
        top.truncate(TENANTS_MAX);
        top
    }

    /// Returns the sequences of each of this router's requests together, by number.
    pub(super) fn requests(&self) -> BTreeMap<u64, Together> {
        let mut requests: BTreeMap<u64, Together> = BTreeMap::new();
        for sequence in self.sequences.values().filter(|sequence| sequence.request.is_some()) {
            let together = requests.entry(sequence.number()).or_default();
            if rank(sequence.state) > rank(together.state) {
                together.state = sequence.state;
            }
            together.kv_blocks = together.kv_blocks.saturating_add(sequence.kv_blocks);
            together.computed_tokens = together.computed_tokens.saturating_add(sequence.computed);
            if !sequence.waiting_for.is_empty() && together.waiting_reason.is_empty() {
                together.waiting_reason = sequence.waiting_for.clone();
            }
        }
        requests
    }
}

/// Order of states by how far a sequence is.
fn rank(state: State) -> u32 {
    match state {
        State::Decode => 5,
        State::Prefill => 4,
        State::Swapped => 3,
        State::Preempted => 2,
        State::Waiting => 1,
        _ => 0,
    }
}
