//! Slots with drafts: `sample` and `accept_drafts` over several rows of a slot at once, against tokens that are
//! drawn one after the other.

use inflight_kernels::RandomKey;
use inflight_kernels::cpu::{self, Isa, Truncation, Workspace};
use inflight_kernels::cuda::{
    HistoryParams, SamplingParams, SamplingResult, SamplingRow, SlotOutput, SplitKernels, accept_drafts,
    count_history, sample,
};
use proptest::prelude::*;

use crate::device::{Buffer, TestDevice};
use crate::sampling::{Row, logits_of, output_of, row};
use crate::sampling_split::SplitRows;
use crate::{SeededRng, on_harness};

/// Slot of a random batch.
#[derive(Debug, Clone)]
struct Slot {
    row: Row,
    /// Sample rows: one, and one behind each draft.
    rows: usize,
    /// Of ten drafts, how many equal the token drawn before them.
    standing: usize,
    /// Tokens generated before.
    generated: usize,
    /// `min_tokens` beyond these.
    min_tokens: u32,
    /// Rows of the batch before the slot's sample rows.
    unsampled: usize,
}

fn slot() -> impl Strategy<Value = Slot> {
    // More than a warp has lanes, and than the ring has places.
    let rows = prop_oneof![2 => Just(1usize), 6 => 2usize..7, 1 => 30usize..45];
    (row(), rows, 6usize..=10, 0usize..40, 0u32..6, 0usize..3).prop_map(
        |(row, rows, standing, generated, min_tokens, unsampled)| Slot {
            row,
            rows,
            standing,
            generated,
            min_tokens,
            unsampled,
        },
    )
}

/// Sequence of a slot, on the host.
struct Sequence {
    row: Row,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    biases: Vec<(u32, f32)>,
    /// Tokens masked until `min_tokens` are generated.
    ending: Vec<u32>,
    min_tokens: usize,
    words: Vec<Vec<u32>>,
    fallback: u32,
    seed: u64,
    choice: u32,
}

/// Token drawn by the reference.
struct Drawn {
    token: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

impl Sequence {
    fn new(slot: &Slot, choice: u32, vocabulary: usize, rng: &mut SeededRng) -> Self {
        let tokens = |rng: &mut SeededRng, count: usize| -> Vec<u32> {
            (0..count).map(|_| rng.below(vocabulary) as u32).collect()
        };
        let mut biased = tokens(rng, slot.row.biases);
        biased.sort_unstable();
        biased.dedup();
        let words = (0..slot.row.words).map(|_| rng.below(4) + 1).collect::<Vec<_>>();
        Self {
            row: slot.row.clone(),
            prompt: tokens(rng, 5),
            generated: tokens(rng, slot.generated),
            biases: biased.into_iter().map(|token| (token, rng.value() * 5.0)).collect(),
            ending: tokens(rng, slot.row.masked),
            min_tokens: slot.generated + slot.min_tokens as usize,
            words: words.into_iter().map(|length| tokens(rng, length)).collect(),
            fallback: rng.below(vocabulary) as u32,
            seed: u64::from(rng.word()) << 7,
            choice,
        }
    }

    /// Returns how often each token was generated, with the top bit for tokens of the prompt.
    fn counts(&self, vocabulary: usize) -> Vec<u32> {
        let mut counts = vec![0u32; vocabulary];
        self.prompt.iter().for_each(|token| counts[*token as usize] |= 1 << 31);
        self.generated.iter().for_each(|token| counts[*token as usize] += 1);
        counts
    }

    /// Draws the next token from a row of logits, of the tokens in `allowed`.
    fn draw(&self, mut logits: Vec<f32>, allowed: &[bool], position: u32) -> Drawn {
        let (isa, mut workspace) = (Isa::detect(), Workspace::default());
        cpu::mask_nan(&mut logits);
        if let Some((repetition, frequency, presence)) = self.row.penalties {
            let counts = self.counts(logits.len());
            for (logit, count) in logits.iter_mut().zip(&counts).filter(|(_, count)| **count > 0) {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                let times = count & 0x7fff_ffff;
                if times > 0 {
                    *logit -= times as f32 * frequency;
                    *logit -= presence;
                }
            }
        }
        for (token, bias) in &self.biases {
            logits[*token as usize] += bias;
        }
        let ending = if self.generated.len() < self.min_tokens { self.ending.as_slice() } else { &[] };
        let last = self.words.iter().filter_map(|word| {
            let (last, before) = word.split_last()?;
            self.generated.ends_with(before).then_some(last)
        });
        let forbidden = (0..).zip(allowed).filter(|(_, allowed)| !**allowed).map(|(token, _)| token);
        for token in ending.iter().chain(last).copied().chain(forbidden) {
            logits[token as usize] = f32::NEG_INFINITY;
        }
        let truncation = Truncation {
            temperature: self.row.temperature,
            top_k: self.row.top_k as usize,
            top_p: self.row.top_p,
            min_p: self.row.min_p,
        };
        let key = RandomKey { seed: self.seed, choice: self.choice, position, draw: 0 };
        let none_left = logits.iter().all(|logit| *logit == f32::NEG_INFINITY);
        let token = match self.row.temperature {
            _ if none_left => self.fallback,
            0.0 => cpu::argmax(isa, &logits),
            _ => cpu::sample(isa, &logits, &truncation, key.uniform(), &mut workspace),
        };
        let total = cpu::log_sum_exp(isa, &logits, &mut workspace);
        let count = self.row.logprobs.unwrap_or(0) as usize;
        let top = cpu::top(&logits, count, &mut workspace)
            .map(|(token, logit)| (token, cpu::logprob(logit, total)))
            .collect();
        Drawn { token, logprob: cpu::logprob(logits[token as usize], total), top }
    }
}

/// Device memory of a slot; dropped after the kernels have run.
struct SlotMemory {
    history: Buffer,
    output: Buffer,
    others: Vec<Buffer>,
}

impl SlotMemory {
    fn new(device: &TestDevice, sequence: &Sequence, vocabulary: usize) -> Self {
        let tokens: Vec<u32> = sequence.prompt.iter().chain(&sequence.generated).copied().collect();
        let (history, tokens) = (device.alloc(vocabulary * 4), device.upload(&tokens));
        let count = HistoryParams {
            history: history.address(),
            tokens: tokens.address(),
            vocabulary: vocabulary as u32,
            prompt: sequence.prompt.len() as u32,
            generated: sequence.generated.len() as u32,
            unused: 0,
        };
        unsafe { count_history(device, &count) }.unwrap();
        let mut list: Vec<u32> =
            sequence.biases.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]).collect();
        list.extend(sequence.ending.iter().flat_map(|token| [*token, 0]));
        let mut words = vec![0];
        let ends = sequence.words.iter().scan(0, |end, word| {
            *end += word.len() as u32;
            Some(*end)
        });
        words.extend(ends);
        words.extend(sequence.words.iter().flatten());
        Self {
            history,
            output: device.upload(&[output_of(&sequence.generated)]),
            others: vec![device.upload(&list), device.upload(&words), tokens],
        }
    }

    fn row(&self, sequence: &Sequence) -> SamplingRow {
        let Row { temperature, top_k, top_p, min_p, penalties, logprobs, .. } = sequence.row;
        let (repetition, frequency, presence) = penalties.unwrap_or((1.0, 0.0, 0.0));
        SamplingRow {
            history: if penalties.is_some() { self.history.address() } else { 0 },
            adjustments: self.others[0].address(),
            words: self.others[1].address(),
            output: self.output.address(),
            seed: sequence.seed,
            biases: sequence.biases.len() as u32,
            masked: sequence.ending.len() as u32,
            choice: sequence.choice,
            temperature,
            top_p,
            min_p,
            top_k,
            repetition,
            frequency,
            presence,
            logprobs: logprobs.map_or(0, |count| count + 1),
            word_count: sequence.words.len() as u32,
            min_tokens: sequence.min_tokens as u32,
            fallback: sequence.fallback,
            ..SamplingRow::default()
        }
    }
}

/// Batch under construction.
struct TestBatch {
    vocabulary: usize,
    stride: usize,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    table: Vec<SamplingRow>,
    /// Masks of rows, which differ within a slot.
    masks: Vec<Buffer>,
}

impl TestBatch {
    /// Appends the rows of a slot; returns the tokens drawn one by one, up to the first that is not the draft
    /// behind it. `sequence` then has those that count.
    fn push(
        &mut self,
        device: &TestDevice,
        slot: &Slot,
        sequence: &mut Sequence,
        row: &SamplingRow,
        rng: &mut SeededRng,
    ) -> Vec<Drawn> {
        let vocabulary = self.vocabulary;
        self.tokens.extend((0..slot.unsampled + 1).map(|_| rng.below(vocabulary) as u32));
        let draft = self.tokens.len() as u32;
        let (mut drawn, mut stands): (Vec<Drawn>, bool) = (Vec::new(), true);
        for nth in 0..slot.rows {
            let logits = logits_of(slot.row.kind, vocabulary, rng);
            let mut allowed = vec![true; vocabulary];
            if slot.row.allowed.is_some() {
                allowed.fill_with(|| rng.below(4) > 0);
            }
            let mut bits = vec![0u32; vocabulary.div_ceil(32)];
            (0..vocabulary).filter(|id| allowed[*id]).for_each(|id| bits[id / 32] |= 1 << (id % 32));
            let mask = device.upload(&bits);
            let position = 1000 + nth as u32;
            self.table.push(SamplingRow {
                rows: slot.rows as u32,
                nth: nth as u32,
                draft,
                position,
                allowed: if slot.row.allowed.is_some() { mask.address() } else { 0 },
                ..*row
            });
            self.masks.push(mask);
            self.logits.extend(&logits);
            self.logits.extend(std::iter::repeat_n(f32::NAN, self.stride - vocabulary));
            let mut next = rng.below(vocabulary) as u32;
            if stands {
                let token = sequence.draw(logits, &allowed, position);
                if rng.below(10) < slot.standing {
                    next = token.token;
                }
                sequence.generated.push(token.token);
                stands = next == token.token;
                drawn.push(token);
            }
            if nth + 1 < slot.rows {
                self.tokens.push(next);
            }
        }
        drawn
    }
}

#[test]
pub(crate) fn tokens_that_count_equal_those_drawn_one_by_one() {
    let shape = (any::<u32>(), 9usize..60, prop::collection::vec(slot(), 1..5), 0u32..4);
    on_harness(60, shape, |(seed, vocabulary, slots, parts)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let stride = vocabulary.next_multiple_of(4) + 4 * rng.below(2);
        let mut batch = TestBatch {
            vocabulary,
            stride,
            tokens: Vec::new(),
            logits: Vec::new(),
            table: Vec::new(),
            masks: Vec::new(),
        };
        let mut expected = Vec::new();
        for (choice, slot) in (0..).zip(&slots) {
            let mut sequence = Sequence::new(slot, choice, vocabulary, &mut rng);
            let memory = SlotMemory::new(&device, &sequence, vocabulary);
            let first = batch.table.len();
            let row = memory.row(&sequence);
            let drawn = batch.push(&device, slot, &mut sequence, &row, &mut rng);
            expected.push((first, drawn, sequence, memory));
        }
        batch.table.push(SamplingRow::default()); // padding
        batch.logits.extend(vec![f32::NAN; stride]);
        let rows = batch.table.len();
        let (logits, table) = (device.upload(&batch.logits), device.upload_constant(&batch.table));
        let tokens = device.upload_constant(&batch.tokens);
        let (results, sampled) = (device.alloc(rows * size_of::<SamplingResult>()), device.alloc(rows * 4));
        let split = SplitRows::new(&device, rows, vocabulary as u32, parts);
        let p = split.params(SamplingParams {
            logits: logits.address(),
            rows: table.address(),
            results: results.address(),
            sampled: sampled.address(),
            tokens: tokens.address(),
            vocabulary: vocabulary as u32,
            stride: stride as u32,
            ..SamplingParams::default()
        });
        let needed = SplitKernels::of(&batch.table, vocabulary as u32);
        unsafe {
            sample(&device, rows as u32, needed, &p).unwrap();
            accept_drafts(&device, rows as u32, &p).unwrap();
        }
        let (results, sampled) = (results.read::<SamplingResult>(rows), sampled.read::<u32>(rows));
        for (first, drawn, sequence, memory) in &expected {
            for (nth, drawn) in drawn.iter().enumerate() {
                let result = &results[first + nth];
                prop_assert_eq!(result.token, drawn.token, "row {} of {:?}", nth, sequence.row);
                prop_assert_eq!(sampled[first + nth], drawn.token);
                if sequence.row.logprobs.is_some() {
                    let close = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-6 * b.abs().max(1.0);
                    prop_assert!(close(result.logprob, drawn.logprob), "row {nth} of {:?}", sequence.row);
                    prop_assert_eq!(result.top as usize, drawn.top.len());
                    for (i, (token, logprob)) in drawn.top.iter().enumerate() {
                        prop_assert_eq!(result.tokens[i], *token, "alternative {} of row {}", i, nth);
                        prop_assert!(close(result.logprobs[i], *logprob));
                    }
                }
            }
            let output = memory.output.read::<SlotOutput>(1)[0];
            prop_assert_eq!(output, output_of(&sequence.generated), "{:?}", sequence.row);
            if sequence.row.penalties.is_some() {
                prop_assert_eq!(memory.history.read::<u32>(vocabulary), sequence.counts(vocabulary));
            }
        }
        Ok(())
    });
}
