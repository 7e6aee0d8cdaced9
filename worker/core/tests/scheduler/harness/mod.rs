//! SequenceModel-based testing with random schedules. The model memory holds at each token position a hash of
//! the prefix up to it, written when an iteration runs and checked when one reads it. A block that is reused
//! too early, shared wrongly, copied from the wrong block or lost in a transfer changes the values read.

mod drafts;
mod rules;
pub mod seeds;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use inflight_contract::{BlockHash, FinishReason, TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::{PolicyKind, SchedulingPolicy};
use inflight_worker_core::{
    CacheEvent, CacheTier, Chunk, Copy, CostModel, CostPrior, Direction, Iteration, IterationOutcome,
    LatencyObjectives, LayerGroup, MemoryShape, NewSequence, Preempted, Preemption, ReplayEvent, Scheduler,
    SchedulerLimits, ScoredRange, SequenceId, StepTarget, SubmitError, Tables, Time, TokenVerdict, Transfer,
    replay,
};
use proptest::prelude::*;

/// Operation of a schedule.
#[derive(Debug, Clone)]
pub enum Op {
    Submit(TestRequest),
    Cancel {
        pick: usize,
    },
    /// Forces the preemption of a sequence.
    Preempt {
        pick: usize,
    },
    /// Ends a sequence whose keys and values are not sound.
    Discard {
        pick: usize,
    },
    /// Plans an iteration; the oldest in flight is committed first if there is no room.
    Plan,
    /// Runs the iterations in flight, then commits the oldest. Each bit of `stops` decides whether a sample
    /// ends its sequence.
    Commit {
        stops: u64,
        device_fails: bool,
    },
    /// Completes a transfer.
    Fence {
        pick: usize,
        succeeds: bool,
    },
}

/// Request of a schedule.
#[derive(Debug, Clone)]
pub struct TestRequest {
    /// Index of the text that the prompt is a prefix of; prompts of one text share prefixes.
    text: u64,
    known: u32,
    max: u32,
    priority: i32,
    tenant: u8,
    deadline_ms: Option<u64>,
    choices: u32,
    /// Whether the logits of the first choice's prompt are wanted.
    scored: bool,
}

fn request() -> impl Strategy<Value = TestRequest> {
    let lengths = (1u32..60, 1u32..40);
    let deadline = prop::option::weighted(0.2, 0u64..50);
    (0u64..3, lengths, -1i32..=1, 0u8..3, deadline, 1u32..=3, prop::bool::weighted(0.25)).prop_map(
        |(text, (known, max), priority, tenant, deadline_ms, choices, scored)| TestRequest {
            text,
            known,
            max,
            priority,
            tenant,
            deadline_ms,
            choices,
            scored,
        },
    )
}

/// Generates operations.
pub fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => request().prop_map(Op::Submit),
        1 => any::<usize>().prop_map(|pick| Op::Cancel { pick }),
        1 => any::<usize>().prop_map(|pick| Op::Preempt { pick }),
        1 => any::<usize>().prop_map(|pick| Op::Discard { pick }),
        8 => Just(Op::Plan),
        8 => (any::<u64>(), prop::bool::weighted(0.02))
            .prop_map(|(stops, device_fails)| Op::Commit { stops: stops & stops >> 9, device_fails }),
        4 => (any::<usize>(), prop::bool::weighted(0.85)).prop_map(|(pick, succeeds)| Op::Fence { pick, succeeds }),
    ]
}

/// Generates step targets.
fn step_target() -> impl Strategy<Value = StepTarget> {
    let duration = || (1u64..40).prop_map(Duration::from_millis);
    let objectives = (prop::option::of(duration()), prop::option::of(duration()));
    prop_oneof![
        1 => Just(StepTarget::Unbounded),
        1 => duration().prop_map(StepTarget::Fixed),
        2 => objectives.prop_map(|(first_token, gap)| StepTarget::Adaptive(LatencyObjectives { first_token, gap })),
    ]
}

/// Generates scheduler limits.
pub fn limits() -> impl Strategy<Value = SchedulerLimits> {
    (
        (1u32..=4, 2u32..40, 0u32..30, 1u32..6, 1u32..16, 0u32..24),
        (0u32..4, 0u32..20, 1u32..=2, 0u32..4, 0u64..6, any::<bool>(), step_target()),
        (1u32..30, 0u32..6, prop::bool::weighted(0.3)),
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
                    step_target,
                ),
                (iteration_scores, drafts_max, govern_drafts),
            )| SchedulerLimits {
                iteration_scores,
                drafts_max,
                predicted_max: drafts_max / 2,
                iteration_samples: running_max + iteration_scores,
                govern_drafts,
                host_blocks,
                waiting_max,
                sequence_tokens: 200,
                watermark_blocks,
                min_decode_tokens,
                depth,
                bypass_max,
                cooldown_steps,
                prefix_cache,
                step_target,
                ..SchedulerLimits::new(1 << block_log, blocks, running_max, running_max + extra)
            },
        )
}

/// Number of the recurrent states, beside those of groups, in the content of blocks.
const STATE: usize = 99;

/// Content of a position of a state whose token is not known yet.
const UNKNOWN: u64 = 0;

/// Generates shapes with windows: beside full attention, alone, or two sizes of them.
pub fn shape() -> impl Strategy<Value = MemoryShape> {
    let windows = prop::collection::btree_map(1u32..50, 1u32..=3, 1..=2);
    (0u32..=3, prop::option::weighted(0.8, 1u32..=2), windows).prop_map(|(block_log, full, windows)| {
        let full = full.map(|blocks| LayerGroup { blocks, window: None });
        let windows =
            windows.into_iter().rev().map(|(size, blocks)| LayerGroup { blocks, window: Some(size) });
        let groups: Vec<LayerGroup> = full.into_iter().chain(windows).collect();
        MemoryShape::new(1 << block_log, &groups).unwrap()
    })
}

/// Generates shapes with a recurrent state, beside full attention, windows or both.
pub fn shape_with_state() -> impl Strategy<Value = MemoryShape> {
    let full = (0u32..=3, 1u32..=2).prop_map(|(block_log, blocks)| {
        MemoryShape::new(1 << block_log, &[LayerGroup { blocks, window: None }]).unwrap()
    });
    (prop_oneof![full, shape()], 1u32..=5).prop_map(|(shape, state)| shape.with_state(state).unwrap())
}

/// Generates scheduling policies.
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

/// SequenceModel of a live sequence, independent of the scheduler's own state.
#[derive(Debug)]
struct SequenceModel {
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
    /// Set while swapped out or being swapped out.
    swapped: bool,
    /// Set from a preemption until the next slot.
    preempted: bool,
    /// Set from a resumption until a token is computed.
    without_progress: bool,
    /// Set while its preemption is pending.
    marked: bool,
    /// Set while a forced preemption is pending.
    forced: bool,
    /// Number of admissions past it while it was the head of its flow.
    bypass_count: u32,
    /// Positions that are still to be scored.
    scored: ScoredRange,
    /// Drafts in the iteration in flight.
    drafts: u32,
}

/// Returns what a position's row is in a block: each block of a span, in each group, holds other layers.
fn row(content: u64, group: usize, part: usize) -> u64 {
    mix(content, (group * 100 + part) as u64)
}

/// Returns the next token of a sequence.
fn next_token(model: &SequenceModel) -> u32 {
    mix(model.seed, model.tokens.len() as u64) as u32
}

/// Iteration in flight, with the block tables at its planning.
struct ModelIteration {
    number: u64,
    chunks: Vec<(Chunk, Tables)>,
    /// Chunks with drafts.
    drafted: BTreeMap<SequenceId, drafts::DraftedChunk>,
    copies: Vec<Copy>,
    ran: bool,
}

/// Scheduler under test with a model of its driver and its memory.
pub struct Harness {
    /// Scheduler under test.
    pub scheduler: Scheduler,
    /// All plans so far.
    plans: Vec<Iteration>,
    policy: Box<dyn SchedulingPolicy>,
    kind: PolicyKind,
    live: BTreeMap<SequenceId, SequenceModel>,
    slots: BTreeMap<u32, SequenceId>,
    device: Vec<Vec<u64>>,
    host: Vec<Vec<u64>>,
    in_flight: VecDeque<ModelIteration>,
    /// Transfers in flight, whether their copies were made, and their sequences.
    transfers: Vec<(Transfer, bool, Option<SequenceId>)>,
    cached: BTreeMap<(CacheTier, BlockHash), ()>,
    submitted: u64,
    groups: u64,
    ended: u64,
    now: Time,
    swaps: u64,
    /// Drafts of committed iterations, and those of them that stood.
    verified: (u64, u64),
}

impl Harness {
    /// Creates a harness with an idle scheduler.
    pub fn new(limits: SchedulerLimits, policy: PolicyKind) -> Self {
        // Copies are cheap in half of the runs and expensive in the others, so that both preemption modes
        // occur.
        let copy_block = if limits.blocks.is_multiple_of(2) { 1e-9 } else { 1e-4 };
        let prior = CostPrior::default().with_copies(0.0, copy_block);
        let cost = CostModel::new(prior);
        let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
        let block = vec![0; limits.block_tokens() as usize];
        let mut scheduler = Scheduler::new(limits, policy.build(), cost, tenants).unwrap();
        scheduler.record(policy, &prior);
        Self {
            scheduler,
            plans: Vec::new(),
            policy: policy.build(),
            kind: policy,
            live: BTreeMap::new(),
            slots: BTreeMap::new(),
            device: vec![block.clone(); limits.blocks as usize],
            host: vec![block; limits.host_blocks as usize],
            in_flight: VecDeque::new(),
            transfers: Vec::new(),
            cached: BTreeMap::new(),
            submitted: 0,
            groups: 0,
            ended: 0,
            now: Time::ZERO,
            swaps: 0,
            verified: (0, 0),
        }
    }

    /// Returns true if a sequence with a slot has its tables, which a transfer has meanwhile.
    fn has_tables(&self, id: SequenceId) -> bool {
        self.scheduler.tables(id).is_some_and(|tables| !tables.groups().is_empty())
    }

    /// Returns the spans up to which the tables of a sequence reach, by group.
    fn ends(&self, id: SequenceId) -> Vec<u32> {
        let groups = self.scheduler.tables(id).map_or(&[][..], Tables::groups);
        groups.iter().map(|table| table.end_span()).collect()
    }

    fn block_tokens(&self) -> usize {
        self.scheduler.limits().block_tokens() as usize
    }

    fn append(model: &mut SequenceModel, token: u32, block_tokens: usize) -> Option<BlockHash> {
        let before = model.contents.last().copied().unwrap_or(u64::from(model.tenant) + 77);
        model.tokens.push(token);
        model.contents.push(mix(before, u64::from(token)));
        let known = model.chain.len();
        let root = BlockHash::root(&model.tenant.to_string());
        BlockHash::extend_chain(&mut model.chain, root, &model.tokens, block_tokens);
        model.chain.get(known).copied()
    }

    fn submit(&mut self, request: &TestRequest) {
        self.groups += 1;
        for choice in 0..request.choices {
            let limits = *self.scheduler.limits();
            let mut model = SequenceModel {
                tokens: Vec::new(),
                contents: Vec::new(),
                chain: Vec::new(),
                tenant: request.tenant,
                priority: request.priority,
                arrival: self.submitted,
                planned: 0,
                remaining: request.max,
                deadline: request.deadline_ms.map(|ms| self.now.after(Duration::from_millis(ms))),
                seed: mix(self.submitted, u64::from(choice)),
                cancelled: false,
                slot: None,
                swapped: false,
                preempted: false,
                without_progress: false,
                marked: false,
                forced: false,
                bypass_count: 0,
                scored: match request.scored && choice == 0 {
                    true => ScoredRange { start: 0, end: request.known - 1 },
                    false => ScoredRange::default(),
                },
                drafts: 0,
            };
            for position in 0..request.known {
                Self::append(
                    &mut model,
                    mix(request.text, u64::from(position)) as u32,
                    limits.block_tokens() as usize,
                );
            }
            let fits = request.known + request.max <= limits.sequence_tokens_max();
            let tenant = request.tenant.to_string();
            let new = NewSequence {
                known_tokens: request.known,
                max_tokens: request.max,
                priority: request.priority,
                deadline: model.deadline,
                tenant: &tenant,
                weight: Weight::default(),
                hashes: &model.chain,
                group: (request.choices > 1).then_some(self.groups),
                virtual_start_time: None,
                charged_tokens: 0,
                scored: model.scored,
            };
            match self.scheduler.submit(new, self.now) {
                Ok(id) => {
                    assert!(fits, "a sequence that can never run was taken");
                    self.submitted += 1;
                    assert!(self.live.insert(id, model).is_none(), "a live id was handed out again");
                }
                Err(SubmitError::TooLong { .. }) => assert!(!fits),
                Err(SubmitError::QueueFull { waiting }) => assert!(waiting >= limits.waiting_max),
                Err(SubmitError::Empty) => unreachable!("both lengths are at least 1"),
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
        self.scheduler.cancel(id); // cancellation is idempotent
        self.settle();
    }

    fn discard(&mut self, pick: usize) {
        if self.live.is_empty() {
            return;
        }
        let id = *self.live.keys().nth(pick % self.live.len()).unwrap();
        let chain = self.live[&id].chain.clone();
        self.scheduler.discard(id);
        self.scheduler.discard(id); // as a cancellation
        self.settle();
        assert!(!self.live.contains_key(&id), "a discarded sequence goes on");
        for hash in chain {
            let cached =
                [CacheTier::Device, CacheTier::Host].map(|tier| self.cached.contains_key(&(tier, hash)));
            assert_eq!(cached, [false; 2], "a block of a discarded sequence is cached");
        }
    }

    fn preempt(&mut self, pick: usize) {
        if self.live.is_empty() {
            return;
        }
        let id = *self.live.keys().nth(pick % self.live.len()).unwrap();
        self.scheduler.preempt(id);
        let runs = self.has_tables(id);
        let model = self.live.get_mut(&id).unwrap();
        model.forced = model.slot.is_some() && runs;
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
                FinishReason::Stop | FinishReason::Complete | FinishReason::Error => {}
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
        assert_eq!(contents, self.cached, "the cache contents differ from the sum of the events");
        self.scheduler.assert_consistent();
    }

    /// Plans an iteration and checks it. Returns true if there was work or a transfer.
    fn plan(&mut self, eager: bool) -> bool {
        if self.scheduler.in_flight() >= self.scheduler.limits().depth as usize {
            self.commit(0, false);
        }
        self.now = self.now.after(Duration::from_millis(1));
        let before = self.snapshot();
        let offered = self.offer_drafts();
        let plan = self.scheduler.plan(self.now).clone();
        self.plans.push(plan.clone());
        self.settle();
        self.check_plan(&before, &plan);
        let limits = *self.scheduler.limits();
        assert!(plan.tokens() <= limits.iteration_tokens, "the budget is exceeded");
        for Preempted { id, kind, .. } in &plan.preempted {
            let victim = self.live.get_mut(id).expect("an ended sequence was preempted");
            if *kind == Preemption::Recompute {
                victim.planned = 0;
            }
            victim.swapped = *kind == Preemption::Swap;
            (victim.preempted, victim.without_progress, victim.marked, victim.forced) =
                (true, false, false, false);
            let priority = victim.priority;
            for (admitted, _) in &plan.admitted {
                assert!(self.live[admitted].priority > priority, "its class was admitted in the same step");
            }
        }
        for (id, slot) in &plan.admitted {
            assert!(self.slots.insert(*slot, *id).is_none(), "a slot was assigned twice");
            let model = self.live.get_mut(id).expect("an ended sequence was admitted");
            assert!(model.slot.replace(*slot).is_none(), "admitted twice");
            model.without_progress |= std::mem::take(&mut model.preempted);
            (model.swapped, model.bypass_count) = (false, 0);
        }
        for (id, _) in &plan.marked {
            self.live.get_mut(id).expect("an ended sequence was marked").marked = true;
        }
        let swapped = plan.preempted.iter().filter(|one| one.kind == Preemption::Swap).map(|one| one.id);
        let arriving = plan.admitted.iter().map(|(id, _)| *id);
        let arriving = arriving.filter(|id| !self.has_tables(*id));
        let (mut out, mut back) = (swapped.collect::<VecDeque<_>>(), arriving.collect::<VecDeque<_>>());
        for transfer in &plan.transfers {
            self.swaps += 1;
            // A copy may happen at any time before its fence: at once or at the end.
            if eager {
                self.run_transfer(transfer);
            }
            // Offloads of the prefix cache come last and have no owner.
            let owner = match transfer.direction {
                Direction::Out => out.pop_front(),
                Direction::In => back.pop_front(),
            };
            self.transfers.push((transfer.clone(), eager, owner));
        }
        let (mut seen, mut scores) = (BTreeMap::new(), 0);
        for chunk in &plan.chunks {
            assert!(seen.insert(chunk.id, ()).is_none(), "a sequence has two chunks");
            assert_eq!(self.slots.get(&chunk.slot), Some(&chunk.id), "a chunk in another sequence's slot");
            let held = self.ends(chunk.id).into_iter().min().unwrap() * limits.block_tokens();
            assert!(held >= chunk.start + chunk.len, "a block table is too short");
            let model = self.live.get_mut(&chunk.id).unwrap();
            assert!(chunk.start >= model.planned, "recomputed without a preemption");
            assert_eq!(model.drafts, 0, "planned while its drafts are in flight");
            model.planned = chunk.start + chunk.len;
            let left = model.scored;
            assert!(left.is_empty() || chunk.start <= left.start, "positions to be scored are skipped");
            scores += left.within(chunk.start, chunk.len).len();
            model.scored.start = left.start.max(model.planned);
        }
        assert!(scores <= limits.iteration_scores, "the budget of scored positions is exceeded");
        let drafted = self.check_drafts(&before, &offered, &plan);
        self.check_copies(&plan);
        let moved = !plan.transfers.is_empty() || !plan.preempted.is_empty();
        if plan.chunks.is_empty() {
            assert!(plan.copies.is_empty(), "copies without an iteration");
            let waits = !self.in_flight.is_empty() || !self.transfers.is_empty() || moved;
            assert!(self.scheduler.is_idle() || waits, "nothing runs though work waits: {plan:?}");
            return moved;
        }
        let tables = |chunk: &Chunk| self.scheduler.tables(chunk.id).unwrap().clone();
        let chunks = plan.chunks.iter().map(|chunk| (*chunk, tables(chunk)));
        let running = ModelIteration {
            number: plan.number,
            chunks: chunks.collect(),
            drafted,
            copies: plan.copies,
            ran: false,
        };
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

    /// Runs all iterations in flight that have not run.
    fn run(&mut self) {
        let SchedulerLimits { shape, snapshot, .. } = *self.scheduler.limits();
        for running in self.in_flight.iter_mut().filter(|running| !running.ran) {
            running.ran = true;
            for copy in &running.copies {
                self.device[copy.to as usize] = self.device[copy.from as usize].clone();
            }
            for (chunk, tables) in &running.chunks {
                // Results of an ended sequence are not read.
                let Some(model) = self.live.get(&chunk.id) else { continue };
                let drafts = running.drafted.get(&chunk.id);
                let guessed = drafts.map_or(&[][..], |drafts| &drafts.contents);
                let contents: Vec<_> = model.contents.iter().chain(guessed).collect();
                // The first blocks have the state at a multiple of some positions, the others the tokens behind it. Those behind the start
                // of the chunk were drafts, if there are any.
                let (start, end) = (chunk.start as usize, (chunk.start + chunk.len) as usize);
                let kept = snapshot.map_or(0, |snapshot| snapshot.blocks as usize);
                let every = snapshot.map_or(1, |snapshot| snapshot.every as usize);
                let mut base = 0;
                for (part, block) in tables.state().iter().enumerate() {
                    let state = &mut self.device[*block as usize];
                    // The newest token may be a placeholder known only to the device.
                    let of =
                        |at: usize| contents.get(at).map_or(UNKNOWN, |content| row(**content, STATE, part));
                    let is_same = |at: usize| [of(at), UNKNOWN].contains(&state[at]);
                    if start > 0 && part < kept {
                        assert!(part == 0 || base == state.len(), "parts of two states");
                        base = state.len();
                        assert!(
                            base <= start && (0..base).all(is_same),
                            "{:?} reads a foreign state",
                            chunk.id
                        );
                    } else if start > base {
                        let known = state.len() >= start && (base..start).all(is_same);
                        assert!(known, "{:?} reads a foreign state at {start}", chunk.id);
                    }
                    state.clear();
                    let certain = end - chunk.drafts as usize;
                    let end = if part < kept { certain - certain % every } else { end };
                    state.extend((0..end).map(of));
                }
                for (group, table) in tables.groups().iter().enumerate() {
                    // What the first token of the chunk sees, and the chunk.
                    let window = shape.groups()[group].window;
                    let first = window.map_or(0, |window| (chunk.start + 1).saturating_sub(window));
                    for position in first..chunk.start + chunk.len {
                        // The newest token may be a placeholder known only to the device.
                        let Some(content) = contents.get(position as usize).copied() else { continue };
                        let blocks = table.span(position / shape.block_tokens());
                        assert!(!blocks.is_empty(), "{:?} lacks position {position}", chunk.id);
                        for (part, block) in blocks.iter().enumerate() {
                            let content = row(*content, group, part);
                            let at = (position % shape.block_tokens()) as usize;
                            let rows = &mut self.device[*block as usize];
                            // It may have been a part of a state.
                            rows.resize(shape.block_tokens() as usize, 0);
                            let cell = &mut rows[at];
                            if position >= chunk.start {
                                *cell = content;
                            } else {
                                assert_eq!(*cell, content, "{:?} reads foreign KV at {position}", chunk.id);
                            }
                        }
                    }
                }
            }
        }
    }

    fn commit(&mut self, stops: u64, device_fails: bool) {
        let Some(oldest) = self.in_flight.front() else { return };
        // Only the oldest has certainly run at its commit; later ones run as late as possible.
        let number = oldest.number;
        let later: Vec<_> = self.in_flight.drain(1..).collect();
        self.run();
        self.in_flight.extend(later);
        let Some(oldest) = self.in_flight.pop_front() else { return };
        let nothing = IterationOutcome { verdicts: &[], accepted: &[], took: Duration::ZERO };
        assert!(self.scheduler.commit(number + 7, nothing).is_err(), "an unknown iteration was committed");
        if device_fails {
            self.in_flight.clear();
            self.scheduler.fail(number).unwrap();
            self.settle();
            return;
        }
        for (chunk, _) in &oldest.chunks {
            if let Some(model) = self.live.get_mut(&chunk.id) {
                model.without_progress = false;
            }
        }
        let block_tokens = self.block_tokens();
        let (mut verdicts, mut accepted) = (Vec::new(), Vec::new());
        for (chunk, _) in oldest.chunks.iter().filter(|(chunk, _)| chunk.samples) {
            let stand = oldest.drafted.get(&chunk.id).map_or(0, |drafts| drafts.stand);
            let first = verdicts.len();
            for _ in 0..=stand {
                let stop = stops >> (verdicts.len() % 64) & 1 == 1;
                let model = self.live.get_mut(&chunk.id);
                let ended = model.is_none();
                let hash = model.and_then(|model| {
                    model.remaining -= 1;
                    Self::append(model, next_token(model), block_tokens)
                });
                verdicts.push(TokenVerdict { stop, hash });
                if stop || ended {
                    break;
                }
            }
            let taken = (verdicts.len() - first) as u32;
            accepted.extend((chunk.drafts > 0).then_some(taken));
            if let Some(model) = self.live.get_mut(&chunk.id).filter(|_| chunk.drafts > 0) {
                (model.planned, model.drafts) = (chunk.start + taken, 0);
                self.verified.0 += u64::from(chunk.drafts);
                self.verified.1 += u64::from(taken - 1);
            }
        }
        let took = Duration::from_micros(100 + 10 * oldest.chunks.len() as u64);
        self.reject_bad_counts(number, &verdicts, &accepted);
        if oldest.chunks.len() % 2 == 0 {
            self.scheduler.observe_predictions(took / 10);
        }
        let outcome = IterationOutcome { verdicts: &verdicts, accepted: &accepted, took };
        self.scheduler.commit(number, outcome).unwrap();
        self.check_roll_back(&oldest.drafted);
        self.settle();
        self.fill_placeholders();
    }

    /// Writes the KV computed by iterations in flight for placeholder tokens that are known now.
    fn fill_placeholders(&mut self) {
        let block_tokens = self.block_tokens() as u32;
        for running in self.in_flight.iter().filter(|running| running.ran) {
            for (chunk, tables) in &running.chunks {
                let Some(model) = self.live.get(&chunk.id) else { continue };
                let position = chunk.start + chunk.len - 1;
                let Some(content) = model.contents.get(position as usize) else { continue };
                for (group, table) in tables.groups().iter().enumerate() {
                    for (part, block) in table.span(position / block_tokens).iter().enumerate() {
                        let at = (position % block_tokens) as usize;
                        let rows = &mut self.device[*block as usize];
                        // It may have been a part of a state.
                        rows.resize(block_tokens as usize, 0);
                        rows[at] = row(*content, group, part);
                    }
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
            // A failed copy leaves garbage.
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
            // Its sequence starts over.
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

    /// Applies an operation; `at` is its position in the schedule.
    pub fn apply(&mut self, at: usize, op: &Op) {
        match op {
            Op::Submit(request) => self.submit(request),
            Op::Cancel { pick } => self.cancel(*pick),
            Op::Preempt { pick } => self.preempt(*pick),
            Op::Discard { pick } => self.discard(*pick),
            Op::Plan => {
                self.plan(at.is_multiple_of(3));
            }
            Op::Commit { stops, device_fails } => self.commit(*stops, *device_fails),
            Op::Fence { pick, succeeds } => self.fence(*pick, *succeeds),
        }
    }

    /// Runs until all sequences have ended, then checks counters and the replay of the log.
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
        assert_eq!((load.drafted_tokens, load.accepted_drafts), self.verified);
        let log = self.scheduler.take_log();
        let mut replayed = Vec::new();
        let plans = replay(&log, |event| {
            if let ReplayEvent::Planned { plan, .. } = event {
                replayed.push(plan.clone());
            }
        })
        .unwrap();
        assert_eq!(plans as usize, self.plans.len());
        assert!(replayed == self.plans, "a replay plans otherwise");
        // A truncated log, as of a killed process, replays up to the truncation; a corrupt one is rejected.
        if plans > 0 {
            let truncated = &log[..log.len() - 3];
            assert!(replay(truncated, |_| {}).is_ok_and(|fewer| fewer <= plans));
        }
        let mut corrupt = log;
        corrupt[3] ^= 1;
        assert!(replay(&corrupt, |_| {}).is_err());
    }
}
