//! Fair queue of a router: weighted fair queueing by virtual token counters (VTC), beneath strict priorities.

mod displacement;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{Service, Tenant, VirtualTokenCounters, Weight};

use crate::fair_queue_options::FairQueueOptions;
use crate::queue_bounds::{QueueFull, QueueLimits, QueueUsage};

/// Request to be queued.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// Name of the tenant.
    pub tenant: &'a str,
    /// Fair-share weight of the tenant.
    pub weight: Weight,
    /// Priority; higher goes first.
    pub priority: i32,
    /// Maximum tokens of the request: prompt and output of all choices.
    pub tokens: u64,
    /// Bounds on the waiting requests of this tenant.
    pub bounds: QueueLimits,
}

/// Result of queueing a request.
#[derive(Debug)]
pub struct Admitted<L, T> {
    /// Position of the request.
    pub position: QueuePosition<L>,
    /// Requests displaced by it: of a lower priority, or of a tenant that holds more than its share of the
    /// queue.
    pub displaced: Vec<T>,
}

/// Request taken out of the queue for dispatch.
#[derive(Debug, PartialEq, Eq)]
pub struct Dequeued<T> {
    /// The request.
    pub item: T,
    /// Cluster-wide virtual time of its tenant; orders the worker's waiting queue.
    pub virtual_start_time: Service,
}

/// Order within a tenant: resubmissions first, then higher priority, then earlier arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    fresh: bool,
    priority: Reverse<i32>,
    arrival: u64,
}

/// Position of a request in the queue; the key to take, requeue and end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePosition<L> {
    lane: L,
    tenant: Tenant,
    rank: Rank,
}

impl<L> QueuePosition<L> {
    /// Arrival number of the request.
    pub fn arrival(&self) -> u64 {
        self.rank.arrival
    }
}

#[derive(Debug)]
struct QueuedRequest<T> {
    tokens: u64,
    queued_at: Duration,
    bypasses: u32,
    item: T,
}

/// TenantQueue requests of one tenant in one lane; never empty.
#[derive(Debug)]
struct TenantQueue<T> {
    name: Arc<str>,
    requests: BTreeMap<Rank, QueuedRequest<T>>,
    by_arrival: BTreeMap<u64, Rank>,
}

#[derive(Debug)]
struct LaneQueue<T> {
    service: VirtualTokenCounters,
    waiting: BTreeMap<Tenant, TenantQueue<T>>,
    /// Provisional charge per tenant: dispatched and not yet reported by a worker.
    pending: BTreeMap<Tenant, u64>,
}

/// TenantQueue requests of one priority, by tenant and arrival.
type PriorityClass<L> = BTreeMap<Arc<str>, BTreeMap<u64, QueuePosition<L>>>;

/// Sort key of a request among all tenants of its lane; the minimum goes first.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct OrderKey {
    fresh: bool,
    priority: Reverse<i32>,
    service: f64,
    arrival: u64,
}

/// Bounded queue that serves tenants by weight: virtual token counters (Sheng et al., *Fairness in Serving
/// Large Language Models*, OSDI 2024) beneath priorities.
///
/// Each kind that is served separately, such as a model, has a lane, so that a blocked head holds up no other
/// lane; bounds are common to all lanes. Within a lane, resubmissions go first, then higher priority, then
/// the tenant with the least virtual time, then the earlier arrival. Service is what workers report
/// ([`FairQueue::charge`]) plus the provisional charge of requests dispatched and not yet reported
/// ([`FairQueue::take`], [`FairQueue::settle`]).
///
/// Invariants: `len` and `tokens` are the sums over the lanes. A request leaves by exactly one of `remove`
/// and `take`, and after `take` by exactly one of `requeue` and `depart`. An arrival over the bounds
/// displaces only requests of lower priority, or of a tenant that holds more over its weight than the
/// arriving tenant would. Resubmissions are never rejected; they are bounded by the requests in flight.
#[derive(Debug)]
pub struct FairQueue<L, T> {
    options: FairQueueOptions,
    /// Number of routers that share the bounds.
    routers: u32,
    lanes: BTreeMap<L, LaneQueue<T>>,
    /// Requests that may be displaced, by priority, tenant and arrival.
    fresh: BTreeMap<i32, PriorityClass<L>>,
    usage: BTreeMap<Arc<str>, QueueUsage>,
    len: usize,
    tokens: u64,
    arrivals: u64,
}

impl<L: Ord + Copy, T> FairQueue<L, T> {
    /// Creates an empty queue.
    pub fn new(options: FairQueueOptions) -> Self {
        Self {
            options,
            routers: 1,
            lanes: BTreeMap::new(),
            fresh: BTreeMap::new(),
            usage: BTreeMap::new(),
            len: 0,
            tokens: 0,
            arrivals: 0,
        }
    }

    /// Divides the bounds by the number of routers, so that more routers do not raise the cluster-wide
    /// bounds.
    pub fn set_routers(&mut self, routers: u32) {
        self.routers = routers.max(1);
    }

    /// Returns this router's share of the bounds.
    pub fn limits(&self) -> QueueLimits {
        self.options.limits.divided(self.routers)
    }

    /// Queues a new request, displacing others if necessary. An empty queue accepts any number of tokens, so
    /// that no request is rejected forever.
    ///
    /// # Errors
    /// [`QueueFull`] with the bound reached; the queue is unchanged.
    pub fn push(
        &mut self,
        lane: L,
        arrival: Arrival<'_>,
        now: Duration,
        item: T,
    ) -> Result<Admitted<L, T>, QueueFull> {
        let (limits, bounds) = (self.limits(), arrival.bounds.divided(self.routers));
        let held = self.usage.get(arrival.tenant).copied().unwrap_or_default();
        let mut positions = Vec::new();
        if let Some(full) = held.exceeded(arrival.tokens, bounds) {
            let less_important = self.victims(&arrival, Some(arrival.tenant), held, bounds);
            positions = less_important.ok_or_else(|| full.of_tenant(arrival.tenant))?;
        }
        let all = QueueUsage { requests: self.len, tokens: self.tokens, weight: Weight::default() };
        let freed = positions.iter().filter_map(|position| self.entry(position)).map(|entry| entry.tokens);
        let all = all.minus(positions.len(), freed.sum());
        if let Some(full) = all.exceeded(arrival.tokens, limits) {
            // Displacing requests of its own tenant must be enough.
            if !positions.is_empty() {
                return Err(full);
            }
            positions = self.victims(&arrival, None, all, limits).ok_or(full)?;
        }
        let displaced = positions.iter().filter_map(|position| self.remove(position)).collect();
        let number = self.arrivals;
        self.arrivals += 1;
        let options = &self.options;
        let entry = self.lanes.entry(lane).or_insert_with(|| LaneQueue {
            service: VirtualTokenCounters::new(options.cost, options.idle_tenants_max),
            waiting: BTreeMap::new(),
            pending: BTreeMap::new(),
        });
        let tenant = entry.service.arrive(arrival.tenant, arrival.weight);
        let rank = Rank { fresh: true, priority: Reverse(arrival.priority), arrival: number };
        let position = QueuePosition { lane, tenant, rank };
        self.insert(position, arrival.tenant, arrival.tokens, now, item);
        Ok(Admitted { position, displaced })
    }

    /// Requeues a request that was taken, ahead of all new requests and ordered by arrival among
    /// resubmissions. `name` is its tenant.
    pub fn requeue(
        &mut self,
        position: &QueuePosition<L>,
        name: &str,
        tokens: u64,
        now: Duration,
        item: T,
    ) -> QueuePosition<L> {
        debug_assert!(position.rank.arrival < self.arrivals, "only what arrived can be put back");
        let position = QueuePosition { rank: Rank { fresh: false, ..position.rank }, ..*position };
        if let Some(lane) = self.lanes.get_mut(&position.lane) {
            lane.service.wait(position.tenant);
        }
        self.insert(position, name, tokens, now, item);
        position
    }

    fn insert(&mut self, position: QueuePosition<L>, name: &str, tokens: u64, now: Duration, item: T) {
        let Some(lane) = self.lanes.get_mut(&position.lane) else { return };
        let waiting = lane.waiting.entry(position.tenant).or_insert_with(|| TenantQueue {
            name: Arc::from(name),
            requests: BTreeMap::new(),
            by_arrival: BTreeMap::new(),
        });
        let entry = QueuedRequest { tokens, queued_at: now, bypasses: 0, item };
        let before = waiting.requests.insert(position.rank, entry);
        debug_assert!(before.is_none(), "an arrival number waits once");
        waiting.by_arrival.insert(position.rank.arrival, position.rank);
        if position.rank.fresh {
            let class = self.fresh.entry(position.rank.priority.0).or_default();
            class.entry(waiting.name.clone()).or_default().insert(position.rank.arrival, position);
        }
        let weight = lane.service.weight(position.tenant);
        let usage = self.usage.entry(waiting.name.clone()).or_default();
        usage.weight = weight;
        usage.requests += 1;
        usage.tokens += tokens;
        self.len += 1;
        self.tokens += tokens;
    }

    /// Returns the number of requests that wait in a lane.
    pub fn len_of(&self, lane: L) -> usize {
        let waiting = self.lanes.get(&lane).map(|lane| lane.waiting.values());
        waiting.into_iter().flatten().map(|waiting| waiting.requests.len()).sum()
    }

    /// Returns the next request of a lane.
    pub fn head(&self, lane: L, now: Duration) -> Option<QueuePosition<L>> {
        let entry = self.lanes.get(&lane)?;
        let keys = entry.waiting.iter().filter_map(|(tenant, waiting)| {
            let (rank, priority) = waiting.first(now, self.options.aging_threshold)?;
            let key = self.order_key(entry, *tenant, waiting, rank, priority, now);
            Some((key, QueuePosition { lane, tenant: *tenant, rank }))
        });
        // Arrival numbers are unique and no key is NaN, so the order is total.
        keys.min_by(|(a, _), (b, _)| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal)).map(|(_, p)| p)
    }

    /// Returns the requests that may bypass the head: by priority, and then round-robin over the tenants'
    /// first, second, ... requests. Empty once the head was bypassed `bypass_max` times.
    pub fn bypass_candidates(&self, head: &QueuePosition<L>, now: Duration) -> Vec<QueuePosition<L>> {
        let bypasses_exhausted =
            self.entry(head).is_none_or(|entry| entry.bypasses >= self.options.bypass_max);
        let Some(lane) = self.lanes.get(&head.lane).filter(|_| !bypasses_exhausted) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for (tenant, waiting) in &lane.waiting {
            let first = waiting.first(now, self.options.aging_threshold);
            let rest = waiting.requests.keys().filter(|rank| first.is_none_or(|(first, _)| **rank != first));
            let rest = rest.map(|rank| (*rank, rank.priority));
            let ranks = first.into_iter().chain(rest).take(self.options.lookahead + 1);
            for (depth, (rank, priority)) in ranks.enumerate() {
                let key = self.order_key(lane, *tenant, waiting, rank, priority, now);
                found.push(((key.fresh, key.priority, depth), key, *tenant, rank));
            }
        }
        found.sort_by(|a, b| {
            let by_key = || a.1.partial_cmp(&b.1).unwrap_or(std::cmp::Ordering::Equal);
            a.0.cmp(&b.0).then_with(by_key)
        });
        let positions =
            found.into_iter().map(|(_, _, tenant, rank)| QueuePosition { lane: head.lane, tenant, rank });
        positions.filter(|position| position != head).take(self.options.lookahead).collect()
    }

    fn order_key(
        &self,
        lane: &LaneQueue<T>,
        tenant: Tenant,
        waiting: &TenantQueue<T>,
        rank: Rank,
        priority: Reverse<i32>,
        now: Duration,
    ) -> OrderKey {
        let waited = waiting.requests.get(&rank).map_or(Duration::ZERO, |e| now.saturating_sub(e.queued_at));
        let aged =
            (self.options.aging_tokens_per_second * waited.as_secs_f64()).min(self.options.aging_tokens_max);
        OrderKey {
            fresh: rank.fresh,
            priority,
            service: lane.virtual_time(tenant).tokens() - aged,
            arrival: rank.arrival,
        }
    }

    /// Returns the request at a position.
    pub fn get(&self, position: &QueuePosition<L>) -> Option<&T> {
        self.entry(position).map(|entry| &entry.item)
    }

    /// Returns when a request was queued.
    pub fn queued(&self, position: &QueuePosition<L>) -> Option<Duration> {
        self.entry(position).map(|entry| entry.queued_at)
    }

    fn entry(&self, position: &QueuePosition<L>) -> Option<&QueuedRequest<T>> {
        self.lanes.get(&position.lane)?.waiting.get(&position.tenant)?.requests.get(&position.rank)
    }

    /// Takes a request out for dispatch and charges its tenant provisionally with `cost`, until
    /// [`FairQueue::settle`].
    pub fn take(&mut self, position: &QueuePosition<L>, cost: u64) -> Option<Dequeued<T>> {
        let item = self.extract(position)?;
        let lane = self.lanes.get_mut(&position.lane)?;
        let virtual_start_time = lane.virtual_time(position.tenant);
        lane.service.start(position.tenant);
        *lane.pending.entry(position.tenant).or_insert(0) += cost;
        Some(Dequeued { item, virtual_start_time })
    }

    /// Returns the virtual start time of a taken request and charges its tenant provisionally, like
    /// [`FairQueue::take`].
    pub fn reserve(&mut self, position: &QueuePosition<L>, cost: u64) -> Service {
        let Some(lane) = self.lanes.get_mut(&position.lane) else { return Service::default() };
        let virtual_start_time = lane.virtual_time(position.tenant);
        *lane.pending.entry(position.tenant).or_insert(0) += cost;
        virtual_start_time
    }

    /// Counts a bypass of `head`.
    pub fn count_bypass(&mut self, head: &QueuePosition<L>) {
        let lane = self.lanes.get_mut(&head.lane);
        let waiting = lane.and_then(|lane| lane.waiting.get_mut(&head.tenant));
        if let Some(entry) = waiting.and_then(|waiting| waiting.requests.get_mut(&head.rank)) {
            entry.bypasses += 1;
        }
    }

    /// Ends the provisional charge of a request: the worker's reports now cover it.
    pub fn settle(&mut self, position: &QueuePosition<L>, cost: u64) {
        let Some(lane) = self.lanes.get_mut(&position.lane) else { return };
        if let Some(pending) = lane.pending.get_mut(&position.tenant) {
            *pending = pending.saturating_sub(cost);
            if *pending == 0 {
                lane.pending.remove(&position.tenant);
            }
        }
    }

    /// Records the end of a request that was taken.
    pub fn depart(&mut self, position: &QueuePosition<L>) {
        if let Some(lane) = self.lanes.get_mut(&position.lane) {
            lane.service.depart(position.tenant);
        }
    }

    /// Removes a waiting request for good, at no cost to its tenant, in O(log n); `None` if it does not wait
    /// there.
    pub fn remove(&mut self, position: &QueuePosition<L>) -> Option<T> {
        let item = self.extract(position)?;
        if let Some(lane) = self.lanes.get_mut(&position.lane) {
            lane.service.start(position.tenant);
            lane.service.depart(position.tenant);
        }
        Some(item)
    }

    fn extract(&mut self, position: &QueuePosition<L>) -> Option<T> {
        let lane = self.lanes.get_mut(&position.lane)?;
        let waiting = lane.waiting.get_mut(&position.tenant)?;
        let entry = waiting.requests.remove(&position.rank)?;
        waiting.by_arrival.remove(&position.rank.arrival);
        let name = waiting.name.clone();
        if waiting.requests.is_empty() {
            lane.waiting.remove(&position.tenant);
        }
        let priority = position.rank.priority.0;
        if let Some(class) = self.fresh.get_mut(&priority).filter(|_| position.rank.fresh) {
            if let Some(arrivals) = class.get_mut(&name) {
                arrivals.remove(&position.rank.arrival);
                if arrivals.is_empty() {
                    class.remove(&name);
                }
            }
            if class.is_empty() {
                self.fresh.remove(&priority);
            }
        }
        if let Some(usage) = self.usage.get_mut(&name) {
            *usage = usage.minus(1, entry.tokens);
            if usage.requests == 0 {
                self.usage.remove(&name);
            }
        }
        self.len -= 1;
        self.tokens -= entry.tokens;
        Some(entry.item)
    }

    /// Adds reported service to a tenant's counter in a lane.
    pub fn charge(&mut self, lane: L, tenant: &str, cost: u64) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.service.charge_elsewhere(tenant, cost);
        }
    }

    /// Takes back service added by [`FairQueue::charge`] whose report has expired.
    pub fn discharge(&mut self, lane: L, tenant: &str, cost: u64) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.service.discharge_elsewhere(tenant, cost);
        }
    }

    /// Raises the virtual time of a lane to the cluster-wide one that a worker reported. Returning tenants
    /// start from there if no request waits here, but never above all tenants known here.
    pub fn raise_virtual_time(&mut self, lane: L, virtual_time: Service) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.service.raise_floor(virtual_time);
        }
    }

    /// Creates a lane, so that charges before its first request are kept.
    pub fn open_lane(&mut self, lane: L) {
        let options = &self.options;
        self.lanes.entry(lane).or_insert_with(|| LaneQueue {
            service: VirtualTokenCounters::new(options.cost, options.idle_tenants_max),
            waiting: BTreeMap::new(),
            pending: BTreeMap::new(),
        });
    }

    /// Removes a lane without waiting requests, with its tenants' counters.
    pub fn forget_lane(&mut self, lane: L) {
        if self.lanes.get(&lane).is_some_and(|lane| lane.waiting.is_empty()) {
            self.lanes.remove(&lane);
        }
    }

    /// Returns the lanes with waiting requests.
    pub fn lanes(&self) -> impl Iterator<Item = L> + '_ {
        self.lanes.iter().filter(|(_, lane)| !lane.waiting.is_empty()).map(|(id, _)| *id)
    }

    /// Whether requests wait in a lane.
    pub fn waits_in(&self, lane: L) -> bool {
        self.lanes.get(&lane).is_some_and(|lane| !lane.waiting.is_empty())
    }

    /// Returns the minimum virtual time of the tenants that wait in a lane, provisional charges included.
    pub fn min_virtual_time(&self, lane: L) -> Option<Service> {
        let lane = self.lanes.get(&lane)?;
        lane.waiting.keys().map(|tenant| lane.virtual_time(*tenant)).min()
    }

    /// Returns the queue usage of each tenant, by name.
    pub fn usage(&self) -> impl Iterator<Item = (&str, QueueUsage)> + '_ {
        self.usage.iter().map(|(name, usage)| (&**name, *usage))
    }

    /// Returns the virtual time of a tenant in a lane, provisional charges included.
    pub fn virtual_time(&self, lane: L, tenant: &str) -> Option<Service> {
        let lane = self.lanes.get(&lane)?;
        Some(lane.virtual_time(lane.service.find(tenant)?))
    }

    /// Returns an upper bound on the requests that go before a new one of this tenant and priority in a lane,
    /// and its tenant's share of the lane.
    pub fn ahead(&self, lane: L, tenant: &str, weight: Weight, priority: i32) -> RequestsAhead {
        let Some(lane) = self.lanes.get(&lane) else { return RequestsAhead { all: 0, own: 0, share: 1.0 } };
        let before = Rank { fresh: true, priority: Reverse(priority), arrival: u64::MAX };
        let mut ahead = RequestsAhead { all: 0, own: 0, share: 1.0 };
        let mut weights = weight.get();
        for waiting in lane.waiting.values() {
            let all = waiting.requests.last_key_value().is_some_and(|(last, _)| *last <= before);
            let count = match all {
                true => waiting.requests.len(),
                // Counted over all lanes: cheap, and exact enough for an estimate.
                false => {
                    let above =
                        self.fresh.range(priority..).filter_map(|(_, class)| class.get(&waiting.name));
                    above.map(BTreeMap::len).sum::<usize>().min(waiting.requests.len())
                }
            };
            ahead.all += count;
            if &*waiting.name == tenant {
                ahead.own = count;
            } else if count > 0 {
                weights += self.usage.get(&waiting.name).map_or(1.0, |usage| usage.weight.get());
            }
        }
        ahead.share = weight.get() / weights;
        ahead
    }

    /// Returns the number of waiting requests.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no request waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum tokens of the waiting requests.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
}

/// Requests that go before a new request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestsAhead {
    /// Requests of its priority or above, of all tenants.
    pub all: usize,
    /// Those of its own tenant.
    pub own: usize,
    /// Its tenant's share of the service among the waiting tenants, in (0, 1].
    pub share: f64,
}

impl<T> TenantQueue<T> {
    /// Returns the tenant's first request (the oldest if it is past `aging_threshold`, else by rank) and its
    /// priority.
    fn first(&self, now: Duration, aging_threshold: Duration) -> Option<(Rank, Reverse<i32>)> {
        let overdue = |rank: &&Rank| {
            self.requests.get(rank).is_some_and(|entry| now.saturating_sub(entry.queued_at) > aging_threshold)
        };
        let (_, oldest) = self.by_arrival.first_key_value()?;
        let (ranked, _) = self.requests.first_key_value()?;
        let first = if ranked.fresh { Some(oldest).filter(overdue).unwrap_or(ranked) } else { ranked };
        Some((*first, ranked.priority))
    }
}

impl<T> LaneQueue<T> {
    /// Returns a tenant's virtual time, provisional charges included.
    fn virtual_time(&self, tenant: Tenant) -> Service {
        let pending = self.pending.get(&tenant).copied().unwrap_or(0);
        self.service.service(tenant).plus(pending, self.service.weight(tenant))
    }
}
