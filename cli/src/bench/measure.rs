//! What a round measured.
//!
//! A token's time is that of the message it came with, read when the message reaches the task that waits for it. A message with k tokens
//! counts as the gap before it and k - 1 gaps of nothing: that is what its reader sees, gaps add up to the time of the stream, and
//! there is one gap for each token after the first. Gaps of streams that fail later are kept; end-to-end times are those of completed
//! requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::client::{Outcome, Served};

/// Histograms keep this many significant digits: values are off by less than 0.1 %.
const DIGITS: u8 = 3;
/// Of times longer than this (about twelve days) the histograms only know that they are no shorter.
const LONGEST_US: u64 = 1 << 40;

/// Durations, to the microsecond.
#[derive(Debug, Clone)]
pub struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        // The arguments are constants within the type's bounds (low >= 1, high >= 2 low, at most 5 digits): a test makes one.
        Self(Histogram::new_with_bounds(1, LONGEST_US, DIGITS).expect("constant bounds are valid"))
    }
}

impl Times {
    fn add(&mut self, time: Duration, count: u64) {
        let micros = u64::try_from((time.as_nanos() + 500) / 1000).unwrap_or(u64::MAX);
        if count > 0 {
            self.0.saturating_record_n(micros, count);
        }
    }

    /// Milliseconds under which a share of the times lies; `None` without any.
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(share) as f64 / 1e3)
    }

    /// Mean in milliseconds; `None` without any.
    pub fn mean_ms(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.mean() / 1e3)
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.0.len()
    }
}

/// Bounds that a good request keeps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Slo {
    /// On the time to the first token.
    pub ttft: Option<Duration>,
    /// On the mean time between the tokens after it.
    pub tpot: Option<Duration>,
    /// On the whole.
    pub e2e: Option<Duration>,
}

impl Slo {
    /// Whether there is a bound at all.
    pub fn is_set(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some() || self.e2e.is_some()
    }

    fn is_kept(&self, ttft: Duration, tpot: Option<Duration>, e2e: Duration) -> bool {
        let keeps = |time: Duration, bound: Option<Duration>| bound.is_none_or(|bound| time <= bound);
        keeps(ttft, self.ttft) && tpot.is_none_or(|tpot| keeps(tpot, self.tpot)) && keeps(e2e, self.e2e)
    }
}

/// Which requests count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// This many.
    Requests(u64),
    /// Those that are due within this time.
    Duration(Duration),
}

/// What one tenant got.
#[derive(Debug, Clone, Default)]
pub struct TenantTimes {
    /// Time to the first token.
    pub ttft: Times,
    /// End to end.
    pub e2e: Times,
    /// Tokens generated in the window.
    pub output_tokens: u64,
}

/// What was measured so far.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// From the time a request was due to its first token.
    pub ttft: Times,
    /// Between two tokens.
    pub itl: Times,
    /// Mean time between the tokens of each request of two or more.
    pub tpot: Times,
    /// From the time a request was due to its end.
    pub e2e: Times,
    /// From the time a request was due to when it was sent.
    pub lag: Times,
    /// By tenant.
    pub tenants: Vec<TenantTimes>,
    /// Requests that count.
    pub started: u64,
    /// Those that ended, however.
    pub ended: u64,
    /// Those that ran to their end.
    pub completed: u64,
    /// Those of them with fewer tokens than asked for.
    pub short: u64,
    /// Those of them that kept all bounds.
    pub good: u64,
    /// Those the server would not take, by what it said.
    pub refused: BTreeMap<String, u64>,
    /// Those that went wrong, by how.
    pub failed: BTreeMap<String, u64>,
    /// An example of each refusal and failure.
    pub examples: BTreeMap<String, String>,
    /// Output tokens that arrived in the window, whichever request they belong to.
    pub output_tokens: u64,
    /// Tokens of prompts whose first token arrived in the window.
    pub prompt_tokens: u64,
    /// Requests completed in the window.
    pub window_completed: u64,
    /// Messages with tokens in the window.
    pub messages: u64,
    /// Most tokens in one message.
    pub message_tokens_max: u32,
    /// When the first request that counts was sent or due.
    pub opened: Option<Instant>,
    /// When the last one ended.
    pub closed: Option<Instant>,
    /// Seconds of processor time that the load generator took in the window, if the system tells.
    pub cpu_s: Option<f64>,
    /// The longest time a request had to wait for a place among those in flight.
    pub held_up: Duration,
    /// The latest failure, whether or not the request counts: its kind and what was said.
    pub last_failure: Option<(String, String)>,
}

impl Measured {
    /// Seconds of the window.
    pub fn seconds(&self) -> f64 {
        match (self.opened, self.closed) {
            (Some(opened), Some(closed)) => closed.duration_since(opened).as_secs_f64(),
            _ => 0.0,
        }
    }
}

#[derive(Debug)]
struct State {
    measured: Measured,
    admitting: bool,
    failures_in_a_row: u32,
    cpu_at_open: Option<f64>,
}

/// Keeps a round's measurements; shared by its requests.
#[derive(Debug, Clone)]
pub struct Meter {
    state: Arc<Mutex<State>>,
    over: Arc<Notify>,
    warmup: u64,
    quota: Quota,
    slo: Slo,
}

impl Meter {
    /// A meter for the requests after the first `warmup`, as many as the quota says.
    pub fn new(warmup: u64, quota: Quota, slo: Slo, tenants: usize) -> Self {
        let measured = Measured { tenants: vec![TenantTimes::default(); tenants], ..Measured::default() };
        let state = State { measured, admitting: true, failures_in_a_row: 0, cpu_at_open: None };
        Self { state: Arc::new(Mutex::new(state)), over: Arc::default(), warmup, quota, slo }
    }

    /// Nobody panics while holding the lock; if one did, the figures up to then stand.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request begins that was due at `due`.
    pub fn begin(&self, place: u64, due: Instant, tenant: usize, asked: u32, prompt_tokens: u32) -> Flight {
        let sent = Instant::now();
        let mut state = self.state();
        let mut counts = place >= self.warmup && state.admitting;
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
            self.check_over();
        }
        let meter = self.clone();
        Flight { meter, due, tenant, asked, prompt_tokens, counts, first: None, last: None, tokens: 0 }
    }

    /// Ends the time in which requests are counted in. For a quota of time whose next request may be long in coming.
    pub fn stop_admitting(&self) {
        self.state().admitting = false;
        self.check_over();
    }

    /// A request was held back, as so many were in flight, until now.
    pub fn held_up(&self, due: Instant) {
        let mut state = self.state();
        state.measured.held_up = state.measured.held_up.max(due.elapsed());
    }

    /// Returns when all requests that count have ended.
    pub async fn over(&self) {
        loop {
            let notified = self.over.notified();
            if self.state().measured.closed.is_some() {
                return;
            }
            notified.await;
        }
    }

    /// When the window opened, if it has.
    pub fn opened(&self) -> Option<Instant> {
        self.state().measured.opened
    }

    /// Requests that count and have ended, and output tokens in the window.
    pub fn progress(&self) -> (u64, u64) {
        let state = self.state();
        (state.measured.ended, state.measured.output_tokens)
    }

    /// How many requests failed without one in between that did not.
    pub fn failures_in_a_row(&self) -> u32 {
        self.state().failures_in_a_row
    }

    /// What was measured. Closes the window if it is still open.
    pub fn read(&self) -> Measured {
        let mut state = self.state();
        if state.measured.closed.is_none() {
            state.close();
        }
        state.measured.clone()
    }

    fn check_over(&self) {
        let mut state = self.state();
        let over = !state.admitting && state.measured.ended == state.measured.started;
        if over && state.measured.closed.is_none() {
            state.close();
            self.over.notify_waiters();
        }
    }
}

impl State {
    fn close(&mut self) {
        self.measured.closed = Some(Instant::now());
        self.measured.cpu_s = cpu_seconds().zip(self.cpu_at_open).map(|(now, then)| now - then);
    }

    fn window_is_open(&self) -> bool {
        self.measured.opened.is_some() && self.measured.closed.is_none()
    }
}

/// A request on its way.
#[derive(Debug)]
pub struct Flight {
    meter: Meter,
    due: Instant,
    tenant: usize,
    asked: u32,
    prompt_tokens: u32,
    counts: bool,
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
}

impl Flight {
    /// A message with this many tokens arrived.
    pub fn arrived(&mut self, tokens: u32) {
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

    /// A message arrived after which the server had counted this many tokens in all.
    pub fn arrived_up_to(&mut self, total: u32) {
        self.arrived(total.saturating_sub(self.tokens));
    }

    /// The server says how long the prompt is.
    pub fn has_prompt_of(&mut self, tokens: u32) {
        let before = std::mem::replace(&mut self.prompt_tokens, tokens);
        let mut state = self.meter.state();
        if self.first.is_some() && state.window_is_open() {
            let sum = &mut state.measured.prompt_tokens;
            *sum = (*sum + u64::from(tokens)).saturating_sub(u64::from(before));
        }
    }

    /// The request is over.
    pub fn end(mut self, outcome: Outcome) {
        if let Outcome::Completed(served) = &outcome {
            self.settle(served);
        }
        let now = Instant::now();
        let mut state = self.meter.state();
        state.failures_in_a_row = match &outcome {
            Outcome::Failed { kind, message } => {
                state.measured.last_failure = Some((kind.clone(), message.clone()));
                state.failures_in_a_row + 1
            }
            _ => 0,
        };
        if state.window_is_open() && matches!(outcome, Outcome::Completed(_)) {
            state.measured.window_completed += 1;
        }
        if self.counts {
            let measured = &mut state.measured;
            measured.ended += 1;
            match outcome {
                Outcome::Completed(_) => {
                    measured.completed += 1;
                    measured.short += u64::from(self.tokens < self.asked);
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
                    measured.good += u64::from(self.meter.slo.is_kept(ttft, tpot, e2e));
                }
                Outcome::Refused { kind, message } => {
                    measured.examples.entry(kind.clone()).or_insert(message);
                    *measured.refused.entry(kind).or_default() += 1;
                }
                Outcome::Failed { kind, message } => {
                    measured.examples.entry(kind.clone()).or_insert(message);
                    *measured.failed.entry(kind).or_default() += 1;
                }
            }
        }
        drop(state);
        self.meter.check_over();
    }

    /// Brings in what only the end of the stream tells: prompt tokens, and tokens that came in messages counted as one.
    fn settle(&mut self, served: &Served) {
        if let Some(prompt) = served.prompt_tokens {
            self.has_prompt_of(prompt);
        }
        let Some(surplus) = served.output_tokens.and_then(|all| all.checked_sub(self.tokens)) else { return };
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
            // They came with others, so no time passed before them; a stream without any message had no gaps.
            let gaps = if self.first.is_some() { surplus } else { surplus - 1 };
            state.measured.itl.add(Duration::ZERO, u64::from(gaps));
        }
        drop(state);
        self.tokens += surplus;
    }
}

/// Seconds of processor time that this process has taken, where the system tells (Linux).
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

    fn completed(output_tokens: u32) -> Outcome {
        Outcome::Completed(Served { prompt_tokens: None, output_tokens: Some(output_tokens) })
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_of_several_tokens_is_one_gap_and_then_none() {
        let slo = Slo { tpot: Some(Duration::from_millis(9)), ..Slo::default() };
        let meter = Meter::new(0, Quota::Requests(1), slo, 1);
        let due = Instant::now();
        tokio::time::advance(Duration::from_millis(2)).await;
        let mut flight = meter.begin(0, due, 0, 6, 10);
        tokio::time::advance(Duration::from_millis(5)).await;
        flight.arrived(1);
        tokio::time::advance(Duration::from_millis(40)).await;
        flight.arrived_up_to(4);
        flight.arrived_up_to(4);
        flight.end(completed(6));
        let measured = meter.read();
        let about = |got: Option<f64>, expected: f64| (got.unwrap() - expected).abs() <= expected * 0.001;
        assert!(about(measured.ttft.quantile_ms(0.5), 7.0), "from when it was due");
        assert!(about(measured.lag.quantile_ms(0.5), 2.0));
        assert_eq!(
            (measured.itl.len(), measured.output_tokens),
            (5, 6),
            "a gap for each token after the first"
        );
        assert_eq!(measured.itl.quantile_ms(0.8), Some(0.0));
        assert!((measured.itl.mean_ms().unwrap() - 8.0).abs() < 0.01, "gaps add up to the stream's time");
        assert_eq!((measured.good, measured.short, measured.prompt_tokens), (1, 0, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_quota_counts_but_the_window_has_all_tokens() {
        let meter = Meter::new(1, Quota::Requests(1), Slo::default(), 1);
        let mut before = meter.begin(0, Instant::now(), 0, 2, 10);
        before.arrived(1);
        let mut counted = meter.begin(1, Instant::now(), 0, 2, 10);
        let mut after = meter.begin(2, Instant::now(), 0, 2, 10);
        tokio::time::advance(Duration::from_secs(1)).await;
        before.arrived(1);
        counted.arrived(1);
        after.arrived(1);
        before.end(completed(2));
        counted.end(completed(1));
        after.arrived(1);
        after.end(Outcome::Failed { kind: "x".into(), message: String::new() });
        meter.over().await;
        let measured = meter.read();
        assert_eq!((measured.started, measured.ended, measured.completed), (1, 1, 1));
        assert_eq!((measured.output_tokens, measured.prompt_tokens), (3, 20));
        assert_eq!((measured.short, measured.seconds()), (1, 1.0));
        assert!(measured.failed.is_empty());
    }
}
