//! Order and bounds of the queue of tokenizing work.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::collections::BTreeMap;

use inflight_contract::Weight;
use inflight_router_core::{
    TokenizeArrival, TokenizeJobId, TokenizePiece, TokenizeQueue, TokenizeQueueFull, TokenizeQueueOptions,
};
use proptest::prelude::*;

const PIECE: u64 = 64 << 10;

fn queue(slots: usize, jobs_max: usize) -> TokenizeQueue {
    TokenizeQueue::new(TokenizeQueueOptions { slots, tenant_slots: slots, jobs_max, idle_tenants_max: 100 })
}

/// Jobs of equal pieces, driven until nothing waits.
struct Run {
    queue: TokenizeQueue,
    /// Tenant and remaining pieces of each job.
    jobs: BTreeMap<TokenizeJobId, (&'static str, u32)>,
    running: Vec<TokenizeJobId>,
    /// Tenants of the granted pieces, in order.
    granted: Vec<&'static str>,
}

impl Run {
    fn new(slots: usize, jobs_max: usize) -> Self {
        let queue = queue(slots, jobs_max);
        Self { queue, jobs: BTreeMap::new(), running: Vec::new(), granted: Vec::new() }
    }

    fn enter(&mut self, tenant: &'static str, weight: f32, priority: i32, pieces: u32) -> TokenizeJobId {
        let weight = Weight::try_from(weight).unwrap();
        let piece = TokenizePiece { bytes: PIECE, last: pieces == 1 };
        let admitted = self.queue.enter(TokenizeArrival { tenant, weight, priority, piece }).unwrap();
        self.jobs.insert(admitted.job, (tenant, pieces));
        admitted.job
    }

    fn grant(&mut self) {
        while let Some(job) = self.queue.grant() {
            self.granted.push(self.jobs[&job].0);
            self.running.push(job);
        }
    }

    /// Finishes the piece that has run longest.
    fn step(&mut self) {
        self.grant();
        let job = self.running.remove(0);
        let left = self.jobs.get_mut(&job).unwrap();
        left.1 -= 1;
        let next = (left.1 > 0).then_some(TokenizePiece { bytes: PIECE, last: left.1 == 1 });
        self.queue.finish(job, next);
        if next.is_none() {
            self.queue.leave(job);
        }
        self.grant();
    }
}

#[test]
fn large_prompts_of_one_tenant_delay_another_one_by_one_piece() {
    for slots in [1, 2, 4] {
        let mut run = Run::new(slots, 100);
        for _ in 0..6 {
            run.enter("flood", 1.0, 0, 62);
        }
        for _ in 0..20 {
            run.step();
        }
        let before = run.granted.len();
        run.enter("other", 1.0, 0, 1);
        run.step();
        assert_eq!(run.granted[before..], ["other"], "{slots} slots: it gets the first slot that is free");
    }
}

#[test]
fn a_tenant_leaves_a_slot_to_the_others_even_after_its_jobs_have_left() {
    let mut run = Run::new(3, 100);
    let options = TokenizeQueueOptions { slots: 3, tenant_slots: 2, jobs_max: 100, idle_tenants_max: 100 };
    run.queue = TokenizeQueue::new(options);
    let jobs: Vec<_> = (0..6).map(|_| run.enter("flood", 1.0, 9, 1)).collect();
    run.grant();
    assert_eq!((run.granted.len(), run.queue.busy()), (2, 2));
    // A granted piece runs on, whether its job has left or not.
    run.queue.leave(jobs[0]);
    run.grant();
    assert_eq!(run.granted.len(), 2);
    run.enter("other", 1.0, 0, 1);
    run.grant();
    assert_eq!(run.granted, ["flood", "flood", "other"]);
    run.queue.finish(jobs[0], None);
    run.grant();
    assert_eq!(run.granted.len(), 4);
}

#[test]
fn tenants_with_one_job_each_share_by_weight() {
    let mut run = Run::new(1, 100);
    run.enter("light", 1.0, 0, 1000);
    run.enter("heavy", 3.0, 0, 1000);
    for _ in 0..400 {
        run.step();
    }
    let heavy = run.granted.iter().filter(|tenant| **tenant == "heavy").count();
    assert!((299..=302).contains(&heavy), "{heavy} of 400");
}

#[test]
fn higher_priority_goes_first_and_a_tenant_finishes_its_jobs_in_order() {
    let mut run = Run::new(1, 100);
    run.enter("a", 1.0, 0, 2);
    run.enter("a", 1.0, 0, 2);
    run.enter("b", 1.0, 5, 2);
    let mut order = Vec::new();
    for _ in 0..6 {
        run.grant();
        order.push(run.running[0]);
        run.step();
    }
    let by_arrival: Vec<usize> =
        order.iter().map(|job| run.jobs.keys().position(|known| known == job).unwrap()).collect();
    assert_eq!(by_arrival, [2, 2, 0, 0, 1, 1]);
}

#[test]
fn a_job_that_has_left_is_never_granted_and_its_running_piece_keeps_its_slot() {
    let mut run = Run::new(1, 100);
    let (first, second) = (run.enter("a", 1.0, 0, 3), run.enter("a", 1.0, 0, 1));
    run.grant();
    run.queue.leave(second);
    run.queue.leave(first);
    assert_eq!((run.queue.busy(), run.queue.waiting()), (1, 0));
    run.enter("b", 1.0, 0, 1);
    assert_eq!(run.queue.grant(), None, "the slot is taken until the piece has ended");
    run.queue.finish(first, Some(TokenizePiece { bytes: PIECE, last: false }));
    assert_eq!(run.queue.waiting(), 1, "only the new job waits");
    run.grant();
    assert_eq!(run.granted, ["a", "b"]);
}

#[test]
fn a_full_queue_displaces_jobs_of_lower_priority_and_of_tenants_over_their_share() {
    let mut run = Run::new(1, 4);
    let jobs: Vec<_> = (0..4).map(|_| run.enter("flood", 1.0, 0, 1)).collect();
    run.grant();
    let arrival = |tenant, priority| TokenizeArrival {
        tenant,
        weight: Weight::ONE,
        priority,
        piece: TokenizePiece { bytes: PIECE, last: true },
    };
    assert_eq!(run.queue.enter(arrival("flood", 0)), Err(TokenizeQueueFull { jobs_max: 4 }));
    let others = [(); 2].map(|()| run.queue.enter(arrival("other", 0)).unwrap());
    let displaced = others.each_ref().map(|other| other.displaced);
    assert_eq!(displaced, [Some(jobs[3]), Some(jobs[2])], "the newest of the tenant that holds most");
    assert!(run.queue.enter(arrival("other", 0)).is_err(), "each holds half");
    let urgent = run.queue.enter(arrival("flood", 1)).unwrap();
    assert_eq!(
        urgent.displaced,
        Some(others[1].job),
        "the newest of the lowest priority, whatever its tenant"
    );
    assert_eq!(run.queue.waiting(), 3);
}

proptest! {
    /// Any number of tenants, weights and jobs: two tenants that stay backlogged never differ by more than one
    /// piece of each, at their weights, per slot.
    #[test]
    fn backlogged_tenants_differ_by_at_most_a_piece_of_each(
        weights in prop::collection::vec(1u8..20, 2..6), slots in 1usize..4, steps in 1usize..300
    ) {
        const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
        let mut run = Run::new(slots, 1000);
        for (name, weight) in NAMES.iter().zip(&weights) {
            for _ in 0..slots {
                run.enter(name, f32::from(*weight), 0, 100_000);
            }
        }
        for _ in 0..steps {
            run.step();
        }
        let served = |name: &str| run.granted.iter().filter(|tenant| **tenant == name).count() as f64;
        for (a, wa) in NAMES.iter().zip(&weights) {
            for (b, wb) in NAMES.iter().zip(&weights) {
                let (wa, wb) = (f64::from(*wa), f64::from(*wb));
                let gap = (served(a) / wa - served(b) / wb).abs();
                prop_assert!(gap <= slots as f64 * (1.0 / wa + 1.0 / wb) + 1e-6, "{a} {b}: {gap}");
            }
        }
    }
}
