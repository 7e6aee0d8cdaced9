//! Virtual start times from routers, and reported service.

use std::time::Duration;

use inflight_contract::{Service, TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, IterationOutcome, NewSequence, Scheduler, SchedulerLimits, ScoredRange, SequenceId,
    Time, TokenVerdict,
};

/// Returns a scheduler with one slot.
fn scheduler() -> Scheduler {
    let limits =
        SchedulerLimits { waiting_max: 100, sequence_tokens: 1000, ..SchedulerLimits::new(16, 100, 1, 256) };
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
    Scheduler::new(limits, PolicyKind::Fair.build(), CostModel::new(CostPrior::default()), tenants).unwrap()
}

fn submit(scheduler: &mut Scheduler, tenant: &str, order: u64, charged_tokens: u32) -> SequenceId {
    let new = NewSequence {
        known_tokens: 10,
        max_tokens: 2,
        priority: 0,
        deadline: None,
        tenant,
        weight: Weight::default(),
        hashes: &[],
        group: None,
        virtual_start_time: Some(Service::from_thousandths(order)),
        charged_tokens,
        scored: ScoredRange::default(),
    };
    scheduler.submit(new, Time::ZERO).unwrap()
}

/// Runs until idle. Returns the sequences in order of their first chunk.
fn run(scheduler: &mut Scheduler) -> Vec<SequenceId> {
    let mut began = Vec::new();
    while !scheduler.is_idle() {
        let plan = scheduler.plan(Time::from_nanos(1));
        let number = plan.number;
        let ids: Vec<_> = plan.chunks.iter().map(|chunk| chunk.id).collect();
        let samples = plan.chunks.iter().filter(|chunk| chunk.samples).count();
        let verdicts = vec![TokenVerdict { stop: false, hash: None }; samples];
        for id in ids {
            if !began.contains(&id) {
                began.push(id);
            }
        }
        let outcome = IterationOutcome { verdicts: &verdicts, accepted: &[], took: Duration::from_micros(1) };
        scheduler.commit(number, outcome).unwrap();
        scheduler.drain_ended().for_each(drop);
    }
    began
}

#[test]
fn waiting_sequences_start_in_order_of_virtual_start_time() {
    let mut scheduler = scheduler();
    let heavy_here = submit(&mut scheduler, "a", 0, 0);
    assert_eq!(run(&mut scheduler), [heavy_here]);
    // By service on this worker, c would go before a.
    let third = submit(&mut scheduler, "c", 9_000, 0);
    let second = submit(&mut scheduler, "b", 5_000, 0);
    let first = submit(&mut scheduler, "a", 4_000, 0);
    // Within a tenant by arrival, whatever virtual start time a router sends.
    let fourth = submit(&mut scheduler, "c", 1_000, 0);
    assert_eq!(run(&mut scheduler), [first, second, third, fourth]);
    assert_eq!(scheduler.virtual_time(), Service::from_thousandths(9_000));
}

#[test]
fn service_is_reported_once_per_token_and_not_for_prompts_charged_before() {
    let mut scheduler = scheduler();
    submit(&mut scheduler, "a", 0, 0);
    submit(&mut scheduler, "b", 0, 10);
    run(&mut scheduler);
    let charged: Vec<_> =
        scheduler.drain_charged().map(|charge| (charge.tenant.to_owned(), charge.counter.cost)).collect();
    // Ten prompt tokens at cost 1 and two output tokens at cost 2; the prompt of the second was charged
    // before.
    assert_eq!(charged, [("a".to_owned(), 14), ("b".to_owned(), 4)]);
    assert_eq!(scheduler.drain_charged().count(), 0, "nothing is new");
    submit(&mut scheduler, "a", 0, 0);
    run(&mut scheduler);
    let charged: Vec<_> =
        scheduler.drain_charged().map(|charge| (charge.tenant.to_owned(), charge.counter.cost)).collect();
    assert_eq!(charged, [("a".to_owned(), 28)], "charges accumulate");
}
