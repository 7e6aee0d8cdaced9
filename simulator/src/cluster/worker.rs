//! Simulated worker around the real scheduler and grants.

use std::collections::VecDeque;
use std::time::Duration;

use inflight_contract::{AdmissionCost, FinishReason, Service, TokenCost, VirtualTokenCounters};
use inflight_router_core::{
    CacheChange, CacheEvents, CacheSnapshot, Credits, SequenceEnd, SequenceUpdate, Submission, SubmissionId,
    TenantCounter, Tier, WorkerLoad, WorkerUpdate,
};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    BlockHash, CacheEvent, CacheTier, Capacity, Chunk, CostModel, DeviceProfile, Grant, Grants,
    IterationOutcome, NewSequence, Scheduler, ScoredRange, SequenceId, StepWork, Time, TokenVerdict,
    TransferId, priority_sequences_max,
};

use super::{Charge, ClusterError, ClusterOptions, ClusterRequest};

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
    submission: SubmissionId,
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
    /// Sequences that requests which outrank others may have beyond the grants.
    priority_sequences: u32,
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
    /// Minimum virtual start time of the requests that wait, by router; `None` if none do.
    min_waiting: Vec<Option<Service>>,
    /// Requests that wait at any router.
    queued: usize,
    /// Blocks that any request needs to start.
    blocks_to_start: u32,
    /// Service charged, with its time.
    charges: Vec<Charge>,
    /// Time of slots that were free while requests waited at a router and none here, and of all slots, in seconds.
    slot_seconds: (f64, f64),
    /// Service counters to report to each router.
    services: Vec<Vec<TenantCounter>>,
    /// New output, by router.
    sequences: Vec<Vec<SequenceUpdate>>,
    last_grants: Vec<Grant>,
    changed: bool,
    busy: Duration,
}

impl SimulatedWorker {
    pub fn new(options: &ClusterOptions) -> Self {
        let limits = options.limits;
        let cost = CostModel::new(options.profile.prior(limits.block_tokens()));
        let tenants = VirtualTokenCounters::new(TokenCost::default(), 1000);
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
            priority_sequences: match options.outranking {
                true => priority_sequences_max(limits.running_max, options.queue_ahead),
                false => 0,
            },
            grants,
            live: Vec::new(),
            step: None,
            transfers: VecDeque::new(),
            progress: Vec::new(),
            due: Vec::new(),
            events: Vec::new(),
            next_event: 0,
            received: vec![0; options.routers],
            min_waiting: vec![None; options.routers],
            queued: 0,
            blocks_to_start: 1,
            charges: Vec::new(),
            slot_seconds: (0.0, 0.0),
            services: vec![Vec::new(); options.routers],
            sequences: vec![Vec::new(); options.routers],
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

    /// Returns the time of slots that were free while requests waited at a router and none here, and of all slots, in seconds.
    pub fn slot_seconds(&self) -> (f64, f64) {
        self.slot_seconds
    }

    /// Sets the number of requests that wait at any router.
    pub fn set_queued(&mut self, queued: usize) {
        self.queued = queued;
    }

    /// Sets the blocks that any request needs to start.
    pub fn set_blocks_to_start(&mut self, blocks: u32) {
        self.blocks_to_start = blocks;
    }

    /// Returns the service charged, with its time.
    pub fn charges(&self) -> &[Charge] {
        &self.charges
    }

    /// Takes a router's word on whether requests wait at it.
    pub fn backlog(&mut self, router: usize, waiting: bool) {
        self.grants.set_backlog(router, waiting);
        if !waiting {
            self.min_waiting[router] = None;
        }
        self.changed = true;
    }

    pub fn submit(
        &mut self,
        router: usize,
        submission: &Submission,
        index: usize,
        request: &ClusterRequest,
        now: Time,
    ) -> Result<(), ClusterError> {
        let block_tokens = self.scheduler.limits().block_tokens();
        let hashes: Vec<BlockHash> = request.hashes(block_tokens).collect();
        let submitted = self.scheduler.submit(
            NewSequence {
                known_tokens: request.prompt_tokens,
                max_tokens: request.output_tokens,
                priority: request.tenant.priority.get(),
                deadline: None,
                tenant: &request.tenant.name,
                weight: request.tenant.weight,
                hashes: &hashes,
                group: None,
                virtual_start_time: submission.virtual_start_time,
                charged_tokens: 0,
                scored: ScoredRange::default(),
            },
            now,
        );
        let id = submitted.map_err(|error| ClusterError::Refused(index, error.to_string()))?;
        let cost = AdmissionCost::new(self.scheduler.limits().shape);
        let prompt = request.prompt_tokens as usize;
        let blocks = cost.prompt(prompt) + cost.choice(prompt, 0);
        let cost = Grant { sequences: 1, blocks };
        self.grants.charge(router, cost);
        if self.live.len() <= id.index() {
            self.live.resize(id.index() + 1, None);
        }
        let live = WorkerRequest {
            request: index,
            router,
            submission: submission.id,
            cost,
            output_tokens: 0,
            cached_tokens: None,
        };
        self.live[id.index()] = Some(live);
        self.received[router] += 1;
        self.min_waiting[router] = submission.min_waiting_virtual_time;
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
        for charge in self.scheduler.drain_charged() {
            let counter = TenantCounter { tenant: charge.tenant.to_owned(), charged: charge.counter };
            self.services.iter_mut().for_each(|of_router| of_router.push(counter.clone()));
            self.charges.push(Charge { at: now, tenant: charge.tenant.to_owned(), service: charge.growth });
        }
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
                self.sequences[live.router].push(SequenceUpdate {
                    submission: live.submission,
                    attempt: 1,
                    choice: 0,
                    tokens: vec![0],
                    logprobs: Vec::new(),
                    prompt_logprobs: Vec::new(),
                    end: stop.then_some(SequenceEnd::Finished(FinishReason::Length)),
                    computed_tokens: 0,
                });
                verdicts.push(if stop { TokenVerdict::STOP } else { TokenVerdict::CONTINUE });
            }
        }
        let outcome = IterationOutcome { verdicts: &verdicts, accepted: &[], took: step.took };
        self.scheduler.commit(step.number, outcome)?;
        Ok(())
    }

    /// Plans an iteration and launches it. Returns true if another plan may admit more at once.
    fn plan(&mut self, now: Time) -> bool {
        let block_tokens = u64::from(self.scheduler.limits().block_tokens());
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
        let (load, slots) = (self.scheduler.load(), self.scheduler.limits().running_max);
        let spare = (load.blocks - self.scheduler.limits().watermark_blocks).saturating_sub(load.blocks_used);
        let startable = (slots - load.running).min(spare / self.blocks_to_start);
        let free = if self.queued > 0 && load.waiting == 0 { startable } else { 0 };
        let seconds = took.as_secs_f64();
        self.slot_seconds.0 += f64::from(free) * seconds;
        self.slot_seconds.1 += f64::from(slots) * seconds;
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
        let changes: Vec<CacheChange> = events.into_iter().map(|(tier, event)| change(tier, event)).collect();
        let update = |(router, grant): (usize, Grant)| {
            let sequences = std::mem::take(&mut self.sequences[router]);
            let services = std::mem::take(&mut self.services[router]);
            let cache_events = (!changes.is_empty()).then(|| CacheEvents { first, changes: changes.clone() });
            WorkerUpdate { sequences, services, cache_events, ..self.update(router, grant) }
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
        let of = |wanted: CacheTier| -> Vec<u64> {
            self.contents().filter(|(tier, _)| *tier == wanted).map(|(_, hash)| hash.short()).collect()
        };
        let snapshot = CacheSnapshot {
            first: true,
            device: of(CacheTier::Device),
            host: of(CacheTier::Host),
            // The snapshot includes unsent events, which must not be sent to this router again.
            next_event: Some(self.next_event + self.events.len() as u64),
        };
        WorkerUpdate { cache_snapshot: Some(snapshot), ..self.update(router, grant) }
    }

    /// Returns an update with load, cost and grant.
    fn update(&self, router: usize, grant: Grant) -> WorkerUpdate {
        let estimate = self.scheduler.prefill_estimate();
        let (backlog, decode_step) = (estimate.backlog.as_secs_f64(), estimate.decode_step.as_secs_f64());
        WorkerUpdate {
            grant: Some(inflight_router_core::Grant {
                credits: Credits { sequences: grant.sequences, blocks: grant.blocks },
                priority_sequences: self
                    .grants
                    .priority_sequences(self.priority_sequences)
                    .find(|(session, _)| *session == router)
                    .map_or(0, |(_, sequences)| sequences),
            }),
            load: Some(WorkerLoad::new(backlog, estimate.slowdown, decode_step)),
            cost: Some(self.scheduler.cost().coefficients()),
            submissions_received: self.received[router],
            router_count: self.received.len() as u32,
            virtual_time: self
                .min_waiting
                .iter()
                .flatten()
                .min()
                .copied()
                .unwrap_or(self.scheduler.virtual_time()),
            ..WorkerUpdate::default()
        }
    }
}

/// Returns the router's name of a cache tier.
pub(super) fn tier_of(tier: CacheTier) -> Tier {
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
