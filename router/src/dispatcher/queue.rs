//! Requests that wait, and what is known of the service that their tenants had in the whole cluster.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use inflight_contract::{
    Charged, Expired, SERVICE_COUNTER_MAX, Service, ServiceTable, TokenCost, Weight, plausible_growth,
};
use inflight_router_core::{
    Arrival, FairQueue, FairQueueOptions, IncarnationCounters, Pace, QueueLimits, TenantCounter, WorkerUpdate,
};

use crate::dispatcher::request::{ActiveRequest, LaneId, Place};
use crate::dispatcher::violation::Violation;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};

/// Incarnations of workers that a lane remembers, and tenants of each.
const INCARNATIONS_MAX: usize = 256;
const TENANTS_MAX: usize = 10_000;
/// Longest name of a tenant that a worker may report.
const NAME_BYTES_MAX: usize = 128;
/// More routers than any worker has sessions for.
const ROUTERS_MAX: u32 = 65_536;
/// What is known of a worker's service by hearsay counts for this long.
const INDIRECT_COUNTERS_TTL: Duration = Duration::from_secs(3600);

/// A worker that reports.
struct ServiceReporter {
    incarnation: String,
    lane: LaneId,
    routers: u32,
    /// When it last reported: until then what it charges may be the work of any time.
    heard: Option<Duration>,
}

/// What a lane knows beside its queue.
struct LaneServices {
    services: ServiceTable,
    pace: Pace,
}

impl Default for LaneServices {
    fn default() -> Self {
        Self { services: ServiceTable::new(INCARNATIONS_MAX, TENANTS_MAX), pace: Pace::default() }
    }
}

/// The fair queue, fed with what workers report: each is the authority on the service that its incarnation gave, so
/// that all routers order by the same counters without a store between them.
pub(crate) struct ClusterQueue {
    queue: FairQueue<LaneId, Arc<ActiveRequest>>,
    cost: TokenCost,
    lanes: BTreeMap<LaneId, LaneServices>,
    reporters: BTreeMap<usize, ServiceReporter>,
    /// What was charged provisionally, by submission: until a worker reports of it.
    provisional: BTreeMap<u64, (Place, u64)>,
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

    /// Queues a request. `first_token` is what it takes at the best worker once it is handed over, if that is known. The
    /// requests returned had to make room: they are out of the queue and must be ended.
    pub(crate) fn push(
        &mut self,
        active: &Arc<ActiveRequest>,
        first_token: Option<Duration>,
        left: Option<Duration>,
        since: Duration,
    ) -> Result<(Place, Vec<Arc<ActiveRequest>>), Outcome> {
        let call = &active.call;
        let weight = Weight::try_from(call.weight).map_err(Outcome::invalid)?;
        if let Some(left) = left {
            let ahead = self.queue.ahead(call.lane, &call.tenant, weight, call.priority);
            let wait =
                self.lanes.get(&call.lane).and_then(|known| known.pace.wait(ahead)).unwrap_or_default();
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
        self.pass(call.lane, since);
        let admitted = self.queue.push(call.lane, arrival, since, active.clone());
        let admitted =
            admitted.map_err(|full| Outcome::Full(Box::new(Overload::of_queue(&full, self.retry))))?;
        Ok((admitted.place, admitted.displaced))
    }

    /// What those are told that had to make room.
    pub(crate) fn displaced(&self) -> Outcome {
        Outcome::Displaced { retry: self.retry }
    }

    /// Queues a request again that was handed over before.
    pub(crate) fn requeue_first(
        &mut self,
        place: &Place,
        active: &Arc<ActiveRequest>,
        since: Duration,
    ) -> Place {
        let call = &active.call;
        self.queue.put_back(place, &call.tenant, call.tokens(), since, active.clone())
    }

    /// The next request of a lane.
    pub(crate) fn head(&self, lane: LaneId, since: Duration) -> Option<(Place, Arc<ActiveRequest>)> {
        let place = self.queue.head(lane, since)?;
        self.queue.get(&place).map(|active| (place, active.clone()))
    }

    /// Those that may go in its place.
    pub(crate) fn bypass_candidates(
        &self,
        head: &Place,
        since: Duration,
    ) -> Vec<(Place, Arc<ActiveRequest>)> {
        let places = self.queue.behind(head, since).into_iter();
        places.filter_map(|place| self.queue.get(&place).map(|active| (place, active.clone()))).collect()
    }

    /// One behind it goes before the head.
    pub(crate) fn count_bypass(&mut self, head: &Place) {
        metrics::counter!(names::OVERTAKES).increment(1);
        self.queue.overtake(head);
    }

    /// Takes a request out to hand it over.
    pub(crate) fn take(&mut self, place: &Place, lane: LaneId, since: Duration) {
        self.pass(lane, since);
        let waited = self.queue.queued(place).is_some_and(|queued| queued < since);
        if let Some(known) = self.lanes.get_mut(&lane).filter(|_| waited) {
            known.pace.hand();
        }
        self.queue.take(place, 0);
    }

    /// A request goes to a worker as `submission`: its turn there. `tokens` of its prompt are charged until the worker
    /// reports of it.
    pub(crate) fn charge_provisionally(&mut self, place: &Place, submission: u64, tokens: usize) -> Service {
        let cost = self.cost.of(u32::try_from(tokens).unwrap_or(u32::MAX), 0);
        let order = self.queue.reserve(place, cost);
        self.provisional.insert(submission, (*place, cost));
        order
    }

    /// The worker has reported of a submission, or it is over.
    pub(crate) fn settle(&mut self, submission: u64) {
        if let Some((place, cost)) = self.provisional.remove(&submission) {
            self.queue.settle(&place, cost);
        }
    }

    /// Takes a request that waits out for good.
    pub(crate) fn remove(&mut self, place: &Place) {
        self.queue.remove(place);
    }

    /// A request that was handed over once is over.
    pub(crate) fn depart(&mut self, place: &Place) {
        self.queue.depart(place);
    }

    fn pass(&mut self, lane: LaneId, since: Duration) {
        let waits = self.waits_in(lane);
        self.lanes.entry(lane).or_default().pace.pass(since, waits);
    }

    /// A session is open. Returns what is to be told to the worker.
    pub(crate) fn open(
        &mut self,
        worker: usize,
        lane: LaneId,
        incarnation: String,
    ) -> Vec<IncarnationCounters> {
        self.queue.open_lane(lane);
        let known = self.lanes.entry(lane).or_default();
        known.services.open(&incarnation);
        let mut told: Vec<IncarnationCounters> = Vec::new();
        // Not what is known by hearsay, or a false report would go round for ever.
        for (other, tenant, charged) in
            known.services.first_hand().filter(|(other, ..)| *other != incarnation)
        {
            let charge = tenant_counter(tenant, charged);
            match told.last_mut().filter(|table| table.incarnation == other) {
                Some(table) => table.tenants.push(charge),
                None => {
                    told.push(IncarnationCounters { incarnation: other.to_owned(), tenants: vec![charge] })
                }
            }
        }
        self.reporters.insert(worker, ServiceReporter { incarnation, lane, routers: 0, heard: None });
        told
    }

    /// A session is over. Returns its last counters, which the other workers of the lane are to be told.
    pub(crate) fn close(&mut self, worker: usize) -> Option<IncarnationCounters> {
        let ServiceReporter { incarnation, lane, .. } = self.reporters.remove(&worker)?;
        self.count_routers();
        let services = &mut self.lanes.get_mut(&lane)?.services;
        services.close(&incarnation);
        let of_worker = services.iter().filter(|(other, ..)| *other == incarnation);
        let tenants: Vec<_> = of_worker.map(|(_, tenant, charged)| tenant_counter(tenant, charged)).collect();
        (!tenants.is_empty()).then_some(IncarnationCounters { incarnation, tenants })
    }

    /// Takes in what an update says of tenants' services and of other routers; `since` is now.
    ///
    /// # Errors
    /// [`Violation`] if no worker can have served so much, or have so many routers; nothing of the update is taken in.
    pub(crate) fn apply_service_counters(
        &mut self,
        worker: usize,
        update: &WorkerUpdate,
        since: Duration,
    ) -> Result<(), Violation> {
        let Some(reporter) = self.reporters.get_mut(&worker) else { return Ok(()) };
        let lane = reporter.lane;
        let Some(known) = self.lanes.get_mut(&lane) else { return Ok(()) };
        let told = update.service_tables.iter().filter(|table| table.incarnation != reporter.incarnation);
        let told = told.flat_map(|table| table.tenants.iter().map(|charge| (&table.incarnation, charge)));
        // The worker only passes on what another router said.
        let told =
            told.filter(|(_, charge)| charge.charged.cost.max(charge.charged.base) <= SERVICE_COUNTER_MAX);
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
        if let Some(heard) = reporter.heard {
            let most = plausible_growth(since.saturating_sub(heard));
            let grown = own.clone().map(|(incarnation, charge)| {
                let known = known.services.counted(incarnation, &charge.tenant);
                charge.charged.cost.saturating_sub(known.max(charge.charged.base))
            });
            let grown = grown.fold(0u64, u64::saturating_add);
            if grown > most {
                return Err(Violation::Charge { cost: grown, most });
            }
        }
        reporter.heard = Some(since);
        for (incarnation, charge) in own.chain(told).filter(named) {
            let Charged { cost, base } = charge.charged;
            let charged = Charged { cost, base: base.min(cost) };
            let grown = known.services.merge(incarnation, &charge.tenant, charged);
            if grown > 0 {
                self.queue.charge(lane, &charge.tenant, grown);
            }
        }
        // A worker that does not count routers says none: then what is known stands.
        let routers = if update.router_count == 0 { reporter.routers } else { update.router_count };
        let changed = std::mem::replace(&mut reporter.routers, routers) != routers;
        self.queue.begun(lane, update.virtual_time);
        if changed {
            self.count_routers();
        }
        Ok(())
    }

    /// Forgets what was known by hearsay for long enough.
    pub(crate) fn expire_indirect_counters(&mut self, since: Duration) {
        for (lane, known) in &mut self.lanes {
            for Expired { tenant, cost } in known.services.expire(since, INDIRECT_COUNTERS_TTL) {
                self.queue.discharge(*lane, &tenant, cost);
            }
        }
    }

    /// The most that any worker has: one that is partitioned from some routers sees fewer. While no worker says
    /// anything the last number stands, or losing all of them would multiply what the routers admit together.
    fn count_routers(&mut self) {
        let said = self.reporters.values().map(|reporter| reporter.routers).filter(|routers| *routers > 0);
        let Some(routers) = said.max() else { return };
        if routers != self.routers.swap(routers, Ordering::Relaxed) {
            tracing::info!(routers, "router count changed; limits are divided among routers");
            self.queue.set_routers(routers);
        }
        metrics::gauge!(names::ROUTERS).set(routers);
    }

    /// The least that any tenant had whose requests wait in a lane.
    pub(crate) fn min_waiting_virtual_time(&self, lane: LaneId) -> Option<Service> {
        self.queue.least(lane)
    }

    /// Routers that share the workers.
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
