use std::collections::BTreeMap;

/// What a token costs its tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCost {
    /// A prompt token that was really computed: neither a prefix hit nor computed again.
    pub input: u32,
    /// A generated token.
    pub output: u32,
}

impl Default for TokenCost {
    /// As in the VTC paper: an output token costs twice an input token.
    fn default() -> Self {
        Self { input: 1, output: 2 }
    }
}

/// A tenant's share relative to others: in (0, 1000], in steps of 1/1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weight(u32);

/// A weight that is not in (0, 1000].
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
    /// The weight of those who have none of their own.
    pub const ONE: Self = Self(1000);

    /// As a number.
    pub fn get(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

/// Service received over weight, in thousandths of a token of weight 1: 2^63 of them last for ages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Service(u64);

impl Service {
    fn of(tokens: u64, weight: Weight) -> Self {
        // Thousandths of a token over thousandths of weight 1: a token at weight 1 is 1000.
        Self(tokens.saturating_mul(1_000_000) / u64::from(weight.0))
    }

    /// In tokens of weight 1.
    pub fn tokens(self) -> f64 {
        self.0 as f64 / 1000.0
    }

    /// As it travels: in thousandths of a token of weight 1.
    pub fn thousandths(self) -> u64 {
        self.0
    }

    /// From what travels.
    pub fn from_thousandths(thousandths: u64) -> Self {
        Self(thousandths)
    }

    /// With so much less, for a tenant of this weight.
    fn minus(self, cost: u64, weight: Weight) -> Self {
        Self(self.0.saturating_sub(Self::of(cost, weight).0))
    }

    /// With so much more, for a tenant of this weight.
    pub fn plus(self, cost: u64, weight: Weight) -> Self {
        Self(self.0.saturating_add(Self::of(cost, weight).0))
    }
}

/// Names a tenant inside a [`TenantService`]; reused after the tenant was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(u32);

impl Tenant {
    /// A small number, for tables kept beside the counters.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a tenant was charged, whatever its weight. Both only grow.
///
/// A worker that forgets a tenant and meets it again goes on counting from a `base` that no forgotten counter had
/// passed, so that whoever kept the old value takes for growth nothing but what is above both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Charged {
    /// The counter, in tokens as weighted by [`TokenCost`].
    pub cost: u64,
    /// What it began at.
    pub base: u64,
}

impl From<u64> for Charged {
    /// Counted from 0.
    fn from(cost: u64) -> Self {
        Self { cost, base: 0 }
    }
}

#[derive(Debug, Clone)]
struct Counter {
    name: String,
    /// Unknown until a request of it arrives here.
    weight: Option<Weight>,
    service: Service,
    /// Requests that wait or run.
    active: u32,
    /// Requests that wait.
    waiting: u32,
    /// Everything charged since it is known, whatever the weight, and `base`.
    charged: u64,
    /// What `charged` began at: no counter that was forgotten before had come further.
    base: u64,
    /// It was charged since [`TenantService::drain_charged`].
    fresh: bool,
}

/// Virtual token counters: how much service each tenant has had, over its weight.
///
/// The algorithm is VTC's (Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024): serve the
/// backlogged tenant with the least service, charge as service happens, and lift the counter of a tenant that
/// becomes backlogged to the least among the backlogged ones, so that idle time earns no credit. For two tenants
/// that stay backlogged the difference of their counters stays bounded. Backlogged means that a request waits: a
/// tenant whose requests all run takes less than its share, and would hand its low counter to every newcomer.
#[derive(Debug, Clone)]
pub struct TenantService {
    cost: TokenCost,
    tenants: Vec<Option<Counter>>,
    by_name: BTreeMap<String, Tenant>,
    /// Places of those that were forgotten.
    free: Vec<Tenant>,
    most: usize,
    /// The furthest `charged` of all that were forgotten.
    forgotten: u64,
    /// The most that any had.
    greatest: Service,
    /// Where a tenant starts when nobody waits: the most that any had when the last of its requests began.
    idle_floor: Service,
    /// Those charged since the last drain.
    fresh: Vec<Tenant>,
}

impl TokenCost {
    /// What these tokens cost together.
    pub fn of(self, input: u32, output: u32) -> u64 {
        u64::from(input) * u64::from(self.input) + u64::from(output) * u64::from(self.output)
    }
}

impl TenantService {
    /// No tenants yet; at most `most` and an eighth more are remembered once they are idle.
    pub fn new(cost: TokenCost, most: usize) -> Self {
        Self {
            cost,
            tenants: Vec::new(),
            by_name: BTreeMap::new(),
            free: Vec::new(),
            most,
            forgotten: 0,
            greatest: Service::default(),
            idle_floor: Service::default(),
            fresh: Vec::new(),
        }
    }

    /// A request of a tenant arrives and waits; its weight is the one in force from now on. Where none was known, it
    /// holds for what was charged before too.
    pub fn arrive(&mut self, name: &str, weight: Weight) -> Tenant {
        let tenant = match self.by_name.get(name) {
            Some(tenant) => *tenant,
            None => self.insert(name),
        };
        // `tenant` was found or inserted just now.
        if let Some(counter) = &mut self.tenants[tenant.index()] {
            counter.active += 1;
            if counter.weight.replace(weight).is_none() {
                // Nothing but charges has changed it so far.
                counter.service = Service::of(counter.charged - counter.base, weight);
                self.greatest = self.greatest.max(counter.service);
            }
        }
        self.wait(tenant);
        tenant
    }

    /// A request of a tenant waits: it has arrived, or was preempted.
    pub fn wait(&mut self, tenant: Tenant) {
        let floor = self.backlogged_least().unwrap_or(self.idle_floor);
        if let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) {
            if counter.waiting == 0 {
                counter.service = counter.service.max(floor);
                self.greatest = self.greatest.max(counter.service);
            }
            counter.waiting += 1;
        }
    }

    /// A request of a tenant waits no more: it begins to be served, or was withdrawn.
    pub fn start(&mut self, tenant: Tenant) {
        if let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) {
            debug_assert!(counter.waiting > 0, "more requests began than waited");
            counter.waiting = counter.waiting.saturating_sub(1);
            if counter.waiting == 0 {
                self.idle_floor = self.idle_floor.max(counter.service);
            }
        }
    }

    /// A request of a tenant is over; it does not wait any more.
    pub fn depart(&mut self, tenant: Tenant) {
        if let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) {
            debug_assert!(counter.active > 0, "more requests departed than arrived");
            counter.active = counter.active.saturating_sub(1);
        }
        self.forget_idle(None);
    }

    /// Charges computed prompt tokens and generated tokens.
    pub fn charge(&mut self, tenant: Tenant, input: u32, output: u32) {
        self.charge_cost(tenant, self.cost.of(input, output));
    }

    /// Charges what was made a cost already, by [`TokenCost::of`].
    pub fn charge_cost(&mut self, tenant: Tenant, cost: u64) {
        self.add(tenant, cost);
        let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) else { return };
        if cost > 0 && !std::mem::replace(&mut counter.fresh, true) {
            self.fresh.push(tenant);
        }
    }

    fn add(&mut self, tenant: Tenant, cost: u64) {
        let Some(counter) = self.tenants.get_mut(tenant.index()).and_then(Option::as_mut) else { return };
        counter.service = counter.service.plus(cost, counter.weight.unwrap_or_default());
        counter.charged = counter.charged.saturating_add(cost);
        self.greatest = self.greatest.max(counter.service);
    }

    /// Charges a tenant for service that somebody else's requests of the same tenant had. One that is not known
    /// yet becomes known, with a weight once a request of it arrives. [`TenantService::drain_charged`] says nothing
    /// of it.
    pub fn charge_elsewhere(&mut self, name: &str, cost: u64) {
        let tenant = match self.by_name.get(name) {
            Some(tenant) => *tenant,
            None => self.insert(name),
        };
        self.add(tenant, cost);
        self.forget_idle(Some(tenant));
    }

    /// Takes back what a tenant was charged by [`TenantService::charge_elsewhere`] and turned out not to be known. The
    /// tenant comes out no lower than the least of those that wait, so that nobody owes it anything.
    pub fn discharge_elsewhere(&mut self, name: &str, cost: u64) {
        let floor = self.backlogged_least().unwrap_or(self.idle_floor);
        let tenant = self.by_name.get(name).copied();
        let counter = tenant.and_then(|tenant| self.tenants.get_mut(tenant.index())?.as_mut());
        let Some(counter) = counter else { return };
        counter.charged = counter.charged.saturating_sub(cost).max(counter.base);
        let lowered = counter.service.minus(cost, counter.weight.unwrap_or_default());
        counter.service = lowered.max(floor.min(counter.service));
    }

    /// The tenants charged since this was asked last, each with all that it was charged since it is known.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = (&str, Charged)> + '_ {
        let Self { fresh, tenants, .. } = self;
        fresh.retain(|tenant| match &mut tenants[tenant.index()] {
            Some(counter) => std::mem::replace(&mut counter.fresh, false),
            None => false,
        });
        let named = fresh.drain(..).filter_map(|tenant| tenants[tenant.index()].as_ref());
        named.map(|counter| (counter.name.as_str(), counter.charged()))
    }

    /// All that each tenant was charged since it is known, by name.
    pub fn charged(&self) -> impl Iterator<Item = (&str, Charged)> + '_ {
        let known = self.by_name.values().filter_map(|tenant| self.tenants[tenant.index()].as_ref());
        known.map(|counter| (counter.name.as_str(), counter.charged()))
    }

    /// A tenant that becomes backlogged while nobody waits starts at least here, as far as any has come: how far
    /// service has got elsewhere.
    pub fn raise_floor(&mut self, floor: Service) {
        self.idle_floor = self.idle_floor.max(floor.min(self.greatest));
    }

    /// A tenant's share.
    pub fn weight(&self, tenant: Tenant) -> Weight {
        self.tenants.get(tenant.index()).and_then(Option::as_ref).and_then(|c| c.weight).unwrap_or_default()
    }

    /// Sum of the weights of the tenants with requests that wait.
    pub fn backlogged_weight(&self) -> f64 {
        let backlogged = self.tenants.iter().flatten().filter(|counter| counter.waiting > 0);
        backlogged.map(|counter| counter.weight.unwrap_or_default().get()).sum()
    }

    /// What a tenant has had.
    pub fn service(&self, tenant: Tenant) -> Service {
        self.tenants.get(tenant.index()).and_then(Option::as_ref).map_or(Service::default(), |c| c.service)
    }

    /// Every tenant known, by name, with its service and the number of its requests.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Service, u32)> {
        self.by_name.values().filter_map(|tenant| {
            self.tenants[tenant.index()].as_ref().map(|c| (c.name.as_str(), c.service, c.active))
        })
    }

    fn backlogged_least(&self) -> Option<Service> {
        let backlogged = self.tenants.iter().flatten().filter(|counter| counter.waiting > 0);
        backlogged.map(|counter| counter.service).min()
    }

    fn insert(&mut self, name: &str) -> Tenant {
        let counter = Some(Counter {
            name: name.to_owned(),
            weight: None,
            service: Service::default(),
            active: 0,
            waiting: 0,
            charged: self.forgotten,
            base: self.forgotten,
            fresh: false,
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

    /// Past the bound and an eighth of it, which spreads the cost of looking, forgets the idle tenants with the least
    /// service: on their return they would be lifted furthest anyway. Those whose charges were not drained go last, and
    /// `but` stays.
    fn forget_idle(&mut self, but: Option<Tenant>) {
        if self.by_name.len() <= self.most + self.most / 8 {
            return;
        }
        let places = self.tenants.iter().enumerate();
        let idle = places.filter_map(|(place, counter)| {
            let counter = counter.as_ref().filter(|counter| counter.active == 0)?;
            Some((counter.fresh, counter.service, Tenant(place as u32)))
        });
        let mut idle: Vec<_> = idle.filter(|(.., tenant)| Some(*tenant) != but).collect();
        let surplus = self.by_name.len() - self.most;
        if surplus < idle.len() {
            idle.select_nth_unstable(surplus);
            idle.truncate(surplus);
        }
        for (.., tenant) in idle {
            if let Some(counter) = self.tenants[tenant.index()].take() {
                self.by_name.remove(&counter.name);
                self.forgotten = self.forgotten.max(counter.charged);
                self.free.push(tenant);
            }
        }
    }
}

impl Counter {
    fn charged(&self) -> Charged {
        Charged { cost: self.charged, base: self.base }
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
        let mut service = TenantService::new(TokenCost::default(), 100);
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
        assert_eq!(service.service(fresh).tokens(), 2000.0, "nor does coming when nobody is there");
    }

    #[test]
    fn what_is_taken_back_leaves_a_tenant_beside_those_that_wait() {
        let mut service = TenantService::new(TokenCost::default(), 100);
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
    fn a_tenant_that_only_runs_gives_no_credit_to_those_who_come() {
        let mut service = TenantService::new(TokenCost::default(), 100);
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
        assert_eq!(service.service(late).tokens(), 2200.0, "nor is anything taken away from who waits again");
    }

    proptest! {
        /// The design's bound for a server that serves one request at a time, whole: at every moment the services
        /// of any two backlogged tenants differ by at most one request's cost over the smaller weight.
        #[test]
        fn two_backlogged_tenants_never_drift_apart(
            weights in (0.1f32..10.0, 0.1f32..10.0), sizes in prop::collection::vec((1u32..200, 1u32..200), 1..300)
        ) {
            let mut service = TenantService::new(TokenCost::default(), 100);
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
        fn idle_tenants_are_forgotten_beyond_the_bound_and_active_ones_never(names in prop::collection::vec(0u32..50, 1..200)) {
            let mut service = TenantService::new(TokenCost::default(), 5);
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

        /// Whoever hears of charges, in whatever pieces, and of the weights afterwards, knows the same as who served.
        #[test]
        fn service_learnt_before_a_tenants_weight_counts_by_its_weight(
            tenants in prop::collection::vec((0.1f32..10.0, prop::collection::vec(1u64..1_000_000, 1..5)), 1..10)
        ) {
            let mut heard = TenantService::new(TokenCost::default(), 100);
            for (number, (_, costs)) in tenants.iter().enumerate() {
                costs.iter().for_each(|cost| heard.charge_elsewhere(&number.to_string(), *cost));
            }
            for (number, (share, costs)) in tenants.iter().enumerate() {
                let tenant = heard.arrive(&number.to_string(), weight(*share));
                let own = Service::default().plus(costs.iter().sum(), weight(*share));
                prop_assert_eq!(heard.service(tenant), own.max(heard.least_but(tenant)));
            }
        }

        /// Past the bound no charge is lost, and none is counted twice by who keeps the reported values.
        #[test]
        fn charges_of_tenants_that_are_forgotten_in_between_are_reported_once(
            served in prop::collection::vec((0u32..40, 1u32..100), 1..300)
        ) {
            let mut service = TenantService::new(TokenCost::default(), 5);
            let mut known: BTreeMap<String, u64> = BTreeMap::new();
            let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
            for (name, tokens) in served {
                let name = name.to_string();
                let tenant = service.arrive(&name, Weight::default());
                service.start(tenant);
                service.charge(tenant, tokens, 0);
                service.depart(tenant);
                sums.entry(name).or_default().0 += u64::from(tokens);
                for (name, charged) in service.drain_charged() {
                    let known = known.entry(name.to_owned()).or_default();
                    sums.get_mut(name).unwrap().1 += charged.cost.saturating_sub(charged.base.max(*known));
                    *known = charged.cost.max(*known);
                }
            }
            for (name, (truth, reported)) in sums {
                prop_assert_eq!(truth, reported, "{}", name);
            }
        }

        #[test]
        fn what_is_learnt_past_the_bound_is_kept_for_those_who_had_most(
            costs in prop::collection::vec(1u64..1000, 1..200)
        ) {
            let mut service = TenantService::new(TokenCost::default(), 16);
            for (number, cost) in costs.iter().enumerate() {
                service.charge_elsewhere(&number.to_string(), *cost);
                let last = service.charged().any(|(name, charged)| {
                    name == number.to_string() && charged.cost - charged.base == *cost
                });
                prop_assert!(last, "the tenant just charged is known with its charge");
                prop_assert!(service.iter().count() <= 18);
            }
            prop_assert_eq!(service.drain_charged().count(), 0, "nothing was served here");
            let most = costs.iter().max().unwrap();
            prop_assert!(service.iter().any(|(_, had, _)| had.tokens() == *most as f64));
        }
    }

    #[test]
    fn a_floor_above_all_that_any_tenant_had_is_none() {
        let mut service = TenantService::new(TokenCost::default(), 5);
        service.charge_elsewhere("a", 500);
        service.raise_floor(Service::from_thousandths(u64::MAX));
        let late = service.arrive("late", Weight::default());
        assert_eq!(service.service(late).tokens(), 500.0);
    }

    impl TenantService {
        /// The least of others that wait.
        fn least_but(&self, but: Tenant) -> Service {
            let others = self.tenants.iter().enumerate().filter(|(place, _)| *place != but.index());
            let waiting = others.filter_map(|(_, counter)| counter.as_ref()).filter(|c| c.waiting > 0);
            waiting.map(|counter| counter.service).min().unwrap_or_default()
        }
    }
}
