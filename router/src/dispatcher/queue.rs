//! Fair queue over all routers: waiting requests, ordered by the service counters that workers report.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use inflight_contract::{
    Charged, Expired, SERVICE_COUNTER_MAX, Service, ServiceTable, TokenCost, Weight, plausible_growth,
};
use inflight_router_core::{
    Arrival, DispatchRate, FairQueue, FairQueueOptions, IncarnationCounters, QueueLimits, TenantCounter,
    WorkerUpdate,
};

use crate::dispatcher::request::{ActiveRequest, LaneId, QueuePosition};
use crate::dispatcher::violation::Violation;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};

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
struct ServiceReporter {
    incarnation: String,
    lane: LaneId,
    routers: u32,
    /// Time of its last report; `None` before the first, whose counters may cover any time.
    last_report: Option<Duration>,
}

/// Service counters and dispatch rate of a lane.
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
pub(crate) struct ClusterQueue {
    queue: FairQueue<LaneId, Arc<ActiveRequest>>,
    cost: TokenCost,
    lanes: BTreeMap<LaneId, LaneServices>,
    reporters: BTreeMap<usize, ServiceReporter>,
    /// Provisional charge by submission, until a worker reports on it.
    provisional: BTreeMap<u64, (QueuePosition, u64)>,
    routers: Arc<AtomicU32>,
    retry: Duration,
}

impl ClusterQueue {
    pub(crate) fn new(options: &Options) -> Self {
        let limits = QueueLimits { requests: options.queue_requests_max, tokens: options.queue_tokens_max };
        let fair = FairQueueOptions {
            limits,
            wait_max: options.aging_threshold,
            aging_tokens_per_second: options.aging_tokens_per_second,
            aging_tokens_max: options.aging_tokens_max,
            bypass_max: options.bypass_max,
            ..FairQueueOptions::default()
        };
        Self {
            queue: FairQueue::new(fair),
            cost: fair.cost,
            lanes: BTreeMap::new(),
            reporters: BTreeMap::new(),
            provisional: BTreeMap::new(),
            routers: Arc::new(AtomicU32::new(1)),
            retry: options.retry_delay,
        }
    }

    /// Queues a request and returns its position with the requests it displaced, which the caller must fail.
    /// `first_token` is the predicted time from dispatch to first token, if known; `left` the time until its
    /// deadline.
    pub(crate) fn push(
        &mut self,
        active: &Arc<ActiveRequest>,
        first_token: Option<Duration>,
        left: Option<Duration>,
        since: Duration,
    ) -> Result<(QueuePosition, Vec<Arc<ActiveRequest>>), Outcome> {
        let call = &active.call;
        let weight = Weight::try_from(call.weight).map_err(Outcome::invalid)?;
        if let Some(left) = left {
            let ahead = self.queue.ahead(call.lane, &call.tenant, weight, call.priority);
            let wait = self
                .lanes
                .get(&call.lane)
                .and_then(|lane_services| lane_services.rate.predict_wait(ahead))
                .unwrap_or_default();
            let predicted = wait + first_token.unwrap_or_default();
            if predicted > left {
                return Err(Outcome::Infeasible { predicted, left });
            }
        }
        let arrival = Arrival {
            tenant: &call.tenant,
            weight,
            priority: call.priority,
            tokens: call.tokens(),
            bounds: call.bounds,
        };
        self.advance_rate(call.lane, since);
        let admitted = self.queue.push(call.lane, arrival, since, active.clone());
        let admitted =
            admitted.map_err(|full| Outcome::Full(Box::new(Overload::of_queue(&full, self.retry))))?;
        Ok((admitted.position, admitted.displaced))
    }

    /// Returns the outcome of a displaced request.
    pub(crate) fn displaced(&self) -> Outcome {
        Outcome::Displaced { retry: self.retry }
    }

    /// Requeues a request that was dispatched before, ahead of all new requests.
    pub(crate) fn requeue_first(
        &mut self,
        position: &QueuePosition,
        active: &Arc<ActiveRequest>,
        since: Duration,
    ) -> QueuePosition {
        let call = &active.call;
        self.queue.requeue(position, &call.tenant, call.tokens(), since, active.clone())
    }

    /// Returns the next request of a lane.
    pub(crate) fn head(&self, lane: LaneId, since: Duration) -> Option<(QueuePosition, Arc<ActiveRequest>)> {
        let position = self.queue.head(lane, since)?;
        self.queue.get(&position).map(|active| (position, active.clone()))
    }

    /// Returns the requests that may bypass the head.
    pub(crate) fn bypass_candidates(
        &self,
        head: &QueuePosition,
        since: Duration,
    ) -> Vec<(QueuePosition, Arc<ActiveRequest>)> {
        let places = self.queue.bypass_candidates(head, since).into_iter();
        places
            .filter_map(|position| self.queue.get(&position).map(|active| (position, active.clone())))
            .collect()
    }

    /// Counts a bypass of the head.
    pub(crate) fn count_bypass(&mut self, head: &QueuePosition) {
        metrics::counter!(names::QUEUE_BYPASSES).increment(1);
        self.queue.count_bypass(head);
    }

    /// Takes a request out of the queue for dispatch.
    pub(crate) fn take(&mut self, position: &QueuePosition, lane: LaneId, since: Duration) {
        self.advance_rate(lane, since);
        let waited = self.queue.queued(position).is_some_and(|queued| queued < since);
        if let Some(lane_services) = self.lanes.get_mut(&lane).filter(|_| waited) {
            lane_services.rate.record_dispatch();
        }
        self.queue.take(position, 0);
    }

    /// Returns the virtual start time of `submission` and charges its tenant provisionally for `tokens` of
    /// the prompt, until the worker reports on it.
    pub(crate) fn charge_provisionally(
        &mut self,
        position: &QueuePosition,
        submission: u64,
        tokens: usize,
    ) -> Service {
        let cost = self.cost.of(u32::try_from(tokens).unwrap_or(u32::MAX), 0);
        let virtual_start_time = self.queue.reserve(position, cost);
        self.provisional.insert(submission, (*position, cost));
        virtual_start_time
    }

    /// Ends the provisional charge of a submission: the worker has reported on it, or it has ended.
    pub(crate) fn settle(&mut self, submission: u64) {
        if let Some((position, cost)) = self.provisional.remove(&submission) {
            self.queue.settle(&position, cost);
        }
    }

    /// Removes a waiting request for good.
    pub(crate) fn remove(&mut self, position: &QueuePosition) {
        self.queue.remove(position);
    }

    /// Records the end of a request that was dispatched.
    pub(crate) fn depart(&mut self, position: &QueuePosition) {
        self.queue.depart(position);
    }

    fn advance_rate(&mut self, lane: LaneId, since: Duration) {
        let waits = self.waits_in(lane);
        self.lanes.entry(lane).or_default().rate.advance(since, waits);
    }

    /// Opens a session. Returns the service counters to send to its worker.
    pub(crate) fn open(
        &mut self,
        worker: usize,
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
    pub(crate) fn close(&mut self, worker: usize) -> Option<IncarnationCounters> {
        let ServiceReporter { incarnation, lane, .. } = self.reporters.remove(&worker)?;
        self.count_routers();
        let services = &mut self.lanes.get_mut(&lane)?.services;
        services.close(&incarnation);
        let of_worker = services.iter().filter(|(other, ..)| *other == incarnation);
        let tenants: Vec<_> = of_worker.map(|(_, tenant, charged)| tenant_counter(tenant, charged)).collect();
        (!tenants.is_empty()).then_some(IncarnationCounters { incarnation, tenants })
    }

    /// Applies the service counters and the router count of an update; `since` is the current time.
    ///
    /// # Errors
    /// [`Violation`] for counters or a router count beyond what is possible; nothing of the update is
    /// applied.
    pub(crate) fn apply_service_counters(
        &mut self,
        worker: usize,
        update: &WorkerUpdate,
        since: Duration,
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
            let most = plausible_growth(since.saturating_sub(last_report));
            let grown = own.clone().map(|(incarnation, charge)| {
                let counted = lane_services.services.counted(incarnation, &charge.tenant);
                charge.charged.cost.saturating_sub(counted.max(charge.charged.base))
            });
            let grown = grown.fold(0u64, u64::saturating_add);
            if grown > most {
                return Err(Violation::Charge { cost: grown, most });
            }
        }
        reporter.last_report = Some(since);
        for (incarnation, charge) in own.chain(indirect).filter(named) {
            let Charged { cost, base } = charge.charged;
            let charged = Charged { cost, base: base.min(cost) };
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
    pub(crate) fn expire_indirect_counters(&mut self, since: Duration) {
        for (lane, lane_services) in &mut self.lanes {
            for Expired { tenant, cost } in lane_services.services.expire(since, INDIRECT_COUNTERS_TTL) {
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
        if routers != self.routers.swap(routers, Ordering::Relaxed) {
            tracing::info!(routers, "router count changed; limits are divided among routers");
            self.queue.set_routers(routers);
        }
        metrics::gauge!(names::ROUTERS).set(routers);
    }

    /// Returns the minimum virtual time of the tenants that wait in a lane.
    pub(crate) fn min_waiting_virtual_time(&self, lane: LaneId) -> Option<Service> {
        self.queue.min_virtual_time(lane)
    }

    /// Returns the shared number of routers.
    pub(crate) fn routers(&self) -> Arc<AtomicU32> {
        self.routers.clone()
    }

    pub(crate) fn forget_lane(&mut self, lane: LaneId) {
        self.queue.forget_lane(lane);
        self.lanes.remove(&lane);
    }

    pub(crate) fn lanes(&self) -> impl Iterator<Item = LaneId> + '_ {
        self.queue.lanes()
    }

    pub(crate) fn waits_in(&self, lane: LaneId) -> bool {
        self.queue.waits_in(lane)
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.queue.tokens()
    }
}

fn tenant_counter(tenant: &str, charged: Charged) -> TenantCounter {
    TenantCounter { tenant: tenant.to_owned(), charged }
}
