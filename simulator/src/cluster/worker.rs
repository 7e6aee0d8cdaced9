use std::collections::VecDeque;
use std::time::Duration;

use inflight_contract::{CostCoefficients, TenantService, TokenCost, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    BlockHash, CacheEvent, CacheTier, Capacity, Chunk, CostModel, DeviceProfile, Grant, Grants, NewSequence,
    Outcome, Scheduler, SequenceId, StepWork, Time, TransferId, Verdict,
};

use super::{ClusterError, ClusterOptions, ClusterRequest};

/// What a worker tells a router, as an update of a session does.
#[derive(Debug, Clone)]
pub(super) struct News {
    pub grant: Grant,
    /// Seconds of prefill ahead, stretch, seconds of a step with the decodes that run.
    pub load: (f64, f64, f64),
    pub cost: CostCoefficients,
    pub taken: u64,
    /// Requests of the router that have ended.
    pub ended: Vec<usize>,
    /// All that the cache holds, before `events`.
    pub snapshot: Option<Vec<(CacheTier, u64)>>,
    /// Number of the first event.
    pub first: u64,
    pub events: Vec<(CacheTier, CacheEvent)>,
}

/// What became of a request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Progress {
    Cached(u32),
    FirstToken,
    Ended,
}

#[derive(Debug, Clone, Copy)]
struct Live {
    request: usize,
    router: usize,
    cost: Grant,
    output_tokens: u32,
    /// Tokens of the prompt that were not computed; known with its first chunk.
    cached_tokens: Option<u32>,
}

#[derive(Debug)]
struct Flight {
    number: u64,
    chunks: Vec<Chunk>,
    took: Duration,
    ends: Time,
}

#[derive(Debug)]
struct Moving {
    id: TransferId,
    took: Duration,
    ends: Time,
}

/// A worker: its scheduler, its grants, its sessions, and a device that only takes time.
#[derive(Debug)]
pub(super) struct Worker {
    scheduler: Scheduler,
    profile: DeviceProfile,
    grants: Grants<usize>,
    /// By [`SequenceId::index`].
    live: Vec<Option<Live>>,
    flight: Option<Flight>,
    transfers: VecDeque<Moving>,
    progress: Vec<(usize, Progress)>,
    due: Vec<Time>,
    events: Vec<(CacheTier, CacheEvent)>,
    /// Number of the next event of the cache.
    next_event: u64,
    taken: Vec<u64>,
    ended: Vec<Vec<usize>>,
    told: Vec<Grant>,
    changed: bool,
    busy: Duration,
}

impl Worker {
    pub fn new(options: &ClusterOptions) -> Self {
        let limits = options.limits;
        let cost = CostModel::new(options.profile.prior(limits.block_tokens));
        let tenants = TenantService::new(TokenCost::default(), 1000);
        let scheduler = Scheduler::new(limits, PolicyKind::default().build(), cost, tenants);
        let capacity = Capacity {
            sequences: limits.running_max + options.queue_ahead,
            blocks: limits.blocks - limits.watermark_blocks,
        };
        let mut grants = Grants::new(capacity);
        (0..options.routers).for_each(|router| grants.open(router));
        Self {
            // The limits are those of a worker that starts.
            scheduler: scheduler.expect("limits that do not contradict each other"),
            profile: options.profile,
            grants,
            live: Vec::new(),
            flight: None,
            transfers: VecDeque::new(),
            progress: Vec::new(),
            due: Vec::new(),
            events: Vec::new(),
            next_event: 0,
            taken: vec![0; options.routers],
            ended: vec![Vec::new(); options.routers],
            told: vec![Grant::default(); options.routers],
            changed: false,
            busy: Duration::ZERO,
        }
    }

    pub fn busy_s(&self) -> f64 {
        self.busy.as_secs_f64()
    }

    /// All that the cache holds.
    pub fn contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        self.scheduler.cache_contents()
    }

    pub fn drain_progress(&mut self) -> Vec<(usize, Progress)> {
        std::mem::take(&mut self.progress)
    }

    /// When the device has something to say.
    pub fn drain_due(&mut self) -> Vec<Time> {
        std::mem::take(&mut self.due)
    }

    pub fn submit(
        &mut self,
        router: usize,
        index: usize,
        request: &ClusterRequest,
        now: Time,
    ) -> Result<(), ClusterError> {
        let block_tokens = self.scheduler.limits().block_tokens;
        let hashes: Vec<BlockHash> = request.hashes(block_tokens).collect();
        let submitted = self.scheduler.submit(
            NewSequence {
                known_tokens: request.prompt_tokens,
                max_tokens: request.output_tokens,
                priority: 0,
                deadline: None,
                tenant: "tenant",
                weight: Weight::default(),
                hashes: &hashes,
                group: None,
                order: None,
                charged_tokens: 0,
            },
            now,
        );
        let id = submitted.map_err(|error| ClusterError::Refused(index, error.to_string()))?;
        let blocks = self.scheduler.limits().blocks_for(request.prompt_tokens) + 1;
        let cost = Grant { sequences: 1, blocks };
        self.grants.charge(router, cost);
        if self.live.len() <= id.index() {
            self.live.resize(id.index() + 1, None);
        }
        let live = Live { request: index, router, cost, output_tokens: 0, cached_tokens: None };
        self.live[id.index()] = Some(live);
        self.taken[router] += 1;
        self.changed = true;
        Ok(())
    }

    /// Takes what the device has finished, and gives it the next.
    pub fn turn(&mut self, requests: &[ClusterRequest], now: Time) -> Result<(), ClusterError> {
        while let Some(moving) = self.transfers.pop_front_if(|moving| moving.ends <= now) {
            self.scheduler.transfer_done(moving.id, true, moving.took, now)?;
        }
        if let Some(flight) = self.flight.take_if(|flight| flight.ends <= now) {
            self.commit(&flight, requests)?;
            self.changed = true;
        }
        while self.flight.is_none() && self.plan(now) {}
        self.settle();
        Ok(())
    }

    fn commit(&mut self, flight: &Flight, requests: &[ClusterRequest]) -> Result<(), ClusterError> {
        let mut verdicts = Vec::with_capacity(flight.chunks.len());
        for chunk in &flight.chunks {
            let Some(live) = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut) else {
                verdicts.extend(chunk.samples.then_some(Verdict::CONTINUE));
                continue;
            };
            if chunk.samples {
                live.output_tokens += 1;
                if live.output_tokens == 1 {
                    self.progress.push((live.request, Progress::FirstToken));
                }
                let over = live.output_tokens == requests[live.request].output_tokens;
                verdicts.push(if over { Verdict::STOP } else { Verdict::CONTINUE });
            }
        }
        let outcome = Outcome { verdicts: &verdicts, took: flight.took };
        self.scheduler.commit(flight.number, outcome)?;
        Ok(())
    }

    /// Returns whether to plan again at once.
    fn plan(&mut self, now: Time) -> bool {
        let block_tokens = u64::from(self.scheduler.limits().block_tokens);
        let plan = self.scheduler.plan(now);
        let mut ends = self.transfers.back().map_or(now, |moving| moving.ends.max(now));
        for transfer in &plan.transfers {
            let took = self.profile.copy_time(transfer.blocks.len() as u64 * block_tokens);
            ends = ends.after(took);
            self.transfers.push_back(Moving { id: transfer.id, took, ends });
            self.due.push(ends);
        }
        let plan = self.scheduler.iteration();
        if plan.chunks.is_empty() {
            return !plan.preempted.is_empty();
        }
        let (mut prefill, mut decode) = (StepWork::default(), StepWork::default());
        for (place, chunk) in plan.chunks.iter().enumerate() {
            let part = if place < plan.decodes as usize { &mut decode } else { &mut prefill };
            part.add(chunk.start, chunk.len);
            if let Some(live) = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut)
                && live.cached_tokens.is_none()
            {
                live.cached_tokens = Some(chunk.start);
                self.progress.push((live.request, Progress::Cached(chunk.start)));
            }
        }
        let took = self.profile.step_time(&prefill, &decode);
        let ends = now.after(took);
        self.busy += took;
        self.due.push(ends);
        self.flight = Some(Flight { number: plan.number, chunks: plan.chunks.clone(), took, ends });
        false
    }

    fn settle(&mut self) {
        let ended: Vec<_> = self.scheduler.drain_ended().collect();
        for ended in ended {
            let entry = self.live.get_mut(SequenceId::index(ended.id));
            let Some(live) = entry.and_then(Option::take) else { continue };
            self.grants.release(live.router, live.cost);
            self.ended[live.router].push(live.request);
            self.progress.push((live.request, Progress::Ended));
            self.changed = true;
        }
        self.scheduler.drain_freed_slots().for_each(drop);
        self.events.extend(self.scheduler.drain_cache_events());
    }

    /// What each router is to be told now, if there is anything.
    pub fn news(&mut self) -> Option<Vec<News>> {
        let grants: Vec<Grant> =
            self.grants.divide(self.scheduler.load().blocks_used).map(|(_, grant)| grant).collect();
        if !std::mem::take(&mut self.changed) && self.events.is_empty() && grants == self.told {
            return None;
        }
        let events = std::mem::take(&mut self.events);
        let first = self.next_event;
        self.next_event += events.len() as u64;
        self.told.clone_from(&grants);
        let tell = |(router, grant): (usize, Grant)| News {
            grant,
            ended: std::mem::take(&mut self.ended[router]),
            first,
            events: events.clone(),
            snapshot: None,
            taken: self.taken[router],
            load: outlook(&self.scheduler),
            cost: self.scheduler.cost().coefficients(),
        };
        Some(grants.into_iter().enumerate().map(tell).collect())
    }

    /// What a router is told first: all that the cache holds.
    pub fn greet(&mut self, router: usize) -> News {
        let grant = self
            .grants
            .divide(self.scheduler.load().blocks_used)
            .find(|(session, _)| *session == router)
            .map_or(Grant::default(), |(_, grant)| grant);
        // Changes that others are still to be told of are in the snapshot already: they must not come again.
        let first = self.next_event + self.events.len() as u64;
        News {
            grant,
            ended: Vec::new(),
            first,
            events: Vec::new(),
            snapshot: Some(self.contents().map(|(tier, hash)| (tier, hash.short())).collect()),
            taken: self.taken[router],
            load: outlook(&self.scheduler),
            cost: self.scheduler.cost().coefficients(),
        }
    }
}

fn outlook(scheduler: &Scheduler) -> (f64, f64, f64) {
    let outlook = scheduler.prefill_outlook();
    (outlook.ahead.as_secs_f64(), outlook.stretch, outlook.decode_step.as_secs_f64())
}
