//! An active request: the hand-off between the dispatcher and its client's stream.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use inflight_contract::{FinishReason, PositionLogprobs, PromptLogprobs};
use inflight_router_core::{ChoiceOutput, RequestId, RequestPlaced};

use super::handoff::Handoff;
use super::phase_spans::PhaseSpans;
use crate::call_guard::CallGuard;
use crate::live::tracker::Tracker;
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::request::admitted_call::AdmittedCall;
use crate::trace::TraceContext;

/// Times of a request's progress.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestTimes {
    pub(crate) placed: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
}

/// Effect of a delivery on the stream's buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DeliveryEffect {
    /// It was taken.
    Taken,
    /// It was taken, and the client has fallen too far behind: pause the request.
    Overfull,
}

/// Change to a worker with another numerics fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FingerprintChange {
    pub(crate) fingerprint: Arc<str>,
    /// Tokens of each choice before the change.
    pub(crate) tokens: Vec<u32>,
}

/// Output of a choice that its stream has not read.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct UnreadOutput {
    /// Unread tokens.
    pub(crate) tokens: Vec<u32>,
    /// One entry per unread token, or empty.
    pub(crate) logprobs: Vec<PositionLogprobs>,
    /// Finish reason; set in exactly one read.
    pub(crate) end: Option<FinishReason>,
}

/// State and unread output that a stream gets from one read.
pub(crate) struct StreamRead {
    pub(crate) placed: bool,
    /// The request was paused; reading resumes it.
    pub(crate) paused: bool,
    /// Fingerprint of the worker of the latest attempt.
    pub(crate) fingerprint: Option<Arc<str>>,
    pub(crate) changes: Vec<FingerprintChange>,
    /// Log probabilities of the next prompt tokens.
    pub(crate) prompt_logprobs: Vec<PromptLogprobs>,
    pub(crate) fresh: Vec<(u32, UnreadOutput)>,
    pub(crate) failure: Option<Outcome>,
}

/// Client side of a request.
pub(crate) trait ClientStream: Send + Sync {
    /// Ends the request with an error and drops what the stream holds. Its transport, which need not poll it,
    /// gets the error.
    fn end(&self, outcome: Outcome);
}

/// Request shared by the dispatcher, which delivers output, and its client's stream, which reads it at its own
/// pace. Locks are taken in this order: that of the response stream, of the dispatcher, of this request.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    id: RequestId,
    pub(crate) call: AdmittedCall,
    state: Handoff<StreamState>,
    /// Its stream, which holds the request.
    stream: OnceLock<Weak<dyn ClientStream>>,
    /// Resources held against the router's limits.
    pub(crate) guard: CallGuard,
    /// Reports to the live view; `None` without one.
    pub(super) live: Option<Tracker>,
}

#[derive(Debug)]
struct StreamState {
    /// Unread output by choice; bounded by n * max_tokens.
    unread: Vec<UnreadOutput>,
    /// Unread log probabilities of prompt tokens; bounded by the prompt.
    prompt_logprobs: Vec<PromptLogprobs>,
    /// Time of the last tokens by choice.
    last_tokens: Vec<Option<Instant>>,
    /// Gaps between tokens of the model, looked up once.
    gaps: metrics::Histogram,
    /// Number of unread tokens, and of log probabilities of prompt tokens.
    unread_tokens: usize,
    times: RequestTimes,
    rejection: Option<Outcome>,
    /// Set when the request has ended other than by the ends of its choices.
    failure: Option<Outcome>,
    paused: bool,
    fingerprint: Option<Arc<str>>,
    /// Fingerprint changes not yet delivered to the stream.
    changes: VecDeque<FingerprintChange>,
    /// Prompt tokens computed before the first token, without cached ones; `None` before that.
    computed_prompt: Option<u32>,
    /// Choices that have not ended.
    running: u32,
    spans: PhaseSpans,
    stalled: bool,
    /// Time since which the stream has something unread, a failure included. A transport whose client does not
    /// read does not poll.
    unread_since: Option<Instant>,
}

impl StreamState {
    /// Unread tokens above which a stream counts as stalled.
    const STALLED_TOKENS: usize = 256;

    /// Returns how long output has been unread.
    fn unread_for(&self, now: Instant) -> Duration {
        self.unread_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Adds output.
    fn push(&mut self, output: ChoiceOutput, now: Instant, live: Option<&Tracker>) {
        let ChoiceOutput { choice, mut tokens, mut logprobs, prompt_logprobs, finish, computed_prompt } =
            output;
        if !tokens.is_empty() {
            self.times.first_token.get_or_insert(now);
            self.times.last_token = Some(now);
            if let Some(last) = self.last_tokens.get_mut(choice as usize)
                && let Some(before) = last.replace(now)
            {
                let gap = now.saturating_duration_since(before);
                self.gaps.record(gap);
                if let Some(live) = live {
                    live.gap(gap);
                }
            }
        }
        self.computed_prompt = self.computed_prompt.or(computed_prompt);
        if finish.is_some() {
            self.running = self.running.saturating_sub(1);
            if self.running == 0 {
                self.spans.end();
            }
        }
        self.unread_since.get_or_insert(now);
        self.unread_tokens += tokens.len() + prompt_logprobs.len();
        self.prompt_logprobs.extend(prompt_logprobs);
        let Some(unread) = self.unread.get_mut(choice as usize) else { return };
        if unread.tokens.is_empty() {
            (unread.tokens, unread.logprobs) = (tokens, logprobs);
        } else {
            unread.tokens.append(&mut tokens);
            unread.logprobs.append(&mut logprobs);
        }
        unread.end = unread.end.or(finish);
        if !self.stalled && self.unread_tokens > Self::STALLED_TOKENS {
            self.stalled = true;
            metrics::counter!(names::STALLED_STREAMS).increment(1);
        }
    }

    /// Takes all that is unread.
    fn take(&mut self) -> StreamRead {
        self.stalled = false;
        self.unread_since = None;
        self.unread_tokens = 0;
        let unread = self.unread.iter_mut().zip(0..);
        let unread = unread.filter(|(unread, _)| !unread.tokens.is_empty() || unread.end.is_some());
        let fresh = unread.map(|(unread, choice)| (choice, std::mem::take(unread))).collect();
        StreamRead {
            placed: self.times.placed.is_some(),
            paused: std::mem::take(&mut self.paused),
            fingerprint: self.fingerprint.clone(),
            changes: self.changes.drain(..).collect(),
            prompt_logprobs: std::mem::take(&mut self.prompt_logprobs),
            fresh,
            failure: self.failure.clone(),
        }
    }
}

impl ActiveRequest {
    /// Unread time after which the transport is assumed not to poll.
    const UNPOLLED_MIN: Duration = Duration::from_millis(50);

    pub(crate) fn new(
        id: RequestId,
        call: AdmittedCall,
        span: tracing::Span,
        guard: CallGuard,
        live: Option<Tracker>,
    ) -> Self {
        let state = StreamState {
            unread: (0..call.sampling.n).map(|_| UnreadOutput::default()).collect(),
            prompt_logprobs: Vec::new(),
            last_tokens: vec![None; call.sampling.n as usize],
            gaps: metrics::histogram!(names::INTER_TOKEN_SECONDS, "model" => call.model.clone()),
            unread_tokens: 0,
            times: RequestTimes::default(),
            rejection: None,
            failure: None,
            paused: false,
            fingerprint: None,
            changes: VecDeque::new(),
            computed_prompt: None,
            running: call.sampling.n,
            spans: PhaseSpans::new(span),
            stalled: false,
            unread_since: None,
        };
        Self { id, call, state: Handoff::new(state), stream: OnceLock::new(), guard, live }
    }

    /// Returns its id in the dispatcher.
    pub(super) fn id(&self) -> RequestId {
        self.id
    }

    /// Sets its stream, once.
    pub(crate) fn attach(&self, stream: Weak<dyn ClientStream>) {
        // Fails if it has one.
        let _ = self.stream.set(stream);
    }

    /// Records that it was not admitted.
    pub(super) fn reject(&self, outcome: Outcome) {
        self.state.access(|state| state.rejection = Some(outcome));
    }

    /// Returns why it was not admitted.
    pub(super) fn rejection(&self) -> Option<Outcome> {
        self.state.access(|state| state.rejection.clone())
    }

    /// Records a dispatch to a worker.
    pub(super) fn place(&self, placed: RequestPlaced, worker: &str, now: Instant, readers: &mut Vec<Waker>) {
        self.state.change(readers, |state| {
            state.spans.attempt(worker);
            state.paused = false;
            if state.times.placed.is_none() {
                state.times.placed = Some(now);
                let waited = now.saturating_duration_since(self.call.arrived);
                let model = self.call.model.clone();
                metrics::histogram!(names::QUEUE_SECONDS, "model" => model.clone()).record(waited);
                metrics::counter!(names::PROMPT_TOKENS, "model" => model)
                    .increment(self.call.prompt.len() as u64);
            }
            if let Some(tokens) = placed.changed_after {
                state
                    .changes
                    .push_back(FingerprintChange { fingerprint: placed.fingerprint.clone(), tokens });
            }
            state.fingerprint = Some(placed.fingerprint);
        });
    }

    /// Delivers output to the stream.
    pub(super) fn deliver(
        &self,
        output: ChoiceOutput,
        unread_max: usize,
        now: Instant,
        readers: &mut Vec<Waker>,
    ) -> DeliveryEffect {
        if let Some(live) = &self.live {
            live.delivered(output.tokens.len(), output.computed_prompt, now);
            if let Some(reason) = output.finish {
                live.choice_ended(output.choice, reason, now);
            }
        }
        self.state.change(readers, |state| {
            state.push(output, now, self.live.as_ref());
            // If it was polled just now, the stream is behind, not its client.
            let overfull = state.unread_tokens > unread_max && state.unread_for(now) > Self::UNPOLLED_MIN;
            if overfull { DeliveryEffect::Overfull } else { DeliveryEffect::Taken }
        })
    }

    /// Records that it runs on no worker until its stream is read.
    pub(super) fn pause(&self, readers: &mut Vec<Waker>) {
        metrics::counter!(names::PAUSED_STREAMS).increment(1);
        self.state.change(readers, |state| {
            state.paused = true;
            state.spans.pause();
        });
    }

    /// Records that its worker does not finish it and another one will.
    pub(super) fn retry(&self, reason: &'static str) {
        self.state.access(|state| state.spans.retry(reason));
    }

    /// Ends its spans, when its call has ended.
    pub(super) fn end_spans(&self) {
        self.state.access(|state| state.spans.end());
    }

    /// Returns the trace context of the attempt that runs; that of the request if spans are not traced.
    pub(crate) fn trace(&self) -> TraceContext {
        // Outside the lock, because the context of a span is computed at its first use.
        let span = self.state.access(|state| state.spans.current());
        span.as_ref().and_then(TraceContext::traced).unwrap_or_else(|| self.call.trace.clone())
    }

    /// Ends it with an error; the first one counts.
    pub(super) fn fail(&self, outcome: Outcome, now: Instant, readers: &mut Vec<Waker>) {
        self.state.change(readers, |state| {
            state.failure.get_or_insert(outcome);
            state.unread_since.get_or_insert(now);
            state.spans.end();
        });
    }

    /// Whether it has failed and its transport is assumed not to poll for the failure.
    pub(super) fn has_unread_failure(&self, now: Instant) -> bool {
        self.state.access(|state| state.failure.is_some() && state.unread_for(now) > Self::UNPOLLED_MIN)
    }

    /// Ends the stream of a failed request, whose transport does not poll. Takes the locks of the stream and the
    /// dispatcher.
    pub(super) fn end_stream(&self) {
        let failure = self.state.access(|state| state.failure.clone());
        if let (Some(failure), Some(stream)) = (failure, self.stream.get().and_then(Weak::upgrade)) {
            stream.end(failure);
        }
    }

    /// Records that its stream has taken all there will be, and that the transport has not read all of that yet.
    pub(crate) fn set_unread(&self, now: Instant) {
        self.state.access(|state| state.unread_since = Some(now));
    }

    /// Returns how long output has been unread.
    pub(super) fn unread_for(&self, now: Instant) -> Duration {
        self.state.access(|state| state.unread_for(now))
    }

    /// Reads all unread output; registers the waker if there is none.
    pub(crate) fn poll_read(&self, context: &Context<'_>) -> Poll<StreamRead> {
        self.state.poll_read(context, StreamState::take)
    }

    pub(crate) fn times(&self) -> RequestTimes {
        self.state.access(|state| state.times)
    }

    /// Returns the prompt tokens found in a worker's prefix cache and the fingerprint of the last worker.
    pub(crate) fn served(&self) -> (u32, Option<Arc<str>>) {
        let (computed, fingerprint) =
            self.state.access(|state| (state.computed_prompt, state.fingerprint.clone()));
        let prompt = self.call.prompt.len() as u32;
        // The first choice to report has computed its resumed tokens, too.
        let resumed = self.call.resumed.iter().map(Vec::len).max().unwrap_or(0) as u32;
        let cached = |computed: u32| (prompt + resumed).saturating_sub(computed).min(prompt);
        (computed.map_or(0, cached), fingerprint)
    }

    pub(crate) fn count_unbilled(&self, tokens: usize) {
        if tokens > 0 {
            metrics::counter!(names::UNBILLED_TOKENS, "model" => self.call.model.clone())
                .increment(tokens as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use inflight_contract::{Priority, SamplingSpec, Weight};
    use inflight_router_core::{LaneId, QueueLimits};

    use super::*;
    use crate::trace::TraceContext;

    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_stream_finds_the_tokens_or_the_pause_and_is_woken_for_either() {
        let now = Instant::now();
        let call = AdmittedCall {
            request_id: String::new(),
            model: String::new(),
            lane: LaneId(0),
            prompt: vec![1],
            sampling: SamplingSpec::default().validate().unwrap(),
            max_tokens: 100,
            stop: Vec::new(),
            tenant: String::new(),
            key_id: String::new(),
            weight: Weight::default(),
            priority: Priority::default(),
            bounds: QueueLimits::NONE,
            arrived: now,
            deadline: None,
            return_token_ids: false,
            discard_output: false,
            require_fingerprint: None,
            output: None,
            chat: false,
            cursor: None,
            resumes: false,
            resumed: Vec::new(),
            trace: TraceContext::default(),
        };
        let id = RequestId::default();
        let active = ActiveRequest::new(id, call, tracing::Span::none(), CallGuard::default(), None);
        let token = || ChoiceOutput {
            choice: 0,
            tokens: vec![5],
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            finish: None,
            computed_prompt: None,
        };
        let woken = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(woken.clone());
        let context = Context::from_waker(&waker);
        assert!(active.poll_read(&context).is_ready(), "the first read is immediate");
        assert!(active.poll_read(&context).is_pending());
        let mut readers = Vec::new();
        assert_eq!(active.deliver(token(), 1, now, &mut readers), DeliveryEffect::Taken);
        let later = now + 2 * ActiveRequest::UNPOLLED_MIN;
        assert_eq!(active.deliver(token(), 1, later, &mut readers), DeliveryEffect::Overfull);
        active.pause(&mut readers);
        assert_eq!((readers.len(), woken.0.load(Ordering::Relaxed)), (1, 0), "once, after all commands");
        readers.drain(..).for_each(Waker::wake);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(read) = active.poll_read(&context) else { panic!("there are tokens") };
        assert!(read.paused, "reading resumes the request");
        assert_eq!(read.fresh[0].1.tokens, [5, 5]);
        assert!(active.poll_read(&context).is_pending());
        assert!(!active.has_unread_failure(later));
        active.fail(Outcome::DeadlineExceeded, later, &mut readers);
        assert_eq!(readers.len(), 1);
        assert!(!active.has_unread_failure(later), "its transport may be about to poll");
        assert!(active.has_unread_failure(later + 2 * ActiveRequest::UNPOLLED_MIN));
        let Poll::Ready(read) = active.poll_read(&context) else { panic!("there is a failure") };
        assert!(!read.paused && read.fresh.is_empty());
        assert_eq!(read.failure, Some(Outcome::DeadlineExceeded));
        assert!(!active.has_unread_failure(later + 2 * ActiveRequest::UNPOLLED_MIN), "it was read");
    }
}
