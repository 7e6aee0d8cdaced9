//! Discrete-event simulation of clusters: the real dispatcher of routers, and the real scheduler and grants of
//! workers. Only devices, network and clients are simulated.

mod charge;
mod error;
mod options;
mod request;
mod router;
mod worker;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use inflight_router_core::{Dispatcher, Submission, WorkerUpdate};
use inflight_worker_core::Time;

pub use charge::Charge;
pub use error::ClusterError;
pub use options::ClusterOptions;
pub use request::{ClusterRequest, ClusterTenant, MooncakeError, conversations, read_mooncake};
use router::{RouterMessage, SimulatedRouter};
use worker::SimulatedWorker;

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedRequest {
    /// Index of the worker that ran it.
    pub worker: usize,
    /// Time of dispatch.
    pub dispatched: Time,
    /// Prompt tokens that the router expected in the worker's cache.
    pub expected_tokens: u32,
    /// Prompt tokens found in the worker's cache.
    pub cached_tokens: u32,
    /// Time of the first token.
    pub first_token: Time,
    /// Time of the end.
    pub ended: Time,
}

/// Result of a cluster simulation.
#[derive(Debug)]
pub struct ClusterReport {
    /// Outcomes, by request.
    pub placed: Vec<PlacedRequest>,
    /// Busy time of each worker's device in seconds.
    pub busy_s: Vec<f64>,
    /// Time at which the last event happened.
    pub makespan: Time,
    /// Share of the time of all steps and slots in which a slot, and blocks for any request, were free while requests waited at a router and
    /// none in the worker.
    pub idle_slots: f64,
    /// Service charged by each worker, in the order of time.
    pub charges: Vec<Vec<Charge>>,
}

impl ClusterReport {
    /// Returns the TTFT of each request in seconds.
    pub fn times_to_first_token(&self, requests: &[ClusterRequest]) -> Vec<f64> {
        let pairs = self.placed.iter().zip(requests);
        pairs.map(|(placed, request)| placed.first_token.since(request.arrival).as_secs_f64()).collect()
    }

    /// Returns the prefix-cache hit rate: the share of prompt tokens found in caches.
    pub fn hit_rate(&self, requests: &[ClusterRequest]) -> f64 {
        let cached: u64 = self.placed.iter().map(|placed| u64::from(placed.cached_tokens)).sum();
        let tokens: u64 = requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
        cached as f64 / tokens.max(1) as f64
    }

    /// Returns the maximum over the mean load of the workers, with `cost` as the load of a request.
    pub fn imbalance(&self, cost: impl Fn(usize, &PlacedRequest) -> f64) -> f64 {
        let mut loads = vec![0.0; self.busy_s.len()];
        for (index, placed) in self.placed.iter().enumerate() {
            loads[placed.worker] += cost(index, placed);
        }
        let mean = loads.iter().sum::<f64>() / loads.len().max(1) as f64;
        loads.iter().fold(0.0, |max: f64, load| max.max(*load)) / mean
    }
}

/// Event of a cluster simulation.
#[derive(Debug)]
enum ClusterEvent {
    /// A submission arrives at a worker.
    Submit { worker: usize, router: usize, request: usize, submission: Box<Submission> },
    /// A router's word on whether requests wait arrives at a worker.
    Backlog { worker: usize, router: usize, waiting: bool },
    /// An update of a worker arrives at a router.
    Update { worker: usize, router: usize, update: Box<WorkerUpdate> },
    /// A router's request for a cache snapshot arrives at a worker.
    Resync { worker: usize, router: usize },
    /// A step or copy of a worker's device completes.
    Device { worker: usize },
}

#[derive(Debug)]
struct ScheduledEvent {
    at: Time,
    /// Sequence number that breaks ties in order of insertion.
    number: u64,
    event: ClusterEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// Priority queue of future events.
#[derive(Debug, Default)]
struct EventQueue {
    events: BinaryHeap<Reverse<ScheduledEvent>>,
    number: u64,
}

impl EventQueue {
    fn add(&mut self, at: Time, event: ClusterEvent) {
        self.number += 1;
        self.events.push(Reverse(ScheduledEvent { at, number: self.number, event }));
    }
}

/// Simulates requests, which must be sorted by arrival, until all have ended.
///
/// # Errors
/// [`ClusterError`].
pub fn simulate(
    options: &ClusterOptions,
    requests: &[ClusterRequest],
) -> Result<ClusterReport, ClusterError> {
    let mut queue = EventQueue::default();
    let mut routers: Vec<SimulatedRouter> =
        (0..options.routers).map(|nth| SimulatedRouter::new(options, nth)).collect();
    let mut workers: Vec<SimulatedWorker> =
        (0..options.workers).map(|_| SimulatedWorker::new(options)).collect();
    let blocks = |request: &ClusterRequest| request.prompt_tokens.div_ceil(options.limits.block_tokens()) + 1;
    let blocks_to_start = requests.iter().map(blocks).max().unwrap_or(1);
    for (worker, node) in workers.iter_mut().enumerate() {
        node.set_blocks_to_start(blocks_to_start);
        for router in 0..options.routers {
            let update = Box::new(node.snapshot_update(router));
            queue.add(Time::ZERO, ClusterEvent::Update { worker, router, update });
        }
    }
    let mut placed: Vec<Option<PlacedRequest>> = vec![None; requests.len()];
    // Requests that have arrived and not been dispatched.
    let mut queued = 0usize;
    let mut arrivals = requests.iter().enumerate().peekable();
    let (mut now, mut left) = (Time::ZERO, requests.len());
    let mut next_tick = Time::ZERO.after(Dispatcher::TICK);
    loop {
        let arrival = arrivals.peek().map(|(_, request)| request.arrival);
        let next = queue.events.peek().map(|Reverse(scheduled)| scheduled.at);
        let Some(at) = arrival.into_iter().chain(next).min() else { break };
        while next_tick <= at {
            for (number, router) in routers.iter_mut().enumerate() {
                router.tick(next_tick)?;
                queued -= deliver_messages(number, router, options, &mut queue, next_tick, &mut placed);
            }
            next_tick = next_tick.after(Dispatcher::TICK);
        }
        now = now.max(at);
        if arrival.is_some_and(|arrival| arrival <= at) {
            let Some((index, request)) = arrivals.next() else { break };
            let number = index % options.routers;
            routers[number].arrive(index, request, now)?;
            queued += 1;
            queued -= deliver_messages(number, &mut routers[number], options, &mut queue, now, &mut placed);
            continue;
        }
        let Some(Reverse(ScheduledEvent { event, .. })) = queue.events.pop() else { break };
        match event {
            ClusterEvent::Submit { worker, router, request, submission } => {
                let node = &mut workers[worker];
                node.submit(router, &submission, request, &requests[request], now)?;
                node.set_queued(queued);
                advance_worker(worker, node, requests, options, &mut queue, now, &mut placed, &mut left)?;
            }
            ClusterEvent::Resync { worker, router } => {
                let update = Box::new(workers[worker].snapshot_update(router));
                queue.add(now.after(options.hop), ClusterEvent::Update { worker, router, update });
            }
            ClusterEvent::Backlog { worker, router, waiting } => {
                let node = &mut workers[worker];
                node.backlog(router, waiting);
                node.set_queued(queued);
                advance_worker(worker, node, requests, options, &mut queue, now, &mut placed, &mut left)?;
            }
            ClusterEvent::Device { worker } => {
                let node = &mut workers[worker];
                node.set_queued(queued);
                advance_worker(worker, node, requests, options, &mut queue, now, &mut placed, &mut left)?;
            }
            ClusterEvent::Update { worker, router: number, update } => {
                routers[number].update(worker, update, now)?;
                queued -=
                    deliver_messages(number, &mut routers[number], options, &mut queue, now, &mut placed);
            }
        }
    }
    if left > 0 {
        return Err(ClusterError::Stalled(left));
    }
    for (number, router) in routers.iter().enumerate() {
        for (worker, node) in workers.iter().enumerate() {
            let blocks = router.index_difference(worker, node);
            if blocks > 0 {
                return Err(ClusterError::Index { router: number, worker, blocks });
            }
        }
    }
    Ok(ClusterReport {
        placed: placed.into_iter().flatten().collect(),
        busy_s: workers.iter().map(SimulatedWorker::busy_s).collect(),
        makespan: now,
        charges: workers.iter().map(|worker| worker.charges().to_vec()).collect(),
        idle_slots: {
            let (idle, all) = workers
                .iter()
                .map(SimulatedWorker::slot_seconds)
                .fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            idle / f64::max(all, f64::MIN_POSITIVE)
        },
    })
}

/// Sends a router's messages to its workers, and notes where requests are placed. Returns the number of requests placed.
fn deliver_messages(
    number: usize,
    router: &mut SimulatedRouter,
    options: &ClusterOptions,
    queue: &mut EventQueue,
    now: Time,
    placed: &mut [Option<PlacedRequest>],
) -> usize {
    let mut count = 0;
    for message in router.drain_messages() {
        let event = match message {
            RouterMessage::Submit { worker, request, submission, expected_tokens } => {
                count += 1;
                placed[request] = Some(PlacedRequest {
                    worker,
                    dispatched: now,
                    expected_tokens,
                    cached_tokens: 0,
                    first_token: Time::ZERO,
                    ended: Time::ZERO,
                });
                ClusterEvent::Submit { worker, router: number, request, submission }
            }
            RouterMessage::Resync { worker } => ClusterEvent::Resync { worker, router: number },
            RouterMessage::Backlog { worker, waiting } => {
                ClusterEvent::Backlog { worker, router: number, waiting }
            }
        };
        queue.add(now.after(options.hop), event);
    }
    count
}

/// Advances a worker to `now`, and schedules its device events and its updates to routers.
fn advance_worker(
    worker: usize,
    node: &mut SimulatedWorker,
    requests: &[ClusterRequest],
    options: &ClusterOptions,
    queue: &mut EventQueue,
    now: Time,
    placed: &mut [Option<PlacedRequest>],
    left: &mut usize,
) -> Result<(), ClusterError> {
    node.advance(requests, now)?;
    for (request, progress) in node.drain_progress() {
        let Some(placed) = &mut placed[request] else { continue };
        match progress {
            worker::RequestProgress::Cached(tokens) => placed.cached_tokens = tokens,
            worker::RequestProgress::FirstToken => placed.first_token = now,
            worker::RequestProgress::Ended => {
                placed.ended = now;
                *left -= 1;
            }
        }
    }
    for at in node.drain_due() {
        queue.add(at, ClusterEvent::Device { worker });
    }
    if let Some(updates) = node.take_updates() {
        for (router, update) in updates.into_iter().enumerate() {
            let update = Box::new(update);
            queue.add(now.after(options.hop), ClusterEvent::Update { worker, router, update });
        }
    }
    Ok(())
}
