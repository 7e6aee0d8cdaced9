//! A request between its admission and its end: the meeting point of a worker's session and the client's stream.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use inflight_contract::{FinishReason, PositionLogprobs, SamplingParams};
use inflight_router_core::{
    Append, Chain, Fresh, Journal, QueueLimits, ResumedChoice, SequenceEnd, SequenceUpdate, Submission,
    Suspicion,
};
use tonic::Code;

use crate::call_guard::CallGuard;
use crate::dispatcher::violation::Violation;
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::trace::TraceContext;

/// Lane of the queue: the requests for one model with one bundle.
pub(crate) type LaneId = u32;

/// Position of a request in the queue.
pub(crate) type Place = inflight_router_core::Place<LaneId>;

/// A request that passed every check, and what is needed to run and to deliver it.
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
    /// What may wait of its tenant.
    pub(crate) bounds: QueueLimits,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) return_token_ids: bool,
    /// The only fingerprint it may run on, if it asks for one.
    pub(crate) require_fingerprint: Option<String>,
    pub(crate) chat: bool,
    pub(crate) trace: TraceContext,
}

impl AdmittedCall {
    /// Tokens that the request may come to hold.
    pub(crate) fn tokens(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens) * u64::from(self.sampling.n)
    }

    /// Whether it may run on a worker with this fingerprint.
    pub(crate) fn accepts(&self, fingerprint: &str) -> bool {
        self.require_fingerprint.as_ref().is_none_or(|required| required == fingerprint)
    }

    /// Tokens of its longest sequence.
    pub(crate) fn sequence_tokens(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens)
    }
}

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// In the queue.
    Queued(Place),
    /// Lost its worker, and waits for the retry budget or for a worker of its own.
    AwaitingRetry,
    /// Its client does not read: nobody works on it until it does.
    Paused,
    /// With a worker, under this handle.
    Running { worker: usize, session: u64, submission: u64 },
    /// Nobody works on it any more.
    Ended,
}

/// When things happened to a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    pub(crate) placed: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
}

/// What a worker's message about a request asks of its session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum UpdateEffect {
    /// Nothing.
    Taken,
    /// It has brought something new to its client.
    Progress,
    /// Its client is further behind than it may be: it is paused. Withdraw the rest of it.
    Overfull,
    /// It came too late for this request: dropped.
    Stale,
    /// The request has failed: withdraw the rest of it. `fault`: it is the worker's.
    Failed { fault: bool },
    /// The worker gave the request back: withdraw the rest of it and run it elsewhere.
    Returned,
    /// The worker talks nonsense.
    ProtocolViolation(Violation),
}

/// The meeting point of a request's session and its client's stream: the session appends to the journal, the
/// stream reads it at its own pace. Whoever holds the dispatcher's lock may take this lock, never the other
/// way round.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub(crate) call: AdmittedCall,
    state: Mutex<RequestState>,
    /// What it holds of the router's bounds.
    pub(crate) guard: CallGuard,
    /// Names of its prompt's blocks, for each size of blocks among the workers at its arrival.
    pub(crate) chains: OnceLock<Vec<Chain>>,
}

#[derive(Debug)]
pub(crate) struct RequestState {
    pub(crate) phase: Phase,
    pub(crate) journal: Journal<PositionLogprobs>,
    pub(crate) times: Times,
    /// Set when the request has ended otherwise than by the ends of its choices.
    pub(crate) failure: Option<Outcome>,
    /// The worker that lost or gave back the latest attempt.
    pub(crate) avoid: Option<usize>,
    /// Whether it may be what its workers die of.
    pub(crate) suspicion: Suspicion,
    /// Whether the latest attempt had its worker for itself.
    pub(crate) alone: bool,
    /// Since when no worker that serves could hold it.
    pub(crate) unfit_since: Option<Instant>,
    /// Fingerprint of the worker of the latest attempt.
    pub(crate) fingerprint: Option<Arc<str>>,
    /// Changes of it that its stream has not been told of.
    changes: Vec<FingerprintChange>,
    /// Tokens of the prompt that a worker computed for it before its first token; `None` before that.
    computed_prompt: Option<u32>,
    /// Covers the first wait in the queue; closed when the request is placed.
    pub(crate) queue_span: Option<tracing::Span>,
    /// Where it waited before it was handed over; `None` before that.
    pub(crate) place: Option<Place>,
    stalled: bool,
    /// There is something that its stream has not seen.
    news: bool,
    /// The one stream that reads, while it waits.
    reader: Option<Waker>,
    /// Since when there is something that its stream has not read. A transport whose client takes nothing does not ask.
    unread_since: Option<Instant>,
}

/// The request goes on at a worker with another fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FingerprintChange {
    pub(crate) fingerprint: Arc<str>,
    /// Tokens that each choice had by then.
    pub(crate) tokens: Vec<u32>,
}

impl RequestState {
    /// The request is handed to a worker with this fingerprint. Returns whether its stream goes on with another than before.
    pub(crate) fn run_on(&mut self, fingerprint: &Arc<str>) -> bool {
        let before = self.fingerprint.replace(fingerprint.clone());
        let changed = self.journal.tokens() > 0 && before.is_some_and(|before| before != *fingerprint);
        if changed {
            let tokens = self.journal.resumed().map(|choice| choice.tokens.len() as u32).collect();
            self.changes.push(FingerprintChange { fingerprint: fingerprint.clone(), tokens });
        }
        changed
    }

    /// How long something has waited for its stream.
    pub(crate) fn unread_for(&self, now: Instant) -> Duration {
        self.unread_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Notes that there is something new. Returns the stream that waits for it, to be woken.
    fn announce(&mut self) -> Option<Waker> {
        self.news = true;
        self.reader.take()
    }

    /// Ends the attempt in force; the next one begins when its client reads again.
    fn pause(&mut self) {
        self.journal.next_attempt();
        self.alone = false;
        self.phase = if self.journal.ended() { Phase::Ended } else { Phase::Paused };
        metrics::counter!(names::PAUSED_STREAMS).increment(1);
    }

    /// Ends the request. Whoever holds it somewhere takes it out there.
    pub(crate) fn fail(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        self.failure.get_or_insert(outcome);
        self.queue_span = None;
    }
}

/// What a stream finds at a read.
pub(crate) struct StreamRead {
    pub(crate) placed: bool,
    pub(crate) waiting: bool,
    /// It was paused, and the client reads again.
    pub(crate) paused: bool,
    /// Fingerprint of the worker of the latest attempt.
    pub(crate) fingerprint: Option<Arc<str>>,
    pub(crate) changes: Vec<FingerprintChange>,
    pub(crate) fresh: Vec<(u32, Fresh<PositionLogprobs>)>,
    pub(crate) failure: Option<Outcome>,
}

impl ActiveRequest {
    /// A client this many tokens behind counts as stalled.
    const STALLED_TOKENS: usize = 256;
    /// A stream that has not read for so long is one that its transport does not ask.
    const BEHIND: Duration = Duration::from_millis(50);

    pub(crate) fn new(call: AdmittedCall, queue_span: tracing::Span, guard: CallGuard) -> Self {
        let journal = Journal::new(call.sampling.n, call.max_tokens, call.sampling.logprobs.is_some());
        let state = RequestState {
            phase: Phase::Ended,
            journal,
            times: Times::default(),
            failure: None,
            avoid: None,
            suspicion: Suspicion::default(),
            alone: false,
            unfit_since: None,
            fingerprint: None,
            changes: Vec::new(),
            computed_prompt: None,
            queue_span: Some(queue_span),
            place: None,
            stalled: false,
            news: true,
            reader: None,
            unread_since: None,
        };
        Self { call, state: Mutex::new(state), guard, chains: OnceLock::new() }
    }

    /// Names of its prompt's blocks; none if the placement does not look at them.
    pub(crate) fn chains(&self) -> &[Chain] {
        self.chains.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RequestState> {
        // Nothing is left half-done where a panic could strike, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn expired(&self, now: Instant) -> bool {
        self.call.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Takes what a worker with this vocabulary sent under the handle `submission`. More than `unread_max` unread
    /// tokens are too many. A stream that waits for this is added to `readers`, to be woken when all of an update is
    /// taken: so those that share a connection find all their tokens at once.
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
            return UpdateEffect::Taken;
        }
        let mut received = match update.end {
            Some(SequenceEnd::Failed { code, message }) => match Code::from_i32(code) {
                Code::Unavailable | Code::Aborted => return UpdateEffect::Returned,
                code => {
                    state.fail(Outcome::WorkerError { code, message });
                    UpdateEffect::Failed { fault: is_fault(code) }
                }
            },
            // The router did not ask for this end, so the worker is letting go of its requests.
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
                    Ok(Append::Taken) => {
                        if !update.tokens.is_empty() {
                            if first {
                                // Of several choices, one computes the prompt and the others share it.
                                state.computed_prompt = Some(update.computed_tokens);
                            }
                            state.times.first_token.get_or_insert(now);
                            state.times.last_token = Some(now);
                            state.suspicion.token();
                        }
                        UpdateEffect::Progress
                    }
                    Ok(Append::AfterEnd | Append::Stale) => return UpdateEffect::Stale,
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
            // Else its stream is about to read: it is behind, and its client is not.
            && state.unread_for(now) > Self::BEHIND
        {
            // Under the lock: its stream may read at any moment, and must find either the tokens or the pause.
            state.pause();
            received = UpdateEffect::Overfull;
        }
        readers.extend(state.announce());
        received
    }

    /// Tells the stream that reads that there is something new.
    pub(crate) fn notify(&self) {
        let reader = self.lock().announce();
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Takes everything new for the client.
    pub(crate) fn poll_read(&self, context: &Context<'_>) -> Poll<StreamRead> {
        let mut state = self.lock();
        if !std::mem::take(&mut state.news) {
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

    pub(crate) fn times(&self) -> Times {
        self.lock().times
    }

    /// Tokens of the prompt that were found in a worker's prefix cache, and the fingerprint of the last worker.
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

    /// The message that hands the request to a worker, under the handle `submission`.
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

/// Whether an error speaks against the worker. Those that a request brings upon itself do not.
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
    fn a_stream_that_reads_at_any_moment_finds_the_tokens_or_the_pause_and_is_woken_for_it() {
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
        assert_eq!(receive(now + 2 * ActiveRequest::BEHIND), UpdateEffect::Overfull);
        assert_eq!((readers.len(), woken.0.load(Ordering::Relaxed)), (1, 0), "once, and when all is taken");
        readers.drain(..).for_each(Waker::wake);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(news) = active.poll_read(&context) else { panic!("there are tokens") };
        assert!(news.paused, "it asks for the rest, or nobody would");
        assert_eq!(news.fresh[0].1.tokens, [5, 5]);
        let late = active.receive(7, update, 10, 1, now, &mut readers);
        assert_eq!(late, UpdateEffect::Stale, "the attempt is over");
        assert!(active.poll_read(&context).is_pending());
        active.notify();
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
    }
}
