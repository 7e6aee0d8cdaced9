mod displacement;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{Service, Tenant, TenantService, TokenCost, Weight};

use crate::queue_bounds::{Hold, QueueFull, QueueLimits};

/// How requests are ordered and bounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FairQueueOptions {
    /// What may wait, over all tenants and lanes.
    pub limits: QueueLimits,
    /// What tokens cost.
    pub cost: TokenCost,
    /// Service forgiven for each second in the queue, in tokens of weight 1.
    pub aging_tokens_per_second: f64,
    /// Service forgiven at most; the bound on the difference of two tenants' services grows by it.
    pub aging_tokens_max: f64,
    /// Past this time in the queue a request goes first in its tenant, in the turn of that tenant's most important one.
    /// Against other tenants it gains nothing, or whoever floods the queue would always be overdue.
    pub wait_max: Duration,
    /// How often a request that fits nowhere now may be overtaken, while it is first, by others that fit.
    pub bypass_max: u32,
    /// Requests behind the first that are looked at in its place.
    pub lookahead: usize,
    /// Idle tenants that a lane remembers with what they had.
    pub idle_tenants_max: usize,
}

impl Default for FairQueueOptions {
    fn default() -> Self {
        Self {
            limits: QueueLimits { requests: 1024, tokens: 4 << 20 },
            cost: TokenCost::default(),
            aging_tokens_per_second: 0.0,
            aging_tokens_max: 0.0,
            wait_max: Duration::from_secs(300),
            bypass_max: 16,
            lookahead: 8,
            idle_tenants_max: 10_000,
        }
    }
}

/// A request that wants in.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// Whose it is.
    pub tenant: &'a str,
    /// The tenant's share.
    pub weight: Weight,
    /// A higher number is more important.
    pub priority: i32,
    /// Tokens it may come to hold.
    pub tokens: u64,
    /// What may wait of this tenant.
    pub bounds: QueueLimits,
}

/// A request that was taken in.
#[derive(Debug)]
pub struct Admitted<L, T> {
    /// Where it waits.
    pub place: Place<L>,
    /// What had to make room for it: less important, or of a tenant that holds more than its share of the queue.
    pub displaced: Vec<T>,
}

/// A request taken out, to be served.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken<T> {
    /// The request.
    pub item: T,
    /// What its tenant has had so far over its weight, cluster-wide: the request's turn at a worker.
    pub order: Service,
}

/// Order within a tenant: resubmissions first, then higher priority, then earlier arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    fresh: bool,
    priority: Reverse<i32>,
    arrival: u64,
}

/// Where a request waits or waited; the key to take it out, to put it back and to end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<L> {
    lane: L,
    tenant: Tenant,
    rank: Rank,
}

impl<L> Place<L> {
    /// The request's number in the order of arrivals.
    pub fn arrival(&self) -> u64 {
        self.rank.arrival
    }
}

#[derive(Debug)]
struct Entry<T> {
    tokens: u64,
    queued: Duration,
    overtaken: u32,
    item: T,
}

/// What waits of one tenant in one lane; never empty.
#[derive(Debug)]
struct Waiting<T> {
    name: Arc<str>,
    requests: BTreeMap<Rank, Entry<T>>,
    by_arrival: BTreeMap<u64, Rank>,
}

#[derive(Debug)]
struct Lane<T> {
    service: TenantService,
    waiting: BTreeMap<Tenant, Waiting<T>>,
    /// Cost of what was handed over and not reported yet.
    pending: BTreeMap<Tenant, u64>,
}

/// Requests of one priority, by tenant and arrival.
type Class<L> = BTreeMap<Arc<str>, BTreeMap<u64, Place<L>>>;

/// Where a request stands against all others of its lane; the least goes first.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct Turn {
    fresh: bool,
    priority: Reverse<i32>,
    service: f64,
    arrival: u64,
}

/// A bounded queue of requests that serves tenants by weight: virtual token counters (Sheng et al., *Fairness in
/// Serving Large Language Models*, OSDI 2024) beneath priorities.
///
/// There is one lane for each kind that is served apart (a model, say), so that a lane whose head cannot start does
/// not hold up the others; bounds are common to all lanes. In a lane goes first what was resubmitted, then the
/// higher priority, then the tenant with the least service over its weight, then the earlier arrival. Service is
/// what workers report ([`FairQueue::charge`]), to which what was handed over and not reported yet is added
/// ([`FairQueue::take`], [`FairQueue::settle`]).
///
/// Invariants: `len` and `tokens` are the sums over the lanes; a request leaves by exactly one of `remove` and
/// `take`, and after `take` by exactly one of `put_back` and `depart`; an arrival over the bounds displaces only
/// what is less important or of a tenant that holds more over its weight than the arriving one would; resubmitted
/// requests were admitted once and are always taken back, so they are bounded by what was in flight.
#[derive(Debug)]
pub struct FairQueue<L, T> {
    options: FairQueueOptions,
    /// Routers that share the bounds.
    routers: u32,
    lanes: BTreeMap<L, Lane<T>>,
    /// What may be displaced, by priority, tenant and arrival.
    fresh: BTreeMap<i32, Class<L>>,
    holds: BTreeMap<Arc<str>, Hold>,
    len: usize,
    tokens: u64,
    arrivals: u64,
}

impl<L: Ord + Copy, T> FairQueue<L, T> {
    /// An empty queue.
    pub fn new(options: FairQueueOptions) -> Self {
        Self {
            options,
            routers: 1,
            lanes: BTreeMap::new(),
            fresh: BTreeMap::new(),
            holds: BTreeMap::new(),
            len: 0,
            tokens: 0,
            arrivals: 0,
        }
    }

    /// Divides the bounds by the number of routers that serve the same clients, so that more routers do not raise
    /// them.
    pub fn set_routers(&mut self, routers: u32) {
        self.routers = routers.max(1);
    }

    /// The bounds in force here.
    pub fn limits(&self) -> QueueLimits {
        self.options.limits.divided(self.routers)
    }

    /// Takes a new request in, if need be in the place of others. An empty queue takes any number of tokens, so
    /// that no request is too large for ever.
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
        let held = self.holds.get(arrival.tenant).copied().unwrap_or_default();
        let mut places = Vec::new();
        if let Some(full) = held.full(arrival.tokens, bounds) {
            let less_important = self.victims(&arrival, Some(arrival.tenant), held, bounds);
            places = less_important.ok_or_else(|| full.of_tenant(arrival.tenant))?;
        }
        let all = Hold { requests: self.len, tokens: self.tokens, weight: Weight::default() };
        let freed = places.iter().filter_map(|place| self.entry(place)).map(|entry| entry.tokens);
        let all = all.less(places.len(), freed.sum());
        if let Some(full) = all.full(arrival.tokens, limits) {
            // Where the tenant makes room for itself already, that has to be enough.
            if !places.is_empty() {
                return Err(full);
            }
            places = self.victims(&arrival, None, all, limits).ok_or(full)?;
        }
        let displaced = places.iter().filter_map(|place| self.remove(place)).collect();
        let number = self.arrivals;
        self.arrivals += 1;
        let options = &self.options;
        let entry = self.lanes.entry(lane).or_insert_with(|| Lane {
            service: TenantService::new(options.cost, options.idle_tenants_max),
            waiting: BTreeMap::new(),
            pending: BTreeMap::new(),
        });
        let tenant = entry.service.arrive(arrival.tenant, arrival.weight);
        let rank = Rank { fresh: true, priority: Reverse(arrival.priority), arrival: number };
        let place = Place { lane, tenant, rank };
        self.insert(place, arrival.tenant, arrival.tokens, now, item);
        Ok(Admitted { place, displaced })
    }

    /// Puts a request that was taken back, ahead of all that never started, in the order of the arrivals among its
    /// like. `name` is its tenant's.
    pub fn put_back(
        &mut self,
        place: &Place<L>,
        name: &str,
        tokens: u64,
        now: Duration,
        item: T,
    ) -> Place<L> {
        debug_assert!(place.rank.arrival < self.arrivals, "only what arrived can be put back");
        let place = Place { rank: Rank { fresh: false, ..place.rank }, ..*place };
        if let Some(lane) = self.lanes.get_mut(&place.lane) {
            lane.service.wait(place.tenant);
        }
        self.insert(place, name, tokens, now, item);
        place
    }

    fn insert(&mut self, place: Place<L>, name: &str, tokens: u64, now: Duration, item: T) {
        let Some(lane) = self.lanes.get_mut(&place.lane) else { return };
        let waiting = lane.waiting.entry(place.tenant).or_insert_with(|| Waiting {
            name: Arc::from(name),
            requests: BTreeMap::new(),
            by_arrival: BTreeMap::new(),
        });
        let entry = Entry { tokens, queued: now, overtaken: 0, item };
        let before = waiting.requests.insert(place.rank, entry);
        debug_assert!(before.is_none(), "an arrival number waits once");
        waiting.by_arrival.insert(place.rank.arrival, place.rank);
        if place.rank.fresh {
            let class = self.fresh.entry(place.rank.priority.0).or_default();
            class.entry(waiting.name.clone()).or_default().insert(place.rank.arrival, place);
        }
        let weight = lane.service.weight(place.tenant);
        let hold = self.holds.entry(waiting.name.clone()).or_default();
        hold.weight = weight;
        hold.requests += 1;
        hold.tokens += tokens;
        self.len += 1;
        self.tokens += tokens;
    }

    /// The request of a lane whose turn it is.
    pub fn head(&self, lane: L, now: Duration) -> Option<Place<L>> {
        let entry = self.lanes.get(&lane)?;
        let turns = entry.waiting.iter().filter_map(|(tenant, waiting)| {
            let (rank, priority) = waiting.first(now, self.options.wait_max)?;
            let turn = self.turn(entry, *tenant, waiting, rank, priority, now);
            Some((turn, Place { lane, tenant: *tenant, rank }))
        });
        // Arrival numbers differ, so that no two turns are equal; none is NaN.
        turns.min_by(|(a, _), (b, _)| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal)).map(|(_, p)| p)
    }

    /// Who may go in the place of the head, which fits nowhere now: some of those behind it, first those of the
    /// highest priority, and among them in turn the first of each tenant, then the second. Nobody, once the head
    /// was overtaken as often as is allowed.
    pub fn behind(&self, head: &Place<L>, now: Duration) -> Vec<Place<L>> {
        let spent = self.entry(head).is_none_or(|entry| entry.overtaken >= self.options.bypass_max);
        let Some(lane) = self.lanes.get(&head.lane).filter(|_| !spent) else { return Vec::new() };
        let mut found = Vec::new();
        for (tenant, waiting) in &lane.waiting {
            let first = waiting.first(now, self.options.wait_max);
            let rest = waiting.requests.keys().filter(|rank| first.is_none_or(|(first, _)| **rank != first));
            let rest = rest.map(|rank| (*rank, rank.priority));
            let ranks = first.into_iter().chain(rest).take(self.options.lookahead + 1);
            for (depth, (rank, priority)) in ranks.enumerate() {
                let turn = self.turn(lane, *tenant, waiting, rank, priority, now);
                found.push(((turn.fresh, turn.priority, depth), turn, *tenant, rank));
            }
        }
        found.sort_by(|a, b| {
            let by_turn = || a.1.partial_cmp(&b.1).unwrap_or(std::cmp::Ordering::Equal);
            a.0.cmp(&b.0).then_with(by_turn)
        });
        let places = found.into_iter().map(|(_, _, tenant, rank)| Place { lane: head.lane, tenant, rank });
        places.filter(|place| place != head).take(self.options.lookahead).collect()
    }

    fn turn(
        &self,
        lane: &Lane<T>,
        tenant: Tenant,
        waiting: &Waiting<T>,
        rank: Rank,
        priority: Reverse<i32>,
        now: Duration,
    ) -> Turn {
        let waited = waiting.requests.get(&rank).map_or(Duration::ZERO, |e| now.saturating_sub(e.queued));
        let aged =
            (self.options.aging_tokens_per_second * waited.as_secs_f64()).min(self.options.aging_tokens_max);
        Turn {
            fresh: rank.fresh,
            priority,
            service: lane.owed(tenant).tokens() - aged,
            arrival: rank.arrival,
        }
    }

    /// The request at a place.
    pub fn get(&self, place: &Place<L>) -> Option<&T> {
        self.entry(place).map(|entry| &entry.item)
    }

    /// Since when a request waits.
    pub fn queued(&self, place: &Place<L>) -> Option<Duration> {
        self.entry(place).map(|entry| entry.queued)
    }

    fn entry(&self, place: &Place<L>) -> Option<&Entry<T>> {
        self.lanes.get(&place.lane)?.waiting.get(&place.tenant)?.requests.get(&place.rank)
    }

    /// Takes a request out to be served. Until [`FairQueue::settle`], its tenant counts as charged with `cost`.
    pub fn take(&mut self, place: &Place<L>, cost: u64) -> Option<Taken<T>> {
        let item = self.extract(place)?;
        let lane = self.lanes.get_mut(&place.lane)?;
        let order = lane.owed(place.tenant);
        lane.service.start(place.tenant);
        *lane.pending.entry(place.tenant).or_insert(0) += cost;
        Some(Taken { item, order })
    }

    /// The turn at a worker of a request that was taken, and a provisional charge for it as [`FairQueue::take`] makes.
    pub fn reserve(&mut self, place: &Place<L>, cost: u64) -> Service {
        let Some(lane) = self.lanes.get_mut(&place.lane) else { return Service::default() };
        let order = lane.owed(place.tenant);
        *lane.pending.entry(place.tenant).or_insert(0) += cost;
        order
    }

    /// Notes that `head` was overtaken by one behind it.
    pub fn overtake(&mut self, head: &Place<L>) {
        let lane = self.lanes.get_mut(&head.lane);
        let waiting = lane.and_then(|lane| lane.waiting.get_mut(&head.tenant));
        if let Some(entry) = waiting.and_then(|waiting| waiting.requests.get_mut(&head.rank)) {
            entry.overtaken += 1;
        }
    }

    /// The worker's report now covers what a request was provisionally charged when it was taken.
    pub fn settle(&mut self, place: &Place<L>, cost: u64) {
        let Some(lane) = self.lanes.get_mut(&place.lane) else { return };
        if let Some(pending) = lane.pending.get_mut(&place.tenant) {
            *pending = pending.saturating_sub(cost);
            if *pending == 0 {
                lane.pending.remove(&place.tenant);
            }
        }
    }

    /// A request that was taken is over.
    pub fn depart(&mut self, place: &Place<L>) {
        if let Some(lane) = self.lanes.get_mut(&place.lane) {
            lane.service.depart(place.tenant);
        }
    }

    /// Takes a request that waits out for good, O(log n), at no cost to its tenant; `None` if it is not waiting
    /// there any more.
    pub fn remove(&mut self, place: &Place<L>) -> Option<T> {
        let item = self.extract(place)?;
        if let Some(lane) = self.lanes.get_mut(&place.lane) {
            lane.service.start(place.tenant);
            lane.service.depart(place.tenant);
        }
        Some(item)
    }

    fn extract(&mut self, place: &Place<L>) -> Option<T> {
        let lane = self.lanes.get_mut(&place.lane)?;
        let waiting = lane.waiting.get_mut(&place.tenant)?;
        let entry = waiting.requests.remove(&place.rank)?;
        waiting.by_arrival.remove(&place.rank.arrival);
        let name = waiting.name.clone();
        if waiting.requests.is_empty() {
            lane.waiting.remove(&place.tenant);
        }
        let priority = place.rank.priority.0;
        if let Some(class) = self.fresh.get_mut(&priority).filter(|_| place.rank.fresh) {
            if let Some(arrivals) = class.get_mut(&name) {
                arrivals.remove(&place.rank.arrival);
                if arrivals.is_empty() {
                    class.remove(&name);
                }
            }
            if class.is_empty() {
                self.fresh.remove(&priority);
            }
        }
        if let Some(hold) = self.holds.get_mut(&name) {
            *hold = hold.less(1, entry.tokens);
            if hold.requests == 0 {
                self.holds.remove(&name);
            }
        }
        self.len -= 1;
        self.tokens -= entry.tokens;
        Some(entry.item)
    }

    /// Takes in what a tenant was served in a lane, as a worker reported it.
    pub fn charge(&mut self, lane: L, tenant: &str, cost: u64) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.service.charge_elsewhere(tenant, cost);
        }
    }

    /// Takes back what [`FairQueue::charge`] took in and turned out not to be known.
    pub fn discharge(&mut self, lane: L, tenant: &str, cost: u64) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.service.discharge_elsewhere(tenant, cost);
        }
    }

    /// How far service has got in the whole cluster, by a worker's word. A tenant that comes back while nobody waits
    /// here starts from there, though never above all tenants known here.
    pub fn begun(&mut self, lane: L, order: Service) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.service.raise_floor(order);
        }
    }

    /// Makes a lane, so that charges are kept also before its first request.
    pub fn open_lane(&mut self, lane: L) {
        let options = &self.options;
        self.lanes.entry(lane).or_insert_with(|| Lane {
            service: TenantService::new(options.cost, options.idle_tenants_max),
            waiting: BTreeMap::new(),
            pending: BTreeMap::new(),
        });
    }

    /// Forgets a lane in which nobody waits, with what its tenants had.
    pub fn forget_lane(&mut self, lane: L) {
        if self.lanes.get(&lane).is_some_and(|lane| lane.waiting.is_empty()) {
            self.lanes.remove(&lane);
        }
    }

    /// Lanes in which something waits.
    pub fn lanes(&self) -> impl Iterator<Item = L> + '_ {
        self.lanes.iter().filter(|(_, lane)| !lane.waiting.is_empty()).map(|(id, _)| *id)
    }

    /// Whether something waits in a lane.
    pub fn waits_in(&self, lane: L) -> bool {
        self.lanes.get(&lane).is_some_and(|lane| !lane.waiting.is_empty())
    }

    /// The least that any tenant had whose requests wait in a lane, with what was handed over.
    pub fn least(&self, lane: L) -> Option<Service> {
        let lane = self.lanes.get(&lane)?;
        lane.waiting.keys().map(|tenant| lane.owed(*tenant)).min()
    }

    /// What each tenant holds in the queue, by name.
    pub fn holds(&self) -> impl Iterator<Item = (&str, Hold)> + '_ {
        self.holds.iter().map(|(name, hold)| (&**name, *hold))
    }

    /// What a tenant has had in a lane over its weight, what was handed over included.
    pub fn service(&self, lane: L, tenant: &str) -> Option<Service> {
        let lane = self.lanes.get(&lane)?;
        let (_, service, _) = lane.service.iter().find(|(name, ..)| *name == tenant)?;
        Some(service)
    }

    /// How many requests go before a new one of this tenant and priority in a lane, at most, and at which share of
    /// the lane's service its own tenant's go.
    pub fn ahead(&self, lane: L, tenant: &str, weight: Weight, priority: i32) -> Ahead {
        let Some(lane) = self.lanes.get(&lane) else { return Ahead { all: 0, own: 0, share: 1.0 } };
        let before = Rank { fresh: true, priority: Reverse(priority), arrival: u64::MAX };
        let mut ahead = Ahead { all: 0, own: 0, share: 1.0 };
        let mut weights = weight.get();
        for waiting in lane.waiting.values() {
            let all = waiting.requests.last_key_value().is_some_and(|(last, _)| *last <= before);
            let count = match all {
                true => waiting.requests.len(),
                // Counted over all lanes, which is as good as an estimate needs and costs little.
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
                weights += self.holds.get(&waiting.name).map_or(1.0, |hold| hold.weight.get());
            }
        }
        ahead.share = weight.get() / weights;
        ahead
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that the waiting requests may come to hold.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
}

/// What goes before a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ahead {
    /// Requests of its priority or above, of all tenants.
    pub all: usize,
    /// Those of its own tenant.
    pub own: usize,
    /// Its tenant's share of the service among those that wait, in (0, 1].
    pub share: f64,
}

impl<T> Waiting<T> {
    /// The tenant's own next, the oldest if it is overdue, else by rank; and the priority of the tenant's turn.
    fn first(&self, now: Duration, wait_max: Duration) -> Option<(Rank, Reverse<i32>)> {
        let overdue = |rank: &&Rank| {
            self.requests.get(rank).is_some_and(|entry| now.saturating_sub(entry.queued) > wait_max)
        };
        let (_, oldest) = self.by_arrival.first_key_value()?;
        let (ranked, _) = self.requests.first_key_value()?;
        let first = if ranked.fresh { Some(oldest).filter(overdue).unwrap_or(ranked) } else { ranked };
        Some((*first, ranked.priority))
    }
}

impl<T> Lane<T> {
    /// What a tenant had, with what was handed over and not reported yet.
    fn owed(&self, tenant: Tenant) -> Service {
        let pending = self.pending.get(&tenant).copied().unwrap_or(0);
        self.service.service(tenant).plus(pending, self.service.weight(tenant))
    }
}
