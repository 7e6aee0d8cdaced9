//! Clusters on a virtual clock: the router's own queue, ledgers, prefix index and placement, and the worker's own
//! scheduler and grants. Only the devices and the network are simulated.

mod request;
mod router;
mod worker;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use inflight_router_core::Policy;
use inflight_worker_core::{CommitError, DeviceProfile, Limits, Time};

pub use request::{ClusterRequest, MooncakeError, conversations, read_mooncake};
use router::Router;
use worker::{News, Worker};

/// A cluster.
#[derive(Debug, Clone, Copy)]
pub struct ClusterOptions {
    /// Routers; requests reach one after the other. They know nothing of each other.
    pub routers: usize,
    /// Workers.
    pub workers: usize,
    /// What each worker computes on.
    pub profile: DeviceProfile,
    /// What bounds each worker's scheduler.
    pub limits: Limits,
    /// Sequences beyond the running ones that routers may have in flight at a worker.
    pub queue_ahead: u32,
    /// One way between a router and a worker.
    pub hop: Duration,
    /// Makes the routers' policies, from a seed of each.
    pub policy: fn(u64) -> Box<dyn Policy>,
}

impl ClusterOptions {
    /// One router and so many workers, each with the pools of its profile.
    pub fn new(workers: usize, profile: DeviceProfile, policy: fn(u64) -> Box<dyn Policy>) -> Self {
        let block_tokens = 64;
        let limits = Limits {
            host_blocks: profile.host_tokens / block_tokens,
            waiting_max: 4096,
            step_target: Some(Duration::from_millis(50)),
            ..Limits::new(block_tokens, profile.pool_tokens / block_tokens, 256, 2048)
        };
        Self {
            routers: 1,
            workers,
            profile,
            limits,
            queue_ahead: 32,
            hop: Duration::from_micros(200),
            policy,
        }
    }
}

/// A simulation that can't go on.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A scheduler did not recognise what it had planned: a fault of the simulation.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Requests are left, but nothing is under way and nothing will arrive.
    #[error("{0} requests are left and nothing is under way: the cluster makes no progress")]
    Stalled(usize),
    /// A request that no queue or worker takes.
    #[error("request {0} is refused: {1}")]
    Refused(usize, String),
    /// A router's index of a worker's cache and that cache differ although nothing is under way between them.
    #[error("the index of router {router} differs from what worker {worker} has, in {blocks} blocks")]
    Index {
        /// Which router.
        router: usize,
        /// Which worker.
        worker: usize,
        /// Blocks that only one of them knows.
        blocks: usize,
    },
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Where it ran.
    pub worker: usize,
    /// When it was handed over.
    pub handed: Time,
    /// Tokens of its prompt that the router expected to be cached there.
    pub expected_tokens: u32,
    /// Tokens of its prompt that were found in the cache.
    pub cached_tokens: u32,
    /// When its first token was there.
    pub first_token: Time,
    /// When it was over.
    pub ended: Time,
}

/// What came of a simulation.
#[derive(Debug)]
pub struct ClusterReport {
    /// By request.
    pub placed: Vec<Placed>,
    /// Seconds in which each worker's device computed.
    pub busy_s: Vec<f64>,
    /// When all was over.
    pub makespan: Time,
}

impl ClusterReport {
    /// Seconds from each request's arrival to its first token.
    pub fn times_to_first_token(&self, requests: &[ClusterRequest]) -> Vec<f64> {
        let pairs = self.placed.iter().zip(requests);
        pairs.map(|(placed, request)| placed.first_token.since(request.arrival).as_secs_f64()).collect()
    }

    /// Share of the prompts' tokens that were found in caches.
    pub fn hit_rate(&self, requests: &[ClusterRequest]) -> f64 {
        let cached: u64 = self.placed.iter().map(|placed| u64::from(placed.cached_tokens)).sum();
        let tokens: u64 = requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
        cached as f64 / tokens.max(1) as f64
    }

    /// The most over the mean of what the workers were given, each request weighed.
    pub fn imbalance(&self, weigh: impl Fn(usize, &Placed) -> f64) -> f64 {
        let mut given = vec![0.0; self.busy_s.len()];
        for (index, placed) in self.placed.iter().enumerate() {
            given[placed.worker] += weigh(index, placed);
        }
        let mean = given.iter().sum::<f64>() / given.len().max(1) as f64;
        given.iter().fold(0.0, |most: f64, one| most.max(*one)) / mean
    }
}

/// What happens, and where.
#[derive(Debug)]
enum Event {
    /// A request reaches a worker.
    Submit { worker: usize, router: usize, request: usize },
    /// News of a worker reach a router.
    News { worker: usize, router: usize, news: Box<News> },
    /// A router's wish for a snapshot reaches a worker.
    Resync { worker: usize, router: usize },
    /// A worker's step or copy has ended.
    Device { worker: usize },
}

#[derive(Debug)]
struct Scheduled {
    at: Time,
    /// Breaks ties in the order of scheduling.
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[derive(Debug, Default)]
struct Agenda {
    events: BinaryHeap<Reverse<Scheduled>>,
    number: u64,
}

impl Agenda {
    fn add(&mut self, at: Time, event: Event) {
        self.number += 1;
        self.events.push(Reverse(Scheduled { at, number: self.number, event }));
    }
}

/// Runs requests, sorted by arrival, to their ends.
///
/// # Errors
/// [`ClusterError`].
pub fn simulate(
    options: &ClusterOptions,
    requests: &[ClusterRequest],
) -> Result<ClusterReport, ClusterError> {
    let mut agenda = Agenda::default();
    let mut routers: Vec<Router> = (0..options.routers).map(|nth| Router::new(options, nth)).collect();
    let mut workers: Vec<Worker> = (0..options.workers).map(|_| Worker::new(options)).collect();
    for (worker, node) in workers.iter_mut().enumerate() {
        for router in 0..options.routers {
            let news = node.greet(router);
            agenda.add(Time::ZERO, Event::News { worker, router, news: Box::new(news) });
        }
    }
    let mut placed: Vec<Option<Placed>> = vec![None; requests.len()];
    let mut arrivals = requests.iter().enumerate().peekable();
    let (mut now, mut left) = (Time::ZERO, requests.len());
    loop {
        let arrival = arrivals.peek().map(|(_, request)| request.arrival);
        let next = agenda.events.peek().map(|Reverse(scheduled)| scheduled.at);
        let mut touched = None;
        match (arrival, next) {
            (Some(arrival), next) if next.is_none_or(|next| arrival <= next) => {
                now = now.max(arrival);
                let Some((index, request)) = arrivals.next() else { break };
                let router = index % options.routers;
                routers[router].arrive(index, request, now)?;
                touched = Some(router);
            }
            (_, Some(_)) => {
                let Some(Reverse(Scheduled { at, event, .. })) = agenda.events.pop() else { break };
                now = now.max(at);
                match event {
                    Event::Submit { worker, router, request } => {
                        let node = &mut workers[worker];
                        node.submit(router, request, &requests[request], now)?;
                        turn(worker, node, requests, options, &mut agenda, now, &mut placed, &mut left)?;
                    }
                    Event::Resync { worker, router } => {
                        let news = Box::new(workers[worker].greet(router));
                        agenda.add(now.after(options.hop), Event::News { worker, router, news });
                    }
                    Event::Device { worker } => {
                        let node = &mut workers[worker];
                        turn(worker, node, requests, options, &mut agenda, now, &mut placed, &mut left)?;
                    }
                    Event::News { worker, router, news } => {
                        if routers[router].hear(worker, &news) {
                            agenda.add(now.after(options.hop), Event::Resync { worker, router });
                        }
                        touched = Some(router);
                    }
                }
            }
            _ => break,
        }
        if let Some(router) = touched {
            for handed in routers[router].pump(requests, now) {
                let worker = handed.worker;
                placed[handed.request] = Some(Placed {
                    worker,
                    handed: now,
                    expected_tokens: handed.expected_tokens,
                    cached_tokens: 0,
                    first_token: Time::ZERO,
                    ended: Time::ZERO,
                });
                let submit = Event::Submit { worker, router, request: handed.request };
                agenda.add(now.after(options.hop), submit);
            }
        }
    }
    if left > 0 {
        return Err(ClusterError::Stalled(left));
    }
    for (number, router) in routers.iter().enumerate() {
        for (worker, node) in workers.iter().enumerate() {
            let blocks = router.index_differs(worker, node);
            if blocks > 0 {
                return Err(ClusterError::Index { router: number, worker, blocks });
            }
        }
    }
    Ok(ClusterReport {
        placed: placed.into_iter().flatten().collect(),
        busy_s: workers.iter().map(Worker::busy_s).collect(),
        makespan: now,
    })
}

/// Lets a worker do what it can do now, and sends its news on their way.
fn turn(
    worker: usize,
    node: &mut Worker,
    requests: &[ClusterRequest],
    options: &ClusterOptions,
    agenda: &mut Agenda,
    now: Time,
    placed: &mut [Option<Placed>],
    left: &mut usize,
) -> Result<(), ClusterError> {
    node.turn(requests, now)?;
    for (request, progress) in node.drain_progress() {
        let Some(placed) = &mut placed[request] else { continue };
        match progress {
            worker::Progress::Cached(tokens) => placed.cached_tokens = tokens,
            worker::Progress::FirstToken => placed.first_token = now,
            worker::Progress::Ended => {
                placed.ended = now;
                *left -= 1;
            }
        }
    }
    for at in node.drain_due() {
        agenda.add(at, Event::Device { worker });
    }
    if let Some(all) = node.news() {
        for (router, news) in all.into_iter().enumerate() {
            agenda.add(now.after(options.hop), Event::News { worker, router, news: Box::new(news) });
        }
    }
    Ok(())
}
