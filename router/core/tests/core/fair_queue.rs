//! The fair queue against a sorted list; its bounds and displacement.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{Tenant, VirtualTokenCounters, Weight};
use inflight_router_core::{Arrival, FairQueue, FairQueueOptions, QueueLimits, QueuePosition};
use proptest::prelude::*;

type Queue = FairQueue<u8, u64>;

const TENANTS: [&str; 4] = ["a", "b", "c", "d"];
const SECOND: Duration = Duration::from_secs(1);

fn arrival(tenant: &str, priority: i32, tokens: u64) -> Arrival<'_> {
    Arrival { tenant, weight: Weight::default(), priority, tokens, bounds: QueueLimits::NONE }
}

fn roomy() -> FairQueueOptions {
    FairQueueOptions {
        limits: QueueLimits { requests: 1000, tokens: 1 << 40 },
        ..FairQueueOptions::default()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Push { lane: u8, tenant: usize, priority: i32, tokens: u64 },
    Take { lane: u8 },
    Cancel { nth: usize },
    PutBack { nth: usize },
    End { nth: usize },
    Charge { lane: u8, tenant: usize, cost: u64 },
    Wait { seconds: u64 },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        5 => (0..2u8, 0..4usize, -1..2i32, 1..50u64)
            .prop_map(|(lane, tenant, priority, tokens)| Op::Push { lane, tenant, priority, tokens }),
        4 => (0..2u8).prop_map(|lane| Op::Take { lane }),
        1 => any::<usize>().prop_map(|nth| Op::Cancel { nth }),
        1 => any::<usize>().prop_map(|nth| Op::PutBack { nth }),
        2 => any::<usize>().prop_map(|nth| Op::End { nth }),
        3 => (0..2u8, 0..4usize, 0..200u64).prop_map(|(lane, tenant, cost)| Op::Charge { lane, tenant, cost }),
        1 => (0..40u64).prop_map(|seconds| Op::Wait { seconds }),
    ];
    proptest::collection::vec(op, 0..300)
}

/// Request of the reference model.
#[derive(Debug, Clone, Copy)]
struct Naive {
    lane: u8,
    tenant: usize,
    fresh: bool,
    priority: i32,
    tokens: u64,
    number: u64,
    queued: u64,
    position: QueuePosition<u8>,
}

const WAIT_MAX: u64 = 100;
const AGED_PER_SECOND: u64 = 3;
const AGED_MAX: u64 = 60;

/// Reference order: each tenant's first request (the oldest once overdue), then the tenants by the priority
/// of their first request by rank.
fn next(waiting: &[Naive], lane: u8, now: u64, service: impl Fn(usize) -> f64) -> Option<usize> {
    let overdue = |r: &Naive| now - r.queued > WAIT_MAX;
    let mut heads = Vec::new();
    for tenant in 0..TENANTS.len() {
        let own = (0..waiting.len()).filter(|i| waiting[*i].lane == lane && waiting[*i].tenant == tenant);
        let own: Vec<usize> = own.collect();
        let rank = |i: &usize| (waiting[*i].fresh, -waiting[*i].priority, waiting[*i].number);
        let Some(first) = own.iter().copied().min_by_key(rank) else { continue };
        let oldest = own.iter().copied().min_by_key(|i| waiting[*i].number).unwrap();
        let next = if waiting[first].fresh && overdue(&waiting[oldest]) { oldest } else { first };
        heads.push((next, waiting[first].priority));
    }
    let least = heads.into_iter().min_by(|a, b| {
        let key = |(i, priority): &(usize, i32)| {
            let r = &waiting[*i];
            let aged = ((now - r.queued) * AGED_PER_SECOND).min(AGED_MAX) as f64;
            (r.fresh, -priority, service(r.tenant) - aged, r.number)
        };
        key(a).partial_cmp(&key(b)).unwrap()
    });
    least.map(|(i, _)| i)
}

/// Reference service counters: one domain per lane.
struct Counters {
    services: Vec<VirtualTokenCounters>,
    handles: BTreeMap<(u8, usize), Tenant>,
    pending: BTreeMap<(u8, usize), u64>,
}

impl Counters {
    fn owed(&self, lane: u8, tenant: usize) -> f64 {
        let handle = self.handles.get(&(lane, tenant));
        let service = handle.map_or(0.0, |handle| self.services[lane as usize].service(*handle).tokens());
        service + self.pending.get(&(lane, tenant)).copied().unwrap_or(0) as f64
    }

    fn of(&mut self, r: &Naive) -> (&mut VirtualTokenCounters, Tenant) {
        (&mut self.services[r.lane as usize], self.handles[&(r.lane, r.tenant)])
    }

    fn settle(&mut self, r: &Naive) {
        *self.pending.get_mut(&(r.lane, r.tenant)).unwrap() -= r.tokens;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_sorted_list_under_any_interleaving(ops in ops()) {
        let options = FairQueueOptions {
            aging_threshold: Duration::from_secs(WAIT_MAX),
            aging_tokens_per_second: AGED_PER_SECOND as f64,
            aging_tokens_max: AGED_MAX as f64,
            ..roomy()
        };
        let mut queue = Queue::new(options);
        let (mut now, mut number) = (0, 0);
        let mut waiting: Vec<Naive> = Vec::new();
        let mut taken: Vec<Naive> = Vec::new();
        let services = vec![VirtualTokenCounters::new(options.cost, 100); 2];
        let mut counters = Counters { services, handles: BTreeMap::new(), pending: BTreeMap::new() };
        for op in ops {
            let at = Duration::from_secs(now);
            match op {
                Op::Push { lane, tenant, priority, tokens } => {
                    let asked = arrival(TENANTS[tenant], priority, tokens);
                    let admitted = queue.push(lane, asked, at, number).unwrap();
                    prop_assert!(admitted.displaced.is_empty());
                    let handle = counters.services[lane as usize].arrive(TENANTS[tenant], Weight::default());
                    counters.handles.insert((lane, tenant), handle);
                    let position = admitted.position;
                    waiting.push(Naive { lane, tenant, fresh: true, priority, tokens, number, queued: now, position });
                    number += 1;
                }
                Op::Take { lane } => {
                    let expected = next(&waiting, lane, now, |t| counters.owed(lane, t)).map(|i| waiting[i]);
                    prop_assert_eq!(queue.head(lane, at), expected.map(|r| r.position));
                    let Some(expected) = expected else { continue };
                    let order = counters.owed(lane, expected.tenant);
                    let got = queue.take(&expected.position, expected.tokens).unwrap();
                    prop_assert_eq!((got.item, got.virtual_start_time.tokens()), (expected.number, order));
                    let (service, handle) = counters.of(&expected);
                    service.start(handle);
                    *counters.pending.entry((lane, expected.tenant)).or_insert(0) += expected.tokens;
                    waiting.retain(|r| r.number != expected.number);
                    taken.push(expected);
                }
                Op::Cancel { nth } => if !waiting.is_empty() {
                    let gone = waiting.remove(nth % waiting.len());
                    prop_assert_eq!(queue.remove(&gone.position), Some(gone.number));
                    prop_assert_eq!(queue.remove(&gone.position), None, "a second cancel finds nothing");
                    let (service, handle) = counters.of(&gone);
                    service.start(handle);
                    service.depart(handle);
                },
                Op::PutBack { nth } => if !taken.is_empty() {
                    let mut back = taken.remove(nth % taken.len());
                    queue.settle(&back.position, back.tokens);
                    counters.settle(&back);
                    back.position = queue.requeue(&back.position, TENANTS[back.tenant], back.tokens, at, back.number);
                    (back.fresh, back.queued) = (false, now);
                    let (service, handle) = counters.of(&back);
                    service.wait(handle);
                    waiting.push(back);
                },
                Op::End { nth } => if !taken.is_empty() {
                    let ended = taken.remove(nth % taken.len());
                    queue.settle(&ended.position, ended.tokens);
                    counters.settle(&ended);
                    queue.depart(&ended.position);
                    let (service, handle) = counters.of(&ended);
                    service.depart(handle);
                },
                Op::Charge { lane, tenant, cost } => {
                    queue.open_lane(lane);
                    queue.charge(lane, TENANTS[tenant], cost);
                    counters.services[lane as usize].charge_elsewhere(TENANTS[tenant], cost);
                }
                Op::Wait { seconds } => now += seconds,
            }
            prop_assert_eq!(queue.len(), waiting.len());
            prop_assert_eq!(queue.tokens(), waiting.iter().map(|r| r.tokens).sum::<u64>());
            let holds: BTreeMap<_, _> =
                queue.usage().map(|(name, hold)| (name.to_owned(), hold.requests)).collect();
            for (tenant, name) in TENANTS.iter().enumerate() {
                let own = waiting.iter().filter(|r| r.tenant == tenant).count();
                prop_assert_eq!(holds.get(*name).copied().unwrap_or(0), own);
            }
        }
    }

    /// Over its bounds, the queue accepts an arrival only by displacing requests of lower priority or of a
    /// tenant that holds more, and is unchanged if it rejects.
    #[test]
    fn over_the_bounds_only_lower_priorities_or_larger_holders_are_displaced(
        arrivals in proptest::collection::vec((0..4usize, -2..3i32, 1..40u64), 1..120),
        routers in 1u32..3
    ) {
        let limits = QueueLimits { requests: 20, tokens: 400 };
        let mut queue = Queue::new(FairQueueOptions { limits, ..roomy() });
        queue.set_routers(routers);
        let weights = [1.0, 1.0, 2.0, 4.0f32];
        type Waiting = BTreeMap<u64, (usize, i32, u64)>;
        let mut waiting = Waiting::new();
        for (number, (tenant, priority, tokens)) in arrivals.into_iter().enumerate() {
            let number = number as u64;
            // In requests or in tokens, over the weight; with one more request of `more` tokens, or without one of them.
            let share = |waiting: &Waiting, tenant: usize, in_requests: bool, requests: i64, more: i64| {
                let held = waiting.values().filter(|r| r.0 == tenant);
                let (count, sum) = held.fold((requests, more), |(count, sum), r| (count + 1, sum + r.2 as i64));
                (if in_requests { count } else { sum }) as f64 / f64::from(weights[tenant])
            };
            let bounds = limits.divided(routers);
            let weight = Weight::try_from(weights[tenant]).unwrap();
            let asked = Arrival { weight, ..arrival(TENANTS[tenant], priority, tokens) };
            match queue.push(0, asked, Duration::ZERO, number) {
                Ok(admitted) => {
                    for gone in admitted.displaced {
                        let (other, theirs, freed) = waiting[&gone];
                        // The unit is that of the bound that is exceeded until then.
                        let in_requests = waiting.len() >= bounds.requests;
                        let left = share(&waiting, other, in_requests, -1, -(freed as i64));
                        let own_after = share(&waiting, tenant, in_requests, 1, tokens as i64);
                        prop_assert!(
                            theirs < priority || (theirs == priority && other != tenant && left >= own_after - 1e-9),
                            "{gone} of {other} at {theirs} gave way to {tenant} at {priority}"
                        );
                        prop_assert!(waiting.values().all(|r| r.1 >= theirs), "the least important goes first");
                        waiting.remove(&gone);
                    }
                    waiting.insert(number, (tenant, priority, tokens));
                }
                Err(_) => {
                    // Displacing all requests of lower priority would not have been enough.
                    let rest: Vec<_> = waiting.values().filter(|r| r.1 >= priority).collect();
                    let left: u64 = rest.iter().map(|r| r.2).sum();
                    prop_assert!(rest.len() >= bounds.requests || left + tokens > bounds.tokens);
                }
            }
            prop_assert_eq!(queue.len(), waiting.len());
            prop_assert_eq!(queue.tokens(), waiting.values().map(|r| r.2).sum::<u64>());
            prop_assert!(queue.len() <= bounds.requests);
            prop_assert!(queue.tokens() <= bounds.tokens || queue.len() == 1);
        }
    }

    /// A head that fits on no worker is bypassed a bounded number of times, then blocks the lane.
    #[test]
    fn head_of_line_bypass_is_bounded(
        others in proptest::collection::vec((0..4usize, -1..2i32), 1..60), bypass_max in 0u32..20
    ) {
        let mut queue = Queue::new(FairQueueOptions { bypass_max, ..roomy() });
        let large = queue.push(0, arrival("large", 1, 1_000), Duration::ZERO, 0).unwrap().position;
        for (number, (tenant, priority)) in others.iter().enumerate() {
            let small = arrival(TENANTS[*tenant], *priority, 1);
            queue.push(0, small, Duration::ZERO, number as u64 + 1).unwrap();
        }
        let mut overtakes = 0;
        loop {
            let head = queue.head(0, SECOND).unwrap();
            if head != large {
                queue.take(&head, 1).unwrap();
                continue;
            }
            let behind = queue.bypass_candidates(&head, SECOND);
            let Some(next) = behind.first() else { break };
            prop_assert!(!behind.contains(&large));
            queue.take(next, 1).unwrap();
            queue.count_bypass(&head);
            overtakes += 1;
        }
        prop_assert!(overtakes <= bypass_max);
        prop_assert!(queue.len() == 1 || overtakes == bypass_max);
        prop_assert_eq!(queue.head(0, SECOND), Some(large));
    }
}

#[test]
fn many_small_requests_keep_nobody_out_whose_requests_are_large() {
    let limits = QueueLimits { requests: 1024, tokens: 4 << 20 };
    let mut queue = Queue::new(FairQueueOptions { limits, ..roomy() });
    for number in 0..1024 {
        queue.push(0, arrival("a", 0, 2), SECOND, number).unwrap();
    }
    for tokens in [2_024, 2_524, 5_024, 3 << 20] {
        let admitted = queue.push(0, arrival("b", 0, tokens), SECOND, 2_000 + tokens).unwrap();
        assert_eq!(admitted.displaced.len(), 1, "{tokens} tokens");
    }
    // And few large requests keep nobody out whose requests are small and many.
    let mut queue = Queue::new(FairQueueOptions { limits, ..roomy() });
    for number in 0..4 {
        queue.push(0, arrival("a", 0, 1 << 20), SECOND, number).unwrap();
    }
    for number in 0..1_000 {
        queue.push(0, arrival("b", 0, 2), SECOND, 10 + number).unwrap();
    }
    assert_eq!(queue.usage().find(|(name, _)| *name == "b").unwrap().1.requests, 1_000);
}

#[test]
fn at_its_own_bound_a_tenant_displaces_only_its_own_lower_priorities() {
    let mut queue = Queue::new(roomy());
    let bounds = QueueLimits { requests: 2, tokens: 100 };
    let ask = |priority, tokens| Arrival { bounds, ..arrival("a", priority, tokens) };
    queue.push(0, ask(0, 10), SECOND, 0).unwrap();
    queue.push(0, ask(0, 10), SECOND, 1).unwrap();
    let full = queue.push(0, ask(0, 10), SECOND, 2).unwrap_err();
    assert_eq!((full.tenant.as_deref(), full.quota()), (Some("a"), "tenant_queue_requests"));
    queue.push(0, arrival("b", 0, 10), SECOND, 3).unwrap();
    let admitted = queue.push(0, ask(1, 10), SECOND, 4).unwrap();
    assert_eq!(admitted.displaced, [1], "the latest of its own that are less important");
    let full = queue.push(0, ask(2, 95), SECOND, 5).unwrap();
    assert_eq!(full.displaced, [0, 4]);
    assert_eq!(queue.push(0, ask(2, 95), SECOND, 6).unwrap_err().quota(), "tenant_queue_tokens");
}

#[test]
fn resubmissions_are_never_displaced_and_go_first() {
    let limits = QueueLimits { requests: 1, tokens: 100 };
    let mut queue = Queue::new(FairQueueOptions { limits, ..roomy() });
    let position = queue.push(0, arrival("a", -5, 10), SECOND, 0).unwrap().position;
    let taken = queue.take(&position, 10).unwrap();
    queue.settle(&position, 10);
    queue.push(0, arrival("b", 5, 10), SECOND, 1).unwrap();
    let back = queue.requeue(&position, "a", 10, SECOND, taken.item);
    assert_eq!(queue.len(), 2);
    assert!(queue.push(0, arrival("c", 5, 10), SECOND, 2).is_err());
    let displacing = queue.push(0, arrival("c", 100, 10), SECOND, 3);
    assert!(displacing.is_err(), "even without b, a is there");
    assert_eq!(queue.head(0, SECOND), Some(back));
}

#[test]
fn a_resubmission_keeps_its_tenants_weight_and_share_of_the_queue() {
    let limits = QueueLimits { requests: 100, tokens: 100 };
    let mut queue = Queue::new(FairQueueOptions { limits, ..roomy() });
    let heavy = Arrival { weight: Weight::try_from(4.0).unwrap(), ..arrival("heavy", 0, 30) };
    let position = queue.push(0, heavy, SECOND, 0).unwrap().position;
    queue.take(&position, 0).unwrap();
    queue.requeue(&position, "heavy", 30, SECOND, 0);
    let holds: Vec<_> = queue.usage().map(|(name, hold)| (name, hold.weight.get())).collect();
    assert_eq!(holds, [("heavy", 4.0)]);
}

#[test]
fn an_overdue_request_goes_first_only_within_its_tenant() {
    let mut queue = Queue::new(FairQueueOptions { aging_threshold: SECOND, ..roomy() });
    let low = queue.push(0, arrival("a", -1, 1), Duration::ZERO, 0).unwrap().position;
    queue.push(0, arrival("a", 1, 1), Duration::ZERO, 1).unwrap();
    let other = queue.push(0, arrival("b", 0, 1), 9 * SECOND, 2).unwrap().position;
    queue.open_lane(0);
    assert_eq!(queue.head(0, 9 * SECOND), Some(low), "in the turn of its tenant's most important");
    queue.charge(0, "a", 10);
    queue.push(0, arrival("b", 1, 1), 9 * SECOND, 3).unwrap();
    let head = queue.head(0, 9 * SECOND).unwrap();
    assert_ne!(head, other, "b is not overdue");
    assert_eq!(head.arrival(), 3, "and b has had less");
}
