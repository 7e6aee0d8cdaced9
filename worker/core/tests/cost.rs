//! What a plan costs: allocations are counted, and the time is printed by `cargo test -- --nocapture`.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "a test may look at the clock")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use inflight_contract::{BlockHash, TenantService, TokenCost, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{CostModel, CostPrior, Limits, NewSequence, Outcome, Scheduler, Time, Verdict};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A scheduler with so many sequences decoding and so many waiting, of 27 tenants.
fn busy(running: u32, waiting: u32) -> Scheduler {
    let limits = Limits {
        waiting_max: running + waiting,
        sequence_tokens: 100_000,
        ..Limits::new(16, running * 400, running, 8192)
    };
    let tenants = TenantService::new(TokenCost::default(), 100);
    let cost = CostModel::new(CostPrior::default());
    let mut scheduler = Scheduler::new(limits, PolicyKind::Fair.build(), cost, tenants).unwrap();
    for sequence in 0..running + waiting {
        let tenant = (sequence % 27).to_string();
        let new = NewSequence {
            known_tokens: 20,
            max_tokens: 5000,
            priority: 0,
            deadline: None,
            tenant: &tenant,
            weight: Weight::default(),
            hashes: &[BlockHash::from_raw((u128::from(sequence) << 64) | (u128::from(sequence) * 977))],
            group: None,
            order: None,
            charged_tokens: 0,
        };
        scheduler.submit(new, Time::ZERO).unwrap();
    }
    for _ in 0..200 {
        step(&mut scheduler, &mut Vec::with_capacity(running as usize));
    }
    assert_eq!((scheduler.load().running, scheduler.load().waiting), (running, waiting));
    scheduler
}

fn step(scheduler: &mut Scheduler, verdicts: &mut Vec<Verdict>) {
    let plan = scheduler.plan(Time::from_nanos(1));
    let number = plan.number;
    verdicts.clear();
    for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
        let filled = (chunk.start + chunk.len + 1).is_multiple_of(16);
        let index = chunk.id.index() as u128;
        let raw = (index << 64) | ((u128::from(chunk.start) * 0x9e37_79b9) ^ index);
        verdicts.push(Verdict { stop: false, hash: filled.then(|| BlockHash::from_raw(raw)) });
    }
    let outcome = Outcome { verdicts, took: Duration::from_micros(900) };
    scheduler.commit(number, outcome).unwrap();
    scheduler.drain_cache_events().for_each(drop);
}

fn median_step(running: u32, waiting: u32) -> Duration {
    let mut scheduler = busy(running, waiting);
    let mut verdicts = Vec::with_capacity(running as usize);
    let mut took: Vec<_> = (0..301)
        .map(|_| {
            let begun = Instant::now();
            step(&mut scheduler, &mut verdicts);
            begun.elapsed()
        })
        .collect();
    took.sort_unstable();
    took[150]
}

#[test]
fn a_steady_iteration_allocates_nothing() {
    let mut scheduler = busy(256, 1000);
    let mut verdicts = Vec::with_capacity(256);
    step(&mut scheduler, &mut verdicts);
    let before = ALLOCATIONS.with(Cell::get);
    for _ in 0..100 {
        step(&mut scheduler, &mut verdicts);
    }
    assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0);
}

#[test]
fn the_cost_of_a_plan_grows_no_worse_than_linearly() {
    // A ratio of medians of one run; four times the sequences may cost four times as much, and half as much again
    // for the caches that they no longer fit.
    let (small, large) = (median_step(64, 250), median_step(1024, 4000));
    println!(
        "plan + commit: 64 running {small:?}, 256 running {:?}, 1024 running {large:?}",
        median_step(256, 1000)
    );
    assert!(large < small * 16 * 3 / 2, "{small:?} at 64, {large:?} at 1024");
}
