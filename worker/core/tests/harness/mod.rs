//! Random schedules against a model of what is in memory: each token position holds a hash of the whole prefix up to
//! it, written when an iteration runs and checked when one reads it. A block that is reused too early, shared
//! wrongly, copied from the wrong place or lost on its way to the host changes what is read.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(dead_code, reason = "each test uses a part of it")]

mod rules;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use inflight_contract::{BlockHash, FinishReason, TenantService, TokenCost, Weight};
use inflight_worker_core::policy::{PolicyKind, SchedulingPolicy};
use inflight_worker_core::{
    CacheEvent, CacheTier, Chunk, Copy, CostModel, CostPrior, Direction, Iteration, Limits, NewSequence,
    Outcome, Preempted, Preemption, Scheduler, SequenceId, SubmitError, Time, Transfer, Verdict, replay,
};
use proptest::prelude::*;

/// One thing that happens.
#[derive(Debug, Clone)]
pub enum Op {
    Submit(Ask),
    Cancel {
        pick: usize,
    },
    /// A sequence is made to give way.
    Preempt {
        pick: usize,
    },
    /// Plans an iteration; the oldest in flight is committed first if there is no room.
    Plan,
    /// Runs what is in flight, then commits the oldest. `stops` decides, bit by bit, which samples end.
    Commit {
        stops: u64,
        device_fails: bool,
    },
    /// A transfer reaches its fence.
    Fence {
        pick: usize,
        succeeds: bool,
    },
}

/// A request.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Which of a few long texts the prompt is the beginning of: prompts share prefixes.
    text: u64,
    known: u32,
    max: u32,
    priority: i32,
    tenant: u8,
    deadline_ms: Option<u64>,
    choices: u32,
}

fn ask() -> impl Strategy<Value = Ask> {
    (0u64..3, 1u32..60, 1u32..40, -1i32..=1, 0u8..3, prop::option::weighted(0.2, 0u64..50), 1u32..=3)
        .prop_map(|(text, known, max, priority, tenant, deadline_ms, choices)| Ask {
            text,
            known,
            max,
            priority,
            tenant,
            deadline_ms,
            choices,
        })
}

/// A strategy.
pub fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => ask().prop_map(Op::Submit),
        1 => any::<usize>().prop_map(|pick| Op::Cancel { pick }),
        1 => any::<usize>().prop_map(|pick| Op::Preempt { pick }),
        8 => Just(Op::Plan),
        8 => (any::<u64>(), prop::bool::weighted(0.02))
            .prop_map(|(stops, device_fails)| Op::Commit { stops: stops & stops >> 9, device_fails }),
        4 => (any::<usize>(), prop::bool::weighted(0.85)).prop_map(|(pick, succeeds)| Op::Fence { pick, succeeds }),
    ]
}

/// A strategy.
pub fn limits() -> impl Strategy<Value = Limits> {
    (
        (1u32..=4, 2u32..40, 0u32..30, 1u32..6, 1u32..16, 0u32..24),
        (0u32..4, 0u32..20, 1u32..=2, 0u32..4, 0u64..6, any::<bool>(), prop::option::of(1u64..40)),
    )
        .prop_map(
            |(
                (block_log, blocks, host_blocks, running_max, waiting_max, extra),
                (
                    watermark_blocks,
                    min_decode_tokens,
                    depth,
                    bypass_max,
                    cooldown_steps,
                    prefix_cache,
                    target,
                ),
            )| Limits {
                host_blocks,
                waiting_max,
                sequence_tokens: 200,
                watermark_blocks,
                min_decode_tokens,
                depth,
                bypass_max,
                cooldown_steps,
                prefix_cache,
                step_target: target.map(Duration::from_millis),
                ..Limits::new(1 << block_log, blocks, running_max, running_max + extra)
            },
        )
}

/// A strategy.
pub fn policy() -> impl Strategy<Value = PolicyKind> {
    prop_oneof![
        Just(PolicyKind::Fcfs),
        Just(PolicyKind::Priority),
        Just(PolicyKind::Fair),
        Just(PolicyKind::Static)
    ]
}

fn mix(a: u64, b: u64) -> u64 {
    (a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31)
}

/// What the driver knows of a live sequence, kept apart from the scheduler's own books.
#[derive(Debug)]
struct Model {
    tokens: Vec<u32>,
    /// Hash of the prefix up to each position.
    contents: Vec<u64>,
    chain: Vec<BlockHash>,
    tenant: u8,
    priority: i32,
    arrival: u64,
    planned: u32,
    remaining: u32,
    deadline: Option<Time>,
    seed: u64,
    cancelled: bool,
    slot: Option<u32>,
    /// Its blocks are on the host, or on their way there.
    swapped: bool,
    /// Was preempted and has no slot since.
    preempted: bool,
    /// Came back from a preemption, and nothing of it was computed since.
    idle: bool,
    /// Will give way once it is not in flight.
    marked: bool,
    /// Will in any case.
    forced: bool,
    /// Admissions past it while it was the first of its lane.
    passed: u32,
}

struct Running {
    number: u64,
    chunks: Vec<(Chunk, Vec<u32>)>,
    copies: Vec<Copy>,
    ran: bool,
}

/// The scheduler with its driver, its memory and the model of both.
pub struct Harness {
    /// What is tested.
    pub scheduler: Scheduler,
    /// Every plan, as it was made.
    plans: Vec<Iteration>,
    policy: Box<dyn SchedulingPolicy>,
    kind: PolicyKind,
    live: BTreeMap<SequenceId, Model>,
    slots: BTreeMap<u32, SequenceId>,
    device: Vec<Vec<u64>>,
    host: Vec<Vec<u64>>,
    in_flight: VecDeque<Running>,
    /// With whether they were made already, and for whom.
    transfers: Vec<(Transfer, bool, Option<SequenceId>)>,
    cached: BTreeMap<(CacheTier, BlockHash), ()>,
    submitted: u64,
    groups: u64,
    ended: u64,
    now: Time,
    swaps: u64,
}

impl Harness {
    /// An idle one.
    pub fn new(limits: Limits, policy: PolicyKind) -> Self {
        // Copies are cheap in half of the runs and dear in the others, so that both kinds of preemption happen.
        let copy_block = if limits.blocks.is_multiple_of(2) { 1e-9 } else { 1e-4 };
        let prior = CostPrior::default().with_copies(0.0, copy_block);
        let cost = CostModel::new(prior);
        let tenants = TenantService::new(TokenCost::default(), 10);
        let page = vec![0; limits.block_tokens as usize];
        let mut scheduler = Scheduler::new(limits, policy.build(), cost, tenants).unwrap();
        scheduler.record(policy, &prior);
        Self {
            scheduler,
            plans: Vec::new(),
            policy: policy.build(),
            kind: policy,
            live: BTreeMap::new(),
            slots: BTreeMap::new(),
            device: vec![page.clone(); limits.blocks as usize],
            host: vec![page; limits.host_blocks as usize],
            in_flight: VecDeque::new(),
            transfers: Vec::new(),
            cached: BTreeMap::new(),
            submitted: 0,
            groups: 0,
            ended: 0,
            now: Time::ZERO,
            swaps: 0,
        }
    }

    fn block_tokens(&self) -> usize {
        self.scheduler.limits().block_tokens as usize
    }

    fn append(model: &mut Model, token: u32, block_tokens: usize) -> Option<BlockHash> {
        let before = model.contents.last().copied().unwrap_or(u64::from(model.tenant) + 77);
        model.tokens.push(token);
        model.contents.push(mix(before, u64::from(token)));
        let known = model.chain.len();
        let root = BlockHash::root(&model.tenant.to_string());
        BlockHash::extend_chain(&mut model.chain, root, &model.tokens, block_tokens);
        model.chain.get(known).copied()
    }

    fn submit(&mut self, ask: &Ask) {
        self.groups += 1;
        for choice in 0..ask.choices {
            let limits = *self.scheduler.limits();
            let mut model = Model {
                tokens: Vec::new(),
                contents: Vec::new(),
                chain: Vec::new(),
                tenant: ask.tenant,
                priority: ask.priority,
                arrival: self.submitted,
                planned: 0,
                remaining: ask.max,
                deadline: ask.deadline_ms.map(|ms| self.now.after(Duration::from_millis(ms))),
                seed: mix(self.submitted, u64::from(choice)),
                cancelled: false,
                slot: None,
                swapped: false,
                preempted: false,
                idle: false,
                marked: false,
                forced: false,
                passed: 0,
            };
            for position in 0..ask.known {
                Self::append(
                    &mut model,
                    mix(ask.text, u64::from(position)) as u32,
                    limits.block_tokens as usize,
                );
            }
            let fits = ask.known + ask.max <= limits.sequence_tokens_max();
            let tenant = ask.tenant.to_string();
            let new = NewSequence {
                known_tokens: ask.known,
                max_tokens: ask.max,
                priority: ask.priority,
                deadline: model.deadline,
                tenant: &tenant,
                weight: Weight::default(),
                hashes: &model.chain,
                group: (ask.choices > 1).then_some(self.groups),
                order: None,
                charged_tokens: 0,
            };
            match self.scheduler.submit(new, self.now) {
                Ok(id) => {
                    assert!(fits, "a sequence that can never run was taken");
                    self.submitted += 1;
                    assert!(self.live.insert(id, model).is_none(), "a live id was handed out again");
                }
                Err(SubmitError::TooLong { .. }) => assert!(!fits),
                Err(SubmitError::QueueFull { waiting }) => assert!(waiting >= limits.waiting_max),
                Err(SubmitError::Empty) => unreachable!("both are at least 1"),
            }
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
        self.settle();
    }

    fn preempt(&mut self, pick: usize) {
        if self.live.is_empty() {
            return;
        }
        let id = *self.live.keys().nth(pick % self.live.len()).unwrap();
        self.scheduler.preempt(id);
        let model = self.live.get_mut(&id).unwrap();
        model.forced = model.slot.is_some() && !self.scheduler.block_table(id).is_empty();
        self.scheduler.assert_consistent();
    }

    fn settle(&mut self) {
        for ended in self.scheduler.drain_ended().collect::<Vec<_>>() {
            let model = self.live.remove(&ended.id).expect("a second terminal event");
            self.ended += 1;
            match ended.reason {
                FinishReason::Cancelled => assert!(model.cancelled),
                FinishReason::Deadline => assert!(model.deadline.is_some_and(|d| d <= self.now)),
                FinishReason::Length => assert_eq!(model.remaining, 0),
                FinishReason::Stop | FinishReason::Error => {}
            }
        }
        for slot in self.scheduler.drain_freed_slots().collect::<Vec<_>>() {
            let owner = self.slots.remove(&slot).expect("a slot was freed twice");
            if let Some(model) = self.live.get_mut(&owner) {
                model.slot = None;
            }
        }
        for (tier, event) in self.scheduler.drain_cache_events().collect::<Vec<_>>() {
            match event {
                CacheEvent::Stored(hash) => assert!(self.cached.insert((tier, hash), ()).is_none()),
                CacheEvent::Removed(hash) => assert!(self.cached.remove(&(tier, hash)).is_some()),
            }
        }
        let contents: BTreeMap<_, _> = self.scheduler.cache_contents().map(|block| (block, ())).collect();
        assert_eq!(contents, self.cached, "whoever joins now is told something else than those who listened");
        self.scheduler.assert_consistent();
    }

    /// Returns whether there was anything to compute or to move.
    fn plan(&mut self, eager: bool) -> bool {
        if self.scheduler.in_flight() >= self.scheduler.limits().depth as usize {
            self.commit(0, false);
        }
        self.now = self.now.after(Duration::from_millis(1));
        let before = self.look();
        let plan = self.scheduler.plan(self.now).clone();
        self.plans.push(plan.clone());
        self.settle();
        self.judge(&before, &plan);
        let limits = *self.scheduler.limits();
        assert!(plan.tokens() <= limits.iteration_tokens, "the budget is exceeded");
        for Preempted { id, kind, .. } in &plan.preempted {
            let victim = self.live.get_mut(id).expect("an ended sequence was preempted");
            if *kind == Preemption::Recompute {
                victim.planned = 0;
            }
            victim.swapped = *kind == Preemption::Swap;
            (victim.preempted, victim.idle, victim.marked, victim.forced) = (true, false, false, false);
            let priority = victim.priority;
            for (admitted, _) in &plan.admitted {
                assert!(self.live[admitted].priority > priority, "its class was admitted in the same step");
            }
        }
        for (id, slot) in &plan.admitted {
            assert!(self.slots.insert(*slot, *id).is_none(), "a slot was given out twice");
            let model = self.live.get_mut(id).expect("an ended sequence was admitted");
            assert!(model.slot.replace(*slot).is_none(), "admitted twice");
            model.idle |= std::mem::take(&mut model.preempted);
            (model.swapped, model.passed) = (false, 0);
        }
        for (id, _) in &plan.marked {
            self.live.get_mut(id).expect("an ended sequence was marked").marked = true;
        }
        let swapped = plan.preempted.iter().filter(|one| one.kind == Preemption::Swap).map(|one| one.id);
        let arriving = plan.admitted.iter().map(|(id, _)| *id);
        let arriving = arriving.filter(|id| self.scheduler.block_table(*id).is_empty());
        let (mut out, mut back) = (swapped.collect::<VecDeque<_>>(), arriving.collect::<VecDeque<_>>());
        for transfer in &plan.transfers {
            self.swaps += 1;
            // A copy happens at some moment before its fence: at the first or at the last.
            if eager {
                self.run_transfer(transfer);
            }
            // Blocks of the prefix cache go out last.
            let owner = match transfer.direction {
                Direction::Out => out.pop_front(),
                Direction::In => back.pop_front(),
            };
            self.transfers.push((transfer.clone(), eager, owner));
        }
        let mut seen = BTreeMap::new();
        for chunk in &plan.chunks {
            assert!(seen.insert(chunk.id, ()).is_none(), "a sequence has two chunks");
            assert_eq!(self.slots.get(&chunk.slot), Some(&chunk.id), "a chunk in another's slot");
            let held = self.scheduler.block_table(chunk.id).len() as u32 * limits.block_tokens;
            assert!(held >= chunk.start + chunk.len, "the block table is too short");
            let model = self.live.get_mut(&chunk.id).unwrap();
            assert!(chunk.start >= model.planned, "computed again without a preemption");
            model.planned = chunk.start + chunk.len;
        }
        let moved = !plan.transfers.is_empty() || !plan.preempted.is_empty();
        if plan.chunks.is_empty() {
            assert!(plan.copies.is_empty(), "copies without an iteration");
            let waits = !self.in_flight.is_empty() || !self.transfers.is_empty() || moved;
            assert!(self.scheduler.is_idle() || waits, "nothing runs though work waits: {plan:?}");
            return moved;
        }
        let chunks = plan.chunks.iter().map(|chunk| (*chunk, self.scheduler.block_table(chunk.id).to_vec()));
        let running =
            Running { number: plan.number, chunks: chunks.collect(), copies: plan.copies, ran: false };
        self.in_flight.push_back(running);
        if eager {
            self.run();
        }
        true
    }

    fn run_transfer(&mut self, transfer: &Transfer) {
        for (device, host) in &transfer.blocks {
            match transfer.direction {
                Direction::Out => self.host[*host as usize].clone_from(&self.device[*device as usize]),
                Direction::In => self.device[*device as usize].clone_from(&self.host[*host as usize]),
            }
        }
    }

    /// Runs everything in flight that has not run.
    fn run(&mut self) {
        let block_tokens = self.block_tokens();
        for running in self.in_flight.iter_mut().filter(|running| !running.ran) {
            running.ran = true;
            for copy in &running.copies {
                self.device[copy.to as usize] = self.device[copy.from as usize].clone();
            }
            for (chunk, table) in &running.chunks {
                // Of a sequence that has ended in the meantime nobody reads the result.
                let Some(model) = self.live.get(&chunk.id) else { continue };
                for position in 0..(chunk.start + chunk.len) as usize {
                    // The newest token may be a placeholder that only the device knows yet.
                    let Some(content) = model.contents.get(position) else { continue };
                    let place =
                        &mut self.device[table[position / block_tokens] as usize][position % block_tokens];
                    if position >= chunk.start as usize {
                        *place = *content;
                    } else {
                        assert_eq!(place, content, "{:?} reads what is not its own at {position}", chunk.id);
                    }
                }
            }
        }
    }

    fn commit(&mut self, stops: u64, device_fails: bool) {
        let Some(oldest) = self.in_flight.front() else { return };
        // Only the oldest is sure to have run by its commit; those behind it run when they must.
        let number = oldest.number;
        let behind: Vec<_> = self.in_flight.drain(1..).collect();
        self.run();
        self.in_flight.extend(behind);
        let Some(oldest) = self.in_flight.pop_front() else { return };
        let nothing = Outcome { verdicts: &[], took: Duration::ZERO };
        assert!(self.scheduler.commit(number + 7, nothing).is_err(), "an unknown iteration was committed");
        if device_fails {
            self.in_flight.clear();
            self.scheduler.fail(number).unwrap();
            self.settle();
            return;
        }
        for (chunk, _) in &oldest.chunks {
            if let Some(model) = self.live.get_mut(&chunk.id) {
                model.idle = false;
            }
        }
        let block_tokens = self.block_tokens();
        let mut verdicts = Vec::new();
        for (chunk, _) in oldest.chunks.iter().filter(|(chunk, _)| chunk.samples) {
            let stop = stops >> (verdicts.len() % 64) & 1 == 1;
            let hash = self.live.get_mut(&chunk.id).and_then(|model| {
                model.remaining -= 1;
                let token = mix(model.seed, model.tokens.len() as u64) as u32;
                Self::append(model, token, block_tokens)
            });
            verdicts.push(Verdict { stop, hash });
        }
        let took = Duration::from_micros(100 + 10 * oldest.chunks.len() as u64);
        self.scheduler.commit(number, Outcome { verdicts: &verdicts, took }).unwrap();
        self.settle();
        // A token that was a placeholder when its iteration was planned is known now, and so is what it writes.
        self.check_tails();
    }

    /// Writes what iterations in flight computed for placeholders, once the token is known.
    fn check_tails(&mut self) {
        let block_tokens = self.block_tokens();
        for running in self.in_flight.iter().filter(|running| running.ran) {
            for (chunk, table) in &running.chunks {
                let Some(model) = self.live.get(&chunk.id) else { continue };
                let position = (chunk.start + chunk.len - 1) as usize;
                if let Some(content) = model.contents.get(position) {
                    self.device[table[position / block_tokens] as usize][position % block_tokens] = *content;
                }
            }
        }
    }

    fn fence(&mut self, pick: usize, succeeds: bool) {
        if self.transfers.is_empty() {
            return;
        }
        let (transfer, moved, owner) = self.transfers.swap_remove(pick % self.transfers.len());
        if succeeds && !moved {
            self.run_transfer(&transfer);
        }
        if !succeeds {
            // A copy that failed leaves rubbish behind.
            for (device, host) in &transfer.blocks {
                match transfer.direction {
                    Direction::Out => self.host[*host as usize].fill(13),
                    Direction::In => self.device[*device as usize].fill(13),
                }
            }
        }
        self.scheduler.transfer_done(transfer.id, succeeds, Duration::from_micros(50), self.now).unwrap();
        assert!(self.scheduler.transfer_done(transfer.id, true, Duration::ZERO, self.now).is_err());
        if !succeeds {
            if let Some(model) = owner.and_then(|owner| self.live.get_mut(&owner)) {
                model.swapped = false;
            }
            // Whoever it belonged to starts over.
            for model in self.live.values_mut().filter(|model| model.slot.is_none()) {
                model.planned = 0;
            }
        }
        self.settle();
        for id in self.live.keys().copied().collect::<Vec<_>>() {
            let model = self.live.get_mut(&id).unwrap();
            if model.slot.is_none() {
                model.planned = 0;
            }
        }
    }

    /// Does one thing.
    pub fn apply(&mut self, at: usize, op: &Op) {
        match op {
            Op::Submit(ask) => self.submit(ask),
            Op::Cancel { pick } => self.cancel(*pick),
            Op::Preempt { pick } => self.preempt(*pick),
            Op::Plan => {
                self.plan(at.is_multiple_of(3));
            }
            Op::Commit { stops, device_fails } => self.commit(*stops, *device_fails),
            Op::Fence { pick, succeeds } => self.fence(*pick, *succeeds),
        }
    }

    /// Left alone, everything ends.
    pub fn finish(&mut self) {
        let mut steps = 0usize;
        while !self.live.is_empty() || !self.transfers.is_empty() || !self.in_flight.is_empty() {
            self.plan(steps.is_multiple_of(2));
            self.commit(0, false);
            self.fence(steps, true);
            steps += 1;
            assert!(steps < 100_000, "no progress: {:?}", self.live);
        }
        assert_eq!(self.ended, self.submitted);
        assert!(self.scheduler.is_idle());
        let load = self.scheduler.load();
        assert_eq!((load.running, load.waiting, load.swapped), (0, 0, 0));
        assert_eq!((load.blocks_used, load.host_blocks_used), (0, 0));
        let log = self.scheduler.take_log();
        let mut replayed = Vec::new();
        let plans = replay(&log, |plan, _| replayed.push(plan.clone())).unwrap();
        assert_eq!(plans as usize, self.plans.len());
        assert!(replayed == self.plans, "a replay plans otherwise");
        // A log that was cut short, as that of a killed process, replays up to there; a spoilt one says so.
        if plans > 0 {
            let cut = &log[..log.len() - 3];
            assert!(replay(cut, |_, _| {}).is_ok_and(|fewer| fewer <= plans));
        }
        let mut spoilt = log;
        spoilt[3] ^= 1;
        assert!(replay(&spoilt, |_, _| {}).is_err());
    }
}
