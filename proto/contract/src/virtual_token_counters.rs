//! Virtual token counters (VTC): weighted fair service of tenants, as in start-time fair queueing.

use std::collections::BTreeMap;

use crate::service_counter::{ServiceCounter, TenantCharge};

/// Service that a token counts for, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TokenCost {
    /// Cost of a computed prompt token; prefix cache hits and recomputed tokens cost nothing.
    pub input: u32,
    /// Cost of a generated token.
    pub output: u32,
}

impl Default for TokenCost {
    /// Returns the costs of the VTC paper: an output token costs twice an input token.
    fn default() -> Self {
        Self { input: 1, output: 2 }
    }
}

/// Fair-share weight of a tenant, in (0, 1000] with a resolution of 1/1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Weight(u32);

/// Weight outside (0, 1000].
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("weight is {0}; it must be above 0 and at most 1000")]
pub struct WeightError(pub f32);

impl Default for Weight {
    fn default() -> Self {
        Self(1000)
    }
}

impl TryFrom<f32> for Weight {
    type Error = WeightError;

    fn try_from(weight: f32) -> Result<Self, WeightError> {
        // Comparisons with NaN are false, so NaN is refused too.
        if weight > 0.0 && weight <= 1000.0 {
            Ok(Self(((weight * 1000.0).round() as u32).max(1)))
        } else {
            Err(WeightError(weight))
        }
    }
}

impl Weight {
    /// Weight 1, of tenants without one of their own.
    pub const ONE: Self = Self(1000);

    /// Returns the weight as a number.
    pub fn get(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

/// Virtual time of a tenant: service received over weight, in thousandths of a token at weight 1.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Service(u64);

impl Service {
    fn of(tokens: u64, weight: Weight) -> Self {
        // `Weight` is in thousandths too, so a token at weight 1 is 10^6 / 10^3 thousandths.
        Self(tokens.saturating_mul(1_000_000) / u64::from(weight.0))
    }

    /// Returns the virtual time in tokens at weight 1.
    pub fn tokens(self) -> f64 {
        self.0 as f64 / 1000.0
    }

    /// Returns the virtual time in thousandths of a token at weight 1, its unit in messages.
    pub fn thousandths(self) -> u64 {
        self.0
    }

    /// Creates a virtual time from thousandths of a token at weight 1.
    pub fn from_thousandths(thousandths: u64) -> Self {
        Self(thousandths)
    }

    /// Returns the virtual time less that of `cost` weighted tokens at `weight`.
    fn minus(self, cost: u64, weight: Weight) -> Self {
        Self(self.0.saturating_sub(Self::of(cost, weight).0))
    }

    /// Returns the virtual time plus that of `cost` weighted tokens at `weight`.
    pub fn plus(self, cost: u64, weight: Weight) -> Self {
        Self(self.0.saturating_add(Self::of(cost, weight).0))
    }
}

/// Id of a tenant within a [`VirtualTokenCounters`]; reused after the tenant was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(u32);

impl Tenant {
    /// Returns the id as an index into dense tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug, Clone)]
struct TenantCounter {
    name: String,
    /// Weight of the tenant's latest request to this process; `None` before its first request.
    weight: Option<Weight>,
    service: Service,
    /// Requests waiting or running.
    active: u32,
    /// Requests waiting.
    waiting: u32,
    /// Service charged, independent of the weight, plus `base`.
    charged: u64,
    /// Value at which `charged` started: the largest evicted counter.
    base: u64,
    /// Whether it was charged since [`VirtualTokenCounters::drain_charged`].
    dirty: bool,
    /// Service charged by [`VirtualTokenCounters::charge_cost`] since then.
    undrained: u64,
    /// Service that the last drain has reported.
    drained: u64,
}

/// Virtual token counters: service received over weight, for each tenant.
///
/// The algorithm is VTC's (Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024): serve the
/// backlogged tenant with the least service, charge as tokens are computed, and lift the counter of a tenant
/// that becomes backlogged to the minimum of the backlogged ones, so that idle time earns no credit. The
/// counters of two tenants that stay backlogged differ by a bounded amount. A tenant is backlogged while a
/// request of it waits: one whose requests all run uses less than its share, and its low counter would credit
/// every newcomer.
#[derive(Debug, Clone)]
pub struct VirtualTokenCounters {
    cost: TokenCost,
    tenants: Vec<Option<TenantCounter>>,
    by_name: BTreeMap<String, Tenant>,
    /// Ids of evicted tenants, for reuse.
    free: Vec<Tenant>,
    tenants_max: usize,
    /// Largest `charged` of all evicted tenants.
    evicted_charged_max: u64,
    /// Largest service of any tenant.
    service_max: Service,
    /// Initial service while no tenant is backlogged: the largest of any tenant when its last waiting request
    /// started.
    idle_floor: Service,
    /// Tenants charged since the last drain.
    dirty: Vec<Tenant>,
}

impl TokenCost {
    /// Returns the cost of `input` computed prompt tokens and `output` generated tokens.
    pub fn of(self, input: u32, output: u32) -> u64 {
        u64::from(input) * u64::from(self.input) + u64::from(output) * u64::from(self.output)
    }
}

impl VirtualTokenCounters {
    /// Creates counters without tenants. Beyond `tenants_max` and an eighth more, idle tenants are evicted.
    pub fn new(cost: TokenCost, tenants_max: usize) -> Self {
        Self {
            cost,
            tenants: Vec::new(),
            by_name: BTreeMap::new(),
            free: Vec::new(),
            tenants_max,
            evicted_charged_max: 0,
            service_max: Service::default(),
            idle_floor: Service::default(),
            dirty: Vec::new(),
        }
    }

    /// Adds a waiting request of a tenant and sets the tenant's weight. The first weight also applies to
    /// service charged before.
    pub fn arrive(&mut self, name: &str, weight: Weight) -> Tenant {
        let tenant = match self.by_name.get(name) {
            Some(tenant) => *tenant,
            None => self.insert(name),
        };
        if let Some(counter) = &mut self.tenants[tenant.index()] {
            counter.active += 1;
            if counter.weight.replace(weight).is_none() {
                // So far only charges have changed the service.
                counter.service = Service::of(counter.charged - counter.base, weight);
                self.service_max = self.service_max.max(counter.service);
            }
        }
        self.wait(tenant);
        tenant
    }

    /// Returns a tenant by its name, if it is known.
    pub fn find(&self, name: &str) -> Option<Tenant> {
        self.by_name.get(name).copied()
    }

    /// Marks a request of a tenant as waiting: it arrived or was preempted.
    pub fn wait(&mut self, tenant: Tenant) {
        let floor = self.min_backlogged_service().unwrap_or(self.idle_floor);
        if let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) {
            if counter.waiting == 0 {
                counter.service = counter.service.max(floor);
                self.service_max = self.service_max.max(counter.service);
            }
            counter.waiting += 1;
        }
    }

    /// Marks a waiting request of a tenant as no longer waiting: it was started or withdrawn.
    pub fn start(&mut self, tenant: Tenant) {
        if let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) {
            debug_assert!(counter.waiting > 0, "more requests started than waited");
            counter.waiting = counter.waiting.saturating_sub(1);
            if counter.waiting == 0 {
                self.idle_floor = self.idle_floor.max(counter.service);
            }
        }
    }

    /// Removes a request of a tenant that no longer waits.
    pub fn depart(&mut self, tenant: Tenant) {
        if let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) {
            debug_assert!(counter.active > 0, "more requests departed than arrived");
            counter.active = counter.active.saturating_sub(1);
        }
        self.evict_idle(None);
    }

    /// Charges a tenant for `input` computed prompt tokens and `output` generated tokens.
    pub fn charge(&mut self, tenant: Tenant, input: u32, output: u32) {
        self.charge_cost(tenant, self.cost.of(input, output));
    }

    /// Charges a tenant a cost in weighted tokens, as returned by [`TokenCost::of`].
    pub fn charge_cost(&mut self, tenant: Tenant, cost: u64) {
        self.add(tenant, cost);
        let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) else { return };
        counter.undrained = counter.undrained.saturating_add(cost);
        if cost > 0 && !std::mem::replace(&mut counter.dirty, true) {
            self.dirty.push(tenant);
        }
    }

    fn add(&mut self, tenant: Tenant, cost: u64) {
        let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) else { return };
        counter.service = counter.service.plus(cost, counter.weight.unwrap_or_default());
        counter.charged = counter.charged.saturating_add(cost);
        self.service_max = self.service_max.max(counter.service);
    }

    /// Charges a tenant for service received elsewhere in the cluster. An unknown tenant is added, without a
    /// weight until a request of it arrives. [`VirtualTokenCounters::drain_charged`] does not report such charges.
    pub fn charge_elsewhere(&mut self, name: &str, cost: u64) {
        let tenant = match self.by_name.get(name) {
            Some(tenant) => *tenant,
            None => self.insert(name),
        };
        self.add(tenant, cost);
        self.evict_idle(Some(tenant));
    }

    /// Refunds a charge by [`VirtualTokenCounters::charge_elsewhere`] whose report has expired. The tenant's service
    /// stays at least at the minimum of the backlogged tenants, so that the refund earns no credit.
    pub fn discharge_elsewhere(&mut self, name: &str, cost: u64) {
        let floor = self.min_backlogged_service().unwrap_or(self.idle_floor);
        let tenant = self.by_name.get(name).copied();
        let counter = tenant.and_then(|tenant| self.tenants.get_mut(tenant.index())?.as_mut());
        let Some(counter) = counter else { return };
        counter.charged = counter.charged.saturating_sub(cost).max(counter.base);
        let lowered = counter.service.minus(cost, counter.weight.unwrap_or_default());
        counter.service = lowered.max(floor.min(counter.service));
    }

    /// Yields the charges of the tenants charged since the last call.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = TenantCharge<'_>> + '_ {
        let Self { dirty, tenants, .. } = self;
        dirty.retain(|tenant| match &mut tenants[tenant.index()] {
            Some(counter) => {
                counter.drained = std::mem::take(&mut counter.undrained);
                std::mem::replace(&mut counter.dirty, false)
            }
            None => false,
        });
        let charged = dirty.drain(..).filter_map(|tenant| tenants[tenant.index()].as_ref());
        charged.map(|counter| TenantCharge {
            tenant: &counter.name,
            counter: counter.charged(),
            growth: counter.drained,
            weight: counter.weight.unwrap_or_default(),
        })
    }

    /// Iterates over the counters of all tenants, by name.
    pub fn charged(&self) -> impl Iterator<Item = (&str, ServiceCounter)> + '_ {
        let known = self.by_name.values().filter_map(|tenant| self.tenants[tenant.index()].as_ref());
        known.map(|counter| (counter.name.as_str(), counter.charged()))
    }

    /// Raises the initial service of tenants that become backlogged while no tenant is, to the virtual time
    /// reached elsewhere in the cluster, but not above the largest service of any tenant here.
    pub fn raise_floor(&mut self, floor: Service) {
        self.idle_floor = self.idle_floor.max(floor.min(self.service_max));
    }

    /// Returns the name of a tenant; empty if it was evicted.
    pub fn name(&self, tenant: Tenant) -> &str {
        self.tenants.get(tenant.index()).and_then(Option::as_ref).map_or("", |counter| &counter.name)
    }

    /// Returns a tenant's weight; 1 if it is unknown.
    pub fn weight(&self, tenant: Tenant) -> Weight {
        self.tenants.get(tenant.index()).and_then(Option::as_ref).and_then(|c| c.weight).unwrap_or_default()
    }

    /// Returns the sum of the weights of the backlogged tenants.
    pub fn backlogged_weight(&self) -> f64 {
        let backlogged = self.tenants.iter().flatten().filter(|counter| counter.waiting > 0);
        backlogged.map(|counter| counter.weight.unwrap_or_default().get()).sum()
    }

    /// Returns a tenant's virtual time; 0 if the tenant is unknown.
    pub fn service(&self, tenant: Tenant) -> Service {
        self.tenants.get(tenant.index()).and_then(Option::as_ref).map_or(Service::default(), |c| c.service)
    }

    /// Iterates over all tenants as (name, virtual time, number of waiting and running requests).
    pub fn iter(&self) -> impl Iterator<Item = (&str, Service, u32)> {
        self.by_name.values().filter_map(|tenant| {
            self.tenants[tenant.index()].as_ref().map(|c| (c.name.as_str(), c.service, c.active))
        })
    }

    fn min_backlogged_service(&self) -> Option<Service> {
        let backlogged = self.tenants.iter().flatten().filter(|counter| counter.waiting > 0);
        backlogged.map(|counter| counter.service).min()
    }

    fn insert(&mut self, name: &str) -> Tenant {
        let counter = Some(TenantCounter {
            name: name.to_owned(),
            weight: None,
            service: Service::default(),
            active: 0,
            waiting: 0,
            charged: self.evicted_charged_max,
            base: self.evicted_charged_max,
            dirty: false,
            undrained: 0,
            drained: 0,
        });
        let tenant = match self.free.pop() {
            Some(tenant) => {
                self.tenants[tenant.index()] = counter;
                tenant
            }
            None => {
                self.tenants.push(counter);
                Tenant(self.tenants.len() as u32 - 1)
            }
        };
        self.by_name.insert(name.to_owned(), tenant);
        tenant
    }

    /// Evicts the idle tenants with the least service down to `tenants_max`: on their return they would be
    /// lifted furthest anyway. Starts at an eighth above the bound, which amortises the scan. Tenants with
    /// undrained charges are evicted last, `except` never.
    fn evict_idle(&mut self, except: Option<Tenant>) {
        if self.by_name.len() <= self.tenants_max + self.tenants_max / 8 {
            return;
        }
        let idle = self.tenants.iter().enumerate().filter_map(|(index, counter)| {
            let counter = counter.as_ref().filter(|counter| counter.active == 0)?;
            Some((counter.dirty, counter.service, Tenant(index as u32)))
        });
        let mut idle: Vec<_> = idle.filter(|(.., tenant)| Some(*tenant) != except).collect();
        let surplus = self.by_name.len() - self.tenants_max;
        if surplus < idle.len() {
            idle.select_nth_unstable(surplus);
            idle.truncate(surplus);
        }
        for (.., tenant) in idle {
            if let Some(counter) = self.tenants[tenant.index()].take() {
                self.by_name.remove(&counter.name);
                self.evicted_charged_max = self.evicted_charged_max.max(counter.charged);
                self.free.push(tenant);
            }
        }
    }
}

impl TenantCounter {
    fn charged(&self) -> ServiceCounter {
        ServiceCounter { cost: self.charged, base: self.base }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn weight(weight: f32) -> Weight {
        Weight::try_from(weight).unwrap()
    }

    #[test]
    fn a_weight_is_positive_finite_and_bounded() {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1000.5] {
            assert!(Weight::try_from(bad).is_err(), "{bad}");
        }
        assert_eq!(Weight::try_from(1e-9).unwrap(), Weight(1));
    }

    #[test]
    fn idle_time_earns_no_credit() {
        let mut service = VirtualTokenCounters::new(TokenCost::default(), 100);
        let busy = service.arrive("busy", weight(1.0));
        service.charge(busy, 1000, 500);
        let late = service.arrive("late", weight(1.0));
        assert_eq!(service.service(late), service.service(busy));
        assert_eq!(service.service(late).tokens(), 2000.0);
        for tenant in [late, busy] {
            service.start(tenant);
            service.depart(tenant);
        }
        let fresh = service.arrive("fresh", weight(1.0));
        assert_eq!(service.service(fresh).tokens(), 2000.0, "nor does arriving while no tenant waits");
    }

    #[test]
    fn a_refund_leaves_a_tenant_at_the_floor_of_the_backlogged_ones() {
        let mut service = VirtualTokenCounters::new(TokenCost::default(), 100);
        let busy = service.arrive("busy", weight(1.0));
        service.charge(busy, 1000, 0);
        service.charge_elsewhere("victim", 1 << 40);
        let victim = service.arrive("victim", weight(2.0));
        assert!(service.service(victim) > service.service(busy));
        service.discharge_elsewhere("victim", 1 << 40);
        assert_eq!(service.service(victim), service.service(busy), "not below it");
        service.charge(victim, 500, 0);
        let ahead = service.service(victim);
        service.discharge_elsewhere("victim", 100);
        assert_eq!(service.service(victim).tokens(), ahead.tokens() - 50.0);
    }

    #[test]
    fn a_tenant_without_waiting_requests_gives_no_credit_to_newcomers() {
        let mut service = VirtualTokenCounters::new(TokenCost::default(), 100);
        let light = service.arrive("light", weight(1.0));
        service.start(light);
        let busy = service.arrive("busy", weight(1.0));
        service.charge(busy, 1000, 500);
        let late = service.arrive("late", weight(1.0));
        assert_eq!(service.service(late).tokens(), 2000.0);
        assert_eq!(service.service(light).tokens(), 0.0);
        service.start(late);
        service.charge(late, 0, 100);
        service.wait(late);
        assert_eq!(service.service(late).tokens(), 2200.0, "nor does a tenant that waits again lose service");
    }

    proptest! {
        /// VTC's bound for a server that runs one whole request at a time: the services of two backlogged
        /// tenants never differ by more than one request's cost over the smaller weight.
        #[test]
        fn services_of_two_backlogged_tenants_differ_by_a_bounded_amount(
            weights in (0.1f32..10.0, 0.1f32..10.0), sizes in prop::collection::vec((1u32..200, 1u32..200), 1..300)
        ) {
            let mut service = VirtualTokenCounters::new(TokenCost::default(), 100);
            let tenants = [service.arrive("f", weight(weights.0)), service.arrive("g", weight(weights.1))];
            let least_weight = f64::from(weights.0.min(weights.1));
            for (input, output) in sizes {
                let next = *tenants.iter().min_by_key(|t| service.service(**t)).unwrap();
                service.charge(next, input, output);
                let gap = (service.service(tenants[0]).tokens() - service.service(tenants[1]).tokens()).abs();
                prop_assert!(gap <= 600.0 / (least_weight - 0.001) + 1.0, "gap {gap}");
            }
        }

        #[test]
        fn beyond_the_bound_idle_tenants_are_evicted_and_active_ones_never(
            names in prop::collection::vec(0u32..50, 1..200)
        ) {
            let mut service = VirtualTokenCounters::new(TokenCost::default(), 5);
            let kept = service.arrive("kept", Weight::default());
            for name in names {
                let tenant = service.arrive(&name.to_string(), Weight::default());
                service.charge(tenant, name, 1);
                service.start(tenant);
                service.depart(tenant);
                prop_assert!(service.iter().count() <= 6);
            }
            service.charge(kept, 1, 0);
            prop_assert!(service.iter().any(|(name, _, active)| name == "kept" && active == 1));
        }

        /// Charges reported in any pieces before the weight is known give the same service as charges after
        /// it.
        #[test]
        fn service_charged_before_the_weight_is_known_counts_by_that_weight(
            tenants in prop::collection::vec((0.1f32..10.0, prop::collection::vec(1u64..1_000_000, 1..5)), 1..10)
        ) {
            let mut remote = VirtualTokenCounters::new(TokenCost::default(), 100);
            for (index, (_, costs)) in tenants.iter().enumerate() {
                costs.iter().for_each(|cost| remote.charge_elsewhere(&index.to_string(), *cost));
            }
            for (index, (share, costs)) in tenants.iter().enumerate() {
                let tenant = remote.arrive(&index.to_string(), weight(*share));
                let own = Service::default().plus(costs.iter().sum(), weight(*share));
                prop_assert_eq!(remote.service(tenant), own.max(remote.min_waiting_except(tenant)));
            }
        }

        /// Beyond the bound no charge is lost, and a reader that keeps the reported values counts none twice.
        #[test]
        fn charges_of_tenants_evicted_in_between_are_reported_once(
            served in prop::collection::vec((0u32..40, 1u32..100), 1..300)
        ) {
            let mut service = VirtualTokenCounters::new(TokenCost::default(), 5);
            let mut known: BTreeMap<String, u64> = BTreeMap::new();
            let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
            for (name, tokens) in served {
                let name = name.to_string();
                let tenant = service.arrive(&name, Weight::default());
                service.start(tenant);
                service.charge(tenant, tokens, 0);
                service.depart(tenant);
                sums.entry(name).or_default().0 += u64::from(tokens);
                for TenantCharge { tenant: name, counter: charged, growth, .. } in service.drain_charged() {
                    let known = known.entry(name.to_owned()).or_default();
                    let grown = charged.cost.saturating_sub(charged.base.max(*known));
                    prop_assert_eq!(growth, grown, "{}", name);
                    sums.get_mut(name).unwrap().1 += grown;
                    *known = charged.cost.max(*known);
                }
            }
            for (name, (truth, reported)) in sums {
                prop_assert_eq!(truth, reported, "{}", name);
            }
        }

        #[test]
        fn beyond_the_bound_the_tenants_with_the_most_service_are_kept(
            costs in prop::collection::vec(1u64..1000, 1..200)
        ) {
            let mut service = VirtualTokenCounters::new(TokenCost::default(), 16);
            for (index, cost) in costs.iter().enumerate() {
                service.charge_elsewhere(&index.to_string(), *cost);
                let last = service.charged().any(|(name, charged)| {
                    name == index.to_string() && charged.cost - charged.base == *cost
                });
                prop_assert!(last, "the tenant just charged is known with its charge");
                prop_assert!(service.iter().count() <= 18);
            }
            prop_assert_eq!(service.drain_charged().count(), 0, "nothing was served here");
            let largest = costs.iter().max().unwrap();
            prop_assert!(service.iter().any(|(_, service, _)| service.tokens() == *largest as f64));
        }
    }

    #[test]
    fn the_floor_is_capped_at_the_largest_service_of_any_tenant() {
        let mut service = VirtualTokenCounters::new(TokenCost::default(), 5);
        service.charge_elsewhere("a", 500);
        service.raise_floor(Service::from_thousandths(u64::MAX));
        let late = service.arrive("late", Weight::default());
        assert_eq!(service.service(late).tokens(), 500.0);
    }

    impl VirtualTokenCounters {
        /// Returns the minimum service of the other backlogged tenants.
        fn min_waiting_except(&self, except: Tenant) -> Service {
            let others = self.tenants.iter().enumerate().filter(|(index, _)| *index != except.index());
            let waiting = others.filter_map(|(_, counter)| counter.as_ref()).filter(|c| c.waiting > 0);
            waiting.map(|counter| counter.service).min().unwrap_or_default()
        }
    }
}
