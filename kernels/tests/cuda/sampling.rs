use inflight_kernels::RandomKey;
use inflight_kernels::cpu::{self, Isa, Truncation, Workspace};
use inflight_kernels::cuda::{
    HistoryParams, RECENT_TOKENS, SamplingParams, SamplingResult, SamplingRow, ScoreParams, ScoreRow,
    SlotOutput, SplitKernels, count_history, sample, score,
};
use proptest::prelude::*;

use crate::device::TestDevice;
use crate::sampling_split::SplitRows;
use crate::{SeededRng, on_harness};

/// Sampling parameters and kind of logits of a row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) penalties: Option<(f32, f32, f32)>,
    pub(crate) biases: usize,
    pub(crate) masked: usize,
    /// Number of allowed tokens; `None`: all.
    pub(crate) allowed: Option<usize>,
    /// Number of bad words.
    pub(crate) words: usize,
    pub(crate) logprobs: Option<u32>,
    /// Distribution of the logits, see [`logits_of`].
    pub(crate) kind: u32,
}

pub(crate) fn row() -> impl Strategy<Value = Row> {
    let temperature = prop_oneof![1 => Just(0.0f32), 3 => 0.05f32..3.0];
    let top_k = prop_oneof![2 => Just(0u32), 1 => 1u32..5, 1 => 1u32..400, 1 => Just(100_000)];
    let top_p = prop_oneof![2 => Just(1.0f32), 3 => 0.01f32..1.0];
    let min_p = prop_oneof![2 => Just(0.0f32), 1 => 0.0f32..0.5, 1 => Just(1.0f32)];
    let penalties = prop::option::of((0.5f32..2.0, -1.0f32..1.0, -1.0f32..1.0));
    let lists = (0usize..6, 0usize..4, prop::option::of(0u32..=20));
    let masks = (prop::option::of(1usize..2000), prop_oneof![Just(0usize), 1usize..40]);
    (temperature, top_k, top_p, min_p, penalties, lists, masks, 0u32..6).prop_map(
        |(temperature, top_k, top_p, min_p, penalties, lists, (allowed, words), kind)| {
            let (biases, masked, logprobs) = lists;
            Row {
                temperature,
                top_k,
                top_p,
                min_p,
                penalties,
                biases,
                masked,
                allowed,
                words,
                logprobs,
                kind,
            }
        },
    )
}

/// Bad words of up to three tokens, every other one of several tokens ending the output.
fn words_of(count: usize, vocabulary: usize, generated: &[u32], rng: &mut SeededRng) -> Vec<Vec<u32>> {
    let word = |_| {
        let mut word: Vec<u32> = (0..rng.below(3)).map(|_| rng.below(vocabulary) as u32).collect();
        if rng.below(2) == 0 {
            let kept = rng.below(generated.len());
            word = generated[generated.len() - kept..].to_vec();
        }
        word.push(rng.below(vocabulary + 3) as u32);
        word
    };
    (0..count).map(word).collect()
}

/// Returns what a slot keeps of a sequence's output.
pub(crate) fn output_of(generated: &[u32]) -> SlotOutput {
    let mut output = SlotOutput { generated: generated.len() as u32, recent: [0; RECENT_TOKENS] };
    for (at, token) in generated.iter().enumerate() {
        output.recent[at % RECENT_TOKENS] = *token;
    }
    output
}

pub(crate) fn logits_of(kind: u32, vocabulary: usize, rng: &mut SeededRng) -> Vec<f32> {
    let mut logits: Vec<f32> = (0..vocabulary)
        .map(|_| match kind {
            0 => 1.5,
            // Few distinct values, hence many ties.
            1 => rng.below(4) as f32 * 0.5 - 1.0,
            // Bell-shaped, like a model's logits.
            _ => (rng.value() + rng.value() + rng.value()) * 4.0,
        })
        .collect();
    let at = |rng: &mut SeededRng| rng.below(vocabulary);
    match kind {
        3 => {
            let (a, b) = (at(rng), at(rng));
            (logits[a], logits[b]) = (f32::MIN, -1e30);
        }
        4 => {
            let (a, b) = (at(rng), at(rng));
            (logits[a], logits[b]) = (0.0, -0.0);
        }
        5 => {
            let a = at(rng);
            logits[a] = 30.0;
        }
        _ => {}
    }
    logits
}

#[test]
pub(crate) fn tokens_and_logprobs_equal_those_of_the_cpu() {
    let shape = (any::<u32>(), 1usize..2500, prop::collection::vec(row(), 1..4), 0u32..5);
    on_harness(60, shape, |(seed, vocabulary, rows, parts)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let stride = vocabulary.next_multiple_of(4) + 4 * rng.below(2);
        let isa = Isa::detect();
        let mut workspace = Workspace::default();
        let mut all = vec![f32::NAN; rows.len() * stride];
        let mut table = Vec::new();
        let mut expected = Vec::new();
        let mut kept = Vec::new();
        for (r, row) in rows.iter().enumerate() {
            let mut logits = logits_of(row.kind, vocabulary, &mut rng);
            all[r * stride..][..vocabulary].copy_from_slice(&logits);
            let draw = RandomKey {
                seed: u64::from(seed) << 20 | 77,
                choice: r as u32,
                position: 1000 + r as u32,
                draw: 0,
            };
            let random_tokens = |rng: &mut SeededRng, count: usize| -> Vec<u32> {
                (0..count).map(|_| rng.below(vocabulary + 3) as u32).collect()
            };
            let (prompt, generated) = (random_tokens(&mut rng, 20), random_tokens(&mut rng, 30));
            let mut biased = random_tokens(&mut rng, row.biases);
            biased.sort_unstable();
            biased.dedup();
            let biases: Vec<(u32, f32)> =
                biased.into_iter().map(|token| (token, rng.value() * 5.0)).collect();
            // At least one token must stay unmasked.
            let masked: Vec<u32> = random_tokens(&mut rng, if vocabulary > 8 { row.masked } else { 0 });
            // Applies penalties, biases and masks on the host.
            let mut counts = vec![0u32; vocabulary];
            let in_range = |token: &&u32| (**token as usize) < vocabulary;
            prompt.iter().filter(in_range).for_each(|token| counts[*token as usize] |= 1 << 31);
            generated.iter().filter(in_range).for_each(|token| counts[*token as usize] += 1);
            if let Some((repetition, frequency, presence)) = row.penalties {
                for (logit, count) in logits.iter_mut().zip(&counts).filter(|(_, count)| **count > 0) {
                    *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                    let times = count & 0x7fff_ffff;
                    if times > 0 {
                        *logit -= times as f32 * frequency;
                        *logit -= presence;
                    }
                }
            }
            for (token, bias) in biases.iter().filter(|(token, _)| (*token as usize) < vocabulary) {
                logits[*token as usize] += bias;
            }
            for token in masked.iter().filter(in_range) {
                logits[*token as usize] = f32::NEG_INFINITY;
            }
            let allowed: Option<Vec<u32>> = row.allowed.map(|count| random_tokens(&mut rng, count));
            let mut bits = vec![0u32; vocabulary.div_ceil(32)];
            allowed
                .iter()
                .flatten()
                .filter(in_range)
                .for_each(|id| bits[*id as usize / 32] |= 1 << (id % 32));
            if let Some(allowed) = &allowed {
                let masked = |id: &usize| !allowed.contains(&(*id as u32));
                (0..vocabulary).filter(masked).for_each(|id| logits[id] = f32::NEG_INFINITY);
            }
            let words = words_of(row.words, vocabulary, &generated, &mut rng);
            for word in &words {
                let (last, before) = word.split_last().unwrap();
                if generated.ends_with(before) && (*last as usize) < vocabulary {
                    logits[*last as usize] = f32::NEG_INFINITY;
                }
            }
            let masks = allowed.is_some() || !words.is_empty();
            let fallback = if masks { rng.below(vocabulary) as u32 } else { u32::MAX };
            let none_left = logits.iter().all(|logit| *logit == f32::NEG_INFINITY);
            let truncation = Truncation {
                temperature: row.temperature,
                top_k: row.top_k as usize,
                top_p: row.top_p,
                min_p: row.min_p,
            };
            let token = match row.temperature {
                _ if masks && none_left => fallback,
                0.0 => cpu::argmax(isa, &logits),
                _ => cpu::sample(isa, &logits, &truncation, draw.uniform(), &mut workspace),
            };
            let total = cpu::log_sum_exp(isa, &logits, &mut workspace);
            let logprob = |logit: f32| {
                let logprob = (f64::from(logit) - total) as f32;
                if logprob.is_nan() { 0.0 } else { logprob }
            };
            let top: Vec<(u32, f32)> = cpu::top(&logits, row.logprobs.unwrap_or(0) as usize, &mut workspace)
                .map(|(token, logit)| (token, logprob(logit)))
                .collect();
            counts[token as usize] += 1;
            let output_at = device.upload(&[output_of(&generated)]);
            let output = output_of(&[&generated[..], &[token]].concat());
            expected.push((token, logprob(logits[token as usize]), top, counts.clone(), output));
            // Builds the kernel's parameters.
            let tokens: Vec<u32> = prompt.iter().chain(&generated).copied().collect();
            let (history, tokens_at) = (device.alloc(vocabulary * 4), device.upload(&tokens));
            let count = HistoryParams {
                history: history.address(),
                tokens: tokens_at.address(),
                vocabulary: vocabulary as u32,
                prompt: prompt.len() as u32,
                generated: generated.len() as u32,
                unused: 0,
            };
            unsafe { count_history(&device, &count) }.unwrap();
            let mut list: Vec<u32> =
                biases.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]).collect();
            list.extend(masked.iter().flat_map(|token| [*token, 0]));
            let adjustments = device.upload(&list);
            let mut entries = vec![0];
            let mut end = 0;
            for word in &words {
                end += word.len() as u32;
                entries.push(end);
            }
            entries.extend(words.iter().flatten());
            let (bits, entries) = (device.upload(&bits), device.upload(&entries));
            let (repetition, frequency, presence) = row.penalties.unwrap_or((1.0, 0.0, 0.0));
            table.push(SamplingRow {
                history: if row.penalties.is_some() { history.address() } else { 0 },
                adjustments: adjustments.address(),
                seed: draw.seed,
                biases: biases.len() as u32,
                masked: masked.len() as u32,
                choice: draw.choice,
                position: draw.position,
                temperature: row.temperature,
                top_p: row.top_p,
                min_p: row.min_p,
                top_k: row.top_k,
                repetition,
                frequency,
                presence,
                logprobs: row.logprobs.map_or(0, |count| count + 1),
                rows: 1,
                // `masked` counts.
                min_tokens: u32::MAX,
                allowed: if allowed.is_some() { bits.address() } else { 0 },
                words: entries.address(),
                output: output_at.address(),
                word_count: words.len() as u32,
                fallback,
                ..SamplingRow::default()
            });
            kept.push((history, output_at, tokens_at, adjustments, bits, entries));
        }
        table.push(SamplingRow::default()); // padding
        all.extend(vec![f32::NAN; stride]);
        let (logits, table_at) = (device.upload(&all), device.upload(&table));
        let results = device.alloc(table.len() * size_of::<SamplingResult>());
        let sampled = device.alloc(table.len() * 4);
        let split = SplitRows::new(&device, table.len(), vocabulary as u32, parts);
        let p = split.params(SamplingParams {
            logits: logits.address(),
            rows: table_at.address(),
            results: results.address(),
            sampled: sampled.address(),
            vocabulary: vocabulary as u32,
            stride: stride as u32,
            ..SamplingParams::default()
        });
        let needed = SplitKernels::of(&table, vocabulary as u32);
        unsafe { sample(&device, table.len() as u32, needed, &p) }.unwrap();
        let results = results.read::<SamplingResult>(table.len());
        let sampled = sampled.read::<u32>(table.len());
        for (r, (token, logprob, top, counts, output)) in expected.iter().enumerate() {
            let result = &results[r];
            prop_assert_eq!(result.non_finite, 0);
            prop_assert_eq!(result.token, *token, "row {} of {:?}", r, rows[r]);
            prop_assert_eq!(sampled[r], *token);
            prop_assert_eq!(&kept[r].1.read::<SlotOutput>(1)[0], output);
            if rows[r].penalties.is_some() {
                prop_assert_eq!(&kept[r].0.read::<u32>(vocabulary), counts);
            }
            if rows[r].logprobs.is_some() {
                let close = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-6 * b.abs().max(1.0);
                prop_assert!(close(result.logprob, *logprob), "{} is not {logprob}", result.logprob);
                prop_assert_eq!(result.top as usize, top.len());
                for (i, (token, logprob)) in top.iter().enumerate() {
                    prop_assert_eq!(result.tokens[i], *token, "alternative {}", i);
                    prop_assert!(close(result.logprobs[i], *logprob));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn scores_equal_those_of_the_cpu() {
    let row = (0u32..6, any::<u32>(), 0u32..=20);
    let shape = (any::<u32>(), 1usize..2500, prop::collection::vec(row, 1..5));
    on_harness(40, shape, |(seed, vocabulary, rows)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let stride = vocabulary.next_multiple_of(4) + 4 * rng.below(2);
        let mut workspace = Workspace::default();
        let mut all = vec![f32::NAN; rows.len() * stride];
        let (mut table, mut expected) = (Vec::new(), Vec::new());
        for (r, (kind, token, top)) in rows.iter().enumerate() {
            let logits = logits_of(*kind, vocabulary, &mut rng);
            all[r * stride..][..vocabulary].copy_from_slice(&logits);
            let token = token % vocabulary as u32;
            table.push(ScoreRow { token, top: *top });
            expected.push(cpu::score(Isa::detect(), &logits, token, *top as usize, &mut workspace));
        }
        let (logits, table_at) = (device.upload(&all), device.upload(&table));
        let results = device.alloc(table.len() * size_of::<SamplingResult>());
        let p = ScoreParams {
            logits: logits.address(),
            rows: table_at.address(),
            results: results.address(),
            vocabulary: vocabulary as u32,
            stride: stride as u32,
        };
        unsafe { score(&device, table.len() as u32, &p) }.unwrap();
        for (result, expected) in results.read::<SamplingResult>(table.len()).iter().zip(&expected) {
            let close = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-6 * b.abs().max(1.0);
            prop_assert_eq!((result.non_finite, result.rank), (0, expected.rank));
            prop_assert!(close(result.logprob, expected.logprob));
            prop_assert_eq!(result.top as usize, expected.top.len());
            for (i, (token, logprob)) in expected.top.iter().enumerate() {
                prop_assert_eq!(result.tokens[i], *token);
                prop_assert!(close(result.logprobs[i], *logprob));
            }
        }
        Ok(())
    });
}

#[test]
fn samples_follow_the_distribution() {
    if !TestDevice::available() {
        return;
    }
    let device = TestDevice::new();
    let weights = [1.0f32, 2.0, 3.0, 4.0, 1e-30];
    let rows = 1000;
    let logits: Vec<f32> =
        (0..rows).flat_map(|_| weights.iter().map(|w| w.ln()).chain([f32::NAN; 3])).collect();
    let table: Vec<SamplingRow> = (0..rows)
        .map(|position| SamplingRow {
            seed: 12,
            position,
            temperature: 1.0,
            top_p: 1.0,
            rows: 1,
            ..SamplingRow::default()
        })
        .collect();
    let (logits, table) = (device.upload(&logits), device.upload(&table));
    let results = device.alloc(rows as usize * size_of::<SamplingResult>());
    let sampled = device.alloc(rows as usize * 4);
    let p = SamplingParams {
        logits: logits.address(),
        rows: table.address(),
        results: results.address(),
        sampled: sampled.address(),
        vocabulary: 5,
        stride: 8,
        ..SamplingParams::default()
    };
    unsafe { sample(&device, rows, SplitKernels::ALL, &p) }.unwrap();
    let mut counts = [0u32; 5];
    sampled.read::<u32>(rows as usize).iter().for_each(|token| counts[*token as usize] += 1);
    for (count, weight) in counts.iter().zip(weights) {
        let expected = weight / 10.0 * rows as f32;
        // Six standard deviations.
        assert!((*count as f32 - expected).abs() <= 6.0 * expected.sqrt(), "{counts:?}");
    }
}
