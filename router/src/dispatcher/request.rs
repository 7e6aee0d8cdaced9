//! An admitted request: phase, journal and the hand-off between its worker's session and its client's stream.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use inflight_contract::{FinishReason, PositionLogprobs, SamplingParams};
use inflight_router_core::{
    AppendOutcome, Chain, Journal, LossStreak, QueueLimits, ResumedChoice, SequenceEnd, SequenceUpdate,
    Submission, UnreadOutput,
};
use tonic::Code;

use crate::call_guard::CallGuard;
use crate::dispatcher::violation::Violation;
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::trace::TraceContext;

/// Lane of the queue: requests for one model with one bundle.
pub(crate) type LaneId = u32;

/// Position of a request in the queue.
pub(crate) type QueuePosition = inflight_router_core::QueuePosition<LaneId>;

/// Validated request with all that is needed to run and deliver it.
#[derive(Debug)]
pub(crate) struct AdmittedCall {
    pub(crate) request_id: String,
    pub(crate) model: String,
    pub(crate) lane: LaneId,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) max_tokens: u32,
    pub(crate) stop: Vec<String>,
    pub(crate) tenant: String,
    pub(crate) weight: f32,
    pub(crate) priority: i32,
    /// Bounds on the waiting requests of its tenant.
    pub(crate) bounds: QueueLimits,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) return_token_ids: bool,
    /// The only numerics fingerprint it may run on, if requested.
    pub(crate) require_fingerprint: Option<String>,
    pub(crate) chat: bool,
    pub(crate) trace: TraceContext,
}

impl AdmittedCall {
    /// Returns the maximum tokens of the request: prompt and output of all choices.
    pub(crate) fn tokens(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens) * u64::from(self.sampling.n)
    }

    /// Whether it may run on a worker with this fingerprint.
    pub(crate) fn accepts(&self, fingerprint: &str) -> bool {
        self.require_fingerprint.as_ref().is_none_or(|required| required == fingerprint)
    }

    /// Returns the maximum tokens of its longest sequence.
    pub(crate) fn sequence_tokens(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens)
    }
}

/// Phase of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the queue.
    Queued(QueuePosition),
    /// In the retry queue or in quarantine, after losing its worker.
    AwaitingRetry,
    /// On no worker until its client reads again.
    Paused,
    /// On a worker, as this submission.
    Running { worker: usize, session: u64, submission: u64 },
    /// Ended.
    Ended,
}

/// RequestTimes of a request's progress.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestTimes {
    pub(crate) placed: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
}

/// Effect of a sequence update on its request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum UpdateEffect {
    /// None.
    None,
    /// New output for the client.
    Progress,
    /// The client has fallen too far behind and the request is paused: cancel the submission.
    Overfull,
    /// Dropped: it belongs to an older attempt.
    Stale,
    /// The request has failed: cancel the submission. `fault` if the worker is at fault.
    Failed { fault: bool },
    /// The worker returned the request: cancel the submission and resubmit it elsewhere.
    Returned,
    /// Protocol violation by the worker.
    ProtocolViolation(Violation),
}

/// Request shared by its worker's session, which appends to the journal, and its client's stream, which reads
/// it at its own pace. Lock order: the dispatcher's lock before this one.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub(crate) call: AdmittedCall,
    state: Mutex<RequestState>,
    /// Resources held against the router's limits.
    pub(crate) guard: CallGuard,
    /// Hash chains of its prompt, one per block size among the workers at its arrival.
    pub(crate) chains: OnceLock<Vec<Chain>>,
}

#[derive(Debug)]
pub(crate) struct RequestState {
    pub(crate) phase: Phase,
    pub(crate) journal: Journal<PositionLogprobs>,
    pub(crate) times: RequestTimes,
    /// Set when the request has ended other than by the ends of its choices.
    pub(crate) failure: Option<Outcome>,
    /// Worker that lost or returned the latest attempt.
    pub(crate) avoid: Option<usize>,
    /// Consecutive worker losses without progress.
    pub(crate) losses: LossStreak,
    /// Whether the latest attempt is quarantined: alone on its worker.
    pub(crate) alone: bool,
    /// Time since which no serving worker is large enough.
    pub(crate) unfit_since: Option<Instant>,
    /// Fingerprint of the worker of the latest attempt.
    pub(crate) fingerprint: Option<Arc<str>>,
    /// Fingerprint changes not yet delivered to the stream.
    changes: Vec<FingerprintChange>,
    /// Prompt tokens computed before the first token, without cached ones; `None` before that.
    computed_prompt: Option<u32>,
    /// Span of the first wait in the queue; closed at the dispatch.
    pub(crate) queue_span: Option<tracing::Span>,
    /// Queue position that it was last dispatched from; `None` before the first dispatch.
    pub(crate) position: Option<QueuePosition>,
    stalled: bool,
    /// Whether the stream has something to read.
    has_unread: bool,
    /// Waker of the stream, while it waits.
    reader: Option<Waker>,
    /// Time since which the stream has something unread. A transport whose client does not read does not
    /// poll.
    unread_since: Option<Instant>,
}

/// Change to a worker with another numerics fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FingerprintChange {
    pub(crate) fingerprint: Arc<str>,
    /// Tokens of each choice before the change.
    pub(crate) tokens: Vec<u32>,
}

impl RequestState {
    /// Records a dispatch to a worker with this fingerprint. Returns whether the stream continues with
    /// another one.
    pub(crate) fn set_fingerprint(&mut self, fingerprint: &Arc<str>) -> bool {
        let before = self.fingerprint.replace(fingerprint.clone());
        let changed = self.journal.tokens() > 0 && before.is_some_and(|before| before != *fingerprint);
        if changed {
            let tokens = self.journal.resumed().map(|choice| choice.tokens.len() as u32).collect();
            self.changes.push(FingerprintChange { fingerprint: fingerprint.clone(), tokens });
        }
        changed
    }

    /// Returns how long output has been unread.
    pub(crate) fn unread_for(&self, now: Instant) -> Duration {
        self.unread_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Marks output as unread. Returns the waker of a waiting stream.
    fn mark_unread(&mut self) -> Option<Waker> {
        self.has_unread = true;
        self.reader.take()
    }

    /// Ends the current attempt; the next one starts when the client reads again.
    fn pause(&mut self) {
        self.journal.next_attempt();
        self.alone = false;
        self.phase = if self.journal.ended() { Phase::Ended } else { Phase::Paused };
        metrics::counter!(names::PAUSED_STREAMS).increment(1);
    }

    /// Fails the request. The caller removes it from the queue or its worker.
    pub(crate) fn fail(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        self.failure.get_or_insert(outcome);
        self.queue_span = None;
    }
}

/// State and unread output that a stream gets from one read.
pub(crate) struct StreamRead {
    pub(crate) placed: bool,
    pub(crate) waiting: bool,
    /// The request was paused; reading resumes it.
    pub(crate) paused: bool,
    /// Fingerprint of the worker of the latest attempt.
    pub(crate) fingerprint: Option<Arc<str>>,
    pub(crate) changes: Vec<FingerprintChange>,
    pub(crate) fresh: Vec<(u32, UnreadOutput<PositionLogprobs>)>,
    pub(crate) failure: Option<Outcome>,
}

impl ActiveRequest {
    /// Unread tokens above which a stream counts as stalled.
    const STALLED_TOKENS: usize = 256;
    /// Unread time after which the transport is assumed not to poll.
    const UNPOLLED_MIN: Duration = Duration::from_millis(50);

    pub(crate) fn new(call: AdmittedCall, queue_span: tracing::Span, guard: CallGuard) -> Self {
        let journal = Journal::new(call.sampling.n, call.max_tokens, call.sampling.logprobs.is_some());
        let state = RequestState {
            phase: Phase::Ended,
            journal,
            times: RequestTimes::default(),
            failure: None,
            avoid: None,
            losses: LossStreak::default(),
            alone: false,
            unfit_since: None,
            fingerprint: None,
            changes: Vec::new(),
            computed_prompt: None,
            queue_span: Some(queue_span),
            position: None,
            stalled: false,
            has_unread: true,
            reader: None,
            unread_since: None,
        };
        Self { call, state: Mutex::new(state), guard, chains: OnceLock::new() }
    }

    /// Returns the hash chains of its prompt; empty if the placement policy ignores prefixes.
    pub(crate) fn chains(&self) -> &[Chain] {
        self.chains.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RequestState> {
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn expired(&self, now: Instant) -> bool {
        self.call.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Applies a worker's update of `submission`; above `unread_max` unread tokens the request is paused. A
    /// waiting stream is added to `readers`, to be woken after the whole update, so that streams of one
    /// connection write all their tokens at once.
    pub(crate) fn receive(
        &self,
        submission: u64,
        update: SequenceUpdate,
        vocab_size: u32,
        unread_max: usize,
        now: Instant,
        readers: &mut Vec<Waker>,
    ) -> UpdateEffect {
        let mut state = self.lock();
        let first = state.journal.tokens() == 0;
        let in_force =
            matches!(state.phase, Phase::Running { submission: current, .. } if current == submission);
        if !in_force {
            return UpdateEffect::Stale;
        }
        if let Some(token) = update.tokens.iter().copied().find(|token| *token >= vocab_size) {
            return UpdateEffect::ProtocolViolation(Violation::UnknownToken {
                request: submission,
                token,
                vocab_size,
            });
        }
        let most = self.call.sampling.logprobs.unwrap_or(0) as usize;
        if let Some(entries) = update.logprobs.iter().map(|one| one.top.len()).find(|top| *top > most) {
            return UpdateEffect::ProtocolViolation(Violation::Alternatives {
                request: submission,
                entries,
                most,
            });
        }
        if state.journal.withdrawn(update.choice) {
            self.count_unbilled(update.tokens.len());
            return UpdateEffect::None;
        }
        let mut received = match update.end {
            Some(SequenceEnd::Failed { code, message }) => match Code::from_i32(code) {
                Code::Unavailable | Code::Aborted => return UpdateEffect::Returned,
                code => {
                    state.fail(Outcome::WorkerError { code, message });
                    UpdateEffect::Failed { fault: is_fault(code) }
                }
            },
            // Not requested by the router: the worker drops its requests.
            Some(SequenceEnd::Finished(FinishReason::Cancelled)) => return UpdateEffect::Returned,
            Some(SequenceEnd::Finished(FinishReason::Deadline)) if self.call.deadline.is_some() => {
                state.fail(Outcome::DeadlineExceeded);
                UpdateEffect::Failed { fault: false }
            }
            end => {
                let finish = end.map(|end| match end {
                    SequenceEnd::Finished(reason) => reason,
                    SequenceEnd::Failed { .. } => FinishReason::Error,
                });
                let attempt = update.attempt;
                let appended =
                    state.journal.append(attempt, update.choice, &update.tokens, update.logprobs, finish);
                match appended {
                    Ok(AppendOutcome::Appended) => {
                        if !update.tokens.is_empty() {
                            if first {
                                // One of several choices computes the prompt and the others share it.
                                state.computed_prompt = Some(update.computed_tokens);
                            }
                            state.times.first_token.get_or_insert(now);
                            state.times.last_token = Some(now);
                            state.losses.record_token();
                        }
                        UpdateEffect::Progress
                    }
                    Ok(AppendOutcome::AfterEnd | AppendOutcome::Stale) => return UpdateEffect::Stale,
                    Err(error) => {
                        return UpdateEffect::ProtocolViolation(Violation::Journal {
                            request: submission,
                            error,
                        });
                    }
                }
            }
        };
        state.unread_since.get_or_insert(now);
        if !state.stalled && state.journal.unread() > Self::STALLED_TOKENS {
            state.stalled = true;
            metrics::counter!(names::STALLED_STREAMS).increment(1);
        }
        if state.journal.ended() && state.failure.is_none() {
            state.phase = Phase::Ended;
        } else if received == UpdateEffect::Progress
            && state.journal.unread() > unread_max
            // Otherwise the stream is about to read: the stream is behind, not its client.
            && state.unread_for(now) > Self::UNPOLLED_MIN
        {
            // Under the lock: the stream must find either the tokens or the pause.
            state.pause();
            received = UpdateEffect::Overfull;
        }
        readers.extend(state.mark_unread());
        received
    }

    /// Wakes the stream.
    pub(crate) fn notify(&self) {
        let reader = self.lock().mark_unread();
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Reads all unread output; registers the waker if there is none.
    pub(crate) fn poll_read(&self, context: &Context<'_>) -> Poll<StreamRead> {
        let mut state = self.lock();
        if !std::mem::take(&mut state.has_unread) {
            match &mut state.reader {
                Some(reader) => reader.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        state.stalled = false;
        state.unread_since = None;
        let choices = 0..self.call.sampling.n;
        let fresh = choices.filter_map(|c| state.journal.read(c).map(|fresh| (c, fresh))).collect();
        Poll::Ready(StreamRead {
            placed: state.times.placed.is_some(),
            waiting: matches!(state.phase, Phase::Queued(_) | Phase::AwaitingRetry),
            paused: state.phase == Phase::Paused,
            fingerprint: state.fingerprint.clone(),
            changes: std::mem::take(&mut state.changes),
            fresh,
            failure: state.failure.clone(),
        })
    }

    pub(crate) fn times(&self) -> RequestTimes {
        self.lock().times
    }

    /// Returns the prompt tokens found in a worker's prefix cache and the fingerprint of the last worker.
    pub(crate) fn served(&self) -> (u32, Option<Arc<str>>) {
        let state = self.lock();
        let prompt = self.call.prompt.len() as u32;
        let cached = state.computed_prompt.map_or(0, |computed| prompt.saturating_sub(computed));
        (cached, state.fingerprint.clone())
    }

    pub(crate) fn count_unbilled(&self, tokens: usize) {
        if tokens > 0 {
            metrics::counter!(names::UNBILLED_TOKENS, "model" => self.call.model.clone())
                .increment(tokens as u64);
        }
    }

    /// Returns the message that submits the request to a worker.
    pub(crate) fn submission(
        &self,
        journal: &Journal<PositionLogprobs>,
        submission: u64,
        now: Instant,
    ) -> Submission {
        let call = &self.call;
        let resumed = journal.resumed().map(|resumed| ResumedChoice {
            choice: resumed.choice,
            tokens: resumed.tokens.to_vec(),
            finished: resumed.finished,
        });
        let left = call.deadline.map(|deadline| deadline.saturating_duration_since(now));
        Submission {
            id: submission,
            attempt: journal.attempt(),
            request_id: call.request_id.clone(),
            prompt: call.prompt.clone(),
            resumed: resumed.collect(),
            sampling: call.sampling.clone(),
            max_tokens: call.max_tokens,
            tenant: call.tenant.clone(),
            weight: call.weight,
            priority: call.priority,
            deadline: left,
            traceparent: call.trace.traceparent.clone(),
            tracestate: call.trace.tracestate.clone(),
            virtual_start_time: None,
            min_waiting_virtual_time: None,
        }
    }
}

/// Whether an error is the worker's fault, rather than the request's.
fn is_fault(code: Code) -> bool {
    matches!(code, Code::Unknown | Code::Internal | Code::DataLoss | Code::Unimplemented | Code::Ok)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;
    use inflight_contract::SamplingSpec;

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
            lane: 0,
            prompt: vec![1],
            sampling: SamplingSpec::default().validate().unwrap(),
            max_tokens: 100,
            stop: Vec::new(),
            tenant: String::new(),
            weight: 1.0,
            priority: 0,
            bounds: QueueLimits::NONE,
            arrived: now,
            deadline: None,
            return_token_ids: false,
            require_fingerprint: None,
            chat: false,
            trace: TraceContext::default(),
        };
        let active = ActiveRequest::new(call, tracing::Span::none(), CallGuard::default());
        active.lock().phase = Phase::Running { worker: 0, session: 0, submission: 7 };
        let update = SequenceUpdate { submission: 7, attempt: 1, tokens: vec![5], ..Default::default() };
        let woken = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(woken.clone());
        let context = Context::from_waker(&waker);
        assert!(active.poll_read(&context).is_ready(), "it begins with a look");
        assert!(active.poll_read(&context).is_pending());
        let mut readers = Vec::new();
        let mut receive = |now| active.receive(7, update.clone(), 10, 1, now, &mut readers);
        assert_eq!(receive(now), UpdateEffect::Progress);
        assert_eq!(receive(now + 2 * ActiveRequest::UNPOLLED_MIN), UpdateEffect::Overfull);
        assert_eq!((readers.len(), woken.0.load(Ordering::Relaxed)), (1, 0), "once, and when all is taken");
        readers.drain(..).for_each(Waker::wake);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(has_unread) = active.poll_read(&context) else { panic!("there are tokens") };
        assert!(has_unread.paused, "it asks for the rest, or nobody would");
        assert_eq!(has_unread.fresh[0].1.tokens, [5, 5]);
        let late = active.receive(7, update, 10, 1, now, &mut readers);
        assert_eq!(late, UpdateEffect::Stale, "the attempt is over");
        assert!(active.poll_read(&context).is_pending());
        active.notify();
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
    }
}
