//! The engine over a runtime that computes nothing but remembers what it was given: each token is a hash of the
//! whole context as read back through the block table, so any mistake in paging, chunking, preemption or
//! resumption changes the answer.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use inflight_contract::{AdmissionCost, CostCoefficients, FinishReason, SamplingSpec, Weight};
use inflight_worker::engine::{
    Command, Engine, Event, Failure, Finish, Request, RequestKey, Resumed, SessionId, Settings,
};
use inflight_worker::runtime::{Batch, Capabilities, Error, Runtime, Sampled, Slot, SlotSetup, TransferDone};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{CostModel, CostPrior, Direction, Grant, StepWork, Time, Transfer, replay};
use proptest::prelude::*;

const VOCAB: u32 = 50;
const EOS: u32 = 7;
const NOW: Time = Time::ZERO;

fn next_token(context: &[u32], seed: u64, choice: u32) -> u32 {
    let mut hash = seed ^ (u64::from(choice) << 32) ^ 0x9e37_79b9_7f4a_7c15;
    for token in context {
        hash = (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    }
    (hash >> 20) as u32 % VOCAB
}

/// What the request yields if it runs alone and undisturbed.
fn undisturbed(request: &Request, choice: u32) -> (Vec<u32>, FinishReason) {
    let mut tokens = request.prompt.to_vec();
    let mut output = Vec::new();
    while output.len() < request.max_tokens as usize {
        let token = next_token(&tokens, request.sampling.seed, choice);
        tokens.push(token);
        output.push(token);
        if token == EOS && !request.sampling.ignore_eos {
            return (output, FinishReason::Stop);
        }
    }
    (output, FinishReason::Length)
}

/// Seed and choice of what is attached to each slot.
type Attached = Vec<Option<(u64, u32)>>;

struct Remembering {
    capabilities: Capabilities,
    memory: Vec<Option<u32>>,
    host: Vec<Option<u32>>,
    /// Transfers under way: they move their blocks at the last moment.
    transfers: Vec<Transfer>,
    steps: usize,
    slots: Attached,
    attached: Arc<AtomicUsize>,
    in_flight: VecDeque<(Batch, Attached)>,
    /// What the last completed step yielded.
    last: Vec<Sampled>,
    fail_after: Option<usize>,
    /// Positions that were never computed read as 0: a calibration does not care.
    lenient: bool,
    /// No transfer ever finishes.
    copies_dead: bool,
}

impl Remembering {
    fn new(blocks: u32, host_blocks: u32, slots: u32, batch_tokens: u32, attached: Arc<AtomicUsize>) -> Self {
        let capabilities = Capabilities {
            vocab_size: VOCAB,
            context_tokens: 120,
            block_tokens: 4,
            blocks,
            host_blocks,
            slots,
            batch_tokens,
            depth: 1,
            fingerprint: "remembering".to_owned(),
        };
        Self {
            capabilities,
            memory: vec![None; (blocks * 4) as usize],
            host: vec![None; (host_blocks * 4) as usize],
            transfers: Vec::new(),
            steps: 0,
            slots: vec![None; slots as usize],
            attached,
            in_flight: VecDeque::new(),
            last: Vec::new(),
            fail_after: None,
            lenient: false,
            copies_dead: false,
        }
    }
}

impl Runtime for Remembering {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        let slot = &mut self.slots[slot as usize];
        assert!(slot.is_none(), "a slot was attached twice");
        *slot = Some((setup.sampling.seed, setup.choice));
        self.attached.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn detach(&mut self, slot: Slot) {
        if self.slots[slot as usize].take().is_some() {
            self.attached.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error> {
        self.transfers.push(transfer.clone());
        Ok(())
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        // Every third step something arrives, and every fifth of those copies fails.
        self.steps += 1;
        if !self.steps.is_multiple_of(3) || self.transfers.is_empty() || self.copies_dead {
            return;
        }
        let Transfer { id, direction, blocks } = self.transfers.remove(0);
        let succeeded = !self.steps.is_multiple_of(15);
        for (device, host) in blocks.iter().filter(|_| succeeded) {
            let (device, host) = (*device as usize * 4, *host as usize * 4);
            let (device, host) = (&mut self.memory[device..device + 4], &mut self.host[host..host + 4]);
            match direction {
                Direction::Out => host.copy_from_slice(device),
                Direction::In => device.copy_from_slice(host),
            }
        }
        finished.push(TransferDone { id, succeeded, took: Duration::from_micros(1) });
    }

    fn wait_for_transfer(&mut self) -> Result<(), Error> {
        if self.copies_dead { Err(Error::Device("no copies any more".to_owned())) } else { Ok(()) }
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error> {
        batch.check(&self.capabilities)?;
        assert!(
            self.in_flight.len() < self.capabilities.depth as usize,
            "launched more than may be in flight"
        );
        // Slots as they are now: what is attached or detached later is not seen by this step.
        self.in_flight.push_back((std::mem::take(batch), self.slots.clone()));
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        // As late as can be: whatever was planned and moved meanwhile must not have touched what this step uses.
        let (mut batch, slots) = self.in_flight.pop_front().expect("a step was launched");
        batch.feed(&self.last)?;
        if let Some(left) = &mut self.fail_after {
            if *left == 0 {
                return Err(Error::Device("out of order".to_owned()));
            }
            *left -= 1;
        }
        sampled.clear();
        let place = |sequence: usize, position: usize| {
            let table = &batch.blocks[batch.block_starts[sequence] as usize..];
            table[position / 4] as usize * 4 + position % 4
        };
        for copy in &batch.copies {
            let from = copy.from as usize * 4;
            self.memory.copy_within(from..from + 4, copy.to as usize * 4);
        }
        for sequence in 0..batch.sequences() {
            for row in batch.starts[sequence]..batch.starts[sequence + 1] {
                let row = row as usize;
                self.memory[place(sequence, batch.positions[row] as usize)] = Some(batch.tokens[row]);
            }
        }
        for sample in &batch.samples {
            let sequence = batch.starts.partition_point(|start| *start <= sample.row) - 1;
            let read = |position| {
                let token = self.memory[place(sequence, position)].or(self.lenient.then_some(0));
                token.expect("a position was never computed")
            };
            let context: Vec<u32> = (0..sample.position as usize).map(read).collect();
            let (seed, choice) = slots[sample.slot as usize].expect("an unattached slot was sampled");
            sampled.push(Sampled { token: next_token(&context, seed, choice), logprobs: None });
        }
        self.last.clone_from(sampled);
        // A device that is as linear as the cost model.
        Ok(Duration::from_micros(200 + 50 * batch.rows() as u64 + 3 * batch.sequences() as u64))
    }
}

#[derive(Debug, Clone)]
struct Ask {
    prompt: Vec<u32>,
    max_tokens: u32,
    n: u32,
    seed: u64,
    ignore_eos: bool,
    priority: i32,
    /// Submitted before this turn.
    at: usize,
    /// Cancelled before this turn.
    cancel_at: Option<usize>,
    /// Starts from this many tokens of an earlier attempt.
    resumed: usize,
    session: u64,
}

fn ask() -> impl Strategy<Value = Ask> {
    (
        // Few beginnings, so that prompts share prefixes.
        (0..2 * VOCAB, 1u32..40)
            .prop_map(|(text, len)| (0..len).map(|i| (i * i + text / 40) % VOCAB).collect()),
        (1u32..40, 1u32..=3, any::<u64>(), any::<bool>(), -1i32..=1),
        (0usize..60, prop::option::weighted(0.2, 0usize..80), 0usize..6, 0u64..3),
    )
        .prop_map(
            |(prompt, (max_tokens, n, seed, ignore_eos, priority), (at, cancel_at, resumed, session))| Ask {
                prompt,
                max_tokens,
                n,
                seed,
                ignore_eos,
                priority,
                at,
                cancel_at,
                resumed,
                session,
            },
        )
}

fn request(ask: &Ask, handle: u64) -> Request {
    let spec =
        SamplingSpec { n: ask.n, seed: ask.seed, ignore_eos: ask.ignore_eos, ..SamplingSpec::default() };
    let mut request = Request {
        key: RequestKey { session: SessionId(ask.session), request: handle },
        attempt: 1,
        prompt: ask.prompt.clone().into(),
        tenant: (if ask.priority == 0 { "a" } else { "b" }).into(),
        weight: Weight::default(),
        order: None,
        max_tokens: ask.max_tokens,
        sampling: Arc::new(spec.validate().unwrap()),
        choices: Vec::new(),
        priority: ask.priority,
        deadline: None,
        span: tracing::Span::none(),
    };
    request.choices = (0..ask.n)
        .map(|choice| {
            let (tokens, _) = undisturbed(&request, choice);
            // Less than all: a finished choice would be marked so.
            let resumed = ask.resumed.min(tokens.len() - 1);
            Resumed { tokens: tokens[..resumed].to_vec(), finished: false }
        })
        .collect();
    request
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_schedule_every_choice_gets_the_tokens_it_gets_alone(
        asks in prop::collection::vec(ask(), 1..16),
        (blocks, host_blocks) in (21u32..60, 0u32..40), slots in 1u32..6, extra in 0u32..30,
        close in prop::option::of((0u64..3, 5usize..60)), prefix_cache in any::<bool>(), fcfs in any::<bool>(),
        depth in 1u32..=2
    ) {
        let attached = Arc::new(AtomicUsize::new(0));
        let mut runtime = Remembering::new(blocks, host_blocks, slots, slots + extra, attached.clone());
        runtime.capabilities.depth = depth;
        let policy = if fcfs { PolicyKind::Fcfs } else { PolicyKind::Fair };
        let prior = CostPrior { trust: 1e-3, ..CostPrior::default().with_copies(0.0, 1e-9) };
        let settings = Settings { waiting_max: 64, queue_ahead: 4, policy, prefix_cache, prior, step_target: None, record: true };
        let mut engine = Engine::new(Box::new(runtime), &[EOS], settings).unwrap();
        let mut events = Vec::new();
        for session in 0..3 {
            engine.command(Command::Open(SessionId(session)), NOW, &mut events);
            // Only one that never has anything wants more, so the grants of these are what they have in flight.
            let session = SessionId(session);
            engine.command(Command::Backlog { session, waits: false }, NOW, &mut events);
        }
        engine.command(Command::Open(SessionId(3)), NOW, &mut events);
        let cost = AdmissionCost::new(4);
        let mut books: BTreeMap<RequestKey, (u32, BTreeMap<u32, u32>)> = BTreeMap::new();
        let requests: Vec<Request> =
            asks.iter().enumerate().map(|(handle, ask)| request(ask, handle as u64)).collect();
        let mut closed = None;
        let mut outputs: BTreeMap<(u64, u32), (Vec<u32>, Option<Finish>)> = BTreeMap::new();
        let mut turns = 0;
        loop {
            for (ask, request) in asks.iter().zip(&requests) {
                if ask.at == turns && closed != Some(ask.session) {
                    for (choice, resumed) in request.choices.iter().enumerate() {
                        outputs.insert((request.key.request, choice as u32), (resumed.tokens.clone(), None));
                    }
                    let own = request.choices.iter().map(|resumed| cost.choice(resumed.tokens.len()));
                    let own = own.enumerate().map(|(choice, blocks)| (choice as u32, blocks)).collect();
                    books.insert(request.key, (cost.prompt(request.prompt.len()), own));
                    engine.command(Command::Submit(Box::new(request.clone())), NOW, &mut events);
                }
                if ask.cancel_at == Some(turns) {
                    engine.command(Command::Cancel { key: request.key, choice: None }, NOW, &mut events);
                }
            }
            if let Some((session, _)) = close.filter(|(_, at)| *at == turns) {
                engine.command(Command::Close(SessionId(session)), NOW, &mut events);
                closed = Some(session);
                books.retain(|key, _| key.session.0 != session);
            }
            let turn = engine.turn(Time::from_nanos(turns as u64), &mut events).unwrap();
            for event in events.drain(..) {
                let output = outputs.get_mut(&(event.key.request, event.choice)).expect("an unknown choice");
                prop_assert!(output.1.is_none(), "an event after the end");
                output.0.extend(event.token);
                if event.finish.is_some() && let Some((_, own)) = books.get_mut(&event.key) {
                    own.remove(&event.choice);
                }
                output.1 = event.finish;
            }
            books.retain(|_, (_, own)| !own.is_empty());
            for (session, grant) in engine.grants().filter(|(session, _)| session.0 < 3) {
                let of_session = books.iter().filter(|(key, _)| key.session == session);
                let held = of_session.fold((0, 0), |(sequences, blocks), (_, (prompt, own))| {
                    (sequences + own.len() as u32, blocks + prompt + own.values().sum::<u32>())
                });
                prop_assert_eq!((grant.sequences, grant.blocks), held, "as its router reckons");
            }
            turns += 1;
            if turn.idle && turns > 60 {
                break;
            }
            prop_assert!(turns < 20_000, "no progress");
        }
        for (ask, request) in asks.iter().zip(&requests) {
            for choice in 0..ask.n {
                let Some((tokens, finish)) = outputs.remove(&(request.key.request, choice)) else {
                    prop_assert_eq!(closed, Some(ask.session));
                    continue;
                };
                let (expected, reason) = undisturbed(request, choice);
                match finish.expect("every choice ends") {
                    Finish::Ended(FinishReason::Cancelled) => {
                        prop_assert!(ask.cancel_at.is_some() || closed == Some(ask.session));
                        prop_assert!(expected.starts_with(&tokens));
                    }
                    finish => {
                        prop_assert_eq!(finish, Finish::Ended(reason));
                        prop_assert_eq!(tokens, expected);
                    }
                }
            }
        }
        let load = engine.load();
        prop_assert_eq!((load.running, load.waiting, load.blocks_used), (0, 0, 0));
        prop_assert_eq!(attached.load(Ordering::Relaxed), 0, "a slot stayed attached");
        let whole: u32 = engine.grants().map(|(_, grant)| grant.sequences).sum();
        // As many more may wait as hide the way to a router, which is learnt.
        prop_assert!((slots + 1..=slots + 4).contains(&whole), "{} granted", whole);
        prop_assert_eq!(engine.held(), Grant::default(), "credits did not all come back");
        prop_assert!(replay(&engine.take_log(), |_, _| ()).is_ok(), "a replay plans otherwise");
    }
}

fn simple(handle: u64) -> Ask {
    Ask {
        prompt: vec![1, 2, 3],
        max_tokens: 5,
        n: 1,
        seed: handle,
        ignore_eos: true,
        priority: 0,
        at: 0,
        cancel_at: None,
        resumed: 0,
        session: 0,
    }
}

fn engine(runtime: Remembering, waiting_max: u32) -> Engine {
    let settings = Settings { waiting_max, queue_ahead: 1, ..Settings::default() };
    let mut engine = Engine::new(Box::new(runtime), &[EOS], settings).unwrap();
    engine.command(Command::Open(SessionId(0)), NOW, &mut Vec::new());
    engine
}

fn failures(events: &[Event]) -> Vec<&Failure> {
    let failures = events.iter().filter_map(|event| match &event.finish {
        Some(Finish::Failed(failure)) => Some(failure),
        _ => None,
    });
    failures.collect()
}

#[test]
fn a_request_the_router_should_not_have_sent_is_refused_and_leaves_nothing_behind() {
    let mut engine = engine(Remembering::new(30, 0, 2, 8, Arc::default()), 2);
    let good = request(&simple(0), 0);
    let change = |f: fn(&mut Request)| {
        let mut bad = good.clone();
        f(&mut bad);
        bad
    };
    let bad = [
        change(|r| r.prompt = Vec::new().into()),
        change(|r| r.prompt = vec![VOCAB].into()),
        change(|r| r.max_tokens = 0),
        change(|r| r.max_tokens = 118),
        change(|r| r.priority = 101),
        change(|r| r.priority = i32::MIN),
        change(|r| r.choices[0].tokens = vec![1; 6]),
        change(|r| r.choices[0].tokens = vec![VOCAB]),
    ];
    for (which, bad) in bad.into_iter().enumerate() {
        let mut events = Vec::new();
        engine.command(Command::Submit(Box::new(bad)), NOW, &mut events);
        assert!(matches!(failures(&events)[..], [Failure::Invalid(_)]), "case {which}: {events:?}");
    }
    let mut events = Vec::new();
    engine.command(Command::Submit(Box::new(good.clone())), NOW, &mut events);
    engine.command(Command::Submit(Box::new(good)), NOW, &mut events);
    assert!(matches!(failures(&events)[..], [Failure::Invalid(_)]), "a handle in use was taken again");
    events.clear();
    let crowd = request(&Ask { n: 3, ..simple(1) }, 1);
    engine.command(Command::Submit(Box::new(crowd)), NOW, &mut events);
    let [Failure::Overloaded(_), Failure::Overloaded(_), Failure::Overloaded(_)] = failures(&events)[..]
    else {
        panic!("all choices or none: {events:?}");
    };
    assert_eq!(engine.load().waiting, 1);
    engine.drain();
    events.clear();
    engine.command(Command::Submit(Box::new(request(&simple(2), 2))), NOW, &mut events);
    assert_eq!(failures(&events), [&Failure::Draining]);
}

#[test]
fn a_failing_device_ends_what_ran_with_an_error_and_stops_the_engine() {
    let mut runtime = Remembering::new(30, 0, 2, 8, Arc::default());
    runtime.fail_after = Some(2);
    let mut engine = engine(runtime, 8);
    let mut events = Vec::new();
    engine.command(Command::Submit(Box::new(request(&simple(0), 0))), NOW, &mut events);
    assert!(engine.turn(Time::ZERO, &mut events).is_ok());
    assert!(engine.turn(Time::ZERO, &mut events).is_ok());
    events.clear();
    assert!(engine.turn(Time::ZERO, &mut events).is_err());
    assert!(matches!(failures(&events)[..], [Failure::Device(_)]));
    assert_eq!(engine.load().blocks_used, 0);
}

#[test]
fn an_engine_whose_copies_never_finish_stops_with_an_error_instead_of_turning_for_ever() {
    let attached = Arc::new(AtomicUsize::new(0));
    let mut runtime = Remembering::new(8, 8, 4, 32, attached);
    runtime.copies_dead = true;
    let prior = CostPrior { trust: 1e-3, ..CostPrior::default().with_copies(0.0, 1e-9) };
    let settings = Settings { prior, ..Settings::default() };
    let mut engine = Engine::new(Box::new(runtime), &[], settings).unwrap();
    let mut events = Vec::new();
    engine.command(Command::Open(SessionId(0)), NOW, &mut events);
    // Two that outgrow the pool together: one is swapped out, and never arrives on the host.
    for handle in 0..2 {
        let ask = Ask { max_tokens: 20, ..simple(handle) };
        engine.command(Command::Submit(Box::new(request(&ask, handle))), NOW, &mut events);
    }
    let stopped = (0..200).find_map(|_| engine.turn(NOW, &mut events).err());
    assert!(stopped.expect("it stops").to_string().contains("no copies any more"));
    assert_eq!(engine.load().swap_preemptions, 1);
}

/// The watchdog takes a turn that lasts many times the largest predicted step for a hang.
#[test]
fn no_step_is_predicted_to_take_longer_than_the_largest() {
    let runtime = Remembering::new(64, 16, 8, 128, Arc::default());
    let cost = CostCoefficients {
        step_s: 1e-3,
        token_s: 1e-4,
        prefill_key_s: 1e-6,
        decode_key_s: 1e-5,
        sequence_s: 0.5,
        copy_s: 0.0,
        copy_block_s: 0.0,
    };
    let settings = Settings { prior: CostPrior { cost, trust: 1e-9 }, ..Settings::default() };
    let engine = Engine::new(Box::new(runtime), &[EOS], settings).unwrap();
    let (batch_tokens, slots, context) = (128, 8, 120);
    // Decodes at the end of their sequences in every slot; and in all slots but one, beside a long prompt.
    let decoding = |slots: u32| {
        let mut work = StepWork::default();
        (0..slots).for_each(|_| work.add(context - 1, 1));
        work
    };
    let (decodes, mut mixed) = (decoding(slots), decoding(slots - 1));
    mixed.add(0, (batch_tokens - slots).min(context));
    let model = CostModel::new(settings.prior);
    for work in [decodes, mixed] {
        assert!(engine.predict_largest_step() >= model.step(&work), "{work:?}");
    }
}

#[test]
fn after_calibration_the_engine_knows_how_long_a_step_takes() {
    let attached = Arc::new(AtomicUsize::new(0));
    let mut runtime = Remembering::new(64, 16, 8, 128, attached.clone());
    runtime.lenient = true;
    let mut engine = Engine::new(Box::new(runtime), &[EOS], Settings::default()).unwrap();
    engine.calibrate().unwrap();
    for tokens in [1, 30, 100] {
        let predicted = engine.predict_first_token(tokens).as_secs_f64();
        let takes = (203 + 50 * tokens) as f64 * 1e-6;
        assert!((predicted / takes - 1.0).abs() < 0.1, "{tokens} tokens: {predicted} s for {takes} s");
    }
    assert_eq!(attached.load(Ordering::Relaxed), 0);
    assert!(engine.turn(NOW, &mut Vec::new()).unwrap().idle, "it left something behind");
}
