//! Freedom from starvation: an upper bound on the iterations until a sequence ends, as a function of the
//! state at its arrival, under an endless stream of later arrivals.
//!
//! **Bound.** Let `A` be sequence r and the sequences ahead of it in policy order at its submission; `S` the
//! maximum tokens computed by any sequence, `R` the slots, `H` the host blocks, `P = max(bypass_max, 1)`, and
//! `D` the iterations that a transfer takes. Let f be the first of `A` that has not ended. If f runs, it
//! progresses in each iteration (no sequence behind it takes its blocks; at most it waits for a fence), so it
//! ends within its own tokens. If f waits, at most `P` sequences are admitted past it; of the running or
//! swapped-out ones, at most `R + H + P`, the first in order progresses in each iteration, so they end within
//! `S` each, and f, which fits alone, starts. Multiplied by the fences:
//!
//! `iterations <= (1 + D) * (tokens of A + |A| * (R + H + P) * S)`
//!
//! Under `fcfs`, `static` and `priority`, `A` is fixed at submission unless higher priorities arrive. Under
//! `fair`, other tenants' sequences go ahead while their virtual time is lower: each tenant until it has
//! caught up with the virtual time of r's tenant at the end of r, which adds that many tokens; recomputation
//! adds uncharged tokens.

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, IterationOutcome, NewSequence, Scheduler, SchedulerLimits, ScoredRange, SequenceId,
    StepTarget, Time, TokenVerdict, TransferId,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use crate::harness::seeds;

/// Maximum number of iterations until a transfer reaches its fence.
const DELAY: u64 = 2;
const TENANTS: u32 = 3;

#[derive(Debug, Clone)]
struct Flood {
    limits: SchedulerLimits,
    policy: PolicyKind,
    /// Prompt and output lengths of the arrivals, used cyclically.
    sizes: Vec<(u32, u32)>,
    /// Number of sequences queued ahead.
    ahead: usize,
    /// Prompt and output length of the observed sequence.
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
            let limits = SchedulerLimits {
                host_blocks,
                depth,
                bypass_max,
                min_decode_tokens,
                watermark_blocks: watermark,
                waiting_max: 8,
                prefix_cache: false,
                step_target: if extra % 2 == 0 { StepTarget::adaptive() } else { StepTarget::Unbounded },
                ..SchedulerLimits::new(1 << block_log, tokens >> block_log, running_max, running_max + extra)
            };
            // With an even prompt length, the observed sequence takes the whole pool.
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

/// Driver of a scheduler in which every iteration succeeds.
struct FloodDriver {
    scheduler: Scheduler,
    /// Iterations in flight, with their number of samples.
    launched: Vec<(u64, usize)>,
    /// Transfers in flight, with the round of their fence.
    transfers: Vec<(TransferId, u64)>,
    sizes: BTreeMap<SequenceId, (u32, u32)>,
    ended: Vec<SequenceId>,
    iterations: u64,
    rounds: u64,
}

impl FloodDriver {
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
            virtual_start_time: None,
            charged_tokens: 0,
            scored: ScoredRange::default(),
        };
        let id = self.scheduler.submit(new, self.now()).ok()?;
        self.sizes.insert(id, size);
        Some(id)
    }

    fn now(&self) -> Time {
        Time::from_nanos(self.rounds * 1000)
    }

    fn advance(&mut self) {
        self.rounds += 1;
        let now = self.now();
        let due: Vec<_> = self.transfers.iter().filter(|one| one.1 <= self.rounds).map(|one| one.0).collect();
        self.transfers.retain(|one| one.1 > self.rounds);
        due.into_iter().for_each(|id| self.scheduler.transfer_done(id, true, Duration::ZERO, now).unwrap());
        let plan = self.scheduler.plan(now);
        let samples = plan.chunks.iter().filter(|chunk| chunk.samples).count();
        let started =
            plan.transfers.iter().map(|transfer| (transfer.id, self.rounds + 1 + transfer.id.0 % DELAY));
        self.transfers.extend(started);
        if !plan.chunks.is_empty() {
            self.iterations += 1;
            self.launched.push((plan.number, samples));
        }
        let full = self.launched.len() >= self.scheduler.limits().depth as usize;
        if full || plan_is_empty(&self.scheduler) && !self.launched.is_empty() {
            let (number, samples) = self.launched.remove(0);
            let outcome = IterationOutcome {
                verdicts: &vec![TokenVerdict::CONTINUE; samples],
                accepted: &[],
                took: Duration::from_micros(1),
            };
            self.scheduler.commit(number, outcome).unwrap();
        }
        self.ended.extend(self.scheduler.drain_ended().map(|ended| ended.id));
        self.scheduler.drain_freed_slots().for_each(drop);
    }
}

fn plan_is_empty(scheduler: &Scheduler) -> bool {
    scheduler.iteration().chunks.is_empty()
}

/// Submits a sequence during a flood. Returns the iterations until it ended, and the bound.
fn wait(flood: &Flood) -> (u64, u64) {
    let limits = flood.limits;
    // Copies are cheap in half of the runs.
    let copy_block = if limits.blocks.is_multiple_of(2) { 1e-9 } else { 1.0 };
    let cost = CostModel::new(CostPrior::default().with_copies(0.0, copy_block));
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 100);
    let mut driver = FloodDriver {
        scheduler: Scheduler::new(limits, flood.policy.build(), cost, tenants).unwrap(),
        launched: Vec::new(),
        transfers: Vec::new(),
        sizes: BTreeMap::new(),
        ended: Vec::new(),
        iterations: 0,
        rounds: 0,
    };
    let mut next = 0;
    let mut fill_queue = |driver: &mut FloodDriver, len: usize| {
        while (driver.scheduler.load().waiting as usize) < len {
            let size = flood.sizes[next % flood.sizes.len()];
            assert!(driver.submit(size, next as u32 % TENANTS).is_some());
            next += 1;
        }
    };
    for _ in 0..flood.ahead * 3 {
        fill_queue(&mut driver, flood.ahead);
        driver.advance();
        for id in driver.ended.drain(..) {
            driver.sizes.remove(&id);
        }
    }
    let computes = |size: &(u32, u32)| u64::from(size.0 + size.1);
    let most = flood.sizes.iter().chain([&flood.own]).map(computes).max().unwrap();
    let service = |driver: &FloodDriver, tenant: u32| {
        let name = tenant.to_string();
        let mut all = driver.scheduler.tenants().iter();
        all.find(|(known, ..)| *known == name).map_or(0.0, |(_, service, _)| service.tokens())
    };
    let others_service: f64 = (1..TENANTS).map(|tenant| service(&driver, tenant)).sum();
    let (begun, recomputed) = (driver.iterations, driver.scheduler.load().recomputed_tokens);
    let id = driver.submit(flood.own, 0).unwrap();
    let ahead: Vec<u64> = driver.sizes.values().map(computes).collect();
    let bypasses = u64::from(limits.bypass_max.max(1));
    let others = u64::from(limits.running_max + limits.host_blocks) + bypasses;
    let bound = |driver: &FloodDriver| {
        let mut tokens = ahead.iter().sum::<u64>() + ahead.len() as u64 * others * most;
        if flood.policy == PolicyKind::Fair {
            // Service of the other tenants until they have caught up, and the sequences admitted until then.
            let catch_up = f64::from(TENANTS - 1) * service(driver, 0) - others_service;
            tokens += catch_up.max(0.0) as u64 + u64::from(TENANTS) * others * most;
            tokens += driver.scheduler.load().recomputed_tokens - recomputed;
        }
        (1 + DELAY) * tokens
    };
    loop {
        fill_queue(&mut driver, limits.waiting_max as usize);
        driver.advance();
        let (took, most) = (driver.iterations - begun, bound(&driver));
        assert!(took <= most, "it waits for more than {most} iterations: {:?}", driver.scheduler.load());
        assert!(driver.rounds <= 1000 + 8 * most, "nothing runs at all");
        if driver.ended.contains(&id) {
            return (took, most);
        }
        driver.ended.clear();
    }
}

#[test]
fn no_sequence_waits_longer_than_the_bound_under_endless_arrivals() {
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

#[test]
fn a_large_sequence_ends_under_endless_small_arrivals() {
    let limits = SchedulerLimits {
        waiting_max: 8,
        prefix_cache: false,
        watermark_blocks: 0,
        bypass_max: 2,
        ..SchedulerLimits::new(4, 20, 4, 32)
    };
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 100);
    let cost = CostModel::new(CostPrior::default());
    let scheduler = Scheduler::new(limits, PolicyKind::Fcfs.build(), cost, tenants).unwrap();
    let mut driver = FloodDriver {
        scheduler,
        launched: Vec::new(),
        transfers: Vec::new(),
        sizes: BTreeMap::new(),
        ended: Vec::new(),
        iterations: 0,
        rounds: 0,
    };
    driver.submit((8, 8), 1).unwrap();
    driver.advance();
    let large = driver.submit((70, 10), 0).unwrap();
    for _ in 0..20_000 {
        while driver.scheduler.load().waiting < limits.waiting_max {
            driver.submit((8, 8), 1).unwrap();
        }
        driver.advance();
    }
    assert!(driver.ended.contains(&large), "the large sequence waits for ever");
}
