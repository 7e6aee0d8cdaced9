//! Closed-loop and open-loop load on one server. In an open loop requests are due independent of responses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::{BenchClient, CompletionRequest, GenerationSettings};
use crate::error::{BenchError, ErrorKind};
use crate::measure::{Meter, Quota, RoundMeasurements};
use crate::outcome::RequestOutcome;
use crate::workload::{Arrivals, BenchWorkload, PromptKey};

/// Consecutive failures after which a round is aborted.
const FAILURES_MAX: u32 = 20;
/// Delay of a closed-loop stream after a request that did not complete, so that refusals do not become a busy
/// loop.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Capacity of the channel of due arrivals. A full channel does not distort latencies: they count from the
/// due time.
const DUE_QUEUE_MAX: usize = 1024;

/// Load pattern of a round: closed or open loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LoadPattern {
    /// Closed loop: each stream sends its next request when the previous one has ended.
    Closed {
        /// Number of concurrent streams.
        streams: u32,
    },
    /// Open loop: requests are sent when they are due.
    Open {
        /// Arrival process.
        arrivals: Arrivals,
        /// Maximum requests in flight; further ones wait, and their queueing time counts.
        in_flight_max: usize,
    },
}

impl LoadPattern {
    /// Returns a short description for the progress bar.
    pub fn short(self) -> String {
        match self {
            Self::Closed { streams: 1 } => "1 stream".to_owned(),
            Self::Closed { streams } => format!("{streams} streams"),
            Self::Open { arrivals: Arrivals::Poisson(rate) | Arrivals::Constant(rate), .. } => {
                format!("{rate} requests/s")
            }
            Self::Open { arrivals: Arrivals::Trace { .. }, .. } => "replay".to_owned(),
        }
    }
}

/// Server, workload and meter of a round.
#[derive(Debug)]
pub struct BenchRound {
    /// Client of the server under test.
    pub client: Arc<BenchClient>,
    /// Requests to send.
    pub workload: Arc<BenchWorkload>,
    /// Key of the prompts.
    pub key: PromptKey,
    /// Sampling and stop settings of the requests.
    pub settings: GenerationSettings,
    /// Timeout of a request.
    pub timeout: Duration,
    /// Meter that records the measurements.
    pub meter: Meter,
}

impl BenchRound {
    /// Sends request `index`, due at `due`, and waits for its end. Returns whether it completed.
    async fn send(&self, index: u64, due: Instant) -> bool {
        let plan = self.workload.plan(index);
        let prompt = self.workload.prompt(index, self.key);
        let tenant = &self.workload.tenants[plan.tenant];
        let call = CompletionRequest { prompt, output_tokens: plan.output_tokens, tenant };
        let mut in_flight =
            self.meter.start_request(index, due, plan.tenant, plan.output_tokens, plan.prompt_tokens);
        let result =
            tokio::time::timeout(self.timeout, self.client.generate(&call, self.settings, &mut in_flight))
                .await;
        let outcome = result.unwrap_or_else(|_| {
            RequestOutcome::failed("timeout", format!("not done within {} s", self.timeout.as_secs_f64()))
        });
        let completed = matches!(outcome, RequestOutcome::Completed(_));
        in_flight.finish(outcome);
        completed
    }
}

/// Runs a round until its last measured request has ended. The load stays the same until then: further
/// requests of the workload are sent, and cancelled at the end.
///
/// # Errors
/// Too many consecutive requests failed.
pub async fn run(
    round: Arc<BenchRound>,
    load: LoadPattern,
    quota: Quota,
) -> Result<RoundMeasurements, BenchError> {
    match load {
        LoadPattern::Closed { streams } => closed(&round, streams, quota).await,
        LoadPattern::Open { arrivals, in_flight_max } => open(&round, arrivals, in_flight_max, quota).await,
    }
}

async fn closed(
    round: &Arc<BenchRound>,
    streams: u32,
    quota: Quota,
) -> Result<RoundMeasurements, BenchError> {
    let next = Arc::new(AtomicU64::new(0));
    let give_up = Arc::new(Notify::new());
    let mut clients = JoinSet::new();
    for _ in 0..streams {
        let (round, next, give_up) = (Arc::clone(round), Arc::clone(&next), Arc::clone(&give_up));
        clients.spawn(async move {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if !round.send(index, Instant::now()).await {
                    if round.meter.consecutive_failures() >= FAILURES_MAX {
                        give_up.notify_one();
                    }
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        });
    }
    tokio::select! {
        () = round.meter.closed() => {}
        () = duration_elapsed(&round.meter, quota) => {}
        () = give_up.notified() => return Err(too_many_failures(&round.meter.finish())),
    }
    let measured = round.meter.finish();
    clients.shutdown().await;
    Ok(measured)
}

/// Stops the measurement after a quota of time; returns when the measured requests have ended. Never returns
/// for a quota of requests.
async fn duration_elapsed(meter: &Meter, quota: Quota) {
    let Quota::Duration(time) = quota else { return std::future::pending().await };
    loop {
        let wait = match meter.opened() {
            Some(opened) => (opened + time).saturating_duration_since(Instant::now()),
            None => RETRY_DELAY,
        };
        if wait.is_zero() {
            meter.stop_admitting();
            return meter.closed().await;
        }
        tokio::time::sleep(wait).await;
    }
}

async fn open(
    round: &Arc<BenchRound>,
    arrivals: Arrivals,
    in_flight_max: usize,
    quota: Quota,
) -> Result<RoundMeasurements, BenchError> {
    let start = Instant::now() + Duration::from_millis(20);
    let mut due = pace(Arc::clone(&round.workload), arrivals, start);
    let slots = Arc::new(Semaphore::new(in_flight_max));
    let mut in_flight = JoinSet::new();
    let mut index = 0u64;
    let mut closed = std::pin::pin!(round.meter.closed());
    let mut duration_elapsed = std::pin::pin!(duration_elapsed(&round.meter, quota));
    loop {
        tokio::select! {
            () = &mut closed => break,
            () = &mut duration_elapsed => break,
            Some(_) = in_flight.join_next() => {
                if round.meter.consecutive_failures() >= FAILURES_MAX {
                    return Err(too_many_failures(&round.meter.finish()));
                }
            }
            at = due.recv() => {
                let Some(at) = at else {
                    // End of the trace: its last requests end the measurement.
                    while in_flight.join_next().await.is_some() {}
                    round.meter.stop_admitting();
                    break;
                };
                let permit = match Arc::clone(&slots).try_acquire_owned() {
                    Ok(permit) => permit,
                    Err(_) => {
                        let Ok(permit) = Arc::clone(&slots).acquire_owned().await else { break };
                        round.meter.record_slot_wait(at);
                        permit
                    }
                };
                let round = Arc::clone(round);
                in_flight.spawn(async move {
                    round.send(index, at).await;
                    drop(permit);
                });
                index += 1;
            }
        }
    }
    let measured = round.meter.finish();
    drop(due);
    in_flight.shutdown().await;
    Ok(measured)
}

/// Sends the due time of each request at that time.
#[cfg(not(test))]
fn pace(workload: Arc<BenchWorkload>, arrivals: Arrivals, start: Instant) -> mpsc::Receiver<Instant> {
    let (due, receiver) = mpsc::channel(DUE_QUEUE_MAX);
    // Tokio's timers have a resolution of 1 ms, about the duration of a step; thread sleep is ten times as
    // precise.
    std::thread::spawn(move || {
        for after in workload.arrivals(arrivals) {
            let Some(at) = start.checked_add(after) else { return };
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if due.blocking_send(at).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Sends the due time of each request at that time, on Tokio's clock, which tests pause and advance.
#[cfg(test)]
fn pace(workload: Arc<BenchWorkload>, arrivals: Arrivals, start: Instant) -> mpsc::Receiver<Instant> {
    let (due, receiver) = mpsc::channel(DUE_QUEUE_MAX);
    tokio::spawn(async move {
        for after in workload.arrivals(arrivals) {
            let at = start + after;
            tokio::time::sleep_until(at).await;
            if due.send(at).await.is_err() {
                return;
            }
        }
    });
    receiver
}

fn too_many_failures(measured: &RoundMeasurements) -> BenchError {
    let (kind, message) = measured.last_failure.clone().unwrap_or_default();
    let exit = if matches!(kind.as_str(), "connect" | "UNAVAILABLE") {
        ErrorKind::Unavailable
    } else {
        ErrorKind::Failure
    };
    BenchError::new(
        exit,
        format!("gave up after {FAILURES_MAX} failures in a row; the last one: {kind}: {message}"),
    )
}
