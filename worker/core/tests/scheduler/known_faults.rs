//! Faults known from other engines, each with the test that excludes it; mutants are in `tests/mutants`.
//!
//! | fault | test |
//! |---|---|
//! | a block is reused while a step that uses it is in flight | `properties` (contents are checked), mutant `free_before_fence` |
//! | sequences that wait for a fence keep preempting each other (livelock) | `properties` (`check_victims` in `harness/rules.rs`), mutants `progress_not_required`, `mark_not_rechecked` |
//! | the late result of a preempted sequence is attributed to its successor | [`a_sequence_in_flight_is_preempted_only_after_its_step`]; worker: token equality under every schedule at depth 2 |
//! | stalled swap-ins hold the whole pool | [`swap_ins_in_flight_never_stop_running_sequences`] |
//! | blocks leak where a request ends during a transfer | [`a_sequence_that_ends_during_a_transfer_frees_all_blocks`] |
//! | a preempted sequence returns to the queue that is being drained | [`a_preempted_sequence_is_not_admitted_in_the_same_step`] |
//! | decoding sequences are preempted to sort by length | [`sequences_of_any_length_decode_together_while_blocks_suffice`] |
//! | the oldest sequence is preempted | `properties` (`check_victims`), mutant `victim_oldest` |
//! | the loop ends while sequences are swapped out | [`a_swapped_sequence_resumes_when_all_others_have_ended`] |
//! | the cool-down uses the wall clock | [`the_cool_down_counts_steps_independent_of_the_clock`] |
//! | the last sequence preempts itself | [`the_last_sequence_has_the_whole_pool_and_is_never_preempted`] |
//! | a swap copies into temporary memory and is lost | `properties` (contents are checked over both pools); worker: token equality under scarce memory |
//! | a long prompt blocks all short ones | [`short_prompts_overtake_a_long_one_that_arrived_first`] |
//! | high priorities wait because all slots are taken | [`a_request_of_higher_priority_gets_a_slot_when_all_are_taken`] |
//! | cold requests starve behind requests with cached prefixes | [`a_cold_request_is_bypassed_a_bounded_number_of_times`], `bounded_wait` |
//! | victims are chosen regardless of cost | [`the_cheapest_sequence_of_another_tenant_is_preempted`] |
//! | a preempted request loses its queue position | [`a_preempted_sequence_is_admitted_before_later_arrivals`] |
//! | a full pool causes preemption all the time | [`admission_leaves_room_for_the_growth_of_running_sequences`] |
//! | admission stops without a reason | `bounded_wait`; `properties` (each plan without admissions names the reason) |
//! | decoding stays slow after a preemption | [`after_a_preemption_the_others_decode_in_every_step`] |
//! | a target below the decode time starves prompts, and leaves the device half empty | [`prompts_make_progress_beside_decodes_that_exceed_the_target`] |
//! | one full context ends every generation | [`a_sequence_that_reaches_its_length_ends_alone`] |

use std::time::Duration;

use inflight_contract::{BlockHash, CostCoefficients, FinishReason, TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    BlockedBy, CostModel, CostPrior, Direction, Ended, Iteration, IterationOutcome, NewSequence, Preemption,
    Scheduler, SchedulerLimits, ScoredRange, SequenceId, StepTarget, Time, TokenVerdict, Transfer,
};

/// Scheduler whose iterations and transfers are completed by the test.
struct Bench {
    scheduler: Scheduler,
    clock: u64,
    ended: Vec<Ended>,
    /// Duration of a step.
    took: fn(&Iteration) -> Duration,
}

impl Bench {
    /// Creates a bench with almost free copies, so that preemption is by swap if there is a host pool.
    fn new(limits: SchedulerLimits, policy: PolicyKind) -> Self {
        let prior = CostPrior { trust: 1e-6, ..CostPrior::default().with_copies(0.0, 1e-9) };
        Self::on(limits, policy, prior, |_| Duration::from_micros(100))
    }

    fn on(
        limits: SchedulerLimits,
        policy: PolicyKind,
        prior: CostPrior,
        took: fn(&Iteration) -> Duration,
    ) -> Self {
        let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
        let scheduler = Scheduler::new(limits, policy.build(), CostModel::new(prior), tenants).unwrap();
        Self { scheduler, clock: 0, ended: Vec::new(), took }
    }

    fn submit(&mut self, known: u32, max: u32) -> SequenceId {
        self.submit_as("t", 0, known, max)
    }

    fn submit_as(&mut self, tenant: &str, priority: i32, known: u32, max: u32) -> SequenceId {
        let new = NewSequence {
            known_tokens: known,
            max_tokens: max,
            priority,
            deadline: None,
            tenant,
            weight: Weight::default(),
            hashes: &[],
            group: None,
            virtual_start_time: None,
            charged_tokens: 0,
            scored: ScoredRange::default(),
        };
        self.scheduler.submit(new, Time::from_nanos(self.clock)).unwrap()
    }

    fn plan(&mut self) -> Iteration {
        self.clock += 1;
        self.scheduler.plan(Time::from_nanos(self.clock)).clone()
    }

    fn commit(&mut self, plan: &Iteration) {
        if plan.chunks.is_empty() {
            return;
        }
        let verdicts = vec![TokenVerdict::CONTINUE; plan.chunks.iter().filter(|chunk| chunk.samples).count()];
        let outcome = IterationOutcome { verdicts: &verdicts, accepted: &[], took: (self.took)(plan) };
        self.scheduler.commit(plan.number, outcome).unwrap();
        self.ended.extend(self.scheduler.drain_ended());
        self.scheduler.drain_freed_slots().for_each(drop);
        self.scheduler.assert_consistent();
    }

    fn finish(&mut self, transfer: &Transfer, succeeded: bool) {
        let now = Time::from_nanos(self.clock);
        self.scheduler.transfer_done(transfer.id, succeeded, Duration::ZERO, now).unwrap();
    }

    /// Plans and completes one step with its transfers.
    fn step(&mut self) -> Iteration {
        let plan = self.plan();
        self.commit(&plan);
        plan.transfers.iter().for_each(|transfer| self.finish(transfer, true));
        plan
    }

    /// Runs steps until a sequence is preempted.
    fn until_preempted(&mut self) -> Iteration {
        for _ in 0..1000 {
            let plan = self.plan();
            self.commit(&plan);
            if !plan.preempted.is_empty() {
                return plan;
            }
            plan.transfers.iter().for_each(|transfer| self.finish(transfer, true));
        }
        panic!("no sequence was preempted");
    }

    /// Runs steps until the scheduler is idle.
    fn drain(&mut self) {
        for _ in 0..10_000 {
            self.step();
            if self.scheduler.is_idle() {
                return;
            }
        }
        panic!("sequences are left: {:?}", self.scheduler.load());
    }

    fn used(&self) -> (u32, u32) {
        (self.scheduler.load().blocks_used, self.scheduler.load().host_blocks_used)
    }
}

fn limits(blocks: u32, running_max: u32, iteration_tokens: u32) -> SchedulerLimits {
    SchedulerLimits {
        watermark_blocks: 0,
        min_decode_tokens: 0,
        prefix_cache: false,
        ..SchedulerLimits::new(4, blocks, running_max, iteration_tokens)
    }
}

fn decodes(plan: &Iteration, id: SequenceId) -> bool {
    plan.chunks.iter().any(|chunk| chunk.id == id)
}

#[test]
fn a_sequence_in_flight_is_preempted_only_after_its_step() {
    let mut bench = Bench::new(SchedulerLimits { depth: 2, ..limits(6, 2, 16) }, PolicyKind::Fcfs);
    let (old, young) = (bench.submit(8, 16), bench.submit(8, 8));
    let mut before = bench.plan();
    let mut marked = false;
    while bench.scheduler.load().recompute_preemptions == 0 {
        let plan = bench.plan();
        for preempted in &plan.preempted {
            assert_eq!((preempted.id, preempted.beneficiary), (young, old));
            assert!(marked, "a sequence in flight is marked first");
            assert!(!decodes(&before, young), "its step is still in flight");
        }
        marked |= plan.marked == [(young, old)];
        bench.commit(&before);
        before = plan;
        assert!(bench.ended.is_empty());
    }
}

#[test]
fn swap_ins_in_flight_never_stop_running_sequences() {
    let mut bench = Bench::new(SchedulerLimits { host_blocks: 8, ..limits(8, 3, 16) }, PolicyKind::Fcfs);
    let old = bench.submit(12, 20);
    let young = bench.submit(12, 8);
    let plan = bench.until_preempted();
    assert_eq!((plan.preempted[0].id, plan.preempted[0].kind), (young, Preemption::Swap));
    plan.transfers.iter().for_each(|transfer| bench.finish(transfer, true));
    // Its swap-in never completes, and the other sequence still runs to its end.
    let mut pending = Vec::new();
    for _ in 0..200 {
        let plan = bench.plan();
        bench.commit(&plan);
        pending.extend(plan.transfers);
        if bench.ended.iter().any(|ended| ended.id == old) {
            return;
        }
    }
    panic!("{old:?} waits for transfers of another sequence: {pending:?}");
}

#[test]
fn a_sequence_that_ends_during_a_transfer_frees_all_blocks() {
    for direction in [Direction::Out, Direction::In] {
        for succeeded in [true, false] {
            let mut bench =
                Bench::new(SchedulerLimits { host_blocks: 8, ..limits(8, 3, 16) }, PolicyKind::Fcfs);
            let (old, young) = (bench.submit(12, 20), bench.submit(12, 8));
            let mut plan = bench.until_preempted();
            if direction == Direction::In {
                plan.transfers.iter().for_each(|transfer| bench.finish(transfer, true));
                bench.scheduler.cancel(old);
                plan = bench.plan();
            }
            let transfer = plan.transfers.iter().find(|one| one.direction == direction).unwrap().clone();
            bench.scheduler.cancel(young);
            bench.scheduler.assert_consistent();
            assert_ne!(bench.used(), (0, 0), "the transfer still uses its blocks");
            bench.finish(&transfer, succeeded);
            bench.scheduler.cancel(old);
            bench.drain();
            assert_eq!(bench.used(), (0, 0), "{direction:?}, succeeded: {succeeded}");
        }
    }
}

#[test]
fn a_preempted_sequence_is_not_admitted_in_the_same_step() {
    let mut bench = Bench::new(limits(8, 4, 16), PolicyKind::Fcfs);
    for _ in 0..4 {
        bench.submit(8, 16);
    }
    for _ in 0..200 {
        let plan = bench.step();
        for preempted in &plan.preempted {
            assert!(plan.admitted.iter().all(|(id, _)| *id != preempted.id));
        }
    }
    assert!(bench.scheduler.load().recompute_preemptions > 0 && bench.scheduler.is_idle());
}

#[test]
fn sequences_of_any_length_decode_together_while_blocks_suffice() {
    let mut bench = Bench::new(limits(200, 8, 600), PolicyKind::Fair);
    let lengths = [1, 400, 3, 90, 2, 7, 33, 5];
    let all: Vec<_> = lengths.into_iter().map(|known| bench.submit(known, 10)).collect();
    bench.step();
    for _ in 0..9 {
        let plan = bench.step();
        assert!(all.iter().all(|id| decodes(&plan, *id)), "{plan:?}");
    }
    assert_eq!(bench.ended.len(), 8);
    assert_eq!(bench.scheduler.load().recompute_preemptions, 0);
}

#[test]
fn a_swapped_sequence_resumes_when_all_others_have_ended() {
    let mut bench = Bench::new(SchedulerLimits { host_blocks: 8, ..limits(8, 3, 16) }, PolicyKind::Fcfs);
    let (old, young) = (bench.submit(12, 20), bench.submit(12, 8));
    let plan = bench.until_preempted();
    plan.transfers.iter().for_each(|transfer| bench.finish(transfer, true));
    bench.scheduler.cancel(old);
    assert!(!bench.scheduler.is_idle(), "a sequence is swapped out");
    bench.drain();
    let last = bench.ended.last().unwrap();
    assert_eq!((last.id, last.reason), (young, FinishReason::Length));
}

#[test]
fn the_cool_down_counts_steps_independent_of_the_clock() {
    // The same workload with a stopped clock and with one that advances an hour per step.
    let plans = |leap: u64| {
        let mut bench =
            Bench::new(SchedulerLimits { cooldown_steps: 3, ..limits(10, 4, 16) }, PolicyKind::Fcfs);
        for i in 0..5 {
            bench.submit_as(["a", "b"][i % 2], 0, 8, 16);
        }
        let mut plans = Vec::new();
        for _ in 0..200 {
            bench.clock += leap;
            plans.push(bench.step());
        }
        assert!(bench.scheduler.is_idle());
        plans
    };
    let still = plans(0);
    assert!(still.iter().any(|plan| !plan.preempted.is_empty()));
    assert!(still == plans(3_600_000_000_000));
}

#[test]
fn the_last_sequence_has_the_whole_pool_and_is_never_preempted() {
    let limits = SchedulerLimits { watermark_blocks: 3, ..limits(5, 2, 16) };
    let mut bench = Bench::new(limits, PolicyKind::Fair);
    let id = bench.submit(3, 17);
    bench.drain();
    assert_eq!(bench.ended, [Ended { id, reason: FinishReason::Length }]);
    assert_eq!(bench.scheduler.load().recompute_preemptions, 0);
}

#[test]
fn short_prompts_overtake_a_long_one_that_arrived_first() {
    let mut bench = Bench::new(limits(400, 8, 16), PolicyKind::Fcfs);
    let long = bench.submit(800, 4);
    bench.step();
    let short: Vec<_> = (0..3).map(|_| bench.submit(4, 2)).collect();
    let mut long_tokens = 0;
    for _ in 0..8 {
        let plan = bench.step();
        long_tokens +=
            plan.chunks.iter().filter(|chunk| chunk.id == long).map(|chunk| chunk.len).sum::<u32>();
    }
    assert!(short.iter().all(|id| bench.ended.iter().any(|ended| ended.id == *id)), "{:?}", bench.ended);
    assert!(long_tokens >= 8 * 8, "the long prompt gets half of each step");
}

#[test]
fn a_request_of_higher_priority_gets_a_slot_when_all_are_taken() {
    let mut bench = Bench::new(limits(100, 2, 16), PolicyKind::Priority);
    let low = [bench.submit_as("t", 0, 4, 50), bench.submit_as("t", 0, 4, 50)];
    (0..3).for_each(|_| drop(bench.step()));
    let high = bench.submit_as("t", 1, 4, 5);
    let started = (0..3).any(|_| bench.step().admitted.iter().any(|(id, _)| *id == high));
    assert!(started, "lower priorities keep all slots");
    assert_eq!(bench.scheduler.load().recompute_preemptions, 1, "one of {low:?} is enough");
}

#[test]
fn a_cold_request_is_bypassed_a_bounded_number_of_times() {
    let limits = SchedulerLimits { prefix_cache: true, bypass_max: 4, waiting_max: 64, ..limits(20, 8, 64) };
    let mut bench = Bench::new(limits, PolicyKind::Fair);
    let hashes: Vec<_> = (1..4).map(|block| BlockHash::from_raw(block << 64 | block)).collect();
    let hit = |bench: &mut Bench| {
        let new = NewSequence {
            known_tokens: 13,
            max_tokens: 6,
            priority: 0,
            deadline: None,
            tenant: "hits",
            weight: Weight::default(),
            hashes: &hashes,
            group: None,
            virtual_start_time: None,
            charged_tokens: 0,
            scored: ScoredRange::default(),
        };
        bench.scheduler.submit(new, Time::from_nanos(bench.clock)).unwrap()
    };
    hit(&mut bench);
    (0..2).for_each(|_| drop(bench.step()));
    let cold = bench.submit_as("cold", 0, 70, 2);
    let mut bypasses = 0;
    for _ in 0..200 {
        while bench.scheduler.load().waiting < 16 {
            hit(&mut bench);
        }
        let plan = bench.step();
        if plan.admitted.iter().any(|(id, _)| *id == cold) {
            assert!(bench.scheduler.load().cached_tokens > 0, "the others found no cached prefix");
            return;
        }
        bypasses += plan.admitted.len();
        assert!(bypasses <= 4, "{bypasses} bypasses");
    }
    panic!("the cold request is never admitted");
}

#[test]
fn the_cheapest_sequence_of_another_tenant_is_preempted() {
    let mut bench = Bench::new(limits(14, 4, 64), PolicyKind::Fair);
    // Two sequences of the tenant with more service, expensive and cheap to recompute; then one of another
    // tenant.
    let expensive = bench.submit_as("much", 0, 37, 12);
    let cheap = bench.submit_as("much", 0, 5, 12);
    bench.step();
    let beneficiary = bench.submit_as("little", 0, 8, 30);
    let preempted = bench.until_preempted().preempted[0];
    assert_eq!((preempted.id, preempted.beneficiary), (cheap, beneficiary), "and not {expensive:?}");
}

#[test]
fn a_preempted_sequence_is_admitted_before_later_arrivals() {
    let mut bench = Bench::new(SchedulerLimits { bypass_max: 0, ..limits(8, 4, 16) }, PolicyKind::Fcfs);
    bench.submit(12, 12);
    let young = bench.submit(12, 12);
    let plan = bench.until_preempted();
    assert_eq!(plan.preempted[0].id, young);
    let late = bench.submit(12, 12);
    let mut order = Vec::new();
    while !bench.scheduler.is_idle() {
        order.extend(bench.step().admitted.iter().map(|(id, _)| *id));
    }
    assert_eq!(order.iter().copied().find(|id| [young, late].contains(id)), Some(young));
}

#[test]
fn admission_leaves_room_for_the_growth_of_running_sequences() {
    // Each sequence grows by two blocks. With the first one reserved and a tenth of the pool as the
    // watermark, few are recomputed; with a pool full of prompts, many more.
    let preemptions = |limits: SchedulerLimits| {
        let mut bench = Bench::new(limits, PolicyKind::Fair);
        for _ in 0..200 {
            bench.submit(24, 8);
        }
        bench.drain();
        bench.scheduler.load().recompute_preemptions
    };
    let reserved = SchedulerLimits {
        waiting_max: 1000,
        prefix_cache: false,
        watermark_blocks: 20,
        ..SchedulerLimits::new(4, 200, 100, 256)
    };
    let unreserved = SchedulerLimits { watermark_blocks: 0, min_decode_tokens: 0, ..reserved };
    let (reserved, unreserved) = (preemptions(reserved), preemptions(unreserved));
    println!("{reserved} preemptions against {unreserved} for 200 sequences");
    assert!(reserved * 2 < unreserved && reserved <= 20, "{reserved} against {unreserved}");
    let mut bench = Bench::new(SchedulerLimits { watermark_blocks: 2, ..limits(8, 4, 64) }, PolicyKind::Fair);
    bench.submit(20, 4);
    bench.submit(8, 4);
    let plan = bench.step();
    assert_eq!(plan.blocked.map(|blocked| blocked.by), Some(BlockedBy::Blocks { needed: 4, free: 3 }));
}

#[test]
fn after_a_preemption_the_others_decode_in_every_step() {
    let mut bench = Bench::new(limits(16, 4, 32), PolicyKind::Fcfs);
    let all: Vec<_> = (0..4).map(|_| bench.submit(12, 12)).collect();
    let victim = bench.until_preempted().preempted[0].id;
    let others: Vec<_> = all.into_iter().filter(|id| *id != victim).collect();
    for _ in 0..20 {
        let plan = bench.step();
        let live = others.iter().filter(|id| !bench.ended.iter().any(|ended| ended.id == **id));
        for id in live {
            let preempted = plan.preempted.iter().any(|one| one.id == *id);
            let waits = bench.scheduler.tables(*id).is_none_or(|tables| tables.is_empty());
            assert!(preempted || waits || decodes(&plan, *id), "{id:?} is stalled: {plan:?}");
        }
    }
}

#[test]
fn a_sequence_that_reaches_its_length_ends_alone() {
    let limits = SchedulerLimits { sequence_tokens: 24, ..limits(40, 4, 32) };
    let mut bench = Bench::new(limits, PolicyKind::Fair);
    let full = bench.submit(20, 4);
    let others: Vec<_> = (0..3).map(|_| bench.submit(4, 16)).collect();
    while bench.ended.is_empty() {
        bench.step();
    }
    assert_eq!(bench.ended, [Ended { id: full, reason: FinishReason::Length }]);
    let plan = bench.step();
    assert!(others.iter().all(|id| decodes(&plan, *id)));
}

#[test]
fn prompts_make_progress_beside_decodes_that_exceed_the_target() {
    // A model of a billion parameters on two cores: 50 ms to read the weights, 2.5 ms of compute per token.
    let cost = CostCoefficients { step_s: 0.05, token_s: 0.0025, ..CostPrior::default().cost };
    let prior = CostPrior { cost, trust: 0.01 };
    // Some steps take longer than predicted, as on real machines; the tail factor must not reduce the share
    // of the prompts.
    let took = |plan: &Iteration| {
        let late = if plan.number.is_multiple_of(5) { 14 } else { 10 };
        Duration::from_micros((5_000 + 250 * u64::from(plan.tokens())) * late)
    };
    for (target, most) in [(50, 4.0), (1_000, f64::INFINITY)] {
        let limits = SchedulerLimits {
            sequence_tokens: 256,
            step_target: StepTarget::Fixed(Duration::from_millis(target)),
            ..limits(4096, 16, 512)
        };
        let mut bench = Bench::on(limits, PolicyKind::Fair, prior, took);
        for _ in 0..16 {
            bench.submit(118, 62);
        }
        let (mut steps, mut decoding, mut ended) = (0, 0, 0);
        while ended < 200 {
            let plan = bench.step();
            for _ in std::mem::take(&mut bench.ended) {
                ended += 1;
                bench.submit(118, 62);
            }
            if ended < 40 {
                continue;
            }
            steps += 1;
            decoding += plan.decodes;
            let alone = Duration::from_micros(50_000 + 2_500 * u64::from(plan.decodes));
            let longer = took(&plan).as_secs_f64() / alone.as_secs_f64();
            // Allows for the tail and for the remaining model error.
            assert!(plan.decodes == 0 || longer < 1.6 * most, "{longer} times what the decodes take");
        }
        let decoding = f64::from(decoding) / f64::from(steps);
        assert!(decoding > 13.5, "only {decoding:.1} of 16 sequences decode under a target of {target} ms");
    }
}

/// Returns the step time of a model of a billion parameters on two cores.
fn step_time(tokens: u32) -> Duration {
    Duration::from_micros(50_000 + 2_500 * u64::from(tokens))
}

/// Returns a bench with eight decoding sequences, whose steps take 70 ms, under a target in milliseconds.
fn eight_decodes(target: u64) -> Bench {
    let cost = CostCoefficients { step_s: 0.05, token_s: 0.0025, ..CostPrior::default().cost };
    let prior = CostPrior { cost, trust: 0.01 };
    let limits = SchedulerLimits {
        step_target: StepTarget::Fixed(Duration::from_millis(target)),
        ..limits(4096, 16, 512)
    };
    let mut bench = Bench::on(limits, PolicyKind::Fair, prior, |plan| step_time(plan.tokens()));
    for _ in 0..8 {
        bench.submit(4, 60);
    }
    while bench.step().decodes < 8 {}
    bench
}

#[test]
fn prompts_share_the_time_allowed_by_a_tight_target() {
    let mut bench = eight_decodes(50);
    let short: Vec<_> = (0..3).map(|_| bench.submit(8, 4)).collect();
    // Three times the 70 ms of the decodes allow 84 tokens.
    let plan = bench.step();
    assert_eq!((plan.decodes, plan.tokens()), (8, 8 + 3 * 8), "{plan:?}");
    assert!(short.iter().all(|id| plan.chunks.iter().any(|chunk| chunk.id == *id && chunk.samples)));
    // Of prompts that take several steps, the first may use all of that time, and the next one the rest.
    let long: Vec<_> = (0..3).map(|_| bench.submit(400, 40)).collect();
    let (mut steps, mut shared) = (0, 0);
    while long.iter().any(|id| bench.ended.iter().all(|ended| ended.id != *id)) {
        let plan = bench.step();
        assert!(plan.decodes == 0 || step_time(plan.tokens()) <= 4 * step_time(plan.decodes), "{plan:?}");
        let prompts = plan.chunks.len() as u32 - plan.decodes;
        if plan.decodes >= 8 && plan.tokens() >= plan.decodes + 80 {
            shared += u32::from(prompts == 2);
        }
        steps += 1;
        assert!(steps < 200, "a prompt starves");
    }
    assert!(shared > 0, "no step was shared by two prompts");
}

#[test]
fn running_prefills_stay_within_a_tight_target_together() {
    let mut bench = eight_decodes(130);
    (0..4).for_each(|_| {
        bench.submit(400, 4);
    });
    for _ in 0..20 {
        let plan = bench.step();
        assert!(step_time(plan.tokens()) <= 4 * step_time(plan.decodes), "{plan:?}");
    }
}
