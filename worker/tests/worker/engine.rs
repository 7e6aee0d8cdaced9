//! Engine tests on a recording runtime: each token is a hash of the whole context as read back through the
//! block table, so any mistake in paging, chunking, preemption or resumption changes the output.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use inflight_contract::{AdmissionCost, CostCoefficients, FinishReason, MemoryShape, SamplingSpec, Weight};
use inflight_runtime::{
    Batch, Capabilities, Error, NonFiniteRows, PromptLogprobs, Runtime, RuntimeFacts, Sampled, Slot,
    SlotSetup, TokenLogprob, TokenMasks, TransferDone,
};
use inflight_worker::engine::{
    ChoiceEvent, Command, Engine, EngineOptions, Failure, Finish, Request, RequestKey, ResumedChoice,
    SessionId,
};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, Direction, Drafts, Grant, SchedulingOptions, StepTargetOption, StepWork, Time,
    Transfer, replay,
};
use proptest::prelude::*;

const VOCAB: u32 = 50;
const EOS: u32 = 7;
const NOW: Time = Time::ZERO;

/// Next token: a hash of the whole context or, with every fourth seed, of the newest token, so that the output
/// repeats and drafts stand.
fn next_token(context: &[u32], seed: u64, choice: u32) -> u32 {
    let first = if seed.is_multiple_of(4) { context.len().saturating_sub(1) } else { 0 };
    let context = &context[first..];
    let mut hash = seed ^ (u64::from(choice) << 32) ^ 0x9e37_79b9_7f4a_7c15;
    for token in context {
        hash = (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    }
    (hash >> 20) as u32 % VOCAB
}

/// Score of a token: its rank is a hash of the whole context.
fn score_of(context: &[u32], token: u32) -> PromptLogprobs {
    let rank = next_token(context, u64::from(token), 0) + 1;
    PromptLogprobs { token: TokenLogprob { token, logprob: -(rank as f32) }, rank, top: Vec::new() }
}

/// Whether the logits behind a context are not finite, where a runtime overflows.
fn overflows(context: &[u32]) -> bool {
    next_token(context, 0xbad, 99) == 0
}

/// End of a choice that resumes from `resumed` tokens, scores the prompt tokens from `scored` on, and runs where contexts overflow.
fn expected_end(request: &Request, choice: u32, resumed: usize, scored: Option<usize>) -> (Vec<u32>, Finish) {
    let (output, reason) = expected_output(request, choice);
    let prompt = &request.prompt;
    if scored.is_some_and(|first| (first..prompt.len()).any(|at| overflows(&prompt[..at]))) {
        return (output[..resumed].to_vec(), Finish::Failed(Failure::NonFinite("in the prompt")));
    }
    let broken = (resumed..output.len()).find(|at| overflows(&[prompt, &output[..*at]].concat()));
    match broken {
        Some(at) => {
            (output[..at].to_vec(), Finish::Failed(Failure::NonFinite("in place of an output token")))
        }
        None => (output, Finish::Ended(reason)),
    }
}

/// Expected output of a choice and its finish reason.
fn expected_output(request: &Request, choice: u32) -> (Vec<u32>, FinishReason) {
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

/// Seed and choice of each attached slot.
type AttachedSlots = Vec<Option<(u64, u32)>>;

struct RecordingRuntime {
    capabilities: Capabilities,
    memory: Vec<Option<u32>>,
    host: Vec<Option<u32>>,
    /// Transfers in flight; blocks are copied when they finish.
    transfers: Vec<Transfer>,
    steps: usize,
    slots: AttachedSlots,
    attached: Arc<AtomicUsize>,
    in_flight: VecDeque<(Batch, AttachedSlots)>,
    /// Samples of the last completed step.
    last: Vec<Sampled>,
    /// Scores of the last completed step.
    scores: Vec<PromptLogprobs>,
    /// Rows of the last completed step that overflow.
    non_finite: NonFiniteRows,
    /// Whether contexts can overflow.
    overflowing: bool,
    fail_after: Option<usize>,
    /// Reads positions that were never computed as 0, for calibration.
    lenient: bool,
    /// Transfers never finish.
    copies_dead: bool,
}

impl RecordingRuntime {
    fn new(blocks: u32, host_blocks: u32, slots: u32, batch_tokens: u32, attached: Arc<AtomicUsize>) -> Self {
        let capabilities = Capabilities {
            vocab_size: VOCAB,
            context_tokens: 120,
            shape: MemoryShape::uniform(4),
            block_bytes: 0,
            blocks,
            host_blocks,
            slots,
            batch_tokens,
            sample_rows: slots + 16,
            snapshot: None,
            sequence_drafts: u32::MAX,
            predicted_drafts: 0,
            depth: 1,
            fingerprint: "remembering".to_owned(),
            facts: RuntimeFacts::default(),
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
            scores: Vec::new(),
            non_finite: NonFiniteRows::default(),
            overflowing: false,
            fail_after: None,
            lenient: false,
            copies_dead: false,
        }
    }
}

impl Runtime for RecordingRuntime {
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
        // A transfer finishes every third call, and every fifth of those fails.
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

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn take_non_finite(&mut self, rows: &mut NonFiniteRows) {
        *rows = std::mem::take(&mut self.non_finite);
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error> {
        batch.check(&self.capabilities)?;
        assert!(
            self.in_flight.len() < self.capabilities.depth as usize,
            "launched more than may be in flight"
        );
        // A snapshot of the slots: later calls of attach and detach do not affect this step.
        self.in_flight.push_back((std::mem::take(batch), self.slots.clone()));
        Ok(())
    }

    fn supply_masks(&mut self, _: &mut TokenMasks) -> Result<(), Error> {
        Err(Error::no_step_lacks_masks())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        // Computed as late as possible: plans and transfers made meanwhile must not touch the step's blocks.
        let (mut batch, slots) = self.in_flight.pop_front().expect("a step was launched");
        batch.feed(&self.last)?;
        if let Some(left) = &mut self.fail_after {
            if *left == 0 {
                return Err(Error::Device("out of order".to_owned()));
            }
            *left -= 1;
        }
        sampled.clear();
        let address = |sequence: usize, position: usize| {
            let table = batch.tables[0].of(sequence);
            table[position / 4] as usize * 4 + position % 4
        };
        for copy in &batch.copies {
            let from = copy.from as usize * 4;
            self.memory.copy_within(from..from + 4, copy.to as usize * 4);
        }
        for sequence in 0..batch.sequences() {
            for row in batch.starts[sequence]..batch.starts[sequence + 1] {
                let row = row as usize;
                self.memory[address(sequence, batch.positions[row] as usize)] = Some(batch.tokens[row]);
            }
        }
        self.non_finite.clear();
        for (nth, sample) in (0..).zip(&batch.samples) {
            let sequence = batch.starts.partition_point(|start| *start <= sample.row) - 1;
            let read = |position| {
                let token = self.memory[address(sequence, position)].or(self.lenient.then_some(0));
                token.expect("a position was never computed")
            };
            let context: Vec<u32> = (0..sample.position as usize).map(read).collect();
            let (seed, choice) = slots[sample.slot as usize].expect("an unattached slot was sampled");
            sampled.push(Sampled { token: next_token(&context, seed, choice), logprobs: None });
            self.non_finite.samples.extend((self.overflowing && overflows(&context)).then_some(nth));
        }
        self.last.clone_from(sampled);
        self.scores = batch
            .scores
            .iter()
            .zip(0..)
            .map(|(score, nth)| {
                let sequence = batch.starts.partition_point(|start| *start <= score.row) - 1;
                let read = |position| {
                    self.memory[address(sequence, position)].expect("a position was never computed")
                };
                let context: Vec<u32> =
                    (0..=batch.positions[score.row as usize] as usize).map(read).collect();
                self.non_finite.scores.extend((self.overflowing && overflows(&context)).then_some(nth));
                score_of(&context, score.token)
            })
            .collect();
        // Linear, like the cost model.
        Ok(Duration::from_micros(200 + 50 * batch.rows() as u64 + 3 * batch.sequences() as u64))
    }
}

/// Random request, with the steps at which it is submitted and cancelled.
#[derive(Debug, Clone)]
struct RequestSpec {
    prompt: Vec<u32>,
    max_tokens: u32,
    n: u32,
    seed: u64,
    ignore_eos: bool,
    priority: i32,
    /// Step before which it is submitted.
    at: usize,
    /// Step before which it is cancelled.
    cancel_at: Option<usize>,
    /// Tokens of an earlier attempt that it resumes from.
    resumed: usize,
    session: u64,
    /// Prompt tokens whose log probabilities an earlier attempt has delivered, if they are wanted.
    scored: Option<u32>,
}

fn spec() -> impl Strategy<Value = RequestSpec> {
    (
        // Few distinct prefixes, so that prompts share them.
        (0..2 * VOCAB, 1u32..40)
            .prop_map(|(text, len)| (0..len).map(|i| (i * i + text / 40) % VOCAB).collect()),
        (1u32..40, 1u32..=3, any::<u64>(), any::<bool>(), -1i32..=1),
        (0usize..60, prop::option::weighted(0.2, 0usize..80), 0usize..6, 0u64..3),
        prop::option::weighted(0.3, prop_oneof![Just(0u32), 0u32..50]),
    )
        .prop_map(
            |(
                prompt,
                (max_tokens, n, seed, ignore_eos, priority),
                (at, cancel_at, resumed, session),
                scored,
            )| {
                RequestSpec {
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
                    scored,
                }
            },
        )
}

fn request(spec: &RequestSpec, id: u64) -> Request {
    let sampling = SamplingSpec {
        n: spec.n,
        seed: spec.seed,
        ignore_eos: spec.ignore_eos,
        prompt_logprobs: spec.scored.map(|_| 0),
        ..SamplingSpec::default()
    };
    let mut request = Request {
        key: RequestKey { session: SessionId(spec.session), request: id },
        attempt: 1,
        prompt: spec.prompt.clone().into(),
        tenant: (if spec.priority == 0 { "a" } else { "b" }).into(),
        weight: Weight::default(),
        virtual_start_time: None,
        max_tokens: spec.max_tokens,
        sampling: Arc::new(sampling.validate().unwrap()),
        choices: Vec::new(),
        prompt_logprobs_received: spec.scored.unwrap_or(0),
        priority: spec.priority,
        deadline: None,
        queued: None,
        grammar: None,
        span: tracing::Span::none(),
    };
    request.choices = (0..spec.n)
        .map(|choice| {
            let (tokens, _) = expected_output(&request, choice);
            // Fewer than all, as a finished choice would be marked `finished`.
            let resumed = spec.resumed.min(tokens.len() - 1);
            ResumedChoice { tokens: tokens[..resumed].to_vec(), finished: false }
        })
        .collect();
    request
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_choice_gets_the_same_tokens_under_any_schedule(
        specs in prop::collection::vec(spec(), 1..16),
        (blocks, host_blocks) in (21u32..60, 0u32..40), slots in 1u32..6, extra in 0u32..30,
        close in prop::option::of((0u64..3, 5usize..60)), prefix_cache in any::<bool>(), fcfs in any::<bool>(),
        depth in 1u32..=2, drafts_max in 0u32..7, overflowing in prop::bool::weighted(0.4)
    ) {
        let attached = Arc::new(AtomicUsize::new(0));
        let mut runtime = RecordingRuntime::new(blocks, host_blocks, slots, slots + extra, attached.clone());
        runtime.capabilities.depth = depth;
        runtime.overflowing = overflowing;
        let policy = if fcfs { PolicyKind::Fcfs } else { PolicyKind::Fair };
        let prior = CostPrior { trust: 1e-3, ..CostPrior::default().with_copies(0.0, 1e-9) };
        let engine_options = EngineOptions {
            scheduling: SchedulingOptions {
                policy: policy.into(), no_prefix_cache: !prefix_cache, step_target: StepTargetOption::Off,
                drafts: Drafts::PromptLookup, drafts_max, max_waiting: 64, ..SchedulingOptions::default()
            },
            queue_ahead: 4, prior, record: true, govern_drafts: false,
        };
        let mut engine = Engine::new(Box::new(runtime), &[EOS], engine_options).unwrap();
        let mut events = Vec::new();
        for session in 0..3 {
            engine.command(Command::Open(SessionId(session)), NOW, &mut events);
            // Only session 3 has a backlog, so the grants of the others equal what they have in flight.
            let session = SessionId(session);
            engine.command(Command::Backlog { session, has_waiting: false }, NOW, &mut events);
        }
        engine.command(Command::Open(SessionId(3)), NOW, &mut events);
        let cost = AdmissionCost::new(MemoryShape::uniform(4));
        // Expected use of grants by request: blocks of the prompt, and blocks of each unfinished choice.
        let mut ledger: BTreeMap<RequestKey, (u32, BTreeMap<u32, u32>)> = BTreeMap::new();
        let requests: Vec<Request> =
            specs.iter().enumerate().map(|(id, spec)| request(spec, id as u64)).collect();
        let mut closed = None;
        let mut outputs: BTreeMap<(u64, u32), (Vec<u32>, Option<Finish>)> = BTreeMap::new();
        let mut scores: BTreeMap<u64, Vec<PromptLogprobs>> = BTreeMap::new();
        let mut steps_run = 0;
        loop {
            for (spec, request) in specs.iter().zip(&requests) {
                if spec.at == steps_run && closed != Some(spec.session) {
                    for (choice, resumed) in request.choices.iter().enumerate() {
                        outputs.insert((request.key.request, choice as u32), (resumed.tokens.clone(), None));
                    }
                    let own = request.choices.iter().map(|resumed| cost.choice(request.prompt.len(), resumed.tokens.len()));
                    let own = own.enumerate().map(|(choice, blocks)| (choice as u32, blocks)).collect();
                    ledger.insert(request.key, (cost.prompt(request.prompt.len()), own));
                    engine.command(Command::Submit(Box::new(request.clone())), NOW, &mut events);
                }
                if spec.cancel_at == Some(steps_run) {
                    engine.command(Command::Cancel { key: request.key, choice: None }, NOW, &mut events);
                }
            }
            if let Some((session, _)) = close.filter(|(_, at)| *at == steps_run) {
                engine.command(Command::Close(SessionId(session)), NOW, &mut events);
                closed = Some(session);
                ledger.retain(|key, _| key.session.0 != session);
            }
            let step = engine.step(Time::from_nanos(steps_run as u64), &mut events).unwrap();
            for event in events.drain(..) {
                let output = outputs.get_mut(&(event.key.request, event.choice)).expect("an unknown choice");
                prop_assert!(output.1.is_none(), "an event after the end");
                prop_assert!(event.prompt_logprobs.is_empty() || event.choice == 0);
                scores.entry(event.key.request).or_default().extend(event.prompt_logprobs);
                output.0.extend(event.token);
                if event.finish.is_some() && let Some((_, own)) = ledger.get_mut(&event.key) {
                    own.remove(&event.choice);
                }
                output.1 = event.finish;
            }
            ledger.retain(|_, (_, own)| !own.is_empty());
            for (session, grant) in engine.grants().filter(|(session, _)| session.0 < 3) {
                let of_session = ledger.iter().filter(|(key, _)| key.session == session);
                let in_use = of_session.fold((0, 0), |(sequences, blocks), (_, (prompt, own))| {
                    (sequences + own.len() as u32, blocks + prompt + own.values().sum::<u32>())
                });
                prop_assert_eq!((grant.sequences, grant.blocks), in_use, "as its router computes");
            }
            steps_run += 1;
            if step.idle && steps_run > 60 {
                break;
            }
            prop_assert!(steps_run < 20_000, "no progress");
        }
        for (spec, request) in specs.iter().zip(&requests) {
            for choice in 0..spec.n {
                let Some((tokens, finish)) = outputs.remove(&(request.key.request, choice)) else {
                    prop_assert_eq!(closed, Some(spec.session));
                    continue;
                };
                let got = scores.get(&request.key.request).cloned().unwrap_or_default();
                let first = spec.scored.map_or(usize::MAX, |received| received as usize + 1);
                let expected: Vec<_> =
                    (first..spec.prompt.len()).map(|at| score_of(&spec.prompt[..at], spec.prompt[at])).collect();
                // Choice 0 delivers the prompt's scores. If it was cancelled they are incomplete, whatever the other choices'
                // finish reasons.
                let resumed = request.choices[choice as usize].tokens.len();
                let from = (choice == 0 && first < usize::MAX).then_some(first);
                let (expected_tokens, expected_finish) = match overflowing {
                    true => expected_end(request, choice, resumed, from),
                    false => {
                        let (output, reason) = expected_output(request, choice);
                        (output, Finish::Ended(reason))
                    }
                };
                match &finish {
                    Some(Finish::Failed(_)) => prop_assert!(expected.starts_with(&got)),
                    _ if choice > 0 => prop_assert!(expected.starts_with(&got)),
                    Some(Finish::Ended(FinishReason::Cancelled)) => prop_assert!(expected.starts_with(&got)),
                    _ => prop_assert_eq!(got, expected),
                }
                match finish.expect("every choice ends") {
                    Finish::Ended(FinishReason::Cancelled) => {
                        prop_assert!(spec.cancel_at.is_some() || closed == Some(spec.session));
                        prop_assert!(expected_tokens.starts_with(&tokens));
                    }
                    finish => {
                        prop_assert_eq!(finish, expected_finish);
                        prop_assert_eq!(tokens, expected_tokens);
                    }
                }
            }
        }
        let load = engine.load();
        prop_assert_eq!((load.running, load.waiting, load.blocks_used), (0, 0, 0));
        prop_assert_eq!(attached.load(Ordering::Relaxed), 0, "a slot stayed attached");
        let granted: u32 = engine.grants().map(|(_, grant)| grant.sequences).sum();
        // Beyond the slots, the learned queue-ahead depth.
        prop_assert!((slots + 1..=slots + 4).contains(&granted), "{} granted", granted);
        prop_assert_eq!(engine.granted_in_use(), Grant::default(), "not all credits were returned");
        prop_assert!(replay(&engine.take_log(), |_| ()).is_ok(), "a replay plans differently");
    }
}

fn simple(id: u64) -> RequestSpec {
    RequestSpec {
        prompt: vec![1, 2, 3],
        max_tokens: 5,
        n: 1,
        seed: id,
        ignore_eos: true,
        priority: 0,
        at: 0,
        cancel_at: None,
        resumed: 0,
        session: 0,
        scored: None,
    }
}

fn engine(runtime: RecordingRuntime, max_waiting: u32) -> Engine {
    let mut engine_options = EngineOptions { queue_ahead: 1, ..EngineOptions::default() };
    engine_options.scheduling.max_waiting = max_waiting;
    let mut engine = Engine::new(Box::new(runtime), &[EOS], engine_options).unwrap();
    engine.command(Command::Open(SessionId(0)), NOW, &mut Vec::new());
    engine
}

fn failures(events: &[ChoiceEvent]) -> Vec<&Failure> {
    let failures = events.iter().filter_map(|event| match &event.finish {
        Some(Finish::Failed(failure)) => Some(failure),
        _ => None,
    });
    failures.collect()
}

#[test]
fn an_invalid_request_is_rejected_and_leaves_nothing_behind() {
    let mut engine = engine(RecordingRuntime::new(30, 0, 2, 8, Arc::default()), 2);
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
    assert!(matches!(failures(&events)[..], [Failure::Invalid(_)]), "a submission id in use was accepted");
    events.clear();
    let three_choices = request(&RequestSpec { n: 3, ..simple(1) }, 1);
    engine.command(Command::Submit(Box::new(three_choices)), NOW, &mut events);
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
fn a_failing_device_ends_running_choices_and_stops_the_engine() {
    let mut runtime = RecordingRuntime::new(30, 0, 2, 8, Arc::default());
    runtime.fail_after = Some(2);
    let mut engine = engine(runtime, 8);
    let mut events = Vec::new();
    engine.command(Command::Submit(Box::new(request(&simple(0), 0))), NOW, &mut events);
    assert!(engine.step(Time::ZERO, &mut events).is_ok());
    assert!(engine.step(Time::ZERO, &mut events).is_ok());
    events.clear();
    assert!(engine.step(Time::ZERO, &mut events).is_err());
    assert!(matches!(failures(&events)[..], [Failure::Device(_)]));
    assert_eq!(engine.load().blocks_used, 0);
}

#[test]
fn an_engine_whose_copies_never_finish_stops_with_an_error() {
    let attached = Arc::new(AtomicUsize::new(0));
    let mut runtime = RecordingRuntime::new(8, 8, 4, 32, attached);
    runtime.copies_dead = true;
    let prior = CostPrior { trust: 1e-3, ..CostPrior::default().with_copies(0.0, 1e-9) };
    let engine_options = EngineOptions { prior, ..EngineOptions::default() };
    let mut engine = Engine::new(Box::new(runtime), &[], engine_options).unwrap();
    let mut events = Vec::new();
    engine.command(Command::Open(SessionId(0)), NOW, &mut events);
    // Two sequences that together outgrow the pool: one is swapped out, and its transfer never finishes.
    for id in 0..2 {
        let spec = RequestSpec { max_tokens: 20, ..simple(id) };
        engine.command(Command::Submit(Box::new(request(&spec, id))), NOW, &mut events);
    }
    let stopped = (0..200).find_map(|_| engine.step(NOW, &mut events).err());
    assert!(stopped.expect("it stops").to_string().contains("no copies any more"));
    assert_eq!(engine.load().swap_preemptions, 1);
}

/// The watchdog's time limit is a multiple of the largest predicted step.
#[test]
fn no_step_is_predicted_to_take_longer_than_the_largest() {
    let runtime = RecordingRuntime::new(64, 16, 8, 128, Arc::default());
    let cost = CostCoefficients {
        step_s: 1e-3,
        token_s: 1e-4,
        prefill_key_s: 1e-6,
        decode_key_s: 1e-5,
        sequence_s: 0.5,
        copy_s: 0.0,
        copy_block_s: 0.0,
    };
    let engine_options = EngineOptions { prior: CostPrior { cost, trust: 1e-9 }, ..EngineOptions::default() };
    let engine = Engine::new(Box::new(runtime), &[EOS], engine_options).unwrap();
    let (batch_tokens, slots, context) = (128, 8, 120);
    // Decodes at the end of the context in every slot; and in all slots but one, beside a long prompt.
    let decoding = |slots: u32| {
        let mut work = StepWork::default();
        (0..slots).for_each(|_| work.add(context - 1, 1));
        work
    };
    let (decodes, mut mixed) = (decoding(slots), decoding(slots - 1));
    mixed.add(0, (batch_tokens - slots).min(context));
    let model = CostModel::new(engine_options.prior);
    for work in [decodes, mixed] {
        assert!(engine.predict_largest_step() >= model.step(&work), "{work:?}");
    }
}

#[test]
fn a_calibrated_engine_predicts_step_times() {
    let attached = Arc::new(AtomicUsize::new(0));
    let mut runtime = RecordingRuntime::new(64, 16, 8, 128, attached.clone());
    runtime.lenient = true;
    let mut engine = Engine::new(Box::new(runtime), &[EOS], EngineOptions::default()).unwrap();
    engine.calibrate().unwrap();
    for tokens in [1, 30, 100] {
        let predicted = engine.predict_first_token(tokens).as_secs_f64();
        let takes = (203 + 50 * tokens) as f64 * 1e-6;
        assert!((predicted / takes - 1.0).abs() < 0.1, "{tokens} tokens: {predicted} s for {takes} s");
    }
    assert_eq!(attached.load(Ordering::Relaxed), 0);
    assert!(engine.step(NOW, &mut Vec::new()).unwrap().idle, "it left something behind");
}
