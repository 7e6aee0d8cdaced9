//! Fair queue over all routers: waiting requests, ordered by the service counters that workers report.

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{
    ExpiredService, SERVICE_COUNTER_MAX, Service, ServiceCounter, ServiceTable, TokenCost, plausible_growth,
};

use crate::{
    Admitted, Arrival, DispatchRate, FairQueue, FairQueueOptions, IncarnationCounters, LaneId, QueueFull,
    QueuePosition, RequestId, RequestSpec, RequestsAhead, SubmissionId, TenantCounter, Violation, WorkerId,
    WorkerUpdate,
};

type Position = QueuePosition<LaneId>;

/// Maximum incarnations of workers per lane, and tenants per incarnation.
const INCARNATIONS_MAX: usize = 256;
const TENANTS_MAX: usize = 10_000;
/// Maximum length of a tenant name in a worker's report, in bytes.
const NAME_BYTES_MAX: usize = 128;
/// Maximum router count that a worker may report.
const ROUTERS_MAX: u32 = 65_536;
/// Expiry of service counters that were reported only indirectly, by other routers.
const INDIRECT_COUNTERS_TTL: Duration = Duration::from_secs(3600);

/// Worker with an open session, as a source of service counters.
#[derive(Debug)]
struct ServiceReporter {
    incarnation: String,
    lane: LaneId,
    routers: u32,
    /// Time of its last report; `None` before the first, whose counters may cover any time.
    last_report: Option<Duration>,
}

/// Service counters and dispatch rate of a lane.
#[derive(Debug)]
struct LaneServices {
    services: ServiceTable,
    rate: DispatchRate,
}

impl Default for LaneServices {
    fn default() -> Self {
        Self { services: ServiceTable::new(INCARNATIONS_MAX, TENANTS_MAX), rate: DispatchRate::default() }
    }
}

/// Fair queue fed by the workers' reports: each worker is the authority on the service its incarnation gave,
/// so all routers order by the same counters without a shared store.
#[derive(Debug)]
pub(super) struct ClusterQueue {
    queue: FairQueue<LaneId, RequestId>,
    cost: TokenCost,
    lanes: BTreeMap<LaneId, LaneServices>,
    reporters: BTreeMap<WorkerId, ServiceReporter>,
    /// Provisional charge by submission, until a worker reports on it.
    provisional: BTreeMap<SubmissionId, (Position, u64)>,
    /// Number of routers that share the workers, as reported by workers.
    routers: u32,
}

impl ClusterQueue {
    pub(super) fn new(options: FairQueueOptions) -> Self {
        Self {
            queue: FairQueue::new(options),
            cost: options.cost,
            lanes: BTreeMap::new(),
            reporters: BTreeMap::new(),
            provisional: BTreeMap::new(),
            routers: 1,
        }
    }

    /// Returns the number of requests that wait in a lane.
    pub(super) fn len_of(&self, lane: LaneId) -> usize {
        self.queue.len_of(lane)
    }

    /// Returns the predicted queueing time of a new request; zero if unknown.
    pub(super) fn predicted_wait(&self, spec: &RequestSpec) -> Duration {
        let ahead: RequestsAhead =
            self.queue.ahead(spec.lane, &spec.tenant, spec.weight, spec.priority.get());
        let services = self.lanes.get(&spec.lane);
        services.and_then(|services| services.rate.predict_wait(ahead)).unwrap_or_default()
    }

    /// Queues a request. The caller must fail the requests that it displaced.
    ///
    /// # Errors
    /// [`QueueFull`] with the bound reached; the queue is unchanged.
    pub(super) fn push(
        &mut self,
        request: RequestId,
        spec: &RequestSpec,
        now: Duration,
    ) -> Result<Admitted<LaneId, RequestId>, QueueFull> {
        let arrival = Arrival {
            tenant: &spec.tenant,
            weight: spec.weight,
            priority: spec.priority.get(),
            tokens: spec.tokens(),
            bounds: spec.bounds,
        };
        self.advance_rate(spec.lane, now);
        self.queue.push(spec.lane, arrival, now, request)
    }

    /// Requeues a request that was dispatched before, ahead of all new requests.
    pub(super) fn requeue_first(
        &mut self,
        position: &Position,
        request: RequestId,
        spec: &RequestSpec,
        now: Duration,
    ) -> Position {
        self.queue.requeue(position, &spec.tenant, spec.tokens(), now, request)
    }

    /// Returns the virtual time of a tenant in a lane, with what was dispatched and is not reported yet.
    pub(super) fn virtual_time(&self, lane: LaneId, tenant: &str) -> Option<Service> {
        self.queue.virtual_time(lane, tenant)
    }

    /// Returns the virtual time that the tenant of a request would have with so many more prompt tokens.
    pub(super) fn virtual_time_with(&self, spec: &RequestSpec, prompt_tokens: u32) -> Option<Service> {
        let now = self.queue.virtual_time(spec.lane, &spec.tenant)?;
        Some(now.plus(self.cost.of(prompt_tokens, 0), spec.weight))
    }

    /// Returns the next request of a lane.
    pub(super) fn head(&self, lane: LaneId, now: Duration) -> Option<(Position, RequestId)> {
        let position = self.queue.head(lane, now)?;
        self.queue.get(&position).map(|request| (position, *request))
    }

    /// Returns the requests that may bypass the head.
    pub(super) fn bypass_candidates(&self, head: &Position, now: Duration) -> Vec<(Position, RequestId)> {
        let positions = self.queue.bypass_candidates(head, now).into_iter();
        positions
            .filter_map(|position| self.queue.get(&position).map(|request| (position, *request)))
            .collect()
    }

    /// Counts a bypass of the head.
    pub(super) fn count_bypass(&mut self, head: &Position) {
        self.queue.count_bypass(head);
    }

    /// Takes a request out of the queue for dispatch.
    pub(super) fn take(&mut self, position: &Position, lane: LaneId, now: Duration) {
        self.advance_rate(lane, now);
        let waited = self.queue.queued(position).is_some_and(|queued| queued < now);
        if let Some(lane_services) = self.lanes.get_mut(&lane).filter(|_| waited) {
            lane_services.rate.record_dispatch();
        }
        self.queue.take(position, 0);
    }

    /// Returns the virtual start time of `submission` and charges its tenant provisionally for `tokens` of
    /// the prompt, until the worker reports on it.
    pub(super) fn charge_provisionally(
        &mut self,
        position: &Position,
        submission: SubmissionId,
        tokens: u32,
    ) -> Service {
        let cost = self.cost.of(tokens, 0);
        let virtual_start_time = self.queue.reserve(position, cost);
        self.provisional.insert(submission, (*position, cost));
        virtual_start_time
    }

    /// Ends the provisional charge of a submission: the worker has reported on it, or it has ended.
    pub(super) fn settle(&mut self, submission: SubmissionId) {
        if let Some((position, cost)) = self.provisional.remove(&submission) {
            self.queue.settle(&position, cost);
        }
    }

    /// Removes a waiting request for good.
    pub(super) fn remove(&mut self, position: &Position) {
        self.queue.remove(position);
    }

    /// Records the end of a request that was dispatched.
    pub(super) fn depart(&mut self, position: &Position) {
        self.queue.depart(position);
    }

    fn advance_rate(&mut self, lane: LaneId, now: Duration) {
        let waits = self.waits_in(lane);
        self.lanes.entry(lane).or_default().rate.advance(now, waits);
    }

    /// Opens a session. Returns the service counters to send to its worker.
    pub(super) fn open(
        &mut self,
        worker: WorkerId,
        lane: LaneId,
        incarnation: String,
    ) -> Vec<IncarnationCounters> {
        self.queue.open_lane(lane);
        let lane_services = self.lanes.entry(lane).or_default();
        lane_services.services.open(&incarnation);
        let mut tables: Vec<IncarnationCounters> = Vec::new();
        // Directly reported counters only, so that a false report does not circulate forever.
        for (other, tenant, charged) in
            lane_services.services.first_hand().filter(|(other, ..)| *other != incarnation)
        {
            let charge = tenant_counter(tenant, charged);
            match tables.last_mut().filter(|table| table.incarnation == other) {
                Some(table) => table.tenants.push(charge),
                None => {
                    tables.push(IncarnationCounters { incarnation: other.to_owned(), tenants: vec![charge] })
                }
            }
        }
        self.reporters.insert(worker, ServiceReporter { incarnation, lane, routers: 0, last_report: None });
        tables
    }

    /// Closes a session. Returns its last service counters, to send to the other workers of the lane.
    pub(super) fn close(&mut self, worker: WorkerId) -> Option<IncarnationCounters> {
        let ServiceReporter { incarnation, lane, .. } = self.reporters.remove(&worker)?;
        self.count_routers();
        let services = &mut self.lanes.get_mut(&lane)?.services;
        services.close(&incarnation);
        let of_worker = services.iter().filter(|(other, ..)| *other == incarnation);
        let tenants: Vec<_> = of_worker.map(|(_, tenant, charged)| tenant_counter(tenant, charged)).collect();
        (!tenants.is_empty()).then_some(IncarnationCounters { incarnation, tenants })
    }

    /// Applies the service counters and the router count of an update; `now` is the current time.
    ///
    /// # Errors
    /// [`Violation`] for counters or a router count beyond what is possible; nothing of the update is
    /// applied.
    pub(super) fn apply_service_counters(
        &mut self,
        worker: WorkerId,
        update: &WorkerUpdate,
        now: Duration,
    ) -> Result<(), Violation> {
        let Some(reporter) = self.reporters.get_mut(&worker) else { return Ok(()) };
        let lane = reporter.lane;
        let Some(lane_services) = self.lanes.get_mut(&lane) else { return Ok(()) };
        let indirect = update.service_tables.iter().filter(|table| table.incarnation != reporter.incarnation);
        let indirect =
            indirect.flat_map(|table| table.tenants.iter().map(|charge| (&table.incarnation, charge)));
        // The worker only forwards what another router reported, so an excess is dropped without a violation.
        let indirect = indirect
            .filter(|(_, charge)| charge.charged.cost.max(charge.charged.base) <= SERVICE_COUNTER_MAX);
        let own = update.services.iter().map(|charge| (&reporter.incarnation, charge));
        let named = |(incarnation, charge): &(&String, &TenantCounter)| {
            charge.tenant.len() <= NAME_BYTES_MAX && incarnation.len() <= NAME_BYTES_MAX
        };
        if update.router_count > ROUTERS_MAX {
            return Err(Violation::Routers { routers: update.router_count, most: ROUTERS_MAX });
        }
        let largest =
            own.clone().map(|(_, charge)| charge.charged.cost.max(charge.charged.base)).max().unwrap_or(0);
        if largest > SERVICE_COUNTER_MAX {
            return Err(Violation::Charge { cost: largest, most: SERVICE_COUNTER_MAX });
        }
        if let Some(last_report) = reporter.last_report {
            let most = plausible_growth(now.saturating_sub(last_report));
            let grown = own.clone().map(|(incarnation, charge)| {
                let counted = lane_services.services.counted(incarnation, &charge.tenant);
                charge.charged.cost.saturating_sub(counted.max(charge.charged.base))
            });
            let grown = grown.fold(0u64, u64::saturating_add);
            if grown > most {
                return Err(Violation::Charge { cost: grown, most });
            }
        }
        reporter.last_report = Some(now);
        for (incarnation, charge) in own.chain(indirect).filter(named) {
            let ServiceCounter { cost, base } = charge.charged;
            let charged = ServiceCounter { cost, base: base.min(cost) };
            let grown = lane_services.services.merge(incarnation, &charge.tenant, charged);
            if grown > 0 {
                self.queue.charge(lane, &charge.tenant, grown);
            }
        }
        // 0 means that the worker does not count routers: keep the previous number.
        let routers = if update.router_count == 0 { reporter.routers } else { update.router_count };
        let changed = std::mem::replace(&mut reporter.routers, routers) != routers;
        self.queue.raise_virtual_time(lane, update.virtual_time);
        if changed {
            self.count_routers();
        }
        Ok(())
    }

    /// Expires counters that were only reported indirectly and too long ago.
    pub(super) fn expire_indirect_counters(&mut self, now: Duration) {
        for (lane, lane_services) in &mut self.lanes {
            for ExpiredService { tenant, cost } in lane_services.services.expire(now, INDIRECT_COUNTERS_TTL) {
                self.queue.discharge(*lane, &tenant, cost);
            }
        }
    }

    /// Sets the number of routers to the maximum over all workers: one partitioned from some routers sees
    /// fewer. Without any report the last number stays, or losing all workers would multiply the admission
    /// limits.
    fn count_routers(&mut self) {
        let reported =
            self.reporters.values().map(|reporter| reporter.routers).filter(|routers| *routers > 0);
        let Some(routers) = reported.max() else { return };
        if routers != std::mem::replace(&mut self.routers, routers) {
            self.queue.set_routers(routers);
        }
    }

    /// Returns the minimum virtual time of the tenants that wait in a lane.
    pub(super) fn min_waiting_virtual_time(&self, lane: LaneId) -> Option<Service> {
        self.queue.min_virtual_time(lane)
    }

    /// Returns the number of routers that share the workers.
    pub(super) fn routers(&self) -> u32 {
        self.routers
    }

    pub(super) fn forget_lane(&mut self, lane: LaneId) {
        self.queue.forget_lane(lane);
        self.lanes.remove(&lane);
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = LaneId> + '_ {
        self.queue.lanes()
    }

    pub(super) fn waits_in(&self, lane: LaneId) -> bool {
        self.queue.waits_in(lane)
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn tokens(&self) -> u64 {
        self.queue.tokens()
    }
}

fn tenant_counter(tenant: &str, charged: ServiceCounter) -> TenantCounter {
    TenantCounter { tenant: tenant.to_owned(), charged }
}
