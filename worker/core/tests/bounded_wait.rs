//! Nobody waits for ever, however many come after: a bound on the iterations until a sequence ends, from what was there
//! when it came, against others that never stop coming.
//!
//! **The bound.** Let `A` be the sequences ahead of sequence r in policy order when it is submitted, and r itself; `S`
//! the most tokens that any sequence computes, `R` the slots, `H` the host's blocks, `P = max(bypass_max, 1)`, and
//! `D` the iterations that a transfer takes. The first of `A` that has not ended, f, is either running: then it gets on
//! in each iteration (nobody who goes after it takes its blocks; at most it waits for a fence), so it ends within
//! its own tokens. Or it waits: then at most `P` sequences are admitted past it; of those that run meanwhile or were
//! swapped out, at most `R + H + P`, the first in order gets on in each iteration, so they end within `S` each, and f,
//! which fits alone, starts. Together, times the fences:
//!
//! `iterations <= (1 + D) * (tokens of A + |A| * (R + H + P) * S)`
//!
//! Under `fcfs`, `static` and `priority`, `A` is fixed once r is there, as long as nobody more important comes. Under
//! `fair`, others' sequences go ahead as long as their tenant has had less service: each tenant at most until it has caught
//! up with what r's has had when r ends, which adds that many tokens, and computing again adds what is not charged.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_methods, reason = "the seeds come from the environment")]

#[path = "harness/seeds.rs"]
mod seeds;

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{TenantService, TokenCost, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, Limits, NewSequence, Outcome, Scheduler, SequenceId, Time, TransferId, Verdict,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// Iterations until a transfer reaches its fence, at most.
const DELAY: u64 = 2;
const TENANTS: u32 = 3;

#[derive(Debug, Clone)]
struct Flood {
    limits: Limits,
    policy: PolicyKind,
    /// Prompt and output of those that come, over and over.
    sizes: Vec<(u32, u32)>,
    /// How many are there before it.
    ahead: usize,
    own: (u32, u32),
}

fn flood() -> impl Strategy<Value = Flood> {
    let limits = (0u32..=3, 64u32..200, 0u32..16, 1u32..6, 0u32..24, 1u32..=2, 0u32..5, 0u32..20, 0u32..3);
    let policy = prop_oneof![
        Just(PolicyKind::Fcfs),
        Just(PolicyKind::Priority),
        Just(PolicyKind::Fair),
        Just(PolicyKind::Static)
    ];
    let sizes = prop::collection::vec((1u32..40, 1u32..24), 1..6);
    (limits, policy, sizes, 0usize..5, (1u32..64, 1u32..40)).prop_map(
        |(
            (
                block_log,
                tokens,
                host_blocks,
                running_max,
                extra,
                depth,
                bypass_max,
                min_decode_tokens,
                watermark,
            ),
            policy,
            sizes,
            ahead,
            (prompt, output),
        )| {
            let limits = Limits {
                host_blocks,
                depth,
                bypass_max,
                min_decode_tokens,
                watermark_blocks: watermark,
                waiting_max: 8,
                prefix_cache: false,
                ..Limits::new(1 << block_log, tokens >> block_log, running_max, running_max + extra)
            };
            // Every other one of those that come last takes the whole pool.
            let most = limits.sequence_tokens_max();
            let own = if prompt % 2 == 0 {
                (most - output.min(most - 1), output.min(most - 1))
            } else {
                (prompt.min(most / 2), output.min(most / 2))
            };
            let fit = |(p, o): (u32, u32)| (p.min(most / 2), o.min(most / 2));
            Flood { limits, policy, sizes: sizes.into_iter().map(fit).collect(), ahead, own }
        },
    )
}

struct Driver {
    scheduler: Scheduler,
    flights: Vec<(u64, usize)>,
    transfers: Vec<(TransferId, u64)>,
    sizes: BTreeMap<SequenceId, (u32, u32)>,
    ended: Vec<SequenceId>,
    iterations: u64,
    turns: u64,
}

impl Driver {
    fn submit(&mut self, size: (u32, u32), tenant: u32) -> Option<SequenceId> {
        let tenant = tenant.to_string();
        let new = NewSequence {
            known_tokens: size.0,
            max_tokens: size.1,
            priority: 0,
            deadline: None,
            tenant: &tenant,
            weight: Weight::default(),
            hashes: &[],
            group: None,
            order: None,
            charged_tokens: 0,
        };
        let id = self.scheduler.submit(new, self.now()).ok()?;
        self.sizes.insert(id, size);
        Some(id)
    }

    fn now(&self) -> Time {
        Time::from_nanos(self.turns * 1000)
    }

    fn turn(&mut self) {
        self.turns += 1;
        let now = self.now();
        let due: Vec<_> = self.transfers.iter().filter(|one| one.1 <= self.turns).map(|one| one.0).collect();
        self.transfers.retain(|one| one.1 > self.turns);
        due.into_iter().for_each(|id| self.scheduler.transfer_done(id, true, Duration::ZERO, now).unwrap());
        let plan = self.scheduler.plan(now);
        let samples = plan.chunks.iter().filter(|chunk| chunk.samples).count();
        let started =
            plan.transfers.iter().map(|transfer| (transfer.id, self.turns + 1 + transfer.id.0 % DELAY));
        self.transfers.extend(started);
        if !plan.chunks.is_empty() {
            self.iterations += 1;
            self.flights.push((plan.number, samples));
        }
        let full = self.flights.len() >= self.scheduler.limits().depth as usize;
        if full || plan_is_empty(&self.scheduler) && !self.flights.is_empty() {
            let (number, samples) = self.flights.remove(0);
            let outcome =
                Outcome { verdicts: &vec![Verdict::CONTINUE; samples], took: Duration::from_micros(1) };
            self.scheduler.commit(number, outcome).unwrap();
        }
        self.ended.extend(self.scheduler.drain_ended().map(|ended| ended.id));
        self.scheduler.drain_freed_slots().for_each(drop);
    }
}

fn plan_is_empty(scheduler: &Scheduler) -> bool {
    scheduler.iteration().chunks.is_empty()
}

/// Submits a sequence in the middle of a flood. Returns the iterations until it ended, and the bound.
fn wait(flood: &Flood) -> (u64, u64) {
    let limits = flood.limits;
    // Copies are cheap in half of the runs.
    let copy_block = if limits.blocks.is_multiple_of(2) { 1e-9 } else { 1.0 };
    let cost = CostModel::new(CostPrior::default().with_copies(0.0, copy_block));
    let tenants = TenantService::new(TokenCost::default(), 100);
    let mut driver = Driver {
        scheduler: Scheduler::new(limits, flood.policy.build(), cost, tenants).unwrap(),
        flights: Vec::new(),
        transfers: Vec::new(),
        sizes: BTreeMap::new(),
        ended: Vec::new(),
        iterations: 0,
        turns: 0,
    };
    let mut next = 0;
    let mut pour = |driver: &mut Driver, room: usize| {
        while (driver.scheduler.load().waiting as usize) < room {
            let size = flood.sizes[next % flood.sizes.len()];
            assert!(driver.submit(size, next as u32 % TENANTS).is_some());
            next += 1;
        }
    };
    for _ in 0..flood.ahead * 3 {
        pour(&mut driver, flood.ahead);
        driver.turn();
        for id in driver.ended.drain(..) {
            driver.sizes.remove(&id);
        }
    }
    let computes = |size: &(u32, u32)| u64::from(size.0 + size.1);
    let most = flood.sizes.iter().chain([&flood.own]).map(computes).max().unwrap();
    let service = |driver: &Driver, tenant: u32| {
        let name = tenant.to_string();
        let mut all = driver.scheduler.tenants().iter();
        all.find(|(known, ..)| *known == name).map_or(0.0, |(_, service, _)| service.tokens())
    };
    let others_had: f64 = (1..TENANTS).map(|tenant| service(&driver, tenant)).sum();
    let (begun, redone) = (driver.iterations, driver.scheduler.load().recomputed_tokens);
    let id = driver.submit(flood.own, 0).unwrap();
    let ahead: Vec<u64> = driver.sizes.values().map(computes).collect();
    let passes = u64::from(limits.bypass_max.max(1));
    let others = u64::from(limits.running_max + limits.host_blocks) + passes;
    let bound = |driver: &Driver| {
        let mut tokens = ahead.iter().sum::<u64>() + ahead.len() as u64 * others * most;
        if flood.policy == PolicyKind::Fair {
            // What each other tenant may have had when it has caught up, and who was admitted until then.
            let catch_up = f64::from(TENANTS - 1) * service(driver, 0) - others_had;
            tokens += catch_up.max(0.0) as u64 + u64::from(TENANTS) * others * most;
            tokens += driver.scheduler.load().recomputed_tokens - redone;
        }
        (1 + DELAY) * tokens
    };
    loop {
        pour(&mut driver, limits.waiting_max as usize);
        driver.turn();
        let (took, most) = (driver.iterations - begun, bound(&driver));
        assert!(took <= most, "it waits for more than {most} iterations: {:?}", driver.scheduler.load());
        assert!(driver.turns <= 1000 + 8 * most, "nothing runs at all");
        if driver.ended.contains(&id) {
            return (took, most);
        }
        driver.ended.clear();
    }
}

#[test]
fn however_many_come_after_it_nobody_waits_longer_than_the_bound() {
    let mut worst = 0.0f64;
    for seed in seeds::seeds() {
        let config = Config {
            cases: 300,
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed),
            ..Config::default()
        };
        let shares = std::cell::RefCell::new(Vec::new());
        let outcome = TestRunner::new(config).run(&flood(), |flood| {
            let (took, bound) = wait(&flood);
            shares.borrow_mut().push(took as f64 / bound as f64);
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("seed {seed} (INFLIGHT_SEEDS={seed}..{}): {error}", seed + 1);
        }
        worst = shares.into_inner().into_iter().fold(worst, f64::max);
    }
    println!("seeds {:?}: the longest wait was {:.1} % of its bound", seeds::seeds(), 100.0 * worst);
}

/// The same with a scheduler that passes whom it can't fit for ever: the bound would not be kept.
#[cfg(feature = "mutants")]
#[test]
fn a_scheduler_that_passes_some_for_ever_breaks_the_bound() {
    use inflight_worker_core::Mutant;
    let limits = Limits {
        waiting_max: 8,
        prefix_cache: false,
        watermark_blocks: 0,
        bypass_max: 2,
        ..Limits::new(4, 20, 4, 32)
    };
    let tenants = TenantService::new(TokenCost::default(), 100);
    let cost = CostModel::new(CostPrior::default());
    let mut scheduler = Scheduler::new(limits, PolicyKind::Fcfs.build(), cost, tenants).unwrap();
    scheduler.mutate(Mutant::UnboundedBypass);
    let mut driver = Driver {
        scheduler,
        flights: Vec::new(),
        transfers: Vec::new(),
        sizes: BTreeMap::new(),
        ended: Vec::new(),
        iterations: 0,
        turns: 0,
    };
    driver.submit((8, 8), 1).unwrap();
    driver.turn();
    let large = driver.submit((70, 10), 0).unwrap();
    for _ in 0..20_000 {
        while driver.scheduler.load().waiting < limits.waiting_max {
            driver.submit((8, 8), 1).unwrap();
        }
        driver.turn();
    }
    assert!(!driver.ended.contains(&large), "it got through");
}
