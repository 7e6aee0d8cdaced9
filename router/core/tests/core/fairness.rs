//! Fairness over several routers and workers: real fair queues, and workers reduced to slots, tokens
//! generated one step at a time, and service counters reported to every router.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{Service, ServiceTable, TokenCost, Weight};
use inflight_router_core::{Arrival, FairQueue, FairQueueOptions, QueueLimits, QueuePosition};
use proptest::prelude::*;

const STEP: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Copy)]
struct TenantRequest {
    tenant: usize,
    prompt: u32,
    output: u32,
}

/// Request on a worker.
struct Running {
    router: usize,
    position: QueuePosition<u8>,
    ask: TenantRequest,
    /// Virtual start time from the router.
    virtual_start_time: Service,
    provisional: u64,
    made: u32,
}

struct Worker {
    incarnation: String,
    slots: usize,
    /// Waiting queue of the worker, beyond its slots.
    waiting: Vec<Running>,
    running: Vec<Running>,
    charged: BTreeMap<usize, u64>,
    virtual_time: Service,
    /// Minimum virtual time of the waiting requests, by router.
    least: BTreeMap<usize, Service>,
}

struct Router {
    queue: FairQueue<u8, TenantRequest>,
    table: ServiceTable,
}

struct Cluster {
    weights: Vec<f32>,
    priorities: Vec<i32>,
    routers: Vec<Router>,
    workers: Vec<Worker>,
    now: Duration,
    cost: TokenCost,
}

fn name(tenant: usize) -> String {
    format!("tenant-{tenant}")
}

impl Cluster {
    /// Creates a cluster in which requests are overdue after a second.
    fn new(weights: &[f32], routers: usize, workers: usize, slots: usize) -> Self {
        let limits = QueueLimits { requests: 1 << 20, tokens: 1 << 40 };
        let options = FairQueueOptions {
            limits,
            aging_threshold: Duration::from_secs(1),
            ..FairQueueOptions::default()
        };
        let router = |_| Router { queue: FairQueue::new(options), table: ServiceTable::new(100, 1000) };
        let worker = |number: usize| Worker {
            incarnation: number.to_string(),
            slots,
            waiting: Vec::new(),
            running: Vec::new(),
            charged: BTreeMap::new(),
            virtual_time: Service::default(),
            least: BTreeMap::new(),
        };
        let mut routers: Vec<Router> = (0..routers).map(router).collect();
        routers.iter_mut().for_each(|router| router.queue.open_lane(0));
        Self {
            weights: weights.to_vec(),
            priorities: vec![0; weights.len()],
            routers,
            workers: (0..workers).map(worker).collect(),
            now: Duration::ZERO,
            cost: TokenCost::default(),
        }
    }

    fn send(&mut self, router: usize, ask: TenantRequest) {
        let name = name(ask.tenant);
        let arrival = Arrival {
            tenant: &name,
            weight: Weight::try_from(self.weights[ask.tenant]).unwrap(),
            priority: self.priorities[ask.tenant],
            tokens: u64::from(ask.prompt + ask.output),
            bounds: QueueLimits::NONE,
        };
        self.routers[router].queue.push(0, arrival, self.now, ask).unwrap();
    }

    /// Returns the cumulative service of a tenant over its weight, in tokens of weight 1.
    fn service(&self, tenant: usize) -> f64 {
        let cost: u64 = self.workers.iter().filter_map(|worker| worker.charged.get(&tenant)).sum();
        cost as f64 / f64::from(self.weights[tenant])
    }

    /// Runs one step of every worker and reports its charges to all routers.
    fn step(&mut self) {
        self.now += STEP;
        self.dispatch();
        for worker in &mut self.workers {
            // The waiting queue is ordered by virtual start time.
            let priorities = &self.priorities;
            worker
                .waiting
                .sort_by_key(|request| (Reverse(priorities[request.ask.tenant]), request.virtual_start_time));
            while worker.running.len() < worker.slots && !worker.waiting.is_empty() {
                let request = worker.waiting.remove(0);
                worker.virtual_time = worker.virtual_time.max(request.virtual_start_time);
                *worker.charged.entry(request.ask.tenant).or_insert(0) += self.cost.of(request.ask.prompt, 0);
                let router = &mut self.routers[request.router];
                router.queue.settle(&request.position, request.provisional);
                worker.running.push(request);
            }
            let routers = &mut self.routers;
            let (charged, cost) = (&mut worker.charged, self.cost);
            worker.running.retain_mut(|request| {
                request.made += 1;
                *charged.entry(request.ask.tenant).or_insert(0) += cost.of(0, 1);
                let over = request.made == request.ask.output;
                if over {
                    routers[request.router].queue.depart(&request.position);
                }
                !over
            });
        }
        for router in &mut self.routers {
            for worker in &self.workers {
                for (tenant, cost) in &worker.charged {
                    let grown = router.table.merge(&worker.incarnation, &name(*tenant), *cost);
                    router.queue.charge(0, &name(*tenant), grown);
                }
                let least = worker.least.values().min();
                router.queue.raise_virtual_time(0, least.copied().unwrap_or(worker.virtual_time));
            }
        }
    }

    /// Dispatches as far as the grants allow; each worker's capacity is divided equally among routers.
    fn dispatch(&mut self) {
        let routers = self.routers.len();
        for at in 0..routers {
            let now = self.now;
            while let Some(head) = self.routers[at].queue.head(0, now) {
                let queue_ahead = 1;
                let room = |worker: &Worker| {
                    let held: usize = worker.waiting.len() + worker.running.len();
                    let own = worker.waiting.iter().filter(|request| request.router == at).count();
                    held < worker.slots + queue_ahead * routers && own < queue_ahead
                };
                let load = |worker: &Worker| worker.waiting.len() + worker.running.len();
                let open = self.workers.iter_mut().filter(|worker| room(worker));
                let Some(worker) = open.min_by_key(|worker| load(worker)) else { break };
                let prompt = self.routers[at].queue.get(&head).unwrap().prompt;
                let provisional = self.cost.of(prompt, 0);
                let taken = self.routers[at].queue.take(&head, provisional).unwrap();
                match self.routers[at].queue.min_virtual_time(0) {
                    Some(least) => worker.least.insert(at, least),
                    None => worker.least.remove(&at),
                };
                worker.waiting.push(Running {
                    router: at,
                    position: head,
                    ask: taken.item,
                    virtual_start_time: taken.virtual_start_time,
                    provisional,
                    made: 0,
                });
            }
        }
    }

    fn waiting(&self, tenant: usize) -> usize {
        let of = |router: &Router| {
            router
                .queue
                .usage()
                .find(|(known, _)| *known == name(tenant))
                .map_or(0, |(_, hold)| hold.requests)
        };
        self.routers.iter().map(of).sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    /// The bound at every instant: |W_f/w_f - W_g/w_g| ≤ 2 max(w_in L_in, w_out M) / min(w_f, w_g), with M
    /// the maximum tokens held at once. One router, so that both tenants are always backlogged in one queue.
    #[test]
    fn two_backlogged_tenants_stay_within_the_bound_at_every_instant(
        weights in (0.5f32..4.0, 0.5f32..4.0), workers in 1usize..4, slots in 1usize..6,
        sizes in proptest::collection::vec((1u32..60, 1u32..60), 60..200)
    ) {
        let mut cluster = Cluster::new(&[weights.0, weights.1], 1, workers, slots);
        for (number, (prompt, output)) in sizes.iter().enumerate() {
            cluster.send(0, TenantRequest { tenant: number % 2, prompt: *prompt, output: *output });
        }
        let input: u32 = 60;
        let held = (workers * (slots + 1)) as u32 * 120;
        let bound = 2.0 * f64::from(input.max(2 * held)) / f64::from(weights.0.min(weights.1));
        while cluster.waiting(0) > 0 && cluster.waiting(1) > 0 {
            cluster.step();
            let gap = (cluster.service(0) - cluster.service(1)).abs();
            prop_assert!(gap <= bound, "gap {gap} over {bound} at {:?}", cluster.now);
        }
    }
}

/// Linear congruential generator: any reproducible sequence will do.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound) as u32
    }

    fn ask(&mut self, tenant: usize) -> TenantRequest {
        TenantRequest { tenant, prompt: 1 + self.below(200), output: 1 + self.below(100) }
    }
}

/// Keeps `wanted` requests of each tenant waiting at each router for `steps`; returns the service of each
/// tenant, not divided by its weight.
fn shares(cluster: &mut Cluster, steps: u32, wanted: &[&[usize]], seed: u64) -> Vec<f64> {
    let tenants = 0..wanted[0].len();
    let cost =
        |cluster: &Cluster, tenant: usize| cluster.service(tenant) * f64::from(cluster.weights[tenant]);
    let before: Vec<f64> = tenants.clone().map(|tenant| cost(cluster, tenant)).collect();
    let mut random = Random(seed);
    for _ in 0..steps {
        for (router, wanted) in wanted.iter().enumerate() {
            for (tenant, wanted) in wanted.iter().enumerate() {
                let held = cluster.routers[router].queue.usage().find(|(known, _)| *known == name(tenant));
                for _ in held.map_or(0, |(_, hold)| hold.requests)..*wanted {
                    cluster.send(router, random.ask(tenant));
                }
            }
        }
        cluster.step();
    }
    tenants.map(|tenant| cost(cluster, tenant) - before[tenant]).collect()
}

#[test]
fn two_routers_and_four_workers_serve_weights_one_to_three_at_one_to_three() {
    for seed in 0..5 {
        let mut cluster = Cluster::new(&[1.0, 3.0], 2, 4, 8);
        let got = shares(&mut cluster, 20_000, &[&[8, 8], &[8, 8]], seed);
        let ratio = got[1] / got[0];
        println!("seed {seed}: 1 to {ratio:.4}");
        assert!((2.85..=3.15).contains(&ratio), "seed {seed}: {ratio}");
    }
}

#[test]
fn a_tenant_with_a_hundred_times_the_requests_gains_nothing_by_aging() {
    for seed in 0..3 {
        let mut cluster = Cluster::new(&[1.0, 1.0], 2, 4, 8);
        let got = shares(&mut cluster, 10_000, &[&[8, 800], &[8, 800]], seed);
        let ratio = got[1] / got[0];
        println!("seed {seed}: 1 to {ratio:.4}");
        assert!((0.95..=1.05).contains(&ratio), "seed {seed}: {ratio}");
    }
}

#[test]
fn tenants_on_separate_routers_share_by_weight() {
    for seed in 0..3 {
        let mut cluster = Cluster::new(&[1.0, 3.0], 2, 4, 8);
        let got = shares(&mut cluster, 20_000, &[&[8, 0], &[0, 8]], seed);
        let ratio = got[1] / got[0];
        println!("seed {seed}: 1 to {ratio:.4}");
        assert!((2.85..=3.15).contains(&ratio), "seed {seed}: {ratio}");
    }
}

#[test]
fn a_new_router_syncs_from_any_worker_and_gives_a_late_tenant_no_credit() {
    let mut cluster = Cluster::new(&[1.0, 3.0, 1.0], 1, 2, 4);
    shares(&mut cluster, 3_000, &[&[4, 4, 0]], 1);
    // A second router starts and receives all counters as after each step; a third tenant uses only it.
    let limits = QueueLimits { requests: 1 << 20, tokens: 1 << 40 };
    let options = FairQueueOptions { limits, ..FairQueueOptions::default() };
    let mut late = Router { queue: FairQueue::new(options), table: ServiceTable::new(100, 1000) };
    late.queue.open_lane(0);
    cluster.routers.push(late);
    cluster.step();
    let got = shares(&mut cluster, 12_000, &[&[4, 4, 0], &[4, 4, 4]], 2);
    // Counters received before the weights were known count by the weights.
    let got: Vec<f64> =
        got.iter().zip(&cluster.weights).map(|(got, weight)| got / f64::from(*weight)).collect();
    let mean = got.iter().sum::<f64>() / 3.0;
    assert!(got.iter().all(|share| (share / mean - 1.0).abs() < 0.07), "{got:?}");
}

#[test]
fn a_new_tenant_starts_at_the_minimum_waiting_virtual_time_of_all_routers() {
    // The first tenant has a higher priority and takes all capacity while it is backlogged; the second waits
    // meanwhile.
    let mut cluster = Cluster::new(&[1.0, 1.0, 3.0], 2, 2, 4);
    cluster.priorities[0] = 1;
    shares(&mut cluster, 3_000, &[&[8, 8, 0], &[0, 0, 0]], 1);
    assert!(cluster.service(0) > 20.0 * cluster.service(1), "only the important one was served");
    shares(&mut cluster, 10, &[&[8, 8, 0], &[0, 0, 8]], 2);
    while cluster.waiting(0) > 0 {
        cluster.step();
    }
    let got = shares(&mut cluster, 6_000, &[&[0, 8, 0], &[0, 0, 8]], 3);
    let ratio = got[2] / got[1];
    println!("1 to {ratio:.4}");
    assert!((2.8..=3.2).contains(&ratio), "{ratio}");
}
