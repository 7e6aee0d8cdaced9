//! Infinities and NaN: no kernel hides them, so that they reach the logits, and no token is made of logits that have them.

use inflight_kernels::cuda::{
    HalfDtype, KvStore, NormParams, QkvParams, SamplingParams, SamplingResult, SamplingRow, ScoreParams,
    ScoreRow, SlotOutput, SplitKernels, finish_qkv, norm, sample, score,
};
use proptest::prelude::*;

use crate::device::TestDevice;
use crate::sampling::{logits_of, output_of};
use crate::sampling_split::SplitRows;
use crate::{SeededRng, half, on_harness, store};

const WRONG: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Row of logits: parameters of its draw, and the place and kind of what is not finite in it, if anything.
#[derive(Debug, Clone)]
struct Row {
    temperature: f32,
    cut: (u32, f32),
    penalized: bool,
    /// Only every second token is allowed.
    masked: bool,
    wrong: Option<(u32, usize)>,
    all_wrong: bool,
}

fn row() -> impl Strategy<Value = Row> {
    let temperature = prop_oneof![1 => Just(0.0f32), 2 => 0.05f32..3.0];
    let cut = prop_oneof![Just((0u32, 1.0f32)), (1u32..900, 0.1f32..1.0)];
    let wrong = prop::option::of((any::<u32>(), 0usize..3));
    (temperature, cut, any::<bool>(), any::<bool>(), wrong, prop::bool::weighted(0.2)).prop_map(
        |(temperature, cut, penalized, masked, wrong, all_wrong)| Row {
            temperature,
            cut,
            penalized,
            masked,
            wrong,
            all_wrong,
        },
    )
}

/// Samples rows of logits, and returns the results and the outputs of their slots.
fn sampled(
    rows: &[Row],
    logits: &[f32],
    (vocabulary, parts): (usize, u32),
) -> (Vec<SamplingResult>, Vec<u32>, Vec<SlotOutput>) {
    let device = TestDevice::new();
    let stride = logits.len() / rows.len();
    let history = device.upload(&(0..vocabulary as u32).map(|i| i % 3).collect::<Vec<_>>());
    let allowed = device.upload(&vec![0x5555_5555u32; vocabulary.div_ceil(32)]);
    let outputs: Vec<_> = rows.iter().map(|_| device.upload(&[output_of(&[])])).collect();
    let table: Vec<SamplingRow> = (0..)
        .zip(rows.iter().zip(&outputs))
        .map(|(position, (row, output))| SamplingRow {
            // The kernel counts what it samples: each row has a history of its own only if it is penalized by one that stays as it is.
            history: if row.penalized { history.address() } else { 0 },
            allowed: if row.masked { allowed.address() } else { 0 },
            output: output.address(),
            seed: 5,
            position,
            temperature: row.temperature,
            top_k: row.cut.0,
            top_p: row.cut.1,
            repetition: 1.2,
            logprobs: 3,
            // Two: sampled rows of drafts are not counted.
            rows: if row.penalized { 2 } else { 1 },
            fallback: u32::MAX,
            ..SamplingRow::default()
        })
        .collect();
    let (logits, table_at) = (device.upload(logits), device.upload(&table));
    let results = device.upload(&vec![SamplingResult::default(); table.len()]);
    let tokens = device.upload(&[0u32]);
    let chosen = device.alloc(table.len() * 4);
    let split = SplitRows::new(&device, table.len(), vocabulary as u32, parts);
    let p = split.params(SamplingParams {
        logits: logits.address(),
        rows: table_at.address(),
        results: results.address(),
        sampled: chosen.address(),
        tokens: tokens.address(),
        vocabulary: vocabulary as u32,
        stride: stride as u32,
        ..SamplingParams::default()
    });
    let needed = SplitKernels::of(&table, vocabulary as u32);
    unsafe { sample(&device, table.len() as u32, needed, &p) }.unwrap();
    let outputs = outputs.iter().map(|output| output.read::<SlotOutput>(1)[0]).collect();
    (results.read(table.len()), chosen.read(table.len()), outputs)
}

#[test]
pub(crate) fn rows_of_logits_that_are_not_finite_are_marked_and_change_no_other() {
    let shape = (any::<u32>(), 2usize..3000, prop::collection::vec(row(), 1..4), 0u32..5);
    on_harness(60, shape, |(seed, vocabulary, rows, parts)| {
        let mut rng = SeededRng::new(seed);
        let stride = vocabulary.next_multiple_of(4);
        let mut sound = vec![f32::NAN; rows.len() * stride];
        for line in sound.chunks_mut(stride) {
            line[..vocabulary].copy_from_slice(&logits_of(2, vocabulary, &mut rng));
        }
        let mut logits = sound.clone();
        let mut expected = Vec::new();
        for (row, line) in rows.iter().zip(logits.chunks_mut(stride)) {
            let Some((at, kind)) = row.wrong else {
                expected.push(false);
                continue;
            };
            let at = at as usize % vocabulary;
            match row.all_wrong {
                true => line[..vocabulary].fill(WRONG[kind]),
                false => line[at] = WRONG[kind],
            }
            // A mask hides what nothing is made of, and of minus infinity one can't tell which it is.
            let adjusted = row.masked || row.penalized;
            let seen = row.all_wrong || !row.masked || at.is_multiple_of(2);
            expected.push(seen && (kind < 2 || !adjusted));
        }
        let (right, _, outputs) = sampled(&rows, &sound, (vocabulary, 0));
        prop_assert!(right.iter().all(|result| result.non_finite == 0));
        let (got, chosen, got_outputs) = sampled(&rows, &logits, (vocabulary, parts));
        for (i, expected) in expected.iter().enumerate() {
            prop_assert_eq!(got[i].non_finite != 0, *expected, "row {} of {:?}", i, rows[i]);
            prop_assert!((chosen[i] as usize) < vocabulary && chosen[i] == got[i].token);
            if rows[i].wrong.is_none() {
                prop_assert_eq!(&got[i], &right[i]);
                prop_assert_eq!(&got_outputs[i], &outputs[i]);
            }
        }
        let table: Vec<ScoreRow> = rows.iter().map(|_| ScoreRow { token: 1, top: 2 }).collect();
        let device = TestDevice::new();
        let (logits_at, table_at) = (device.upload(&logits), device.upload(&table));
        let results = device.upload(&vec![SamplingResult::default(); rows.len()]);
        let p = ScoreParams {
            logits: logits_at.address(),
            rows: table_at.address(),
            results: results.address(),
            vocabulary: vocabulary as u32,
            stride: stride as u32,
        };
        unsafe { score(&device, rows.len() as u32, &p) }.unwrap();
        for (result, row) in results.read::<SamplingResult>(rows.len()).iter().zip(&rows) {
            prop_assert_eq!(result.non_finite != 0, row.wrong.is_some());
        }
        Ok(())
    });
}

#[test]
pub(crate) fn heads_with_an_element_that_is_not_finite_are_nan() {
    let wrong = (any::<u32>(), 0usize..3);
    let shape = (any::<u32>(), half(), store(), prop_oneof![Just(16usize), Just(96), Just(128)], wrong);
    on_harness(40, shape, |(seed, half, store, head_dim, (at, kind))| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let (heads, kv_heads, block_tokens) = (2, 2, 4);
        let all = heads + 2 * kv_heads;
        let mut qkv = rng.halves(half, all * head_dim, 2.0);
        let at = at as usize % qkv.len();
        let run = |qkv: &[u16]| {
            let layer = store.layer_bytes(kv_heads as u64, block_tokens as u64, head_dim as u64) as usize;
            let (qkv_at, kv) = (device.upload(qkv), device.upload(&vec![0u8; layer]));
            let angles = device.upload_constant(&[0.6f32, 0.8].repeat(head_dim / 2));
            let (positions, places) = (device.upload_constant(&[0u32]), device.upload_constant(&[1u32]));
            let p = QkvParams {
                qkv: qkv_at.address(),
                q_norm: 0,
                k_norm: 0,
                angles: angles.address(),
                positions: positions.address(),
                places: places.address(),
                kv: kv.address(),
                block_numbers: layer as u64 / store.unit(),
                layer_offset: 0,
                rows: 1,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                head_dim: head_dim as u32,
                block_tokens: block_tokens as u32,
                eps: 1e-6,
            };
            unsafe { finish_qkv(&device, half, store, &p) }.unwrap();
            let (queries, pool) = (qkv_at.read::<u16>(heads * head_dim), kv.read::<u8>(layer));
            // What attention reads of each head.
            let mut read: Vec<Vec<f32>> =
                queries.chunks(head_dim).map(|head| head.iter().map(|x| half.widen(*x)).collect()).collect();
            for head in 0..2 * kv_heads {
                let line = head * block_tokens + 1;
                let bytes = head_dim * store.unit() as usize;
                let stored = &pool[line * bytes..(line + 1) * bytes];
                read.push(match store {
                    KvStore::Half => stored
                        .chunks(2)
                        .map(|pair| half.widen(u16::from_ne_bytes([pair[0], pair[1]])))
                        .collect(),
                    KvStore::Fp8 => {
                        let scales = 2 * kv_heads * block_tokens * head_dim + line * 4;
                        let scale = f32::from_ne_bytes(pool[scales..scales + 4].try_into().unwrap());
                        stored.iter().map(|byte| crate::e4m3::value(*byte) as f32 * scale).collect()
                    }
                });
            }
            read
        };
        let right = run(&qkv);
        qkv[at] = half.narrow(WRONG[kind]);
        let got = run(&qkv);
        for (head, (got, right)) in got.iter().zip(&right).enumerate() {
            match head == at / head_dim {
                true => prop_assert!(got.iter().all(|x| x.is_nan()), "head {}: {:?}", head, got),
                false => prop_assert_eq!(got, right),
            }
        }
        Ok(())
    });
}

#[test]
fn a_norm_whose_squares_overflow_is_nan() {
    on_harness(
        8,
        (half(), prop_oneof![Just(1e20f32), Just(f32::INFINITY), Just(f32::NAN)]),
        |(half, wrong)| {
            let (device, width) = (TestDevice::new(), 64);
            let mut residual = vec![1.0f32; 2 * width];
            residual[3] = wrong;
            let residual = device.upload(&residual);
            let weight = device.upload_constant(&vec![1.0f32; width]);
            let out = device.alloc(2 * width * 2);
            let p = NormParams {
                residual: residual.address(),
                weight: weight.address(),
                out: out.address(),
                rows: 2,
                width: width as u32,
                eps: 1e-6,
                ..NormParams::default()
            };
            unsafe { norm(&device, half, &p) }.unwrap();
            let out: Vec<f32> = out.read::<u16>(2 * width).into_iter().map(|x| half.widen(x)).collect();
            prop_assert!(out[..width].iter().all(|x| x.is_nan()), "{:?}", &out[..width]);
            prop_assert!(out[width..].iter().all(|x| (x - 1.0).abs() < 0.01));
            Ok(())
        },
    );
}

#[test]
fn halves_keep_infinities() {
    assert!(HalfDtype::F16.widen(HalfDtype::F16.narrow(f32::INFINITY)) == f32::INFINITY);
}
