//! Random workloads under random interleavings of submission, cancel, deadline and device failure.

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::FinishReason;
use inflight_worker_core::{Limits, NewSequence, Scheduler, SequenceId, SubmitError, Time, Verdict};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Submit { known: u32, max: u32, priority: i32, deadline_ms: Option<u64> },
    Cancel { pick: usize },
    /// One iteration; `stops` decides, bit by bit, which samples end their sequence; `cancel` withdraws a
    /// sequence while the iteration is in flight.
    Step { stops: u64, cancel: Option<usize>, device_fails: bool },
}

fn limits() -> impl Strategy<Value = Limits> {
    (1u32..=5, 2u32..40, 1u32..6, 1u32..12, 0u32..24, 0u32..4, 0u32..20).prop_map(
        |(block_log, blocks, running_max, waiting_max, extra, watermark_blocks, min_decode_tokens)| Limits {
            block_tokens: 1 << block_log,
            blocks,
            running_max,
            waiting_max,
            iteration_tokens: running_max + extra,
            sequence_tokens: 200,
            watermark_blocks,
            min_decode_tokens,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u32..60, 1u32..40, -1i32..=1, prop::option::weighted(0.2, 0u64..50))
            .prop_map(|(known, max, priority, deadline_ms)| Op::Submit { known, max, priority, deadline_ms }),
        1 => any::<usize>().prop_map(|pick| Op::Cancel { pick }),
        8 => (any::<u64>(), prop::option::weighted(0.15, any::<usize>()), prop::bool::weighted(0.02))
            .prop_map(|(stops, cancel, device_fails)| Op::Step { stops: stops & stops >> 7, cancel, device_fails }),
    ]
}

/// What the driver knows of a live sequence, kept apart from the scheduler's own books.
#[derive(Debug)]
struct Model {
    rank: (std::cmp::Reverse<i32>, u64),
    known: u32,
    computed: u32,
    remaining: u32,
    deadline: Option<Time>,
    cancelled: bool,
}

struct Harness {
    scheduler: Scheduler,
    live: BTreeMap<SequenceId, Model>,
    slots: BTreeMap<u32, SequenceId>,
    submitted: u64,
    ended: u64,
    now: Time,
}

impl Harness {
    fn new(limits: Limits) -> Self {
        let scheduler = Scheduler::new(limits).unwrap();
        Self { scheduler, live: BTreeMap::new(), slots: BTreeMap::new(), submitted: 0, ended: 0, now: Time::ZERO }
    }

    fn submit(&mut self, known: u32, max: u32, priority: i32, deadline_ms: Option<u64>) {
        let deadline = deadline_ms.map(|ms| self.now.after(Duration::from_millis(ms)));
        let fits = known + max <= self.scheduler.limits().sequence_tokens_max();
        match self.scheduler.submit(NewSequence { known_tokens: known, max_tokens: max, priority, deadline }) {
            Ok(id) => {
                assert!(fits, "a sequence that can never run was taken");
                self.submitted += 1;
                let rank = (std::cmp::Reverse(priority), self.submitted);
                let model = Model { rank, known, computed: 0, remaining: max, deadline, cancelled: false };
                assert!(self.live.insert(id, model).is_none(), "a live id was handed out again");
            }
            Err(SubmitError::TooLong { .. }) => assert!(!fits),
            Err(SubmitError::QueueFull { waiting }) => {
                assert!(waiting >= self.scheduler.limits().waiting_max)
            }
            Err(SubmitError::Empty) => unreachable!("both are at least 1"),
        }
    }

    fn cancel(&mut self, pick: usize) {
        if self.live.is_empty() {
            return;
        }
        let id = *self.live.keys().nth(pick % self.live.len()).unwrap();
        self.live.get_mut(&id).unwrap().cancelled = true;
        self.scheduler.cancel(id);
        self.scheduler.cancel(id); // withdrawing twice is withdrawing once
    }

    fn drain(&mut self) {
        for ended in self.scheduler.drain_ended().collect::<Vec<_>>() {
            let model = self.live.remove(&ended.id).expect("a second terminal event");
            self.ended += 1;
            if let Some(slot) = ended.slot {
                assert_eq!(self.slots.remove(&slot), Some(ended.id), "a slot came back from another owner");
            }
            match ended.reason {
                FinishReason::Cancelled => assert!(model.cancelled),
                FinishReason::Deadline => assert!(model.deadline.is_some_and(|d| d <= self.now)),
                FinishReason::Length => assert_eq!(model.remaining, 0),
                FinishReason::Stop | FinishReason::Error => {}
            }
        }
        self.scheduler.assert_consistent();
    }

    /// Returns whether there was anything to compute.
    fn step(&mut self, stops: u64, cancel: Option<usize>, device_fails: bool) -> bool {
        self.now = self.now.after(Duration::from_millis(1));
        let plan = self.scheduler.plan(self.now).clone();
        self.drain();
        let limits = *self.scheduler.limits();
        assert!(plan.tokens() <= limits.iteration_tokens, "the budget is exceeded");
        assert!(plan.preempted.is_empty() || plan.admitted.is_empty(), "admitted in a step that preempted");
        for (id, slot) in &plan.preempted {
            assert_eq!(self.slots.remove(slot), Some(*id));
            self.live.get_mut(id).unwrap().computed = 0;
            let victim = self.live[id].rank;
            for chunk in plan.chunks.iter().filter(|chunk| chunk.samples && chunk.len == 1) {
                assert!(self.live[&chunk.id].rank < victim, "a better rank gave way");
            }
        }
        for (id, slot) in &plan.admitted {
            assert!(self.slots.insert(*slot, *id).is_none(), "a slot was given out twice");
        }
        let mut samples = 0;
        let mut seen = BTreeMap::new();
        for chunk in &plan.chunks {
            let model = &self.live[&chunk.id];
            assert!(seen.insert(chunk.id, ()).is_none(), "a sequence has two chunks");
            assert_eq!(self.slots.get(&chunk.slot), Some(&chunk.id));
            assert_eq!(chunk.start, model.computed, "a gap or an overlap in the positions");
            assert!(chunk.len >= 1 && chunk.start + chunk.len <= model.known);
            assert_eq!(chunk.samples, chunk.start + chunk.len == model.known);
            let held = self.scheduler.block_table(chunk.id).len() as u32 * limits.block_tokens;
            assert!(held >= chunk.start + chunk.len, "the block table is too short");
            samples += usize::from(chunk.samples);
        }
        if plan.chunks.is_empty() {
            assert!(self.scheduler.is_idle() || !plan.preempted.is_empty(), "nothing runs though work waits");
            return false;
        }
        if let Some(pick) = cancel {
            self.cancel(pick);
        }
        assert!(self.scheduler.commit(plan.number + 1, &[]).is_err(), "an unknown iteration was committed");
        if device_fails {
            self.scheduler.fail(plan.number).unwrap();
        } else {
            let mut verdicts = Vec::new();
            for chunk in &plan.chunks {
                let model = self.live.get_mut(&chunk.id);
                let Some(model) = model else { continue };
                model.computed += chunk.len;
                if chunk.samples {
                    let stop = stops >> (verdicts.len() % 64) & 1 == 1;
                    verdicts.push(if stop { Verdict::Stop } else { Verdict::Continue });
                    model.known += 1;
                    model.remaining -= 1;
                }
            }
            while verdicts.len() < samples {
                verdicts.push(Verdict::Continue); // withdrawn ones
            }
            self.scheduler.commit(plan.number, &verdicts).unwrap();
        }
        self.drain();
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_schedule_conserves_blocks_and_ends_each_sequence_once(
        limits in limits(), ops in prop::collection::vec(op(), 1..80)
    ) {
        let mut harness = Harness::new(limits);
        for op in ops {
            match op {
                Op::Submit { known, max, priority, deadline_ms } => {
                    harness.submit(known, max, priority, deadline_ms)
                }
                Op::Cancel { pick } => {
                    harness.cancel(pick);
                    harness.drain();
                }
                Op::Step { stops, cancel, device_fails } => {
                    harness.step(stops, cancel, device_fails);
                }
            }
        }
        // Left alone, everything ends: at most a few hundred tokens are live, so this bound is generous even if
        // every token were computed many times over.
        let mut steps = 0;
        while !harness.live.is_empty() {
            harness.step(0, None, false);
            steps += 1;
            prop_assert!(steps < 200_000, "no progress: {:?}", harness.live);
        }
        prop_assert_eq!(harness.ended, harness.submitted);
        prop_assert!(harness.scheduler.is_idle());
        let load = harness.scheduler.load();
        prop_assert_eq!((load.running, load.waiting, load.blocks_used), (0, 0, 0));
    }
}

fn roomy() -> Limits {
    Limits {
        block_tokens: 16,
        blocks: 1000,
        running_max: 8,
        waiting_max: 100,
        iteration_tokens: 64,
        sequence_tokens: 4096,
        watermark_blocks: 0,
        min_decode_tokens: 16,
    }
}

fn sequence(known_tokens: u32) -> NewSequence {
    NewSequence { known_tokens, max_tokens: 8, priority: 0, deadline: None }
}

#[test]
fn a_short_prompt_does_not_wait_behind_a_long_one() {
    let mut scheduler = Scheduler::new(roomy()).unwrap();
    let long = scheduler.submit(sequence(4000)).unwrap();
    let first = scheduler.plan(Time::ZERO).clone();
    scheduler.commit(first.number, &[]).unwrap();
    let short = scheduler.submit(sequence(20)).unwrap();
    let plan = scheduler.plan(Time::ZERO).clone();
    let of = |id| plan.chunks.iter().find(|chunk| chunk.id == id).map(|chunk| (chunk.len, chunk.samples));
    assert_eq!(of(short), Some((20, true)), "the short one gets its first token in its first iteration");
    assert_eq!(of(long), Some((44, false)), "the long one gets everything else");
}

#[test]
fn decodes_are_subtracted_from_the_budget_before_prefills() {
    let mut scheduler = Scheduler::new(roomy()).unwrap();
    for _ in 0..4 {
        scheduler.submit(sequence(10)).unwrap();
    }
    let first = scheduler.plan(Time::ZERO).clone();
    scheduler.commit(first.number, &[Verdict::Continue; 4]).unwrap();
    scheduler.submit(sequence(1000)).unwrap();
    let plan = scheduler.plan(Time::ZERO);
    assert_eq!(plan.chunks.iter().map(|chunk| chunk.len).collect::<Vec<_>>(), [1, 1, 1, 1, 60]);
}
