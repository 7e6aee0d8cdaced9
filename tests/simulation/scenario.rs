use std::ops::Range;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

pub const WORKERS: usize = 3;
pub const ROUTERS: usize = 2;
const CALLS: usize = 24;
/// While calls begin and things break.
pub const UNREST: Duration = Duration::from_secs(6);

/// What happens to the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A worker dies.
    Crash(usize),
    /// It is started again, crashed or drained.
    Start(usize),
    /// A worker is told to drain.
    Drain(usize),
    /// Nothing gets through between a router and a worker; both find out by themselves.
    Partition(usize, usize),
    /// Everything gets through again.
    Repair(usize, usize),
    /// What is sent between a router and a worker is kept.
    Hold(usize, usize),
    /// It arrives, late.
    Release(usize, usize),
    /// A router is told to drain.
    DrainRouter(usize),
    /// It is started again.
    StartRouter(usize),
}

/// A client's call.
#[derive(Debug, Clone)]
pub struct Call {
    pub id: usize,
    pub at: Duration,
    pub router: usize,
    pub prompt: Vec<u32>,
    pub n: u32,
    pub max_tokens: u32,
    pub seed: u64,
    /// Tokens that end it, beside the model's own.
    pub stop_ids: Vec<u32>,
    /// It goes on past the model's own.
    pub ignore_eos: bool,
    /// Messages after which the client leaves.
    pub leaves_after: Option<usize>,
}

/// One run: everything that chance decides, decided beforehand.
#[derive(Debug, Clone)]
pub struct Script {
    pub calls: Vec<Call>,
    /// In order.
    pub events: Vec<(Duration, Event)>,
}

fn between(random: &mut StdRng, millis: Range<u64>) -> Duration {
    Duration::from_millis(random.random_range(millis))
}

impl Script {
    pub fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let unrest = UNREST.as_millis() as u64;
        let calls = (0..CALLS).map(|id| Call {
            id,
            at: between(&mut random, 500..unrest),
            router: random.random_range(0..ROUTERS),
            // Few beginnings, so that prompts share prefixes.
            prompt: {
                let (text, len) = (random.random_range(0..4u32), random.random_range(1..50u32));
                (0..len).map(|i| (i * i + text * 41) % 250).collect()
            },
            n: random.random_range(1..=2),
            max_tokens: random.random_range(5..100),
            seed: random.random(),
            stop_ids: (0..random.random_range(0..4)).map(|_| random.random_range(0..250)).collect(),
            ignore_eos: random.random(),
            leaves_after: random.random_bool(0.15).then(|| random.random_range(0..20)),
        });
        let calls = calls.collect();
        let mut events = Vec::new();
        // Each worker, each router and each link has its own row of misfortunes.
        for worker in 0..WORKERS {
            let mut at = between(&mut random, 500..3000);
            while at < UNREST {
                events.push((at, if random.random() { Event::Crash(worker) } else { Event::Drain(worker) }));
                at += between(&mut random, 200..1200);
                events.push((at, Event::Start(worker)));
                at += between(&mut random, 800..4000);
            }
        }
        for router in 0..ROUTERS {
            for worker in 0..WORKERS {
                let mut at = between(&mut random, 500..6000);
                while at < UNREST {
                    let long = between(&mut random, 20..1500);
                    let (begin, end) = match random.random() {
                        true => (Event::Partition(router, worker), Event::Repair(router, worker)),
                        false => (Event::Hold(router, worker), Event::Release(router, worker)),
                    };
                    events.extend([(at, begin), (at + long, end)]);
                    at += long + between(&mut random, 1000..6000);
                }
            }
            if random.random_bool(0.3) {
                let at = between(&mut random, 1000..unrest);
                // Late enough for its streams to end, for what is started again was told to stop and is not killed.
                let again = UNREST + between(&mut random, 1000..3000);
                events.extend([(at, Event::DrainRouter(router)), (again, Event::StartRouter(router))]);
            }
        }
        events.sort_by_key(|(at, _)| *at);
        Self { calls, events }
    }
}
