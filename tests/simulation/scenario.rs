//! Scenario of a simulation run: client calls and fault events, drawn from a seed.

use std::ops::Range;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

pub const WORKERS: usize = 3;
pub const ROUTERS: usize = 2;
const CALLS: usize = 24;
/// Period in which calls start and faults are injected.
pub const FAULT_WINDOW: Duration = Duration::from_secs(6);

/// Fault or repair of the cluster. Fields are indices: worker, router, or router and worker of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEvent {
    /// Crash of a worker.
    Crash(usize),
    /// Restart of a crashed or draining worker.
    Start(usize),
    /// Drain of a worker.
    Drain(usize),
    /// Partition of a link: messages are dropped without an error on either side.
    Partition(usize, usize),
    /// End of a partition.
    Repair(usize, usize),
    /// Hold of a link: messages are buffered.
    Hold(usize, usize),
    /// End of a hold: buffered messages are delivered.
    Release(usize, usize),
    /// Drain of a router.
    DrainRouter(usize),
    /// Restart of a drained router.
    StartRouter(usize),
}

/// Call of a client, at time `at` to router `router` first.
#[derive(Debug, Clone)]
pub struct ClientCall {
    pub id: usize,
    pub at: Duration,
    pub router: usize,
    pub prompt: Vec<u32>,
    pub n: u32,
    pub max_tokens: u32,
    pub seed: u64,
    /// Stop token ids beside the EOS tokens.
    pub stop_ids: Vec<u32>,
    /// Ignores the EOS tokens.
    pub ignore_eos: bool,
    /// Alternatives to each prompt token, if the prompt's log probabilities are requested.
    pub prompt_logprobs: Option<u32>,
    /// Number of messages after which the client cancels.
    pub cancel_after: Option<usize>,
}

/// Calls and faults of one run.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub calls: Vec<ClientCall>,
    /// Simulated times and events, ascending.
    pub events: Vec<(Duration, FaultEvent)>,
}

/// Draws a duration from a range of milliseconds.
fn between(random: &mut StdRng, millis: Range<u64>) -> Duration {
    Duration::from_millis(random.random_range(millis))
}

impl Scenario {
    /// Draws a scenario from a seed.
    pub fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let window_ms = FAULT_WINDOW.as_millis() as u64;
        let calls = (0..CALLS).map(|id| ClientCall {
            id,
            at: between(&mut random, 500..window_ms),
            router: random.random_range(0..ROUTERS),
            // One of four texts, so that prompts share prefixes.
            prompt: {
                let (text, len) = (random.random_range(0..4u32), random.random_range(1..50u32));
                (0..len).map(|i| (i * i + text * 41) % 250).collect()
            },
            n: random.random_range(1..=2),
            max_tokens: random.random_range(5..100),
            seed: random.random(),
            stop_ids: (0..random.random_range(0..4)).map(|_| random.random_range(0..250)).collect(),
            ignore_eos: random.random(),
            prompt_logprobs: random.random_bool(0.4).then(|| random.random_range(0..=20)),
            cancel_after: random.random_bool(0.15).then(|| random.random_range(0..20)),
        });
        let calls = calls.collect();
        let mut events = Vec::new();
        // Each worker, router and link has an independent sequence of faults.
        for worker in 0..WORKERS {
            let mut at = between(&mut random, 500..3000);
            while at < FAULT_WINDOW {
                events.push((
                    at,
                    if random.random() { FaultEvent::Crash(worker) } else { FaultEvent::Drain(worker) },
                ));
                at += between(&mut random, 200..1200);
                events.push((at, FaultEvent::Start(worker)));
                at += between(&mut random, 800..4000);
            }
        }
        for router in 0..ROUTERS {
            for worker in 0..WORKERS {
                let mut at = between(&mut random, 500..6000);
                while at < FAULT_WINDOW {
                    let long = between(&mut random, 20..1500);
                    let (begin, end) = match random.random() {
                        true => (FaultEvent::Partition(router, worker), FaultEvent::Repair(router, worker)),
                        false => (FaultEvent::Hold(router, worker), FaultEvent::Release(router, worker)),
                    };
                    events.extend([(at, begin), (at + long, end)]);
                    at += long + between(&mut random, 1000..6000);
                }
            }
            if random.random_bool(0.3) {
                let at = between(&mut random, 1000..window_ms);
                // Late enough for its streams to end, because turmoil's `bounce` ends the previous instance.
                let again = FAULT_WINDOW + between(&mut random, 1000..3000);
                events.extend([
                    (at, FaultEvent::DrainRouter(router)),
                    (again, FaultEvent::StartRouter(router)),
                ]);
            }
        }
        events.sort_by_key(|(at, _)| *at);
        Self { calls, events }
    }
}
