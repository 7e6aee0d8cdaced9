//! Cost of the fair queue per request: `cargo bench -p inflight-router-core --bench queue_cost`.
//!
//! Prints nanoseconds per push, per take of the next request, and per cancel of a waiting one, by the numbers
//! of tenants and waiting requests.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a benchmark needs the clock")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use inflight_contract::Weight;
use inflight_router_core::{Arrival, FairQueue, FairQueueOptions, QueueLimits};

const ROUNDS: u32 = 20_000;

fn main() {
    println!(
        "{:>8} {:>9} {:>10} {:>10} {:>10} {:>12}",
        "tenants", "waiting", "push ns", "take ns", "cancel ns", "displace ns"
    );
    for (tenants, waiting) in [(1, 1), (1, 1_000), (10, 1_000), (100, 1_000), (1_000, 10_000)] {
        measure(tenants, waiting);
    }
}

fn measure(tenants: usize, waiting: usize) {
    let names: Vec<String> = (0..tenants).map(|tenant| format!("tenant-{tenant}")).collect();
    let arrival = |number: usize, priority: i32| Arrival {
        tenant: &names[number % tenants],
        weight: Weight::default(),
        priority,
        tokens: 500,
        bounds: QueueLimits::NONE,
    };
    let limits = QueueLimits { requests: waiting + 1, tokens: u64::MAX };
    let mut queue = FairQueue::new(FairQueueOptions { limits, ..FairQueueOptions::default() });
    let now = Duration::from_secs(1);
    let mut number = 0;
    let mut push = |queue: &mut FairQueue<u8, usize>| {
        number += 1;
        queue.push(0, arrival(number, 0), now, number).map(|admitted| admitted.position)
    };
    for _ in 0..waiting {
        let _ = push(&mut queue);
    }
    let (mut pushing, mut taking, mut cancelling, mut displacing) = Default::default();
    let timed = |sum: &mut Duration, began: Instant| *sum += began.elapsed();
    for round in 0..ROUNDS {
        let began = Instant::now();
        let position = push(&mut queue);
        timed(&mut pushing, began);
        if round % 2 == 0 {
            let began = Instant::now();
            if let Some(head) = queue.head(0, now) {
                black_box(queue.take(&head, 100));
                queue.settle(&head, 100);
                queue.charge(0, &names[round as usize % tenants], 300);
                timed(&mut taking, began);
                queue.depart(&head);
            }
        } else if let Ok(position) = position {
            let began = Instant::now();
            black_box(queue.remove(&position));
            timed(&mut cancelling, began);
        }
    }
    // The queue is full: every arrival of a higher priority displaces a request.
    let _ = push(&mut queue);
    let rounds = (waiting as u32).min(1_000);
    for round in 0..rounds {
        let began = Instant::now();
        let _ = black_box(queue.push(0, arrival(round as usize, 1), now, 0));
        timed(&mut displacing, began);
    }
    let nanos = |sum: Duration, count: u32| sum.as_nanos() / u128::from(count);
    println!(
        "{tenants:>8} {waiting:>9} {:>10} {:>10} {:>10} {:>12}",
        nanos(pushing, ROUNDS),
        nanos(taking, ROUNDS / 2),
        nanos(cancelling, ROUNDS / 2),
        nanos(displacing, rounds)
    );
}
