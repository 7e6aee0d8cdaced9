//! Invalid inputs that the scheduler must reject or tolerate.

use std::time::Duration;

use inflight_contract::{FinishReason, MemoryShape, TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CommitError, CostModel, CostPrior, IterationOutcome, LimitsError, NewSequence, Scheduler,
    SchedulerLimits, ScoredRange, SubmitError, Time, TokenVerdict, TransferId,
};

fn scheduler(limits: SchedulerLimits) -> Result<Scheduler, LimitsError> {
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
    Scheduler::new(limits, PolicyKind::Fair.build(), CostModel::new(CostPrior::default()), tenants)
}

fn sequence(known_tokens: u32, max_tokens: u32) -> NewSequence<'static> {
    NewSequence {
        known_tokens,
        max_tokens,
        priority: 0,
        deadline: None,
        tenant: "t",
        weight: Weight::default(),
        hashes: &[],
        group: None,
        virtual_start_time: None,
        charged_tokens: 0,
        scored: ScoredRange::default(),
    }
}

const LIMITS: fn() -> SchedulerLimits =
    || SchedulerLimits { sequence_tokens: 100, waiting_max: 2, ..SchedulerLimits::new(4, 20, 4, 16) };

#[test]
fn contradictory_limits_are_rejected_by_name() {
    assert_eq!(
        scheduler(SchedulerLimits { shape: MemoryShape::uniform(0), ..LIMITS() }).err(),
        Some(LimitsError::Zero("block_tokens"))
    );
    assert_eq!(scheduler(SchedulerLimits { blocks: 0, ..LIMITS() }).err(), Some(LimitsError::Zero("blocks")));
    let threshold = SchedulerLimits { preemption_threshold: 0, ..LIMITS() };
    assert_eq!(scheduler(threshold).err(), Some(LimitsError::Zero("preemption_threshold")));
    assert_eq!(scheduler(SchedulerLimits { depth: 3, ..LIMITS() }).err(), Some(LimitsError::Depth(3)));
    let starved = scheduler(SchedulerLimits { iteration_tokens: 3, ..LIMITS() }).err();
    assert_eq!(starved, Some(LimitsError::BudgetBelowRunning { iteration_tokens: 3, running_max: 4 }));
}

#[test]
fn without_a_host_pool_preemption_is_by_recompute() {
    let limits = SchedulerLimits { host_blocks: 0, watermark_blocks: 0, min_decode_tokens: 0, ..LIMITS() };
    let mut scheduler = scheduler(SchedulerLimits { blocks: 6, ..limits }).unwrap();
    for _ in 0..2 {
        scheduler.submit(sequence(8, 14), Time::ZERO).unwrap();
    }
    for now in 0..200 {
        let plan = scheduler.plan(Time::from_nanos(now));
        assert!(plan.transfers.is_empty());
        let (number, chunks) = (plan.number, plan.chunks.len());
        let verdicts = vec![TokenVerdict::CONTINUE; plan.chunks.iter().filter(|chunk| chunk.samples).count()];
        if chunks > 0 {
            scheduler
                .commit(number, IterationOutcome { verdicts: &verdicts, accepted: &[], took: Duration::ZERO })
                .unwrap();
        }
    }
    assert_eq!(scheduler.drain_ended().filter(|ended| ended.reason == FinishReason::Length).count(), 2);
    assert!(scheduler.load().recompute_preemptions > 0 && scheduler.load().swap_preemptions == 0);
}

#[test]
fn a_sequence_that_can_never_run_is_rejected_without_side_effects() {
    let mut scheduler = scheduler(LIMITS()).unwrap();
    let mut rejected = |new| scheduler.submit(new, Time::ZERO).err();
    assert_eq!(rejected(sequence(5, 0)), Some(SubmitError::Empty));
    assert_eq!(rejected(sequence(0, 5)), Some(SubmitError::Empty));
    // The pool holds 80 tokens, less than the context of 100.
    assert_eq!(rejected(sequence(80, 1)), Some(SubmitError::TooLong { tokens: 81, most: 80 }));
    assert_eq!(
        rejected(sequence(u32::MAX, u32::MAX)),
        Some(SubmitError::TooLong { tokens: 2 * u64::from(u32::MAX), most: 80 })
    );
    assert_eq!(rejected(sequence(79, 1)), None);
    assert_eq!(rejected(sequence(1, 1)), None);
    assert_eq!(rejected(sequence(1, 1)), Some(SubmitError::QueueFull { waiting: 2 }));
    assert_eq!(scheduler.load().waiting, 2);
}

#[test]
fn a_clock_that_goes_backwards_neither_ends_nor_stalls_sequences() {
    let mut scheduler = scheduler(LIMITS()).unwrap();
    let late = Time::from_nanos(1_000_000);
    let deadline = Some(Time::from_nanos(2_000_000));
    scheduler.submit(NewSequence { deadline, ..sequence(4, 3) }, late).unwrap();
    for now in [late, Time::ZERO, Time::from_nanos(5)] {
        let number = scheduler.plan(now).number;
        let outcome =
            IterationOutcome { verdicts: &[TokenVerdict::CONTINUE], accepted: &[], took: Duration::ZERO };
        scheduler.commit(number, outcome).unwrap();
    }
    let ended: Vec<_> = scheduler.drain_ended().map(|ended| ended.reason).collect();
    assert_eq!(ended, [FinishReason::Length]);
}

#[test]
fn unknown_completions_are_rejected_without_side_effects() {
    let mut scheduler = scheduler(LIMITS()).unwrap();
    let nothing = IterationOutcome { verdicts: &[], accepted: &[], took: Duration::ZERO };
    let unknown = |given, in_flight| Err(CommitError::UnknownIteration { given, in_flight });
    assert_eq!(scheduler.commit(1, nothing), unknown(1, None));
    assert_eq!(scheduler.fail(1), unknown(1, None));
    scheduler.submit(sequence(4, 3), Time::ZERO).unwrap();
    let number = scheduler.plan(Time::ZERO).number;
    assert_eq!(scheduler.commit(number + 1, nothing), unknown(number + 1, Some(number)));
    assert_eq!(scheduler.commit(number, nothing), Err(CommitError::Verdicts { expected: 1, given: 0 }));
    let transfer = TransferId(9);
    let done = scheduler.transfer_done(transfer, true, Duration::ZERO, Time::ZERO);
    assert_eq!(done, Err(CommitError::UnknownTransfer(transfer)));
    let outcome = IterationOutcome { verdicts: &[TokenVerdict::STOP], accepted: &[], took: Duration::ZERO };
    assert_eq!(scheduler.commit(number, outcome), Ok(()));
    assert!(scheduler.is_idle());
}
