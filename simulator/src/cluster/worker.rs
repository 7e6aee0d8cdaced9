//! Simulated worker around the real scheduler and grants.

use std::collections::VecDeque;
use std::time::Duration;

use inflight_contract::{CostCoefficients, TenantService, TokenCost, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    BlockHash, CacheEvent, CacheTier, Capacity, Chunk, CostModel, DeviceProfile, Grant, Grants,
    IterationOutcome, NewSequence, Scheduler, SequenceId, StepWork, Time, TokenVerdict, TransferId,
};

use super::{ClusterError, ClusterOptions, ClusterRequest};

/// Update of a worker for one router, like a session's update.
#[derive(Debug, Clone)]
pub(super) struct WorkerUpdate {
    pub grant: Grant,
    /// Prefill backlog in seconds, prefill slowdown, and seconds of a step with the running decodes alone.
    pub load: (f64, f64, f64),
    pub cost: CostCoefficients,
    /// Number of submissions received from the router.
    pub received: u64,
    /// Ended requests of the router.
    pub ended: Vec<usize>,
    /// Contents of the cache before `events`.
    pub snapshot: Option<Vec<(CacheTier, u64)>>,
    /// Sequence number of the first event.
    pub first: u64,
    pub events: Vec<(CacheTier, CacheEvent)>,
}

/// Progress of a request.
#[derive(Debug, Clone, Copy)]
pub(super) enum RequestProgress {
    Cached(u32),
    FirstToken,
    Ended,
}

/// Request held by the scheduler.
#[derive(Debug, Clone, Copy)]
struct WorkerRequest {
    request: usize,
    router: usize,
    cost: Grant,
    output_tokens: u32,
    /// Prompt tokens found in the cache; known with its first chunk.
    cached_tokens: Option<u32>,
}

/// Step in flight on the device.
#[derive(Debug)]
struct WorkerStep {
    number: u64,
    chunks: Vec<Chunk>,
    took: Duration,
    ends: Time,
}

/// Transfer in flight between device and host.
#[derive(Debug)]
struct WorkerTransfer {
    id: TransferId,
    took: Duration,
    ends: Time,
}

/// Simulated worker: scheduler, grants, sessions, and a device that models durations only.
#[derive(Debug)]
pub(super) struct SimulatedWorker {
    scheduler: Scheduler,
    profile: DeviceProfile,
    grants: Grants<usize>,
    /// Live requests by [`SequenceId::index`].
    live: Vec<Option<WorkerRequest>>,
    step: Option<WorkerStep>,
    transfers: VecDeque<WorkerTransfer>,
    progress: Vec<(usize, RequestProgress)>,
    due: Vec<Time>,
    events: Vec<(CacheTier, CacheEvent)>,
    /// Sequence number of the next cache event.
    next_event: u64,
    received: Vec<u64>,
    ended: Vec<Vec<usize>>,
    last_grants: Vec<Grant>,
    changed: bool,
    busy: Duration,
}

impl SimulatedWorker {
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
            // Limits from `ClusterOptions` are consistent.
            scheduler: scheduler.expect("limits that do not contradict each other"),
            profile: options.profile,
            grants,
            live: Vec::new(),
            step: None,
            transfers: VecDeque::new(),
            progress: Vec::new(),
            due: Vec::new(),
            events: Vec::new(),
            next_event: 0,
            received: vec![0; options.routers],
            ended: vec![Vec::new(); options.routers],
            last_grants: vec![Grant::default(); options.routers],
            changed: false,
            busy: Duration::ZERO,
        }
    }

    pub fn busy_s(&self) -> f64 {
        self.busy.as_secs_f64()
    }

    /// Returns the contents of the prefix cache.
    pub fn contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        self.scheduler.cache_contents()
    }

    /// Takes the progress of requests since the last call.
    pub fn drain_progress(&mut self) -> Vec<(usize, RequestProgress)> {
        std::mem::take(&mut self.progress)
    }

    /// Takes the times of the device completions scheduled since the last call.
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
                virtual_start_time: None,
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
        let live = WorkerRequest { request: index, router, cost, output_tokens: 0, cached_tokens: None };
        self.live[id.index()] = Some(live);
        self.received[router] += 1;
        self.changed = true;
        Ok(())
    }

    /// Processes completed transfers and steps, then plans and launches the next step.
    pub fn advance(&mut self, requests: &[ClusterRequest], now: Time) -> Result<(), ClusterError> {
        while let Some(transfer) = self.transfers.pop_front_if(|transfer| transfer.ends <= now) {
            self.scheduler.transfer_done(transfer.id, true, transfer.took, now)?;
        }
        if let Some(step) = self.step.take_if(|step| step.ends <= now) {
            self.commit(&step, requests)?;
            self.changed = true;
        }
        while self.step.is_none() && self.plan(now) {}
        self.process_ended();
        Ok(())
    }

    fn commit(&mut self, step: &WorkerStep, requests: &[ClusterRequest]) -> Result<(), ClusterError> {
        let mut verdicts = Vec::with_capacity(step.chunks.len());
        for chunk in &step.chunks {
            let Some(live) = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut) else {
                verdicts.extend(chunk.samples.then_some(TokenVerdict::CONTINUE));
                continue;
            };
            if chunk.samples {
                live.output_tokens += 1;
                if live.output_tokens == 1 {
                    self.progress.push((live.request, RequestProgress::FirstToken));
                }
                let stop = live.output_tokens == requests[live.request].output_tokens;
                verdicts.push(if stop { TokenVerdict::STOP } else { TokenVerdict::CONTINUE });
            }
        }
        let outcome = IterationOutcome { verdicts: &verdicts, took: step.took };
        self.scheduler.commit(step.number, outcome)?;
        Ok(())
    }

    /// Plans an iteration and launches it. Returns true if another plan may admit more at once.
    fn plan(&mut self, now: Time) -> bool {
        let block_tokens = u64::from(self.scheduler.limits().block_tokens);
        let plan = self.scheduler.plan(now);
        let mut ends = self.transfers.back().map_or(now, |transfer| transfer.ends.max(now));
        for transfer in &plan.transfers {
            let took = self.profile.copy_time(transfer.blocks.len() as u64 * block_tokens);
            ends = ends.after(took);
            self.transfers.push_back(WorkerTransfer { id: transfer.id, took, ends });
            self.due.push(ends);
        }
        let plan = self.scheduler.iteration();
        if plan.chunks.is_empty() {
            return !plan.preempted.is_empty();
        }
        let (mut prefill, mut decode) = (StepWork::default(), StepWork::default());
        for (position, chunk) in plan.chunks.iter().enumerate() {
            let part = if position < plan.decodes as usize { &mut decode } else { &mut prefill };
            part.add(chunk.start, chunk.len);
            if let Some(live) = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut)
                && live.cached_tokens.is_none()
            {
                live.cached_tokens = Some(chunk.start);
                self.progress.push((live.request, RequestProgress::Cached(chunk.start)));
            }
        }
        let took = self.profile.step_time(&prefill, &decode);
        let ends = now.after(took);
        self.busy += took;
        self.due.push(ends);
        self.step = Some(WorkerStep { number: plan.number, chunks: plan.chunks.clone(), took, ends });
        false
    }

    /// Processes terminal events and cache events of the scheduler.
    fn process_ended(&mut self) {
        let ended: Vec<_> = self.scheduler.drain_ended().collect();
        for ended in ended {
            let entry = self.live.get_mut(SequenceId::index(ended.id));
            let Some(live) = entry.and_then(Option::take) else { continue };
            self.grants.release(live.router, live.cost);
            self.ended[live.router].push(live.request);
            self.progress.push((live.request, RequestProgress::Ended));
            self.changed = true;
        }
        self.scheduler.drain_freed_slots().for_each(drop);
        self.events.extend(self.scheduler.drain_cache_events());
    }

    /// Returns the updates to be sent now, by router; `None` if nothing has changed.
    pub fn take_updates(&mut self) -> Option<Vec<WorkerUpdate>> {
        let grants: Vec<Grant> =
            self.grants.divide(self.scheduler.load().blocks_used).map(|(_, grant)| grant).collect();
        if !std::mem::take(&mut self.changed) && self.events.is_empty() && grants == self.last_grants {
            return None;
        }
        let events = std::mem::take(&mut self.events);
        let first = self.next_event;
        self.next_event += events.len() as u64;
        self.last_grants.clone_from(&grants);
        let update = |(router, grant): (usize, Grant)| WorkerUpdate {
            grant,
            ended: std::mem::take(&mut self.ended[router]),
            first,
            events: events.clone(),
            snapshot: None,
            received: self.received[router],
            load: load(&self.scheduler),
            cost: self.scheduler.cost().coefficients(),
        };
        Some(grants.into_iter().enumerate().map(update).collect())
    }

    /// Returns an update with a full cache snapshot, sent first and at every resync.
    pub fn snapshot_update(&mut self, router: usize) -> WorkerUpdate {
        let grant = self
            .grants
            .divide(self.scheduler.load().blocks_used)
            .find(|(session, _)| *session == router)
            .map_or(Grant::default(), |(_, grant)| grant);
        // The snapshot includes unsent events, which must not be sent to this router again.
        let first = self.next_event + self.events.len() as u64;
        WorkerUpdate {
            grant,
            ended: Vec::new(),
            first,
            events: Vec::new(),
            snapshot: Some(self.contents().map(|(tier, hash)| (tier, hash.short())).collect()),
            received: self.received[router],
            load: load(&self.scheduler),
            cost: self.scheduler.cost().coefficients(),
        }
    }
}

/// Returns the fields of [`WorkerUpdate::load`].
fn load(scheduler: &Scheduler) -> (f64, f64, f64) {
    let estimate = scheduler.prefill_estimate();
    (estimate.backlog.as_secs_f64(), estimate.slowdown, estimate.decode_step.as_secs_f64())
}
