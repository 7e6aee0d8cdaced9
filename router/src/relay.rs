use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use inflight_contract::{FinishReason, SamplingParams};
use inflight_proto::v1;
use inflight_router_core::{Append, Fresh, Journal, Place};
use tokio::sync::Notify;
use tonic::Code;

use crate::dispatch::LaneId;
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::trace::TraceContext;

/// A request that passed every check, and what is needed to run and to deliver it.
#[derive(Debug)]
pub(crate) struct Call {
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
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) return_token_ids: bool,
    pub(crate) chat: bool,
    pub(crate) trace: TraceContext,
}

impl Call {
    /// Tokens that the request may come to hold.
    pub(crate) fn tokens(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens) * u64::from(self.sampling.n)
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
    Queued(Place<LaneId>),
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
pub(crate) enum Received {
    /// Nothing.
    Taken,
    /// It came too late for this request: dropped.
    Stale,
    /// The request has failed: withdraw the rest of it.
    Failed,
    /// The worker gave the request back: withdraw the rest of it and run it elsewhere.
    GivenBack,
}

/// The meeting point of a request's session and its client's stream: the session appends to the journal, the
/// stream reads it at its own pace. Whoever holds the dispatcher's lock may take this lock, never the other
/// way round.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) call: Call,
    state: Mutex<State>,
    /// Tells the one stream that reads that there is something new.
    pub(crate) changed: Notify,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) journal: Journal<v1::PositionLogprobs>,
    pub(crate) times: Times,
    /// Set when the request has ended otherwise than by the ends of its choices.
    pub(crate) failure: Option<Outcome>,
    /// The worker that lost or gave back the latest attempt.
    pub(crate) avoid: Option<usize>,
    /// Fingerprint of the worker of the latest attempt.
    pub(crate) fingerprint: Option<String>,
    /// Covers the first wait in the queue; closed when the request is placed.
    pub(crate) queue_span: Option<tracing::Span>,
    /// Its number in the queue's order of arrivals.
    pub(crate) arrival: u64,
    stalled: bool,
}

impl State {
    pub(crate) fn fail(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        self.failure.get_or_insert(outcome);
        self.queue_span = None;
    }
}

/// What a stream finds at a read.
pub(crate) struct News {
    pub(crate) placed: bool,
    pub(crate) waiting: bool,
    pub(crate) fresh: Vec<(u32, Fresh<v1::PositionLogprobs>)>,
    pub(crate) failure: Option<Outcome>,
}

impl Relay {
    /// A client this many tokens behind counts as stalled.
    const STALLED_TOKENS: usize = 256;

    pub(crate) fn new(call: Call, queue_span: tracing::Span) -> Self {
        let journal = Journal::new(call.sampling.n, call.max_tokens, call.sampling.logprobs.is_some());
        let state = State {
            phase: Phase::Ended,
            journal,
            times: Times::default(),
            failure: None,
            avoid: None,
            fingerprint: None,
            queue_span: Some(queue_span),
            arrival: 0,
            stalled: false,
        };
        Self { call, state: Mutex::new(state), changed: Notify::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half-done where a panic could strike, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn expired(&self, now: Instant) -> bool {
        self.call.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Takes what a worker sent under the handle `submission`.
    pub(crate) fn receive(&self, submission: u64, update: v1::SequenceUpdate, now: Instant) -> Received {
        let finish = finish_reason(update.finish);
        let mut state = self.lock();
        let in_force =
            matches!(state.phase, Phase::Running { submission: current, .. } if current == submission);
        if !in_force {
            return Received::Stale;
        }
        if state.journal.withdrawn(update.choice) {
            self.count_unbilled(update.token_ids.len());
            return Received::Taken;
        }
        let received = match finish {
            Some(FinishReason::Error) => match Code::from_i32(update.error_code) {
                Code::Unavailable | Code::Aborted => return Received::GivenBack,
                code => {
                    state.fail(Outcome::WorkerError { code, message: update.error });
                    Received::Failed
                }
            },
            // The router did not ask for this end, so the worker is letting go of its requests.
            Some(FinishReason::Cancelled) => return Received::GivenBack,
            Some(FinishReason::Deadline) if self.call.deadline.is_some() => {
                state.fail(Outcome::DeadlineExceeded);
                Received::Failed
            }
            _ => {
                let attempt = update.attempt;
                let appended =
                    state.journal.append(attempt, update.choice, &update.token_ids, update.logprobs, finish);
                match appended {
                    Ok(Append::Taken) => {
                        if !update.token_ids.is_empty() {
                            state.times.first_token.get_or_insert(now);
                            state.times.last_token = Some(now);
                        }
                        Received::Taken
                    }
                    Ok(Append::AfterEnd | Append::Stale) => return Received::Stale,
                    Err(error) => {
                        state.fail(Outcome::Internal(error.to_string()));
                        Received::Failed
                    }
                }
            }
        };
        if !state.stalled && state.journal.unread() > Self::STALLED_TOKENS {
            state.stalled = true;
            metrics::counter!(names::STALLED_STREAMS).increment(1);
        }
        if state.journal.ended() && state.failure.is_none() {
            state.phase = Phase::Ended;
        }
        drop(state);
        self.changed.notify_one();
        received
    }

    /// Takes everything new for the client.
    pub(crate) fn read(&self) -> News {
        let mut state = self.lock();
        state.stalled = false;
        let choices = 0..self.call.sampling.n;
        let fresh = choices.filter_map(|c| state.journal.read(c).map(|fresh| (c, fresh))).collect();
        News {
            placed: state.times.placed.is_some(),
            waiting: matches!(state.phase, Phase::Queued(_)),
            fresh,
            failure: state.failure.clone(),
        }
    }

    pub(crate) fn times(&self) -> Times {
        self.lock().times
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
        journal: &Journal<v1::PositionLogprobs>,
        submission: u64,
        now: Instant,
    ) -> v1::Submit {
        let call = &self.call;
        let resumed = journal.resumed().map(|resumed| v1::ResumedChoice {
            choice: resumed.choice,
            token_ids: resumed.tokens.to_vec(),
            finished: resumed.finished,
        });
        let left = call.deadline.map(|deadline| deadline.saturating_duration_since(now));
        v1::Submit {
            request: submission,
            attempt: journal.attempt(),
            request_id: call.request_id.clone(),
            prompt: call.prompt.clone(),
            resumed: resumed.collect(),
            sampling: Some(v1::SamplingParams::from_spec(&call.sampling)),
            stop: Some(v1::StopConditions::from_spec(&call.sampling, call.max_tokens)),
            tenant: call.tenant.clone(),
            weight: call.weight,
            priority: call.priority,
            deadline_us: left.map(|left| u64::try_from(left.as_micros()).unwrap_or(u64::MAX)),
            traceparent: call.trace.traceparent.clone(),
            tracestate: call.trace.tracestate.clone(),
        }
    }
}

fn finish_reason(value: i32) -> Option<FinishReason> {
    match v1::FinishReason::try_from(value) {
        Ok(reason) => reason.to_contract(),
        // A reason from a newer protocol: the choice has ended, that much is certain.
        Err(_) => Some(FinishReason::Error),
    }
}
