//! Response stream of a request: detokenization, stop strings, deadlines and the final messages.

use std::collections::VecDeque;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures::Stream;
use inflight_contract::{FinishReason, PromptLogprobs};
use tokio::sync::oneshot;
use tokio::time::Sleep;

use crate::clock;
use crate::cluster::bundle::Model;
use crate::dispatcher::Ticket;
use crate::dispatcher::request::{ActiveRequest, ClientStream, FingerprintChange, StreamRead, UnreadOutput};
use crate::dispatcher::transition::{RequestEnd, Transition};
use crate::outcome::Outcome;
use crate::output::choice_output::ChoiceOutput;
use crate::output::event::{Completed, GenerationEvent, Started, Timings, Usage};
use crate::request::admitted_call::AdmittedCall;
use crate::request::cursor::Cursor;

/// Maximum entries of one event with log probabilities of the prompt.
const PROMPT_LOGPROBS_MAX: usize = 512;

/// Response stream of a queued request, before its first event is read.
pub(crate) struct ResponseStream {
    active: Arc<ActiveRequest>,
    model: Arc<Model>,
    events: GenerationEvents,
}

impl ResponseStream {
    pub(crate) fn new(ticket: Ticket, model: Arc<Model>) -> Self {
        let active = ticket.active.clone();
        let open = OpenStream::new(ticket, model.clone());
        let shared = Arc::new(SharedStream(Mutex::new(Phase::Open(Box::new(open)))));
        let stream: Weak<SharedStream> = Arc::downgrade(&shared);
        active.attach(stream);
        Self { active, model, events: GenerationEvents(shared) }
    }

    /// Returns the request.
    pub(crate) fn call(&self) -> &AdmittedCall {
        &self.active.call
    }

    /// Returns the bundle of the request's model.
    pub(crate) fn bundle(&self) -> Arc<Model> {
        self.model.clone()
    }

    /// Returns the cursor at the start of the stream; `None` if it cannot be resumed.
    pub(crate) fn cursor(&self) -> Option<Cursor> {
        self.call().cursor.clone()
    }

    /// Returns the events, which alone hold the request from then on.
    pub(crate) fn into_events(self) -> GenerationEvents {
        self.events
    }
}

/// Events of a request, up to the last one or the failure. With it the request ends and all that it holds is
/// released: a transport whose client does not read may keep the stream without polling it again.
pub(crate) struct GenerationEvents(Arc<SharedStream>);

/// State of a response stream, shared with the dispatcher, which ends it if the transport does not poll it.
struct SharedStream(Mutex<Phase>);

enum Phase {
    Open(Box<OpenStream>),
    Ended {
        /// Failure to report, if the transport has not polled it.
        failure: Option<Outcome>,
        /// Token counts of a failed request.
        usage: Option<Usage>,
    },
}

impl SharedStream {
    fn lock(&self) -> MutexGuard<'_, Phase> {
        // A stream whose poll has panicked is only dropped.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientStream for SharedStream {
    fn end(&self, outcome: Outcome) {
        let mut phase = self.lock();
        let Phase::Open(open) = &mut *phase else { return };
        open.outcome.get_or_insert_with(|| outcome.clone());
        let usage = open.usage();
        let ended = std::mem::replace(&mut *phase, Phase::Ended { failure: Some(outcome), usage });
        drop(phase);
        drop(ended);
    }
}

impl GenerationEvents {
    /// Returns the token counts of a failed request; `None` if it was not dispatched.
    pub(crate) fn usage(&self) -> Option<Usage> {
        match &*self.0.lock() {
            Phase::Open(open) => open.usage(),
            Phase::Ended { usage, .. } => usage.clone(),
        }
    }
}

impl Stream for GenerationEvents {
    type Item = Result<GenerationEvent, Outcome>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut phase = self.0.lock();
        let open = match &mut *phase {
            Phase::Open(open) => open,
            Phase::Ended { failure, .. } => return Poll::Ready(failure.take().map(Err)),
        };
        let polled = open.poll_event(context);
        if open.is_over() {
            let failed = matches!(polled, Poll::Ready(Err(_)));
            let usage = if failed { open.usage() } else { None };
            let ended = std::mem::replace(&mut *phase, Phase::Ended { failure: None, usage });
            drop(phase);
            drop(ended);
        } else if open.is_ending() {
            open.ticket.active.set_unread(clock::now());
        }
        polled.map(Some)
    }
}

/// Client side of a request: reads the journal when there is new output and the client has room, detokenizes
/// it and ends the call. Runs in the task that writes the client's stream, so a slow client delays no other.
struct OpenStream {
    ticket: Ticket,
    model: Arc<Model>,
    choices: Vec<ChoiceOutput>,
    started: bool,
    /// Whether nothing follows the events in `ready`.
    over: bool,
    /// Failure to report once `ready` is delivered.
    failure: Option<Outcome>,
    /// Log probabilities of prompt tokens delivered so far.
    scored: u32,
    /// Output that came before the last log probabilities of the prompt: of a choice that had to compute the
    /// prompt itself.
    held: Vec<(u32, UnreadOutput)>,
    /// Deadline timer, created at the first poll.
    expiry: Option<Pin<Box<Sleep>>>,
    ready: VecDeque<GenerationEvent>,
    /// Final outcome; `None` while the request runs.
    outcome: Option<Outcome>,
    /// Resolves once the line of a completed request is written, before which the last event is not sent: a
    /// client that has all of its output is billed even if the router is killed.
    written: Option<oneshot::Receiver<()>>,
}

impl OpenStream {
    fn new(ticket: Ticket, model: Arc<Model>) -> Self {
        let call = &ticket.active.call;
        let choices = (0..call.sampling.n).map(|index| ChoiceOutput::new(index, call, &model.tokenizer));
        let choices = choices.collect();
        Self {
            ticket,
            model,
            choices,
            started: false,
            over: false,
            failure: None,
            scored: 0,
            held: Vec::new(),
            expiry: None,
            ready: VecDeque::new(),
            outcome: None,
            written: None,
        }
    }

    /// Whether the last event or the failure was taken.
    fn is_over(&self) -> bool {
        self.over && self.ready.is_empty()
    }

    /// Whether the journal has nothing more, so that only `ready` tells if the client reads.
    fn is_ending(&self) -> bool {
        self.over || self.failure.is_some()
    }

    /// Resolves at the deadline.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<Outcome> {
        let call = &self.ticket.active.call;
        if let Some(deadline) = call.deadline {
            let expiry =
                self.expiry.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline.into())));
            if expiry.as_mut().poll(context).is_ready() {
                return Poll::Ready(Outcome::DeadlineExceeded);
            }
        }
        Poll::Pending
    }

    /// Converts new output to events.
    fn take(&mut self, read: StreamRead) -> Result<(), Outcome> {
        if read.placed && !self.started {
            self.started = true;
            let call = &self.ticket.active.call;
            self.ready.push_back(GenerationEvent::Started(Started {
                request_id: call.request_id.clone(),
                model: call.model.clone(),
                prompt_tokens: call.prompt.len() as u32,
                seed: call.sampling.seed,
                fingerprint: read.fingerprint.as_deref().unwrap_or_default().to_owned(),
                parsed: call.output.is_some(),
            }));
            self.take_resumed()?;
        }
        for FingerprintChange { fingerprint, tokens } in read.changes {
            let fingerprint = fingerprint.to_string();
            self.ready.push_back(GenerationEvent::FingerprintChanged { fingerprint, tokens });
        }
        self.take_prompt(read.prompt_logprobs);
        self.held.extend(read.fresh);
        let call = &self.ticket.active.call;
        let scored = call.sampling.prompt_logprobs.map_or(0, |_| call.prompt.len() - 1);
        // The first choice computes what is missing, so after its end nothing follows.
        let ended = self.held.iter().any(|(choice, fresh)| *choice == 0 && fresh.end.is_some());
        if self.scored as usize >= scored || ended || read.failure.is_some() {
            self.take_output()?;
        }
        if self.choices.iter().all(ChoiceOutput::ended) {
            self.complete();
            return Ok(());
        }
        match read.failure {
            Some(failure) if self.ready.is_empty() => Err(failure),
            // Output before the failure is delivered first.
            failure => {
                self.failure = failure;
                Ok(())
            }
        }
    }

    /// Converts log probabilities of the prompt to events.
    fn take_prompt(&mut self, mut fresh: Vec<PromptLogprobs>) {
        while !fresh.is_empty() {
            let rest = fresh.split_off(fresh.len().min(PROMPT_LOGPROBS_MAX));
            let first = self.scored + 1;
            self.scored += fresh.len() as u32;
            self.ready.push_back(GenerationEvent::PromptLogprobs { first, positions: fresh });
            fresh = rest;
        }
    }

    /// Converts the output of the choices to events.
    fn take_output(&mut self) -> Result<(), Outcome> {
        let mut withdrawn = Vec::new();
        for (index, mut fresh) in std::mem::take(&mut self.held) {
            let active = &self.ticket.active;
            let call = &active.call;
            let discard = |tokens: usize| {
                if tokens > 0 {
                    active.observe(&Transition::Discarded { tokens }, clock::now());
                }
            };
            let choice = &mut self.choices[index as usize];
            if choice.ended() {
                discard(fresh.tokens.len());
                continue;
            }
            if call.discard_output {
                discard(fresh.tokens.len());
                fresh =
                    UnreadOutput { end: fresh.end.map(|_| FinishReason::Length), ..UnreadOutput::default() };
            }
            let worker_ended = fresh.end.is_some();
            let received = fresh.tokens.len();
            let before = choice.tokens();
            let taken = choice.take(fresh, call, self.model.tokenizer.vocabulary())?;
            discard(received - (choice.tokens() - before) as usize);
            self.ready.extend(taken.deltas.into_iter().map(GenerationEvent::Delta));
            if let Some(finished) = taken.finished {
                self.observe(&Transition::ChoiceFinished(finished.reason));
                if !worker_ended {
                    withdrawn.push(index);
                }
                self.ready.push_back(GenerationEvent::Finished(finished));
            }
        }
        for choice in withdrawn {
            self.ticket.withdraw(choice);
        }
        Ok(())
    }

    /// Takes the output that a worker continues from.
    fn take_resumed(&mut self) -> Result<(), Outcome> {
        let call = &self.ticket.active.call;
        for (choice, tokens) in self.choices.iter_mut().zip(&call.resumed) {
            let resumed = UnreadOutput { tokens: tokens.clone(), ..UnreadOutput::default() };
            let taken = choice.take(resumed, call, self.model.tokenizer.vocabulary())?;
            self.ready.extend(taken.deltas.into_iter().map(GenerationEvent::Delta));
        }
        Ok(())
    }

    /// Returns the token counts so far; `None` before the request was dispatched.
    fn usage(&self) -> Option<Usage> {
        self.started.then(|| self.count())
    }

    fn count(&self) -> Usage {
        let active = &self.ticket.active;
        let (cached_prompt_tokens, fingerprint) = active.served();
        Usage {
            prompt_tokens: active.call.prompt.len() as u32,
            completion_tokens: self.delivered(),
            cached_prompt_tokens,
            reasoning_tokens: self.choices.iter().map(ChoiceOutput::reasoning_tokens).sum(),
            fingerprint: fingerprint.as_deref().unwrap_or_default().to_owned(),
        }
    }

    fn observe(&self, transition: &Transition<'_>) {
        self.ticket.active.observe(transition, clock::now());
    }

    fn delivered(&self) -> u32 {
        self.choices.iter().map(ChoiceOutput::delivered).sum()
    }

    fn complete(&mut self) {
        let active = &self.ticket.active;
        let call = &active.call;
        let times = active.times();
        let since = |at: Option<Instant>| {
            at.map_or(0.0, |at| at.saturating_duration_since(call.arrived).as_secs_f64())
        };
        let longest = self.choices.iter().map(ChoiceOutput::tokens).max().unwrap_or(0);
        let between = match (times.first_token, times.last_token) {
            (Some(first), Some(last)) if longest > 1 => {
                last.saturating_duration_since(first).as_secs_f64() / f64::from(longest - 1)
            }
            _ => 0.0,
        };
        let timings = Timings {
            queue_seconds: since(times.placed),
            first_token_seconds: since(times.first_token),
            per_token_seconds: between,
            total_seconds: since(times.last_token),
        };
        let usage = self.count();
        self.ready.push_back(GenerationEvent::Completed(Completed { usage, timings }));
        self.over = true;
        self.outcome = Some(Outcome::Completed);
        let per_token = (longest > 1).then(|| Duration::from_secs_f64(between));
        self.written = self.ticket.active.complete(self.delivered(), per_token);
    }

    fn end_with(&mut self, outcome: Outcome) -> Outcome {
        self.over = true;
        self.ready.clear();
        self.outcome = Some(outcome.clone());
        outcome
    }

    /// Returns the next event, or the failure.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<GenerationEvent, Outcome>> {
        loop {
            if let (Some(GenerationEvent::Completed(_)), Some(written)) =
                (self.ready.front(), &mut self.written)
            {
                // Fails if the writer has ended, which has reported it.
                let _ = ready!(Pin::new(written).poll(context));
                self.written = None;
            }
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Ok(event));
            }
            if let Some(failure) = self.failure.take() {
                return Poll::Ready(Err(self.end_with(failure)));
            }
            let Poll::Ready(read) = self.ticket.active.poll_read(context) else {
                return self.poll_end(context).map(|outcome| Err(self.end_with(outcome)));
            };
            if read.paused {
                self.ticket.resume();
            }
            if let Err(outcome) = self.take(read) {
                return Poll::Ready(Err(self.end_with(outcome)));
            }
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        // Dropped before its end: the client has cancelled.
        let outcome = self.outcome.take().unwrap_or(Outcome::Cancelled);
        let unfinished = self.choices.iter().filter(|choice| !choice.ended()).count();
        let completion_tokens = self.delivered();
        self.observe(&Transition::Ended(RequestEnd { outcome: &outcome, completion_tokens, unfinished }));
    }
}
