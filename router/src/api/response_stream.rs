//! Response stream of a request: detokenization, stop strings, deadlines and the final messages.

use std::collections::VecDeque;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::Stream;
use inflight_contract::{FinishReason, PromptLogprobs};
use tokio::time::Sleep;
use tracing::Span;

use crate::api::admission::TokenCharge;
use crate::api::generation::{Completed, Delta, Finished, GenerationEvent, Started, Timings, Usage};
use crate::clock;
use crate::cluster::bundle::Model;
use crate::dispatcher::Ticket;
use crate::dispatcher::request::{AdmittedCall, FingerprintChange, StreamRead, UnreadOutput};
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::text::{Detokenizer, StopMatcher, Vocabulary};
use crate::usage::log::UsageSlot;
use crate::usage::{UsageRecord, timestamp};

/// Maximum entries of one event with log probabilities of the prompt.
const PROMPT_LOGPROBS_MAX: usize = 512;

/// Output state of one choice.
struct ChoiceOutput {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Delivered tokens, up to its end.
    tokens: u32,
    /// Latest of these tokens.
    last_token: Option<u32>,
    ended: bool,
}

/// End of a choice as its client sees it.
struct ChoiceEnding {
    reason: FinishReason,
    stop: String,
    stop_token_id: Option<u32>,
}

/// Client side of a request: reads the journal when there is new output and the client has room, detokenizes
/// it and ends the call. Runs in the task that writes the client's stream, so a slow client delays no other.
pub(crate) struct ResponseStream {
    ticket: Ticket,
    model: Arc<Model>,
    choices: Vec<ChoiceOutput>,
    started: bool,
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
    span: Span,
    /// Final outcome; `None` while the request runs.
    outcome: Option<Outcome>,
    /// Tokens charged to its tenant's rate.
    charge: Option<TokenCharge>,
    /// Place of its line in the usage log.
    usage: Option<UsageSlot>,
}

impl ResponseStream {
    pub(crate) fn new(
        ticket: Ticket,
        model: Arc<Model>,
        span: Span,
        charge: Option<TokenCharge>,
        usage: Option<UsageSlot>,
    ) -> Self {
        let call = &ticket.active.call;
        let choice = |_| ChoiceOutput {
            detokenizer: Detokenizer::new(model.tokenizer.vocabulary(), &call.prompt),
            stops: StopMatcher::new(&call.stop),
            tokens: 0,
            last_token: None,
            ended: false,
        };
        let choices = (0..call.sampling.n).map(choice).collect();
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
            span,
            outcome: None,
            charge,
            usage,
        }
    }

    /// Returns the request.
    pub(crate) fn call(&self) -> &AdmittedCall {
        &self.ticket.active.call
    }

    /// Returns the bundle of the request's model.
    pub(crate) fn bundle(&self) -> Arc<Model> {
        self.model.clone()
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
            }));
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
            self.take_output();
        }
        if self.choices.iter().all(|choice| choice.ended) {
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
    fn take_output(&mut self) {
        let mut withdrawn = Vec::new();
        for (index, mut fresh) in std::mem::take(&mut self.held) {
            let call = &self.ticket.active.call;
            let choice = &mut self.choices[index as usize];
            if choice.ended {
                self.ticket.active.count_unbilled(fresh.tokens.len());
                continue;
            }
            if call.discard_output {
                self.ticket.active.count_unbilled(fresh.tokens.len());
                fresh =
                    UnreadOutput { end: fresh.end.map(|_| FinishReason::Length), ..UnreadOutput::default() };
            }
            let worker_ended = fresh.end.is_some();
            let received = fresh.tokens.len();
            let before = choice.tokens;
            let (delta, ending) = choice.take(index, fresh, call, self.model.tokenizer.vocabulary());
            self.ticket.active.count_unbilled(received - (choice.tokens - before) as usize);
            if let Some(delta) = delta {
                self.ready.push_back(GenerationEvent::Delta(delta));
            }
            if let Some(ending) = ending {
                if !worker_ended {
                    withdrawn.push(index);
                }
                self.ready.push_back(GenerationEvent::Finished(Finished {
                    choice: index,
                    reason: ending.reason,
                    stop_string: ending.stop,
                    stop_token_id: ending.stop_token_id,
                }));
            }
        }
        for choice in withdrawn {
            self.ticket.withdraw(choice);
        }
    }

    /// Returns the token counts so far; `None` before the request was dispatched.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.started.then(|| self.count())
    }

    fn count(&self) -> Usage {
        let active = &self.ticket.active;
        let (cached_prompt_tokens, fingerprint) = active.served();
        Usage {
            prompt_tokens: active.call.prompt.len() as u32,
            completion_tokens: self.choices.iter().map(|choice| choice.tokens).sum(),
            cached_prompt_tokens,
            fingerprint: fingerprint.as_deref().unwrap_or_default().to_owned(),
        }
    }

    fn complete(&mut self) {
        let active = &self.ticket.active;
        let call = &active.call;
        let times = active.times();
        let since = |at: Option<Instant>| {
            at.map_or(0.0, |at| at.saturating_duration_since(call.arrived).as_secs_f64())
        };
        let longest = self.choices.iter().map(|choice| choice.tokens).max().unwrap_or(0);
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
        if longest > 1 {
            let (model, operation) = (call.model.clone(), operation(call));
            metrics::histogram!(names::PER_TOKEN_SECONDS,
                "gen_ai_request_model" => model, "gen_ai_operation_name" => operation)
            .record(between);
        }
    }

    /// Returns the line of the usage log. Prompt tokens count if a worker has received them.
    fn usage_record(&self, outcome: &Outcome, prompt_tokens: u64, tokens: u32) -> UsageRecord {
        let active = &self.ticket.active;
        let call = &active.call;
        let times = active.times();
        let (cached, fingerprint) = active.served();
        let (now, ended) = (clock::now(), clock::since_unix_epoch());
        let at = |at: Instant| timestamp(ended.saturating_sub(now.saturating_duration_since(at)));
        UsageRecord {
            id: String::new(),
            tenant: call.tenant.clone(),
            key: call.key_id.clone(),
            request: call.request_id.clone(),
            model: call.model.clone(),
            fingerprint: fingerprint.as_deref().unwrap_or_default().to_owned(),
            prompt_tokens,
            cached_prompt_tokens: u64::from(cached),
            completion_tokens: u64::from(tokens),
            arrived: at(call.arrived),
            dispatched: times.placed.map(at),
            first_token: times.first_token.map(at),
            ended: timestamp(ended),
            outcome: outcome.label().to_owned(),
        }
    }

    fn end_with(&mut self, outcome: Outcome) -> Outcome {
        self.over = true;
        self.outcome = Some(outcome.clone());
        outcome
    }
}

/// Events, up to the last one or the failure.
impl Stream for ResponseStream {
    type Item = Result<GenerationEvent, Outcome>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if this.over {
                return Poll::Ready(None);
            }
            if let Some(failure) = this.failure.take() {
                return Poll::Ready(Some(Err(this.end_with(failure))));
            }
            let Poll::Ready(read) = this.ticket.active.poll_read(context) else {
                return this.poll_end(context).map(|outcome| Some(Err(this.end_with(outcome))));
            };
            if read.paused {
                this.ticket.resume();
            }
            if let Err(outcome) = this.take(read) {
                return Poll::Ready(Some(Err(this.end_with(outcome))));
            }
        }
    }
}

impl Drop for ResponseStream {
    fn drop(&mut self) {
        let active = &self.ticket.active;
        let call = &active.call;
        // Dropped before its end: the client has cancelled.
        let outcome = self.outcome.take().unwrap_or(Outcome::Cancelled);
        let times = active.times();
        let elapsed = clock::now().saturating_duration_since(call.arrived);
        let tokens: u32 = self.choices.iter().map(|choice| choice.tokens).sum();
        // The prompt is charged only if a worker has received it.
        let prompt = if times.placed.is_some() { call.prompt.len() as u64 } else { 0 };
        if let Some(charge) = &mut self.charge {
            charge.used(prompt + u64::from(tokens));
        }
        if let Some(usage) = self.usage.take() {
            usage.record(self.usage_record(&outcome, prompt, tokens));
        }
        let (model, operation) = (call.model.clone(), operation(call));
        let error = match outcome {
            Outcome::Completed => "",
            _ => outcome.label(),
        };
        metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
        metrics::counter!(names::COMPLETION_TOKENS, "model" => model.clone()).increment(tokens.into());
        metrics::histogram!(names::REQUEST_SECONDS, "gen_ai_request_model" => model.clone(),
            "gen_ai_operation_name" => operation, "error_type" => error)
        .record(elapsed);
        if let Some(first) = times.first_token {
            metrics::histogram!(names::FIRST_TOKEN_SECONDS,
                "gen_ai_request_model" => model, "gen_ai_operation_name" => operation)
            .record(first.saturating_duration_since(call.arrived));
        }
        self.span.record("outcome", outcome.label());
        self.span.record("completion_tokens", tokens);
        tracing::info!(
            parent: &self.span,
            request_id = call.request_id,
            model = call.model,
            outcome = outcome.label(),
            prompt_tokens = call.prompt.len(),
            completion_tokens = tokens,
            seconds = elapsed.as_secs_f64(),
            "request ended"
        );
    }
}

impl ChoiceOutput {
    /// Appends new tokens. Returns the delta to send, if any, and the end of the choice, if it has ended.
    fn take(
        &mut self,
        index: u32,
        fresh: UnreadOutput,
        call: &AdmittedCall,
        vocabulary: &Vocabulary,
    ) -> (Option<Delta>, Option<ChoiceEnding>) {
        let UnreadOutput { mut tokens, mut logprobs, end } = fresh;
        // With STOP, the last token is the stop token. The update has no token only if an earlier attempt, on
        // a worker with another fingerprint, has delivered it.
        let stopped = end == Some(FinishReason::Stop);
        let has_stop_token = stopped && !tokens.is_empty();
        self.last_token = tokens.last().copied().or(self.last_token);
        let stop_token_id = self.last_token.filter(|_| stopped);
        let shown = tokens.len() - usize::from(has_stop_token);
        let mut text = String::new();
        let mut ending = end.map(|reason| ChoiceEnding { reason, stop: String::new(), stop_token_id });
        let mut piece = String::new();
        for (at, token) in tokens[..shown].iter().enumerate() {
            self.tokens += 1;
            if self.stops.is_empty() {
                self.detokenizer.push(vocabulary, *token, &mut text);
                continue;
            }
            piece.clear();
            self.detokenizer.push(vocabulary, *token, &mut piece);
            let armed = self.tokens > call.sampling.min_tokens;
            if let Some(found) = self.stops.push(&piece, armed, &mut text) {
                self.ended = true;
                ending = Some(ChoiceEnding {
                    reason: FinishReason::Stop,
                    stop: call.stop[found.stop].clone(),
                    stop_token_id: None,
                });
                tokens.truncate(at + 1);
                logprobs.truncate(at + 1);
                break;
            }
        }
        if !self.ended && ending.is_some() {
            self.ended = true;
            self.tokens += u32::from(has_stop_token);
            ending = self.flush(&mut text, call, ending);
        }
        let token_ids = if call.return_token_ids { tokens } else { Vec::new() };
        let empty = text.is_empty() && token_ids.is_empty() && logprobs.is_empty();
        let delta = Delta { choice: index, text, token_ids, logprobs };
        (if empty { None } else { Some(delta) }, ending)
    }

    /// Releases held-back text. The replacement of an incomplete last character is ordinary text and may
    /// complete a stop string.
    fn flush(
        &mut self,
        text: &mut String,
        call: &AdmittedCall,
        ending: Option<ChoiceEnding>,
    ) -> Option<ChoiceEnding> {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        let armed = self.tokens > call.sampling.min_tokens;
        if let Some(found) = self.stops.push(&rest, armed, text) {
            return Some(ChoiceEnding {
                reason: FinishReason::Stop,
                stop: call.stop[found.stop].clone(),
                stop_token_id: None,
            });
        }
        self.stops.finish(text);
        ending
    }
}

fn operation(call: &AdmittedCall) -> &'static str {
    if call.chat { "chat" } else { "text_completion" }
}
