//! Several sample rows of a sequence in one launch: tokens, history and ring are those of one launch per row.

use inflight_kernels::cuda::{RECENT_TOKENS, SamplingParams, SamplingResult, SamplingRow, sample};
use proptest::prelude::*;

use crate::device::TestDevice;
use crate::{SeededRng, on_harness};

/// Sequence with drafts: how many rows it has, and how many drafts stand.
#[derive(Debug, Clone)]
struct Drafted {
    rows: usize,
    stand: usize,
    temperature: f32,
    frequency: f32,
    bad_words: bool,
}

fn drafted() -> impl Strategy<Value = Drafted> {
    (1usize..7, any::<prop::sample::Index>(), 0.0f32..1.5, -1.0f32..1.0, any::<bool>()).prop_map(
        |(rows, stand, temperature, frequency, bad_words)| Drafted {
            rows,
            stand: stand.index(rows),
            temperature: if temperature < 0.4 { 0.0 } else { temperature },
            frequency,
            bad_words,
        },
    )
}

/// State of a sequence on the device.
struct DeviceSequence {
    history: crate::Buffer,
    recent: crate::Buffer,
}

#[test]
pub fn drafted_rows_sample_what_the_rows_of_single_steps_do() {
    let shape = (any::<u32>(), 4usize..300, prop::collection::vec(drafted(), 1..4));
    on_harness(24, shape, |(seed, vocabulary, sequences)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let stride = vocabulary.next_multiple_of(4);
        // Few tokens, so that bad words of two tokens occur.
        let entries = device.upload(&[0u32, 2, 0, 1]);
        let new = || DeviceSequence {
            history: device.upload(&vec![0u32; vocabulary]),
            recent: device.upload(&[0u32; RECENT_TOKENS]),
        };
        let row = |sequence: &Drafted, state: &DeviceSequence, nth: usize, draft: Option<u32>| SamplingRow {
            history: state.history.address(),
            recent: state.recent.address(),
            words: entries.address(),
            word_count: sequence.bad_words.into(),
            seed: 5,
            position: 40 + nth as u32,
            generated: nth as u32,
            temperature: sequence.temperature,
            top_p: 1.0,
            repetition: 1.0,
            frequency: sequence.frequency,
            logprobs: 3,
            active: 1,
            fallback: u32::MAX,
            draft: draft.unwrap_or(0),
            drafted: draft.is_some().into(),
            ..SamplingRow::default()
        };
        let launch = |rows: &[SamplingRow], logits: &[f32]| {
            let (logits, table) = (device.upload(logits), device.upload(rows));
            let results = device.upload(&vec![u32::MAX; rows.len() * size_of::<SamplingResult>() / 4]);
            let sampled = device.upload(&vec![u32::MAX; rows.len()]);
            let p = SamplingParams {
                logits: logits.address(),
                rows: table.address(),
                results: results.address(),
                sampled: sampled.address(),
                vocabulary: vocabulary as u32,
                stride: stride as u32,
                count: rows.len() as u32,
                unused: 0,
            };
            unsafe { sample(&device, rows.len() as u32, &p) }.unwrap();
            (sampled.read::<u32>(rows.len()), results.read::<SamplingResult>(rows.len()))
        };
        let (mut table, mut all, mut expected, mut states) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for sequence in &sequences {
            let (single, together) = (new(), new());
            let mut tokens: Vec<u32> = Vec::new();
            for nth in 0..sequence.rows {
                let mut logits: Vec<f32> = (0..stride).map(|_| rng.below(1000) as f32 / 400.0).collect();
                logits[0] += 2.0;
                logits[1] += 2.0;
                let draft = tokens.last().map(|last| match nth <= sequence.stand {
                    true => *last,
                    false => (last + 1) % vocabulary as u32,
                });
                table.push(row(sequence, &together, nth, draft));
                all.extend_from_slice(&logits);
                if nth <= sequence.stand {
                    let (sampled, _) = launch(&[row(sequence, &single, nth, None)], &logits);
                    tokens.push(sampled[0]);
                }
            }
            expected.push(tokens);
            states.push((single, together));
        }
        let (sampled, results) = launch(&table, &all);
        let mut first = 0;
        for ((sequence, expected), (single, together)) in sequences.iter().zip(&expected).zip(&states) {
            let counted = first + expected.len();
            prop_assert_eq!(&sampled[first..counted], expected.as_slice(), "{:?}", sequence);
            let tokens: Vec<u32> = results[first..counted].iter().map(|result| result.token).collect();
            prop_assert_eq!(&tokens, expected);
            // The others have no result, and left no trace.
            let rest = counted..first + sequence.rows;
            prop_assert!(results[rest].iter().all(|result| result.token == 0 && result.top == 0));
            prop_assert_eq!(single.history.read::<u32>(vocabulary), together.history.read::<u32>(vocabulary));
            prop_assert_eq!(
                single.recent.read::<u32>(RECENT_TOKENS),
                together.recent.read::<u32>(RECENT_TOKENS)
            );
            first += sequence.rows;
        }
        Ok(())
    });
}
