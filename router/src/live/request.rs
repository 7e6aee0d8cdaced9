//! A request in the live view: what it is, its state, its counters and its life.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use inflight_router_core::{SubmissionId, WorkerId};

use super::life::{Life, Mark, SequenceEvent};
use super::tenant::LiveTenant;
use super::view::{LifeView, RequestView, State};
use crate::options::TraceUrl;
use crate::trace::TraceId;

/// Submissions that a request keeps: a client that does not read may cause any number.
const SUBMISSIONS_MAX: usize = 16;

/// Properties of a request that do not change after its arrival.
pub(crate) struct NewRequest<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) tenant: &'a str,
    pub(crate) weight: f64,
    pub(crate) model: &'a str,
    pub(crate) priority: i32,
    pub(crate) prompt_tokens: u32,
    pub(crate) max_tokens: u32,
    pub(crate) choices: u32,
    pub(crate) arrived: Instant,
    /// Id of its trace; `None` if it is in none that is exported.
    pub(crate) trace_id: Option<TraceId>,
}

/// Worker that a request runs on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place {
    pub(super) worker: WorkerId,
    pub(super) name: Arc<str>,
}

/// Request of this router.
#[derive(Debug)]
pub(crate) struct LiveRequest {
    pub(super) number: u64,
    request_id: Arc<str>,
    pub(super) tenant: Arc<LiveTenant>,
    pub(super) model: Arc<str>,
    priority: i32,
    pub(super) prompt_tokens: u32,
    max_tokens: u32,
    choices: u32,
    pub(super) arrived: Instant,
    trace_id: Option<TraceId>,
    output_tokens: AtomicU32,
    /// Whether the current attempt has no output yet.
    awaits_output: AtomicBool,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    state: State,
    place: Option<Place>,
    attempts: u32,
    cached_tokens: u32,
    /// Bits of the choices that have ended.
    ended_choices: u64,
    outcome: Arc<str>,
    ended_us: Option<u64>,
    submissions: Vec<SubmissionId>,
    life: Life,
}

/// State of a request at one time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RequestNow {
    pub(super) state: State,
    pub(super) place: Option<Place>,
    pub(super) attempts: u32,
    pub(super) cached_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) outcome: Arc<str>,
    pub(super) ended_us: Option<u64>,
    /// State of the request's sequences at its worker, while the worker is observed.
    pub(super) computed_tokens: u32,
    pub(super) kv_blocks: u32,
    pub(super) waiting_reason: Arc<str>,
}

impl LiveRequest {
    pub(super) fn new(number: u64, new: &NewRequest<'_>, tenant: Arc<LiveTenant>) -> Self {
        let mut life = Life::default();
        life.push(0, "arrived", None, format!("{} prompt tokens", new.prompt_tokens), Mark::None);
        let progress = Progress { state: State::Queued, life, ..Progress::default() };
        Self {
            number,
            request_id: Arc::from(new.request_id),
            tenant,
            model: Arc::from(new.model),
            priority: new.priority,
            prompt_tokens: new.prompt_tokens,
            max_tokens: new.max_tokens,
            choices: new.choices,
            arrived: new.arrived,
            trace_id: new.trace_id,
            output_tokens: AtomicU32::new(0),
            awaits_output: AtomicBool::new(true),
            progress: Mutex::new(progress),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        // The progress is consistent at every call that could panic.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time since its arrival, in microseconds.
    pub(super) fn age_us(&self, now: Instant) -> u64 {
        let age = now.saturating_duration_since(self.arrived).as_micros();
        u64::try_from(age).unwrap_or(u64::MAX)
    }

    /// Appends an event and changes the state, unless the request has ended.
    fn change(
        &self,
        now: Instant,
        (kind, mark): (&'static str, Mark),
        detail: String,
        change: impl FnOnce(&mut Progress),
    ) -> bool {
        let at = self.age_us(now);
        let mut progress = self.lock();
        if progress.ended_us.is_some() {
            return false;
        }
        change(&mut progress);
        let worker = progress.place.as_ref().map(|place| place.name.clone());
        progress.life.push(at, kind, worker, detail, mark);
        true
    }

    /// Records that the request waits in the queue.
    pub(super) fn queued(&self, now: Instant, detail: &str) {
        self.change(now, ("queued", Mark::None), detail.to_owned(), |progress| {
            (progress.state, progress.place) = (State::Queued, None);
        });
    }

    /// Records a dispatch. Returns whether it is the first one.
    pub(super) fn dispatched(&self, now: Instant, place: Place, detail: String) -> bool {
        self.awaits_output.store(true, Ordering::Relaxed);
        let mut first = false;
        self.change(now, ("dispatched", Mark::Dispatch(None)), detail, |progress| {
            first = progress.attempts == 0;
            progress.attempts = progress.attempts.max(1);
            (progress.state, progress.place) = (State::Waiting, Some(place));
        });
        first
    }

    /// Records the id of its submission to a worker. Returns the id of an old one that it forgets.
    pub(super) fn submitted(&self, submission: SubmissionId, attempt: u32) -> Option<SubmissionId> {
        let mut progress = self.lock();
        progress.attempts = attempt;
        progress.life.submitted(attempt);
        let full = progress.submissions.len() == SUBMISSIONS_MAX;
        let oldest = full.then(|| progress.submissions.remove(0));
        progress.submissions.push(submission);
        oldest
    }

    /// Counts tokens. Returns whether they are the first of the request, and the first of its present attempt.
    pub(super) fn count(&self, tokens: u32) -> (bool, bool) {
        let before = self.output_tokens.fetch_add(tokens, Ordering::Relaxed);
        let awaited = self.awaits_output.load(Ordering::Relaxed);
        if awaited {
            self.awaits_output.store(false, Ordering::Relaxed);
        }
        (before == 0, awaited)
    }

    /// Records the first output of an attempt.
    pub(super) fn generating(&self, now: Instant, kind: &'static str, computed: Option<u32>) {
        let detail = computed.map_or_else(String::new, |computed| {
            let cached = self.prompt_tokens.saturating_sub(computed);
            format!("{cached} of {} prompt tokens were in the prefix cache", self.prompt_tokens)
        });
        self.change(now, (kind, Mark::FirstOutput), detail, |progress| {
            progress.state = State::Decode;
            if let Some(computed) = computed {
                progress.cached_tokens = self.prompt_tokens.saturating_sub(computed);
            }
        });
    }

    /// Records the end of a choice. Returns whether all have ended.
    pub(super) fn choice_ended(&self, now: Instant, choice: u32, reason: &str) -> bool {
        let bit = 1u64.checked_shl(choice).unwrap_or_default();
        let mut all = false;
        let ends = self.lock().ended_choices & bit == 0;
        if ends {
            let detail =
                if self.choices == 1 { reason.to_owned() } else { format!("choice {choice}: {reason}") };
            self.change(now, ("choice_ended", Mark::ChoiceEnd(choice)), detail, |progress| {
                progress.ended_choices |= bit;
                all = progress.ended_choices.count_ones() >= self.choices;
            });
        }
        all
    }

    /// Records that the request is paused until its client reads.
    pub(super) fn paused(&self, now: Instant) {
        self.change(now, ("paused", Mark::AttemptEnd), "its client does not read".to_owned(), |progress| {
            (progress.state, progress.place) = (State::Paused, None);
        });
    }

    /// Records that the client reads again.
    pub(super) fn continued(&self, now: Instant) {
        if self.lock().state == State::Paused {
            self.change(now, ("continued", Mark::None), "its client reads again".to_owned(), |progress| {
                progress.state = State::Queued;
            });
        }
    }

    /// Records that the worker was lost or returned the request.
    pub(super) fn lost(&self, now: Instant, reason: &str) {
        self.change(now, ("lost", Mark::AttemptEnd), reason.to_owned(), |_| {});
    }

    /// Records that the request waits for its next attempt outside the queue: for the retry budget or in quarantine.
    pub(super) fn held(&self, now: Instant, state: State, kind: &'static str, detail: &str) {
        self.change(now, (kind, Mark::None), detail.to_owned(), |progress| {
            (progress.state, progress.place) = (state, None);
        });
    }

    /// Records an event of a sequence at the worker, such as a chunk or a preemption. It may be reported after the end.
    pub(super) fn observed(&self, event: SequenceEvent) {
        self.lock().life.observed(event, self.choices);
    }

    /// Records the end of the request. Returns false if it had ended before.
    pub(super) fn end(&self, now: Instant, outcome: &str) -> bool {
        let at = self.age_us(now);
        self.change(now, ("ended", Mark::AttemptEnd), outcome.to_owned(), |progress| {
            (progress.state, progress.ended_us) = (State::Ended, Some(at));
            progress.outcome = Arc::from(outcome);
        })
    }

    /// Takes the ids of its submissions.
    pub(super) fn take_submissions(&self) -> Vec<SubmissionId> {
        std::mem::take(&mut self.lock().submissions)
    }

    /// Returns the current state.
    pub(super) fn now(&self) -> RequestNow {
        let progress = self.lock();
        RequestNow {
            state: progress.state,
            place: progress.place.clone(),
            attempts: progress.attempts,
            cached_tokens: progress.cached_tokens,
            output_tokens: self.output_tokens.load(Ordering::Relaxed),
            outcome: progress.outcome.clone(),
            ended_us: progress.ended_us,
            computed_tokens: 0,
            kv_blocks: 0,
            waiting_reason: Arc::default(),
        }
    }

    /// Whether the request has this request id.
    pub(super) fn has_id(&self, request_id: &str) -> bool {
        *self.request_id == *request_id
    }

    /// Approximate upper bound of the bytes of the request's view.
    pub(super) fn view_bytes(&self) -> usize {
        300 + self.request_id.len() + self.tenant.name.len() + self.model.len()
    }

    /// Returns the view of the request in `state`.
    pub(super) fn view(&self, state: &RequestNow, now: Instant) -> RequestView {
        RequestView {
            number: self.number,
            request_id: self.request_id.clone(),
            tenant: self.tenant.name.clone(),
            model: self.model.clone(),
            priority: self.priority,
            state: state.state,
            age_ms: state.ended_us.unwrap_or_else(|| self.age_us(now)) / 1000,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: state.cached_tokens,
            computed_tokens: state.computed_tokens,
            output_tokens: state.output_tokens,
            max_tokens: self.max_tokens,
            choices: self.choices,
            kv_blocks: state.kv_blocks,
            worker: state.place.as_ref().map(|place| place.name.clone()).unwrap_or_default(),
            attempts: state.attempts,
            waiting_reason: state.waiting_reason.clone(),
            outcome: state.outcome.clone(),
        }
    }

    /// Returns the life of the request, whose view is that of `state`, with the address of its trace.
    pub(super) fn life(&self, state: &RequestNow, traces: Option<&TraceUrl>, now: Instant) -> LifeView {
        let request = self.view(state, now);
        let (events, omitted_events) = self.lock().life.view();
        let age_us = state.ended_us.unwrap_or_else(|| self.age_us(now));
        let trace_id = self.trace_id.map_or_else(String::new, |id| id.to_string());
        let trace_url = traces.zip(self.trace_id).map_or_else(String::new, |(url, id)| url.of(id));
        LifeView { request, events, omitted_events, age_us, trace_id, trace_url }
    }
}
