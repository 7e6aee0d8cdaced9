//! Latency and throughput measurements of a round.
//!
//! The arrival time of a token is that of its message, taken when the message reaches the receiving task. A
//! message of k tokens counts as the gap before it and k - 1 gaps of zero: gaps add up to the duration of the
//! stream, and there is one for each token after the first. Gaps of streams that fail later are kept;
//! end-to-end latencies are those of completed requests only.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::outcome::{ReportedUsage, RequestOutcome};

/// Significant digits of histograms: relative error below 0.1 %.
const DIGITS: u8 = 3;
/// Maximum duration of histograms in microseconds, about twelve days; longer ones saturate.
const DURATION_US_MAX: u64 = 1 << 40;

/// Histogram of durations with microsecond resolution.
#[derive(Debug, Clone)]
pub struct LatencyHistogram(Histogram<u64>);

impl Default for LatencyHistogram {
    fn default() -> Self {
        // The constants are within the type's bounds (low >= 1, high >= 2 low, at most 5 digits), as tests
        // show.
        Self(Histogram::new_with_bounds(1, DURATION_US_MAX, DIGITS).expect("constant bounds are valid"))
    }
}

impl LatencyHistogram {
    fn add(&mut self, time: Duration, count: u64) {
        let micros = u64::try_from((time.as_nanos() + 500) / 1000).unwrap_or(u64::MAX);
        if count > 0 {
            self.0.saturating_record_n(micros, count);
        }
    }

    /// Returns the quantile `share`, from 0 to 1, in milliseconds; `None` if the histogram is empty.
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(share) as f64 / 1e3)
    }

    /// Returns the mean in milliseconds; `None` if the histogram is empty.
    pub fn mean_ms(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.mean() / 1e3)
    }

    /// Returns the number of recorded durations.
    pub fn len(&self) -> u64 {
        self.0.len()
    }
}

/// Service level objectives of a request; requests that meet all count as goodput.
#[derive(Debug, Clone, Copy, Default)]
pub struct Slo {
    /// Maximum time to first token.
    pub ttft: Option<Duration>,
    /// Maximum mean time per output token after the first.
    pub tpot: Option<Duration>,
    /// Maximum end-to-end latency.
    pub e2e: Option<Duration>,
}

impl Slo {
    /// Returns whether any objective is set.
    pub fn is_set(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some() || self.e2e.is_some()
    }

    fn is_met(&self, ttft: Duration, tpot: Option<Duration>, e2e: Duration) -> bool {
        let meets = |time: Duration, bound: Option<Duration>| bound.is_none_or(|bound| time <= bound);
        meets(ttft, self.ttft) && tpot.is_none_or(|tpot| meets(tpot, self.tpot)) && meets(e2e, self.e2e)
    }
}

/// Quota of measured requests of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// Number of requests.
    Requests(u64),
    /// Time within which measured requests are due.
    Duration(Duration),
}

/// Measurements of a tenant in a round.
#[derive(Debug, Clone, Default)]
pub struct TenantMeasurements {
    /// Time to first token.
    pub ttft: LatencyHistogram,
    /// End-to-end latency.
    pub e2e: LatencyHistogram,
    /// Output tokens received in the measurement window.
    pub output_tokens: u64,
}

/// Measurements of a round; latencies and request counts are those of measured requests, without warm-up.
#[derive(Debug, Clone, Default)]
pub struct RoundMeasurements {
    /// Time to first token, from a request's due time.
    pub ttft: LatencyHistogram,
    /// Inter-token latency.
    pub itl: LatencyHistogram,
    /// Mean time per output token after the first, of requests with two or more.
    pub tpot: LatencyHistogram,
    /// End-to-end latency, from a request's due time.
    pub e2e: LatencyHistogram,
    /// Delay from a request's due time until it was sent.
    pub lag: LatencyHistogram,
    /// Measurements by tenant.
    pub tenants: Vec<TenantMeasurements>,
    /// Number of requests started.
    pub started: u64,
    /// Number of requests ended, with any outcome.
    pub ended: u64,
    /// Number of requests completed.
    pub completed: u64,
    /// Number of requests completed with fewer tokens than requested.
    pub short: u64,
    /// Number of requests completed that met all objectives.
    pub slo_met: u64,
    /// Number of requests refused, by kind.
    pub refused: BTreeMap<String, u64>,
    /// Number of requests failed, by kind.
    pub failed: BTreeMap<String, u64>,
    /// Message of the first refusal or failure of each kind.
    pub examples: BTreeMap<String, String>,
    /// Output tokens received in the measurement window, of all requests.
    pub output_tokens: u64,
    /// Prompt tokens of all requests whose first token was received in the window.
    pub prompt_tokens: u64,
    /// Number of requests completed in the window, including unmeasured ones.
    pub window_completed: u64,
    /// Number of messages with tokens in the window, of all requests.
    pub messages: u64,
    /// Maximum tokens in a message of the window.
    pub message_tokens_max: u32,
    /// Start of the window: due time of the first measured request.
    pub opened: Option<Instant>,
    /// End of the window: end of the last measured request.
    pub closed: Option<Instant>,
    /// CPU seconds of the load generator in the window, if available.
    pub cpu_s: Option<f64>,
    /// Maximum time that a request waited for a slot among those in flight.
    pub slot_wait_max: Duration,
    /// Kind and message of the latest failure, of all requests.
    pub last_failure: Option<(String, String)>,
}

impl RoundMeasurements {
    /// Returns the length of the window in seconds; 0 while it is open.
    pub fn seconds(&self) -> f64 {
        match (self.opened, self.closed) {
            (Some(opened), Some(closed)) => closed.duration_since(opened).as_secs_f64(),
            _ => 0.0,
        }
    }
}

#[derive(Debug)]
struct MeterState {
    measured: RoundMeasurements,
    admitting: bool,
    consecutive_failures: u32,
    cpu_at_open: Option<f64>,
}

/// Recorder of a round's measurements, shared by its requests.
#[derive(Debug, Clone)]
pub struct Meter {
    state: Arc<Mutex<MeterState>>,
    closed_notify: Arc<Notify>,
    warmup: u64,
    quota: Quota,
    slo: Slo,
}

impl Meter {
    /// Creates a meter of `quota` requests after `warmup` warm-up requests, with `tenants` tenants.
    pub fn new(warmup: u64, quota: Quota, slo: Slo, tenants: usize) -> Self {
        let measured = RoundMeasurements {
            tenants: vec![TenantMeasurements::default(); tenants],
            ..RoundMeasurements::default()
        };
        let state = MeterState { measured, admitting: true, consecutive_failures: 0, cpu_at_open: None };
        Self { state: Arc::new(Mutex::new(state)), closed_notify: Arc::default(), warmup, quota, slo }
    }

    /// Locks the state. No holder of the lock panics; after a panic the measurements so far would be used.
    fn state(&self) -> MutexGuard<'_, MeterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts request `index`, due at `due`. It is measured if it is past the warm-up and within the quota.
    pub fn start_request(
        &self,
        index: u64,
        due: Instant,
        tenant: usize,
        requested_tokens: u32,
        prompt_tokens: u32,
    ) -> InFlightRequest {
        let sent = Instant::now();
        let mut state = self.state();
        let mut counts = index >= self.warmup && state.admitting;
        if counts {
            if state.measured.opened.is_none() {
                state.measured.opened = Some(due);
                state.cpu_at_open = cpu_seconds();
            }
            let opened = state.measured.opened.unwrap_or(due);
            match self.quota {
                Quota::Requests(all) => state.admitting = state.measured.started + 1 < all,
                Quota::Duration(time) => {
                    counts = due.duration_since(opened) < time;
                    state.admitting = counts;
                }
            }
        }
        if counts {
            state.measured.started += 1;
            state.measured.lag.add(sent.duration_since(due), 1);
        }
        drop(state);
        if !counts {
            self.close_if_complete();
        }
        let meter = self.clone();
        InFlightRequest {
            meter,
            due,
            tenant,
            requested_tokens,
            prompt_tokens,
            counts,
            first: None,
            last: None,
            tokens: 0,
        }
    }

    /// Excludes later requests from the measurement, such as at the end of a quota of time.
    pub fn stop_admitting(&self) {
        self.state().admitting = false;
        self.close_if_complete();
    }

    /// Records that a request due at `due` waited until now for a slot among those in flight.
    pub fn record_slot_wait(&self, due: Instant) {
        let mut state = self.state();
        state.measured.slot_wait_max = state.measured.slot_wait_max.max(due.elapsed());
    }

    /// Waits until the window is closed: all measured requests have ended.
    pub async fn closed(&self) {
        loop {
            let notified = self.closed_notify.notified();
            if self.state().measured.closed.is_some() {
                return;
            }
            notified.await;
        }
    }

    /// Returns the start of the window; `None` before the first measured request.
    pub fn opened(&self) -> Option<Instant> {
        self.state().measured.opened
    }

    /// Returns the number of measured requests that have ended, and of output tokens in the window.
    pub fn progress(&self) -> (u64, u64) {
        let state = self.state();
        (state.measured.ended, state.measured.output_tokens)
    }

    /// Returns the number of failures since the last request that did not fail.
    pub fn consecutive_failures(&self) -> u32 {
        self.state().consecutive_failures
    }

    /// Closes the window if it is open and returns the measurements.
    pub fn finish(&self) -> RoundMeasurements {
        let mut state = self.state();
        if state.measured.closed.is_none() {
            state.close();
        }
        state.measured.clone()
    }

    fn close_if_complete(&self) {
        let mut state = self.state();
        let complete = !state.admitting && state.measured.ended == state.measured.started;
        if complete && state.measured.closed.is_none() {
            state.close();
            self.closed_notify.notify_waiters();
        }
    }
}

impl MeterState {
    fn close(&mut self) {
        self.measured.closed = Some(Instant::now());
        self.measured.cpu_s = cpu_seconds().zip(self.cpu_at_open).map(|(now, then)| now - then);
    }

    fn window_is_open(&self) -> bool {
        self.measured.opened.is_some() && self.measured.closed.is_none()
    }
}

/// Request in flight; records its tokens and its outcome in the meter.
#[derive(Debug)]
pub struct InFlightRequest {
    meter: Meter,
    due: Instant,
    tenant: usize,
    requested_tokens: u32,
    prompt_tokens: u32,
    counts: bool,
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
}

impl InFlightRequest {
    /// Records a message of `tokens` tokens, received now.
    pub fn record_tokens(&mut self, tokens: u32) {
        if tokens == 0 {
            return;
        }
        let now = Instant::now();
        let mut state = self.meter.state();
        let open = state.window_is_open();
        let measured = &mut state.measured;
        if open {
            measured.output_tokens += u64::from(tokens);
            measured.messages += 1;
            measured.message_tokens_max = measured.message_tokens_max.max(tokens);
            if let Some(tenant) = measured.tenants.get_mut(self.tenant) {
                tenant.output_tokens += u64::from(tokens);
            }
            if self.first.is_none() {
                measured.prompt_tokens += u64::from(self.prompt_tokens);
            }
        }
        if self.counts {
            match self.last {
                None => {
                    let ttft = now.duration_since(self.due);
                    measured.ttft.add(ttft, 1);
                    if let Some(tenant) = measured.tenants.get_mut(self.tenant) {
                        tenant.ttft.add(ttft, 1);
                    }
                }
                Some(last) => measured.itl.add(now.duration_since(last), 1),
            }
            measured.itl.add(Duration::ZERO, u64::from(tokens - 1));
        }
        drop(state);
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.tokens += tokens;
    }

    /// Records a message, received now, that brings the number of tokens to `total`.
    pub fn record_total_tokens(&mut self, total: u32) {
        self.record_tokens(total.saturating_sub(self.tokens));
    }

    /// Sets the prompt length that the server reported, in tokens.
    pub fn set_prompt_tokens(&mut self, tokens: u32) {
        let before = std::mem::replace(&mut self.prompt_tokens, tokens);
        let mut state = self.meter.state();
        if self.first.is_some() && state.window_is_open() {
            let sum = &mut state.measured.prompt_tokens;
            *sum = (*sum + u64::from(tokens)).saturating_sub(u64::from(before));
        }
    }

    /// Records the end of the request.
    pub fn finish(mut self, outcome: RequestOutcome) {
        if let RequestOutcome::Completed(usage) = &outcome {
            self.apply_reported_usage(usage);
        }
        let now = Instant::now();
        let mut state = self.meter.state();
        state.consecutive_failures = match &outcome {
            RequestOutcome::Failed { kind, message } => {
                state.measured.last_failure = Some((kind.clone(), message.clone()));
                state.consecutive_failures + 1
            }
            _ => 0,
        };
        if state.window_is_open() && matches!(outcome, RequestOutcome::Completed(_)) {
            state.measured.window_completed += 1;
        }
        if self.counts {
            let measured = &mut state.measured;
            measured.ended += 1;
            match outcome {
                RequestOutcome::Completed(_) => {
                    measured.completed += 1;
                    measured.short += u64::from(self.tokens < self.requested_tokens);
                    let e2e = now.duration_since(self.due);
                    measured.e2e.add(e2e, 1);
                    if let Some(tenant) = measured.tenants.get_mut(self.tenant) {
                        tenant.e2e.add(e2e, 1);
                    }
                    let times = self.first.zip(self.last).filter(|_| self.tokens > 1);
                    let tpot = times.map(|(first, last)| last.duration_since(first) / (self.tokens - 1));
                    if let Some(tpot) = tpot {
                        measured.tpot.add(tpot, 1);
                    }
                    let ttft = self.first.map_or(e2e, |first| first.duration_since(self.due));
                    measured.slo_met += u64::from(self.meter.slo.is_met(ttft, tpot, e2e));
                }
                RequestOutcome::Refused { kind, message } => {
                    measured.examples.entry(kind.clone()).or_insert(message);
                    *measured.refused.entry(kind).or_default() += 1;
                }
                RequestOutcome::Failed { kind, message } => {
                    measured.examples.entry(kind.clone()).or_insert(message);
                    *measured.failed.entry(kind).or_default() += 1;
                }
            }
        }
        drop(state);
        self.meter.close_if_complete();
    }

    /// Applies the usage reported at the end: prompt tokens, and tokens in messages that were counted as one.
    fn apply_reported_usage(&mut self, usage: &ReportedUsage) {
        if let Some(prompt) = usage.prompt_tokens {
            self.set_prompt_tokens(prompt);
        }
        let Some(surplus) = usage.output_tokens.and_then(|all| all.checked_sub(self.tokens)) else { return };
        if surplus == 0 {
            return;
        }
        let mut state = self.meter.state();
        if state.window_is_open() {
            state.measured.output_tokens += u64::from(surplus);
            if let Some(tenant) = state.measured.tenants.get_mut(self.tenant) {
                tenant.output_tokens += u64::from(surplus);
            }
        }
        if self.counts {
            // They arrived in the same messages as others, with a gap of zero; without messages the first has
            // no gap.
            let gaps = if self.first.is_some() { surplus } else { surplus - 1 };
            state.measured.itl.add(Duration::ZERO, u64::from(gaps));
        }
        drop(state);
        self.tokens += surplus;
    }
}

/// Returns the user and system CPU seconds of this process (Linux only).
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // "pid (name) state …": user and system time are fields 14 and 15, in hundredths of a second.
    let mut fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(output_tokens: u32) -> RequestOutcome {
        RequestOutcome::Completed(ReportedUsage { prompt_tokens: None, output_tokens: Some(output_tokens) })
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_of_several_tokens_is_one_gap_and_then_gaps_of_zero() {
        let slo = Slo { tpot: Some(Duration::from_millis(9)), ..Slo::default() };
        let meter = Meter::new(0, Quota::Requests(1), slo, 1);
        let due = Instant::now();
        tokio::time::advance(Duration::from_millis(2)).await;
        let mut in_flight = meter.start_request(0, due, 0, 6, 10);
        tokio::time::advance(Duration::from_millis(5)).await;
        in_flight.record_tokens(1);
        tokio::time::advance(Duration::from_millis(40)).await;
        in_flight.record_total_tokens(4);
        in_flight.record_total_tokens(4);
        in_flight.finish(completed(6));
        let measured = meter.finish();
        let about = |got: Option<f64>, expected: f64| (got.unwrap() - expected).abs() <= expected * 0.001;
        assert!(about(measured.ttft.quantile_ms(0.5), 7.0), "from its due time");
        assert!(about(measured.lag.quantile_ms(0.5), 2.0));
        assert_eq!(
            (measured.itl.len(), measured.output_tokens),
            (5, 6),
            "a gap for each token after the first"
        );
        assert_eq!(measured.itl.quantile_ms(0.8), Some(0.0));
        assert!((measured.itl.mean_ms().unwrap() - 8.0).abs() < 0.01, "gaps add up to the stream's time");
        assert_eq!((measured.slo_met, measured.short, measured.prompt_tokens), (1, 0, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn only_requests_of_the_quota_are_measured_but_all_tokens_of_the_window() {
        let meter = Meter::new(1, Quota::Requests(1), Slo::default(), 1);
        let mut before = meter.start_request(0, Instant::now(), 0, 2, 10);
        before.record_tokens(1);
        let mut counted = meter.start_request(1, Instant::now(), 0, 2, 10);
        let mut after = meter.start_request(2, Instant::now(), 0, 2, 10);
        tokio::time::advance(Duration::from_secs(1)).await;
        before.record_tokens(1);
        counted.record_tokens(1);
        after.record_tokens(1);
        before.finish(completed(2));
        counted.finish(completed(1));
        after.record_tokens(1);
        after.finish(RequestOutcome::Failed { kind: "x".into(), message: String::new() });
        meter.closed().await;
        let measured = meter.finish();
        assert_eq!((measured.started, measured.ended, measured.completed), (1, 1, 1));
        assert_eq!((measured.output_tokens, measured.prompt_tokens), (3, 20));
        assert_eq!((measured.short, measured.seconds()), (1, 1.0));
        assert!(measured.failed.is_empty());
    }
}
