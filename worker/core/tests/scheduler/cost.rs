//! Cost of planning: counts allocations, and prints times with `cargo test -- --nocapture`.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "a test may look at the clock")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use inflight_contract::{BlockHash, TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, IterationOutcome, NewSequence, Scheduler, SchedulerLimits, ScoredRange, Time,
    TokenVerdict, TransferId,
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every method forwards its arguments unchanged to `System`, which upholds the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller guarantees a layout of non-zero size.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees that `at` was returned by `alloc`, hence by `System`, for this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns a scheduler with the given numbers of decoding and waiting sequences, of 27 tenants.
fn busy(running: u32, waiting: u32) -> Scheduler {
    let limits = SchedulerLimits {
        waiting_max: running + waiting,
        sequence_tokens: 100_000,
        ..SchedulerLimits::new(16, running * 400, running, 8192)
    };
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 100);
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
            virtual_start_time: None,
            charged_tokens: 0,
            scored: ScoredRange::default(),
        };
        scheduler.submit(new, Time::ZERO).unwrap();
    }
    for _ in 0..200 {
        step(&mut scheduler, &mut Vec::with_capacity(running as usize));
    }
    assert_eq!((scheduler.load().running, scheduler.load().waiting), (running, waiting));
    scheduler
}

fn step(scheduler: &mut Scheduler, verdicts: &mut Vec<TokenVerdict>) {
    let plan = scheduler.plan(Time::from_nanos(1));
    let number = plan.number;
    let transfers: Vec<TransferId> = plan.transfers.iter().map(|transfer| transfer.id).collect();
    verdicts.clear();
    for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
        let filled = (chunk.start + chunk.len + 1).is_multiple_of(16);
        let index = chunk.id.index() as u128;
        let raw = (index << 64) | ((u128::from(chunk.start) * 0x9e37_79b9) ^ index);
        verdicts.push(TokenVerdict { stop: false, hash: filled.then(|| BlockHash::from_raw(raw)) });
    }
    if !scheduler.iteration().chunks.is_empty() {
        let outcome = IterationOutcome { verdicts, accepted: &[], took: Duration::from_micros(900) };
        scheduler.commit(number, outcome).unwrap();
    }
    for id in transfers {
        scheduler.transfer_done(id, true, Duration::from_micros(1), Time::from_nanos(1)).unwrap();
    }
    scheduler.drain_ended().for_each(drop);
    scheduler.drain_freed_slots().for_each(drop);
    scheduler.drain_cache_events().for_each(drop);
}

/// Returns the minimum and the median duration of 301 steps.
fn timed_step(running: u32, waiting: u32) -> (Duration, Duration) {
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
    (took[0], took[150])
}

/// Returns a scheduler short of all resources: cached blocks in the host pool, sequences swapped out for
/// higher priorities, and waiting sequences with a cached prefix but too few free blocks for the rest.
fn crowded() -> Scheduler {
    let limits = SchedulerLimits {
        host_blocks: 2000,
        watermark_blocks: 0,
        ..SchedulerLimits::new(16, 4000, 64, 4096)
    };
    let prior = CostPrior { trust: 1e-6, ..CostPrior::default().with_copies(0.0, 1e-9) };
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 100);
    let mut scheduler =
        Scheduler::new(limits, PolicyKind::Fair.build(), CostModel::new(prior), tenants).unwrap();
    let shared: Vec<_> = (1..1000u128).map(|block| BlockHash::from_raw((block << 64) | block)).collect();
    let submit =
        |scheduler: &mut Scheduler, count: u32, known: u32, max: u32, priority: i32, found: usize| {
            for _ in 0..count {
                let new = NewSequence {
                    known_tokens: known,
                    max_tokens: max,
                    priority,
                    deadline: None,
                    tenant: "t",
                    weight: Weight::default(),
                    hashes: &shared[..found],
                    group: None,
                    virtual_start_time: None,
                    charged_tokens: 0,
                    scored: ScoredRange::default(),
                };
                scheduler.submit(new, Time::ZERO).unwrap();
            }
        };
    let run = |scheduler: &mut Scheduler, steps: u32| {
        (0..steps).for_each(|_| step(scheduler, &mut Vec::with_capacity(64)));
    };
    submit(&mut scheduler, 1, 8000, 2, 0, 500);
    run(&mut scheduler, 600); // it ends, and its blocks are offloaded to the host
    submit(&mut scheduler, 40, 200, 20_000, 0, 0);
    run(&mut scheduler, 20);
    submit(&mut scheduler, 60, 500, 20_000, 1, 0);
    run(&mut scheduler, 200);
    submit(&mut scheduler, 20, 60_000, 1000, 1, 900); // half of the blocks are cached, no room for the rest
    run(&mut scheduler, 50);
    let load = scheduler.load();
    assert!(load.swapped > 0 && load.waiting > 0 && load.running > 0, "{load:?}");
    assert!(load.host_blocks_used > 0 && load.blocks_offloaded > 0, "{load:?}");
    scheduler
}

#[test]
fn a_steady_iteration_allocates_nothing() {
    for (name, mut scheduler) in [("waiting for slots", busy(256, 1000)), ("short of everything", crowded())]
    {
        let mut verdicts = Vec::with_capacity(256);
        step(&mut scheduler, &mut verdicts);
        let loads = scheduler.load();
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..100 {
            step(&mut scheduler, &mut verdicts);
        }
        assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0, "{name}");
        let now = scheduler.load();
        assert_eq!((now.running, now.waiting, now.swapped), (loads.running, loads.waiting, loads.swapped));
    }
}

#[test]
fn the_cost_of_a_plan_grows_no_worse_than_linearly() {
    // Ratio of the minimum times of one run: 16 times the sequences may take 16 times as long, plus half for
    // CPU caches that no longer hold the state.
    let [(small, _), (middle, median), (large, most)] =
        [(64, 250), (256, 1000), (1024, 4000)].map(|(running, waiting)| timed_step(running, waiting));
    println!("plan + commit at 64, 256, 1024 running, undisturbed: {small:?}, {middle:?}, {large:?}");
    println!("in the median: {median:?} at 256, {most:?} at 1024");
    assert!(large < small * 16 * 3 / 2, "{small:?} at 64, {large:?} at 1024");
}

/// Iterations whose instructions `tests/instructions/run` counts under callgrind: as many as INFLIGHT_ITERATIONS says, of one load.
fn count_iterations(mut scheduler: Scheduler) {
    let iterations =
        std::env::var("INFLIGHT_ITERATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut verdicts = Vec::with_capacity(256);
    for _ in 0..iterations {
        step(&mut scheduler, &mut verdicts);
    }
}

#[test]
#[ignore = "counted under callgrind by tests/instructions/run"]
fn instructions_with_64_decodes() {
    count_iterations(busy(64, 0));
}

#[test]
#[ignore = "counted under callgrind by tests/instructions/run"]
fn instructions_with_64_decodes_and_256_waiting() {
    count_iterations(busy(64, 256));
}

#[test]
#[ignore = "counted under callgrind by tests/instructions/run"]
fn instructions_short_of_everything() {
    count_iterations(crowded());
}
