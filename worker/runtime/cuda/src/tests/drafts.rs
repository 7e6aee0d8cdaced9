//! Drafts: several sample rows of a slot in a step, on the kernels' CPU harness.

use super::ranks::on_ranks;
use super::recording_device::RecordingDevice;
use super::*;

/// Sequence under test.
struct Request {
    prompt: Vec<u32>,
    sampling: SamplingParams,
    /// Whether each of its sample rows has a token mask.
    masked: bool,
}

/// Output tokens of each sequence.
const OUTPUT: usize = 24;

/// Result of a request at one step: its logits after penalties, biases and masks, and the token.
#[derive(Debug, Clone, PartialEq)]
struct StepBits {
    logits: Vec<u32>,
    sampled: Sampled,
}

/// Sequences whose next token depends on those before in all ways that there are.
fn requests(vocabulary: u32, seed: u32) -> Vec<Request> {
    let drawn = SamplingSpec { temperature: 0.9, logprobs: Some(3), ..SamplingSpec::default() };
    let pairs = (40..46).flat_map(|a| (40..46).map(move |b| vec![a, b])).filter(|pair| pair[0] == pair[1]);
    let triples = (40..46).map(|token| vec![token, 85 - token, token]);
    let specs = [
        SamplingSpec {
            frequency_penalty: 1.5,
            presence_penalty: 0.5,
            repetition_penalty: 1.3,
            ..drawn.clone()
        },
        SamplingSpec {
            allowed_token_ids: (40..46).collect(),
            bad_word_token_ids: pairs.chain(triples).collect(),
            ..drawn.clone()
        },
        SamplingSpec {
            temperature: 0.0,
            min_tokens: OUTPUT as u32 - 9,
            stop_token_ids: vec![2, 4],
            logit_bias: vec![(4, 30.0), (9, -50.0)],
            ..drawn.clone()
        },
        SamplingSpec { top_p: 0.9, top_k: 50, frequency_penalty: 2.0, ..drawn },
    ];
    let word = |i: usize, j: u32| philox4x32([i as u32, j, 0, 0], [seed, 31])[0] % vocabulary;
    let requests = specs.into_iter().enumerate().map(|(i, spec)| Request {
        prompt: (0..[33, 5, 18, 1][i]).map(|j| word(i, j)).collect(),
        sampling: SamplingSpec { seed: u64::from(seed) + i as u64, ..spec }.validate().unwrap(),
        masked: i == 3,
    });
    requests.collect()
}

/// Appends the mask of the tokens that may follow `token`.
fn push_mask(masks: &mut TokenMasks, token: u32, vocabulary: u32) {
    let row = masks.push_row();
    for id in (0..vocabulary).filter(|id| (id * 7 + token).is_multiple_of(3)) {
        row[id as usize / 32] &= !(1 << (id % 32));
    }
}

/// Runs a step and returns the result of each sample row.
fn results<G: Gpu<Memory = HostMemory>>(
    gpu: &mut HarnessRunner<G>,
    batch: &Batch,
    masks: &TokenMasks,
) -> Vec<StepBits> {
    let vocabulary = gpu.runner.capabilities.vocab_size as usize;
    let (sampled, logits) = gpu.masked_step(batch, masks).unwrap();
    let rows = sampled.into_iter().zip(logits.chunks(vocabulary));
    rows.map(|(sampled, row)| StepBits { logits: row.iter().map(|x| x.to_bits()).collect(), sampled })
        .collect()
}

fn attach<G: Gpu<Memory = HostMemory>>(
    gpu: &mut HarnessRunner<G>,
    slot: u32,
    request: &Request,
    generated: &[u32],
) {
    let setup = SlotSetup {
        sampling: Arc::new(request.sampling.clone()),
        choice: 1,
        prompt: &request.prompt,
        generated,
        eos_token_ids: &[1],
    };
    gpu.runner.attach(&gpu.harness, slot, &setup).unwrap();
}

/// Appends tokens and drafts of a request, which has blocks of its own.
fn push(
    batch: &mut Batch,
    (tokens, drafts): (&[u32], &[u32]),
    position: usize,
    shape: &MemoryShape,
    request: usize,
) {
    let each = 80u32.div_ceil(shape.block_tokens()) * shape.span_blocks();
    let blocks = |count: std::ops::Range<u32>| -> Vec<u32> {
        count.rev().map(|i| i * SLOTS + request as u32).collect()
    };
    let (table, state) = (blocks(0..each), blocks(each..each + shape.state_blocks()));
    batch.push_tables(tokens, drafts, position as u32, [(0, table.as_slice())], &state);
}

/// Runs a request alone: the prompt, then token by token.
fn alone<G: Gpu<Memory = HostMemory>>(gpu: &mut HarnessRunner<G>, request: &Request) -> Vec<StepBits> {
    let Capabilities { vocab_size, shape, .. } = gpu.runner.capabilities;
    attach(gpu, 0, request, &[]);
    let (mut tokens, mut fed, mut steps) = (request.prompt.clone(), 0, Vec::new());
    let (mut batch, mut masks) = (Batch::default(), TokenMasks::none(vocab_size));
    while steps.len() < OUTPUT {
        batch.clear();
        masks.clear(vocab_size);
        push(&mut batch, (&tokens[fed..], &[]), fed, &shape, 0);
        batch.sample_last_row(0);
        if request.masked {
            batch.mask_last_samples(1);
            push_mask(&mut masks, tokens[tokens.len() - 1], vocab_size);
        }
        fed = tokens.len();
        steps.extend(results(gpu, &batch, &masks));
        tokens.push(steps[steps.len() - 1].sampled.token);
    }
    steps
}

/// Running request.
struct Running {
    request: usize,
    tokens: Vec<u32>,
    /// Tokens with KV computed.
    fed: usize,
    steps: Vec<StepBits>,
    /// Sample of the last step that is the newest token, which was drawn without drafts.
    sampled_at: Option<u32>,
}

impl Running {
    /// Attaches a request to the slot of its index.
    fn start<G: Gpu<Memory = HostMemory>>(
        gpu: &mut HarnessRunner<G>,
        requests: &[Request],
        request: usize,
    ) -> Self {
        attach(gpu, request as u32, &requests[request], &[]);
        let tokens = requests[request].prompt.clone();
        Self { request, tokens, fed: 0, steps: Vec::new(), sampled_at: None }
    }
}

/// Steps of [`together`], so that a test can't pass without them.
#[derive(Debug, Default, PartialEq)]
struct Coverage {
    accepted: usize,
    rejected: usize,
    fed_back: usize,
    recomputed: usize,
}

/// Adds the results of a step to the requests that ran, each with its drafts, up to the first draft that does not stand. Returns
/// the number of results used.
fn accept(
    live: &mut [Running],
    ran: &[(usize, Vec<u32>)],
    results: &[StepBits],
    coverage: &mut Coverage,
) -> usize {
    let mut sample = 0;
    for (index, drafts) in ran {
        let one = &mut live[*index];
        for nth in 0..=drafts.len() {
            let result = &results[sample + nth];
            one.tokens.push(result.sampled.token);
            one.steps.push(result.clone());
            if drafts.get(nth) != Some(&result.sampled.token) {
                coverage.rejected += drafts.len() - nth;
                break;
            }
            one.fed += 1;
            coverage.accepted += 1;
        }
        one.sampled_at = drafts.is_empty().then_some(sample as u32);
        sample += 1 + drafts.len();
    }
    sample
}

/// Runs all requests, whose outputs are `expected`, under a random schedule with drafts, of which some stand;
/// tokens of slots without drafts may reach the next step on the device.
fn together<G: Gpu<Memory = HostMemory>>(
    gpu: &mut HarnessRunner<G>,
    requests: &[Request],
    expected: &[Vec<StepBits>],
    seed: u32,
) -> (Vec<Vec<StepBits>>, Coverage) {
    let Capabilities { vocab_size, shape, .. } = gpu.runner.capabilities;
    let mut count = 0;
    let mut below = |bound: usize| {
        count += 1;
        philox4x32([count, 0, 0, 0], [seed, 32])[0] as usize % bound
    };
    let mut coverage = Coverage::default();
    let mut live: Vec<Running> = (0..requests.len()).map(|i| Running::start(gpu, requests, i)).collect();
    let (mut batch, mut masks) = (Batch::default(), TokenMasks::none(vocab_size));
    while live.iter().any(|one| one.steps.len() < OUTPUT) {
        batch.clear();
        masks.clear(vocab_size);
        let mut ran: Vec<(usize, Vec<u32>)> = Vec::new();
        let first = below(live.len());
        for index in (first..live.len()).chain(0..first) {
            let one = &mut live[index];
            let request = &requests[one.request];
            let step = one.steps.len();
            if step == OUTPUT || batch.rows() > 0 && below(4) == 0 {
                one.sampled_at = None;
                continue;
            }
            if below(12) == 0 && step > 0 {
                gpu.runner.detach(one.request as u32);
                attach(gpu, one.request as u32, request, &one.tokens[request.prompt.len()..]);
                (one.fed, one.sampled_at) = (0, None);
                coverage.recomputed += 1;
            }
            let end = one.tokens.len().min(one.fed + 1 + below(40));
            let samples = end == one.tokens.len();
            let mut drafts = Vec::new();
            if samples && below(3) > 0 {
                let future: Vec<u32> =
                    expected[index][step..].iter().map(|step| step.sampled.token).collect();
                let drafted: usize = ran.iter().map(|(_, drafts)| drafts.len()).sum();
                // The last token to generate has no row behind it.
                let most = below(9).min(future.len() - 1).min(DRAFT_ROWS as usize - drafted);
                let stand = below(most + 1);
                let guess =
                    |nth: usize| if nth < stand { future[nth] } else { (future[nth] + 1) % vocab_size };
                drafts.extend((0..most).map(guess));
            }
            let fed_from = one.sampled_at.take().filter(|_| end == one.fed + 1 && drafts.is_empty());
            match fed_from {
                Some(sample) => {
                    push(&mut batch, (&[0], &[]), one.fed, &shape, one.request);
                    batch.feed_last_row(sample);
                    coverage.fed_back += 1;
                }
                None => {
                    push(&mut batch, (&one.tokens[one.fed..end], &drafts), one.fed, &shape, one.request);
                }
            }
            one.fed = end;
            if samples {
                batch.sample_with_drafts(one.request as u32, drafts.len() as u32);
                if request.masked {
                    batch.mask_last_samples(1 + drafts.len());
                    let newest = one.tokens[end - 1];
                    let before = std::iter::once(&newest).chain(&drafts);
                    before.for_each(|token| push_mask(&mut masks, *token, vocab_size));
                }
                ran.push((index, drafts));
            }
        }
        let results = results(gpu, &batch, &masks);
        let sample = accept(&mut live, &ran, &results, &mut coverage);
        assert_eq!(sample, results.len(), "seed {seed}");
    }
    (live.into_iter().map(|one| one.steps).collect(), coverage)
}

fn check(steps: &[Vec<StepBits>], expected: &[Vec<StepBits>], what: &str) {
    for (request, (steps, expected)) in steps.iter().zip(expected).enumerate() {
        assert_eq!(steps.len(), OUTPUT);
        for (step, (got, expected)) in steps.iter().zip(expected).enumerate() {
            assert_eq!(got.sampled, expected.sampled, "{what}, request {request}, step {step}");
            assert!(got.logits == expected.logits, "{what}, request {request}, step {step}: other logits");
        }
    }
}

#[test]
fn drafts_change_no_bit_of_tokens_log_probabilities_and_logits() {
    if !available() {
        return;
    }
    let cases = [
        (0, Arch::Qwen3, KvStore::Half, true),
        (1, Arch::Qwen35, KvStore::Fp8, true),
        (2, Arch::Qwen3, KvStore::Fp8, true),
        (3, Arch::Qwen3, KvStore::Half, false),
        (4, Arch::Qwen35, KvStore::Half, false),
    ];
    let cases = &cases[..if inflight_fixtures::is_thorough() { 5 } else { 2 }];
    for (seed, arch, store, graphs) in cases.iter().copied() {
        let model = model(arch, Dtype::Bf16, 91);
        let vocabulary = model.config().vocab_size as u32;
        let requests = requests(vocabulary, seed);
        let mut gpu = HarnessRunner::with_store(store, &model, 16, true, graphs);
        let expected: Vec<_> = requests.iter().map(|request| alone(&mut gpu, request)).collect();
        let modes = RunnerModes { deterministic: true, graphs };
        let device = RecordingDevice::new(Harness::new());
        let mut gpu = HarnessRunner::load(device, unsharded(&model), &model, 16, store, modes);
        gpu.harness.allocated.take();
        let (steps, coverage) = together(&mut gpu, &requests, &expected, seed);
        assert_eq!(*gpu.harness.allocated.borrow(), [0u64; 0], "memory was allocated in service");
        check(&steps, &expected, &format!("seed {seed}, {store:?}"));
        assert!(coverage.accepted > 20 && coverage.rejected > 10, "seed {seed}: {coverage:?}");
        assert!(coverage.fed_back > 0 && coverage.recomputed > 0, "seed {seed}: {coverage:?}");
    }
}

#[test]
fn ranks_of_a_group_accept_the_same_drafts() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 93);
    let requests = requests(model.config().vocab_size as u32, 5);
    let modes = RunnerModes { deterministic: true, graphs: true };
    let expected = on_ranks(&model, 2, 16, KvStore::Half, modes, |mut rank| {
        requests.iter().map(|request| alone(&mut rank, request)).collect::<Vec<_>>()
    });
    let ranks = on_ranks(&model, 2, 16, KvStore::Half, modes, |mut rank| {
        together(&mut rank, &requests, &expected[0], 6)
    });
    assert!(ranks[0] == ranks[1], "ranks have different results");
    check(&ranks[0].0, &expected[0], "a group of two");
    assert!(ranks[0].1.accepted > 20 && ranks[0].1.rejected > 10, "{:?}", ranks[0].1);
}

#[test]
fn rows_behind_drafts_have_the_logits_of_the_cpu_runtime() {
    if !available() {
        return;
    }
    for (seed, deterministic) in [(7, true), (8, false)] {
        let model = model(Arch::Mistral, Dtype::F16, seed);
        let vocabulary = model.config().vocab_size;
        let (mut gpu, mut cpu) = (HarnessRunner::new(&model, 16, deterministic, true), on_cpu(&model, 16));
        let mut sequences = TestSequences::new(&[30, 1, 12], vocabulary as u32, 16, seed);
        for (slot, tokens) in (0..).zip(&sequences.tokens) {
            gpu.attach(slot, &SamplingParams::greedy(), tokens);
            let setup = SlotSetup {
                sampling: Arc::new(SamplingParams::greedy()),
                choice: slot,
                prompt: tokens,
                generated: &[],
                eos_token_ids: &[1],
            };
            cpu.attach(slot, &setup).unwrap();
        }
        for step in 0..4u32 {
            let (mut batch, mut reference) = (Batch::default(), Vec::new());
            batch.clear();
            for slot in 0..3usize {
                // Drafts by formula: most do not stand, but each row's logits are those behind its draft.
                let drafts: Vec<u32> =
                    (0..slot as u32 * 3 * step.min(1)).map(|i| (i * 31 + step) % vocabulary as u32).collect();
                let (tokens, done) = (&sequences.tokens[slot], sequences.done[slot]);
                batch.push_drafted(&tokens[done..], &drafts, done as u32, &sequences.tables[slot]);
                batch.sample_with_drafts(slot as u32, drafts.len() as u32);
            }
            let (_, logits) = gpu.step(&batch);
            let samples = batch.samples.clone();
            let tokens = batch.tokens.clone();
            cpu.execute(&mut batch, &mut reference).unwrap();
            let exact = cpu.logits();
            let (difference, bound) = (max_abs_difference(&logits, exact), 2e-2 * max_abs(exact));
            assert_eq!(logits.len(), exact.len());
            assert!(difference <= bound, "seed {seed}, step {step}: logits differ by {difference}");
            // Both go on with the tokens of the CPU.
            let mut stands = true;
            for (at, sample) in samples.iter().enumerate() {
                let slot = sample.slot as usize;
                let counts =
                    stands && sample.drafted && tokens[sample.row as usize] == reference[at - 1].token;
                stands = !sample.drafted || counts;
                if stands {
                    sequences.done[slot] = sequences.tokens[slot].len();
                    sequences.tokens[slot].push(reference[at].token);
                }
            }
        }
    }
}

#[test]
fn batches_whose_drafts_follow_no_row_of_their_slot_are_refused() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 95);
    let mut gpu = HarnessRunner::new(&model, 16, true, true);
    (0..2).for_each(|slot| gpu.attach(slot, &SamplingParams::greedy(), &[]));
    let drafted = || {
        let mut batch = Batch::default();
        batch.clear();
        batch.push_drafted(&[1], &[2, 3], 0, &[0]);
        batch.sample_with_drafts(0, 2);
        batch.push_sequence(&[1], 0, &[1]);
        batch.sample_last_row(1);
        batch
    };
    let mut refused = |change: &dyn Fn(&mut Batch), clue: &str| {
        let mut batch = drafted();
        change(&mut batch);
        let error = gpu.runner.prepare(&batch, &mut gpu.packed).unwrap_err().to_string();
        assert!(error.contains(clue), "{error}");
    };
    refused(&|batch| batch.samples[3].slot = 0, "slot 0 is sampled from twice");
    refused(&|batch| batch.samples[1].drafted = false, "slot 0 is sampled from twice");
    refused(&|batch| _ = batch.samples.remove(1), "does not follow a sample row of its slot");
    refused(&|batch| batch.feedback.push(Feedback { row: 2, sample: 0 }), "a draft is to be filled in");
    refused(
        &|batch| {
            batch.push_drafted(&[1], &[4; 30], 0, &[2, 3]);
            batch.sample_with_drafts(1, 30);
        },
        "more sample rows than sample_rows",
    );
    assert!(gpu.runner.prepare(&drafted(), &mut gpu.packed).is_ok());
}
