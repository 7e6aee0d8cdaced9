//! Observer of a request: what each of its transitions means for metrics, spans, logs, the live view and the tenant's bill.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::FinishReason;
use inflight_router_core::{ChoiceOutput, RequestPlaced, ResubmissionReason, RetryWait};
use tokio::sync::oneshot;
use tracing::Span;

use super::model_counters::{CountersByModel, End, EndedRequest};
use super::phase_spans::PhaseSpans;
use super::transition::{RequestEnd, Transition};
use crate::clock;
use crate::live::tracker::Tracker;
use crate::metrics as names;
use crate::outcome::Outcome;
use crate::request::admitted_call::AdmittedCall;
use crate::request::cursor::Cursor;
use crate::tenants::TokenCharge;
use crate::usage::log::UsageSlot;
use crate::usage::{UsageRecord, timestamp};

/// Times of a request's progress.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestTimes {
    pub(crate) placed: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
}

/// What a request is billed by; settled once.
#[derive(Default)]
pub(crate) struct Billing {
    /// Tokens charged to its tenant's rate.
    pub(crate) charge: Option<TokenCharge>,
    /// Place of its line in the usage log.
    pub(crate) usage: Option<UsageSlot>,
}

/// Observer of one request.
#[derive(Debug)]
pub(crate) struct RequestObserver {
    times: RequestTimes,
    /// Time of the last tokens by choice.
    last_tokens: Vec<Option<Instant>>,
    /// Gaps between tokens of the model, looked up once.
    gaps: metrics::Histogram,
    /// Choices that no worker has ended.
    running: u32,
    /// Numerics fingerprint of the worker of the latest attempt.
    fingerprint: Option<Arc<str>>,
    /// Prompt tokens computed before the first token, without cached ones; `None` before that.
    computed_prompt: Option<u32>,
    /// Span of the request, until its end.
    span: Span,
    phases: PhaseSpans,
    billing: Billing,
    /// Reports to the live view; `None` without one.
    live: Option<Tracker>,
    counters: Arc<CountersByModel>,
}

impl RequestObserver {
    pub(super) fn new(
        call: &AdmittedCall,
        span: Span,
        billing: Billing,
        live: Option<Tracker>,
        counters: Arc<CountersByModel>,
    ) -> Self {
        Self {
            times: RequestTimes::default(),
            last_tokens: vec![None; call.sampling.n as usize],
            gaps: metrics::histogram!(names::INTER_TOKEN_SECONDS, "model" => call.model.clone()),
            running: call.sampling.n,
            fingerprint: None,
            computed_prompt: None,
            phases: PhaseSpans::new(span.clone()),
            span,
            billing,
            live,
            counters,
        }
    }

    pub(super) fn times(&self) -> RequestTimes {
        self.times
    }

    pub(super) fn fingerprint(&self) -> Option<&Arc<str>> {
        self.fingerprint.as_ref()
    }

    /// Returns the span of the current phase; `None` if it has ended or spans are off.
    pub(super) fn phase(&self) -> Option<Span> {
        self.phases.current()
    }

    /// Returns the prompt tokens found in a worker's prefix cache.
    pub(super) fn cached_prompt(&self, call: &AdmittedCall) -> u32 {
        let prompt = call.prompt.len() as u32;
        // The first choice to report has computed its resumed tokens, too.
        let resumed = call.resumed.iter().map(Vec::len).max().unwrap_or(0) as u32;
        self.computed_prompt.map_or(0, |computed| (prompt + resumed).saturating_sub(computed).min(prompt))
    }

    /// Observes a transition of the request of `call`.
    pub(super) fn observe(&mut self, call: &AdmittedCall, transition: &Transition<'_>, now: Instant) {
        if let Some(live) = &self.live {
            live.observe(transition, now);
        }
        match transition {
            Transition::Placed { placed, address } => self.placed(call, placed, address, now),
            Transition::Delivered(output) => self.delivered(output, now),
            Transition::Stalled => metrics::counter!(names::STALLED_STREAMS).increment(1),
            Transition::Paused => {
                metrics::counter!(names::PAUSED_STREAMS).increment(1);
                self.phases.pause();
            }
            Transition::Resubmitted { reason, attempt, wait } => {
                self.resubmitted(call, *reason, *attempt, *wait);
            }
            Transition::Discarded { tokens } => {
                metrics::counter!(names::UNBILLED_TOKENS, "model" => call.model.clone())
                    .increment(*tokens as u64);
            }
            Transition::ChoiceFinished(reason) => count_finished(&call.model, *reason),
            Transition::Ended(end) => self.ended(call, end, now),
            Transition::Failed(_) | Transition::Released => self.phases.end(),
            Transition::Rejected
            | Transition::Submitted { .. }
            | Transition::Resumed
            | Transition::Requeued => {}
        }
    }

    fn placed(&mut self, call: &AdmittedCall, placed: &RequestPlaced, address: &str, now: Instant) {
        metrics::counter!(names::PLACED_TOKENS).increment(placed.tokens.into());
        metrics::counter!(names::PLACED_CACHED_TOKENS).increment(placed.cached_tokens.into());
        if placed.changed_after.is_some() {
            metrics::counter!(names::FINGERPRINT_CHANGES).increment(1);
            tracing::warn!(
                request_id = call.request_id,
                worker = address,
                fingerprint = &*placed.fingerprint,
                "stream continues on a worker with another fingerprint; its tokens may differ"
            );
        }
        self.fingerprint = Some(placed.fingerprint.clone());
        self.phases.attempt(address);
        if self.times.placed.is_none() {
            self.times.placed = Some(now);
            let waited = now.saturating_duration_since(call.arrived);
            metrics::histogram!(names::QUEUE_SECONDS, "model" => call.model.clone()).record(waited);
            metrics::counter!(names::PROMPT_TOKENS, "model" => call.model.clone())
                .increment(call.prompt.len() as u64);
        }
    }

    fn delivered(&mut self, output: &ChoiceOutput, now: Instant) {
        if !output.tokens.is_empty() {
            self.times.first_token.get_or_insert(now);
            self.times.last_token = Some(now);
            if let Some(last) = self.last_tokens.get_mut(output.choice as usize)
                && let Some(before) = last.replace(now)
            {
                let gap = now.saturating_duration_since(before);
                self.gaps.record(gap);
                if let Some(live) = &self.live {
                    live.gap(gap);
                }
            }
        }
        self.computed_prompt = self.computed_prompt.or(output.computed_prompt);
        if output.finish.is_some() {
            self.running = self.running.saturating_sub(1);
            if self.running == 0 {
                self.phases.end();
            }
        }
    }

    fn resubmitted(
        &mut self,
        call: &AdmittedCall,
        reason: ResubmissionReason,
        attempt: u32,
        wait: RetryWait,
    ) {
        let quarantined = wait == RetryWait::Quarantine;
        metrics::counter!(names::RESUBMISSIONS, "reason" => reason.label()).increment(1);
        self.phases.retry(reason.label());
        tracing::info!(
            request_id = call.request_id,
            reason = reason.label(),
            attempt,
            isolated = quarantined,
            "resubmitting request"
        );
        if quarantined {
            metrics::counter!(names::QUARANTINED_REQUESTS).increment(1);
        }
    }

    /// Writes the line of a request whose client is about to get the last of its output. Returns a receiver that resolves when the line is
    /// written; `None` without a usage log, or if the line was written before.
    ///
    /// `per_token` is the mean time between two tokens of the longest choice, if it has more than one.
    pub(super) fn completed(
        &mut self,
        call: &AdmittedCall,
        completion_tokens: u32,
        per_token: Option<Duration>,
    ) -> Option<oneshot::Receiver<()>> {
        if let Some(per_token) = per_token {
            metrics::histogram!(names::PER_TOKEN_SECONDS,
                "gen_ai_request_model" => call.model.clone(), "gen_ai_operation_name" => operation(call))
            .record(per_token);
        }
        let slot = self.billing.usage.take()?;
        Some(slot.record(self.usage_record(call, &Outcome::Completed, completion_tokens)))
    }

    fn ended(&mut self, call: &AdmittedCall, end: &RequestEnd<'_>, now: Instant) {
        let RequestEnd { outcome, completion_tokens, unfinished } = *end;
        if let Some(mut charge) = self.billing.charge.take() {
            let tokens = self.counted_prompt(call) + u64::from(completion_tokens);
            charge.used(tokens.saturating_sub(call.charged_tokens()));
        }
        if let Some(slot) = self.billing.usage.take() {
            // Resolves at the write, for which nothing waits here.
            drop(slot.record(self.usage_record(call, outcome, completion_tokens)));
        }
        let (model, operation) = (call.model.clone(), operation(call));
        let error = match outcome {
            Outcome::Completed => "",
            _ => outcome.label(),
        };
        metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
        let reason = match outcome {
            Outcome::Cancelled => FinishReason::Cancelled,
            Outcome::DeadlineExceeded => FinishReason::Deadline,
            _ => FinishReason::Error,
        };
        (0..unfinished).for_each(|_| count_finished(&model, reason));
        let received = call.cursor.as_ref().map_or(0, Cursor::tokens);
        metrics::counter!(names::COMPLETION_TOKENS, "model" => model.clone())
            .increment(u64::from(completion_tokens).saturating_sub(received));
        let elapsed = now.saturating_duration_since(call.arrived);
        self.count_ended(call, outcome, elapsed);
        metrics::histogram!(names::REQUEST_SECONDS, "gen_ai_request_model" => model.clone(),
            "gen_ai_operation_name" => operation, "error_type" => error)
        .record(elapsed);
        if let Some(first) = self.times.first_token {
            metrics::histogram!(names::FIRST_TOKEN_SECONDS,
                "gen_ai_request_model" => model, "gen_ai_operation_name" => operation)
            .record(first.saturating_duration_since(call.arrived));
        }
        // The last reference to a span closes it; its last exit is its end: it was entered before, to tokenize.
        let span = std::mem::replace(&mut self.span, Span::none());
        span.record("outcome", outcome.label());
        span.record("completion_tokens", completion_tokens);
        let _entered = span.enter();
        tracing::info!(
            request_id = call.request_id,
            model = call.model,
            outcome = outcome.label(),
            prompt_tokens = call.prompt.len(),
            completion_tokens,
            seconds = elapsed.as_secs_f64(),
            "request ended"
        );
    }

    /// Counts the request among those of its model.
    fn count_ended(&self, call: &AdmittedCall, outcome: &Outcome, total: Duration) {
        let RequestTimes { placed, last_token, .. } = self.times;
        let end = match outcome {
            Outcome::Completed => End::Completed,
            Outcome::Cancelled => End::Cancelled,
            _ => End::Failed,
        };
        let between = |from: Instant, to: Instant| to.saturating_duration_since(from);
        let ended = EndedRequest {
            end,
            arrived: clock::since_unix_epoch().saturating_sub(total),
            total,
            queued: placed.map(|placed| between(call.arrived, placed)),
            computed: placed.zip(last_token).map(|(placed, last)| between(placed, last)),
        };
        self.counters.count(&call.model, &ended);
    }

    /// Returns the prompt tokens that count: all, if a worker has received them.
    fn counted_prompt(&self, call: &AdmittedCall) -> u64 {
        let received = self.times.placed.is_some() || call.charged_tokens() > 0;
        if received { call.prompt.len() as u64 } else { 0 }
    }

    /// Returns the line of the usage log.
    fn usage_record(&self, call: &AdmittedCall, outcome: &Outcome, completion_tokens: u32) -> UsageRecord {
        let (now, ended) = (clock::now(), clock::since_unix_epoch());
        let at = |at: Instant| timestamp(ended.saturating_sub(now.saturating_duration_since(at)));
        UsageRecord {
            id: String::new(),
            tenant: call.tenant.clone(),
            key: call.key_id.clone(),
            request: call.request_id.clone(),
            model: call.model.clone(),
            fingerprint: self.fingerprint.as_deref().unwrap_or_default().to_owned(),
            stream: call.cursor.as_ref().map(Cursor::stream_id),
            resumed_tokens: call.cursor.as_ref().map(Cursor::tokens).filter(|_| call.resumes),
            prompt_tokens: self.counted_prompt(call),
            cached_prompt_tokens: u64::from(self.cached_prompt(call)),
            completion_tokens: u64::from(completion_tokens),
            arrived: at(call.arrived),
            dispatched: self.times.placed.map(at),
            first_token: self.times.first_token.map(at),
            ended: timestamp(ended),
            outcome: outcome.label().to_owned(),
        }
    }
}

impl std::fmt::Debug for Billing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Billing")
    }
}

fn count_finished(model: &str, reason: FinishReason) {
    let reason = match reason {
        // One reason to clients.
        FinishReason::Complete => FinishReason::Stop,
        reason => reason,
    };
    metrics::counter!(names::FINISHED_CHOICES, "model" => model.to_owned(), "reason" => reason.label())
        .increment(1);
}

fn operation(call: &AdmittedCall) -> &'static str {
    if call.chat { "chat" } else { "text_completion" }
}
