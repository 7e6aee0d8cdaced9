//! Sends a workload to one server: in a closed loop, where a request follows the end of another, or an open one, where requests are due
//! whether or not the server keeps up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::client::{Call, Client, Manner, Outcome};
use super::measure::{Measured, Meter, Quota};
use super::workload::{Arrivals, PromptKey, Workload};
use crate::exit::{Exit, Failure};

/// Failures in a row after which a round is given up: the server is gone, or refuses the very kind of request.
const FAILURES_MAX: u32 = 20;
/// What a stream of a closed loop waits after a request that did not run, so that a server that refuses is not asked in a frenzy.
const PAUSE: Duration = Duration::from_millis(100);
/// Arrivals that may be due and not yet taken up; the pacer keeps to its times whatever the limit, as it is the due time that counts.
const DUE_MAX: usize = 1024;

/// How requests follow one another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Load {
    /// So many streams, each of which sends its next request at the end of the one before.
    Closed {
        /// Streams.
        streams: u32,
    },
    /// Requests when they are due.
    Open {
        /// When.
        arrivals: Arrivals,
        /// Most of them in flight; further ones wait, and their time counts.
        in_flight_max: usize,
    },
}

impl Load {
    /// In a few words.
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

/// Everything about a round but its load.
#[derive(Debug)]
pub struct Round {
    /// Whom to ask.
    pub client: Arc<Client>,
    /// What.
    pub workload: Arc<Workload>,
    /// With which prompts.
    pub key: PromptKey,
    /// How.
    pub manner: Manner,
    /// Longest time for one request.
    pub timeout: Duration,
    /// Where the figures go.
    pub meter: Meter,
}

impl Round {
    /// Sends request number `place`, due at `due`, and waits for its end. Whether it ran.
    async fn send(&self, place: u64, due: Instant) -> bool {
        let plan = self.workload.plan(place);
        let prompt = self.workload.prompt(place, self.key);
        let tenant = &self.workload.tenants[plan.tenant];
        let call = Call { prompt, output_tokens: plan.output_tokens, tenant };
        let mut flight = self.meter.begin(place, due, plan.tenant, plan.output_tokens, plan.prompt_tokens);
        let answer =
            tokio::time::timeout(self.timeout, self.client.generate(&call, self.manner, &mut flight)).await;
        let outcome = answer.unwrap_or_else(|_| {
            Outcome::failed("timeout", format!("not done within {} s", self.timeout.as_secs_f64()))
        });
        let ran = matches!(outcome, Outcome::Completed(_));
        flight.end(outcome);
        ran
    }
}

/// Runs a round to the end of its last request that counts. The load stays the same until then: further requests of the workload take
/// the places of those that end, or come when they are due, and are withdrawn at the end.
///
/// # Errors
/// Too many failures in a row.
pub async fn run(round: Arc<Round>, load: Load, quota: Quota) -> Result<Measured, Failure> {
    match load {
        Load::Closed { streams } => closed(&round, streams, quota).await,
        Load::Open { arrivals, in_flight_max } => open(&round, arrivals, in_flight_max, quota).await,
    }
}

async fn closed(round: &Arc<Round>, streams: u32, quota: Quota) -> Result<Measured, Failure> {
    let next = Arc::new(AtomicU64::new(0));
    let broken = Arc::new(Notify::new());
    let mut clients = JoinSet::new();
    for _ in 0..streams {
        let (round, next, broken) = (Arc::clone(round), Arc::clone(&next), Arc::clone(&broken));
        clients.spawn(async move {
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed);
                if !round.send(place, Instant::now()).await {
                    if round.meter.failures_in_a_row() >= FAILURES_MAX {
                        broken.notify_one();
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        });
    }
    tokio::select! {
        () = round.meter.over() => {}
        () = time_is_up(&round.meter, quota) => {}
        () = broken.notified() => return Err(gave_up(&round.meter.read())),
    }
    let measured = round.meter.read();
    clients.shutdown().await;
    Ok(measured)
}

/// Where the quota is a time, ends it; returns when what was begun in it has ended.
async fn time_is_up(meter: &Meter, quota: Quota) {
    let Quota::Duration(time) = quota else { return std::future::pending().await };
    loop {
        let wait = match meter.opened() {
            Some(opened) => (opened + time).saturating_duration_since(Instant::now()),
            None => PAUSE,
        };
        if wait.is_zero() {
            meter.stop_admitting();
            return meter.over().await;
        }
        tokio::time::sleep(wait).await;
    }
}

async fn open(
    round: &Arc<Round>,
    arrivals: Arrivals,
    in_flight_max: usize,
    quota: Quota,
) -> Result<Measured, Failure> {
    let start = Instant::now() + Duration::from_millis(20);
    let mut due = pace(Arc::clone(&round.workload), arrivals, start);
    let places = Arc::new(Semaphore::new(in_flight_max));
    let mut in_flight = JoinSet::new();
    let mut place = 0u64;
    let over = round.meter.over();
    let mut over = std::pin::pin!(over);
    let mut time_is_up = std::pin::pin!(time_is_up(&round.meter, quota));
    loop {
        tokio::select! {
            () = &mut over => break,
            () = &mut time_is_up => break,
            Some(_) = in_flight.join_next() => {
                if round.meter.failures_in_a_row() >= FAILURES_MAX {
                    return Err(gave_up(&round.meter.read()));
                }
            }
            at = due.recv() => {
                let Some(at) = at else {
                    // The trace has ended, and with its last requests so does what counts.
                    while in_flight.join_next().await.is_some() {}
                    round.meter.stop_admitting();
                    break;
                };
                let permit = match Arc::clone(&places).try_acquire_owned() {
                    Ok(permit) => permit,
                    Err(_) => {
                        let Ok(permit) = Arc::clone(&places).acquire_owned().await else { break };
                        round.meter.held_up(at);
                        permit
                    }
                };
                let round = Arc::clone(round);
                in_flight.spawn(async move {
                    round.send(place, at).await;
                    drop(permit);
                });
                place += 1;
            }
        }
    }
    let measured = round.meter.read();
    drop(due);
    in_flight.shutdown().await;
    Ok(measured)
}

/// Says when each request is due, at that time.
#[cfg(not(test))]
fn pace(workload: Arc<Workload>, arrivals: Arrivals, start: Instant) -> mpsc::Receiver<Instant> {
    let (due, taken) = mpsc::channel(DUE_MAX);
    // The runtime's timers are good to a millisecond, which is long beside a step; a sleeping thread is good to a tenth of that.
    std::thread::spawn(move || {
        for after in workload.arrivals(arrivals) {
            let Some(at) = start.checked_add(after) else { return };
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if due.blocking_send(at).is_err() {
                return;
            }
        }
    });
    taken
}

/// The same on the runtime's clock, which tests stop and move.
#[cfg(test)]
fn pace(workload: Arc<Workload>, arrivals: Arrivals, start: Instant) -> mpsc::Receiver<Instant> {
    let (due, taken) = mpsc::channel(DUE_MAX);
    tokio::spawn(async move {
        for after in workload.arrivals(arrivals) {
            let at = start + after;
            tokio::time::sleep_until(at).await;
            if due.send(at).await.is_err() {
                return;
            }
        }
    });
    taken
}

fn gave_up(measured: &Measured) -> Failure {
    let (kind, message) = measured.last_failure.clone().unwrap_or_default();
    let exit =
        if matches!(kind.as_str(), "connect" | "UNAVAILABLE") { Exit::Unavailable } else { Exit::Failure };
    Failure::new(
        exit,
        format!("gave up after {FAILURES_MAX} failures in a row; the last one: {kind}: {message}"),
    )
}
