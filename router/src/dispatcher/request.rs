//! An active request: the hand-off between the dispatcher and its client's stream.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use inflight_contract::{FinishReason, PositionLogprobs, PromptLogprobs};
use inflight_router_core::{ChoiceOutput, RequestId, RequestPlaced};
use tokio::sync::oneshot;

use super::handoff::Handoff;
use super::observer::{RequestObserver, RequestTimes};
use super::transition::Transition;
use crate::call_guard::CallGuard;
use crate::outcome::Outcome;
use crate::request::admitted_call::AdmittedCall;
use crate::trace::TraceContext;

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
}

#[derive(Debug)]
struct StreamState {
    /// Unread output by choice; bounded by n * max_tokens.
    unread: Vec<UnreadOutput>,
    /// Unread log probabilities of prompt tokens; bounded by the prompt.
    prompt_logprobs: Vec<PromptLogprobs>,
    /// Number of unread tokens, and of log probabilities of prompt tokens.
    unread_tokens: usize,
    rejection: Option<Outcome>,
    /// Set when the request has ended other than by the ends of its choices.
    failure: Option<Outcome>,
    paused: bool,
    /// Fingerprint changes not yet delivered to the stream.
    changes: VecDeque<FingerprintChange>,
    observer: RequestObserver,
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

    /// Adds output of the request of `call`.
    fn push(&mut self, call: &AdmittedCall, output: ChoiceOutput, now: Instant) {
        self.observer.observe(call, &Transition::Delivered(&output), now);
        let ChoiceOutput { choice, mut tokens, mut logprobs, prompt_logprobs, finish, computed_prompt: _ } =
            output;
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
            self.observer.observe(call, &Transition::Stalled, now);
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
            placed: self.observer.times().placed.is_some(),
            paused: std::mem::take(&mut self.paused),
            fingerprint: self.observer.fingerprint().cloned(),
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

    pub(super) fn new(
        id: RequestId,
        call: AdmittedCall,
        guard: CallGuard,
        observer: RequestObserver,
    ) -> Self {
        let state = StreamState {
            unread: (0..call.sampling.n).map(|_| UnreadOutput::default()).collect(),
            prompt_logprobs: Vec::new(),
            unread_tokens: 0,
            rejection: None,
            failure: None,
            paused: false,
            changes: VecDeque::new(),
            observer,
            stalled: false,
            unread_since: None,
        };
        Self { id, call, state: Handoff::new(state), stream: OnceLock::new(), guard }
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

    /// Passes a transition to its observer.
    pub(crate) fn observe(&self, transition: &Transition<'_>, now: Instant) {
        self.state.access(|state| state.observer.observe(&self.call, transition, now));
    }

    /// Records that its client is about to get the last of its output: see [`RequestObserver::completed`].
    pub(crate) fn complete(
        &self,
        completion_tokens: u32,
        per_token: Option<Duration>,
    ) -> Option<oneshot::Receiver<()>> {
        self.state.access(|state| state.observer.completed(&self.call, completion_tokens, per_token))
    }

    /// Records a dispatch to the worker at `address`.
    pub(super) fn place(&self, placed: RequestPlaced, address: &str, now: Instant, readers: &mut Vec<Waker>) {
        self.state.change(readers, |state| {
            state.observer.observe(&self.call, &Transition::Placed { placed: &placed, address }, now);
            state.paused = false;
            let RequestPlaced { fingerprint, changed_after, .. } = placed;
            state.changes.extend(changed_after.map(|tokens| FingerprintChange { fingerprint, tokens }));
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
        self.state.change(readers, |state| {
            state.push(&self.call, output, now);
            // If it was polled just now, the stream is behind, not its client.
            let overfull = state.unread_tokens > unread_max && state.unread_for(now) > Self::UNPOLLED_MIN;
            if overfull { DeliveryEffect::Overfull } else { DeliveryEffect::Taken }
        })
    }

    /// Records that it runs on no worker until its stream is read.
    pub(super) fn pause(&self, now: Instant, readers: &mut Vec<Waker>) {
        self.state.change(readers, |state| {
            state.observer.observe(&self.call, &Transition::Paused, now);
            state.paused = true;
        });
    }

    /// Returns the trace context of the attempt that runs; that of the request if spans are not traced.
    pub(crate) fn trace(&self) -> TraceContext {
        // Outside the lock, because the context of a span is computed at its first use.
        let span = self.state.access(|state| state.observer.phase());
        span.as_ref().and_then(TraceContext::traced).unwrap_or_else(|| self.call.trace.clone())
    }

    /// Ends it with an error; the first one counts.
    pub(super) fn fail(&self, outcome: Outcome, now: Instant, readers: &mut Vec<Waker>) {
        self.state.change(readers, |state| {
            state.observer.observe(&self.call, &Transition::Failed(&outcome), now);
            state.failure.get_or_insert(outcome);
            state.unread_since.get_or_insert(now);
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
        self.state.access(|state| state.observer.times())
    }

    /// Returns the prompt tokens found in a worker's prefix cache and the fingerprint of the last worker.
    pub(crate) fn served(&self) -> (u32, Option<Arc<str>>) {
        self.state
            .access(|state| (state.observer.cached_prompt(&self.call), state.observer.fingerprint().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use inflight_contract::{Priority, SamplingSpec, Weight};
    use inflight_router_core::{LaneId, QueueLimits};

    use super::*;
    use crate::dispatcher::observer::Billing;
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
        let observer =
            RequestObserver::new(&call, tracing::Span::none(), Billing::default(), None, Arc::default());
        let active = ActiveRequest::new(id, call, CallGuard::default(), observer);
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
        active.pause(later, &mut readers);
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
