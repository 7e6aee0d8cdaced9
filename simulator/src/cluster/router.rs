//! Simulated router around the real fair queue, credit ledgers, prefix indexes and placement.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use inflight_contract::Weight;
use inflight_router_core::{
    Arrival, CacheChange, Candidate, Chain, Credits, FairQueue, FairQueueOptions, Fleet, IndexStep, Ledger,
    PlacementRequest, Placer, QueueLimits, QueuePosition, SnapshotPiece, Tier, WorkerLoad,
};
use inflight_worker_core::{CacheEvent, CacheTier, Grant, Time};

use super::worker::{SimulatedWorker, WorkerUpdate};
use super::{ClusterError, ClusterOptions, ClusterRequest};

/// Only queue lane, since all workers serve one model.
const LANE: u32 = 0;

/// Request dispatched to a worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct DispatchedRequest {
    pub request: usize,
    pub worker: usize,
    pub expected_tokens: u32,
}

/// Simulated router: fair queue, credit ledgers, worker loads and prefix indexes, placement.
#[derive(Debug)]
pub(super) struct SimulatedRouter {
    queue: FairQueue<u32, usize>,
    ledgers: Vec<Ledger>,
    fleet: Fleet,
    placer: Placer,
    block_tokens: u32,
    running: BTreeMap<usize, QueuePosition<u32>>,
}

impl SimulatedRouter {
    pub fn new(options: &ClusterOptions, nth: usize) -> Self {
        let limits = QueueLimits { requests: usize::MAX, tokens: u64::MAX };
        let queue = FairQueue::new(FairQueueOptions { limits, ..FairQueueOptions::default() });
        let mut fleet = Fleet::default();
        let blocks = options.limits.blocks as usize + options.limits.host_blocks as usize;
        (0..options.workers).for_each(|worker| fleet.open(worker, options.limits.block_tokens, blocks));
        Self {
            queue,
            ledgers: (0..options.workers).map(|_| Ledger::default()).collect(),
            fleet,
            placer: Placer::new((options.policy)(0x5eed + nth as u64)),
            block_tokens: options.limits.block_tokens,
            running: BTreeMap::new(),
        }
    }

    pub fn arrive(&mut self, index: usize, request: &ClusterRequest, now: Time) -> Result<(), ClusterError> {
        let arrival = Arrival {
            tenant: "tenant",
            weight: Weight::default(),
            priority: 0,
            tokens: u64::from(request.prompt_tokens) + u64::from(request.output_tokens),
            bounds: QueueLimits { requests: usize::MAX, tokens: u64::MAX },
        };
        let admitted = self.queue.push(LANE, arrival, since_start(now), index);
        admitted.map(drop).map_err(|full| ClusterError::Refused(index, full.to_string()))
    }

    /// Applies an update of a worker. Returns true if a cache snapshot must be requested.
    pub fn apply_update(&mut self, worker: usize, update: &WorkerUpdate) -> bool {
        let Grant { sequences, blocks } = update.grant;
        self.ledgers[worker].set_grant(Credits { sequences, blocks });
        self.fleet.set_cost(worker, update.cost);
        let (ahead, stretch, decode_step) = update.load;
        self.fleet.set_load(worker, WorkerLoad::new(ahead, stretch, decode_step), update.received);
        for request in &update.ended {
            self.ledgers[worker].settle(*request as u64, 0);
            self.fleet.settle(worker, *request as u64);
            if let Some(place) = self.running.remove(request) {
                self.queue.depart(&place);
            }
        }
        if !self.placer.reads_prefixes() {
            return false;
        }
        let mut steps = Vec::new();
        if let Some(snapshot) = &update.snapshot {
            let of = |wanted| -> Vec<u64> {
                snapshot.iter().filter(|(tier, _)| *tier == wanted).map(|(_, block)| *block).collect()
            };
            let (device, host) = (of(CacheTier::Device), of(CacheTier::Host));
            let piece = SnapshotPiece { first: true, device: &device, host: &host, next: Some(update.first) };
            steps.push(self.fleet.load(worker, piece));
        }
        if !update.events.is_empty() {
            let changes = update.events.iter().map(|(tier, event)| change(*tier, *event));
            steps.push(self.fleet.apply(worker, update.first, changes));
        }
        steps.contains(&IndexStep::Lost)
    }

    /// Dispatches queued requests in queue order, with head-of-line bypass, while any fits on a worker.
    pub fn dispatch_all(&mut self, requests: &[ClusterRequest], now: Time) -> Vec<DispatchedRequest> {
        let mut dispatched = Vec::new();
        while let Some(head) = self.queue.head(LANE, since_start(now)) {
            let Some(index) = self.queue.get(&head).copied() else { break };
            if let Some(one) = self.dispatch(&head, index, &requests[index]) {
                dispatched.push(one);
                continue;
            }
            let behind = self.queue.bypass_candidates(&head, since_start(now));
            let fits = behind.into_iter().find_map(|place| {
                let index = *self.queue.get(&place)?;
                self.dispatch(&place, index, &requests[index])
            });
            let Some(one) = fits else { break };
            self.queue.count_bypass(&head);
            dispatched.push(one);
        }
        dispatched
    }

    /// Dispatches a queued request to the worker chosen by placement; `None` if it fits on no worker.
    fn dispatch(
        &mut self,
        place: &QueuePosition<u32>,
        index: usize,
        request: &ClusterRequest,
    ) -> Option<DispatchedRequest> {
        let need = Credits { sequences: 1, blocks: request.prompt_tokens.div_ceil(self.block_tokens) + 1 };
        let mut candidates: Vec<Candidate> = self
            .ledgers
            .iter()
            .enumerate()
            .map(|(worker, ledger)| Candidate {
                worker,
                grant: ledger.grant(),
                used: ledger.used(),
                need,
                ..Candidate::default()
            })
            .collect();
        if !candidates.iter().any(Candidate::has_room) {
            return None;
        }
        let chains: Vec<Chain> = match self.placer.reads_prefixes() {
            true => vec![Chain::of_names(
                request.hashes(self.block_tokens).map(|hash| hash.short()),
                self.block_tokens,
            )],
            false => Vec::new(),
        };
        for candidate in candidates.iter_mut().filter(|candidate| candidate.has_room()) {
            candidate.estimate = self.fleet.estimate(candidate.worker, request.prompt_tokens, &chains);
        }
        let ask = PlacementRequest {
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens.min(256),
        };
        let worker = self.placer.choose(&ask, &candidates)?;
        let cost = u64::from(request.prompt_tokens);
        self.queue.take(place, cost)?;
        self.queue.settle(place, cost);
        let estimate = candidates[worker].estimate;
        self.fleet.route(worker, index as u64, request.prompt_tokens, &chains, &estimate);
        self.ledgers[worker].charge(index as u64, 1, need.blocks);
        self.running.insert(index, *place);
        Some(DispatchedRequest { request: index, worker, expected_tokens: estimate.cached.tokens() })
    }

    /// Returns the number of blocks that only one of prefix index and worker cache contains.
    pub fn index_difference(&self, worker: usize, node: &SimulatedWorker) -> usize {
        let Some(index) = self.fleet.index(worker).filter(|_| self.placer.reads_prefixes()) else { return 0 };
        let has: BTreeSet<(Tier, u64)> =
            node.contents().map(|(tier, hash)| (tier_of(tier), hash.short())).collect();
        let missing = has.iter().filter(|(tier, block)| !index.holds(*tier, *block)).count();
        let known: BTreeSet<u64> = has.iter().map(|(_, block)| *block).collect();
        missing + index.len().abs_diff(known.len())
    }
}

fn since_start(now: Time) -> Duration {
    now.since(Time::ZERO)
}

fn tier_of(tier: CacheTier) -> Tier {
    match tier {
        CacheTier::Device => Tier::Device,
        CacheTier::Host => Tier::Host,
    }
}

fn change(tier: CacheTier, event: CacheEvent) -> CacheChange {
    match event {
        CacheEvent::Stored(hash) => CacheChange::Stored(tier_of(tier), hash.short()),
        CacheEvent::Removed(hash) => CacheChange::Removed(tier_of(tier), hash.short()),
    }
}
