//! Property tests of attention against a reference in f64.

use proptest::prelude::*;

use super::*;
use crate::cpu::{KvSlot, RopeScaling, RopeTable, finish_qkv, inverse_frequencies};
use crate::test_size::size;

fn values(seed: u32, n: usize, scale: f32) -> Vec<f32> {
    let value = |i| (crate::philox4x32([i, 2, 0, 0], [seed, 0])[0] as f32 / 2f32.powi(31) - 1.0) * scale;
    (0..n as u32).map(value).collect()
}

#[derive(Debug, Clone)]
struct Case {
    shape: QkvShape,
    dtype: KvDtype,
    lengths: Vec<usize>,
    window: Option<u32>,
    normed: bool,
    seed: u32,
    /// Value that replaces an element of the first sequence's queries, keys or values: position, column and value.
    broken: Option<(usize, usize, f32)>,
}

/// Shape of the calls that compute a case.
#[derive(Clone, Copy)]
struct Chunks {
    /// Maximum rows of a sequence per call.
    rows: usize,
    block_tokens: usize,
    threads: usize,
    /// Whether each call runs all sequences.
    together: bool,
    seed: u32,
}

/// Returns the outputs of layer 1 of 2 for every sequence and position, computed by calls of the given shape.
fn run(isa: Isa, case: &Case, chunks: Chunks) -> Vec<Vec<f32>> {
    let QkvShape { heads, kv_heads, head_dim } = case.shape;
    let pool = Pool::new(chunks.threads).unwrap();
    let layout = KvLayout::new(case.dtype, kv_heads, head_dim, chunks.block_tokens);
    // Behind another layer, and before a gap.
    let block_bytes = 2 * layout.layer_bytes() + 8;
    let layout = layout.within(block_bytes, layout.layer_bytes());
    let needed: Vec<usize> = case.lengths.iter().map(|length| length.div_ceil(chunks.block_tokens)).collect();
    let total: usize = needed.iter().sum();
    let mut kv = KvPool::new(block_bytes, total).unwrap();
    // Stale contents of blocks must not matter.
    let garbage = kv.as_mut_ptr();
    for i in 0..total * block_bytes {
        // SAFETY: `i` is below the pool's size in bytes.
        unsafe { garbage.add(i).write(0xff) };
    }
    // Pseudo-random block order.
    let mut order: Vec<u32> = (0..total as u32).collect();
    order.sort_by_key(|block| crate::philox4x32([*block, 3, 0, 0], [chunks.seed, 0])[0]);
    let mut rope = RopeTable::new(inverse_frequencies(head_dim, 10_000.0, &RopeScaling::None));
    rope.ensure(case.lengths.iter().max().copied().unwrap_or(0));
    let (q_norm, k_norm) = (values(case.seed, head_dim, 1.5), values(!case.seed, head_dim, 1.5));
    let norms = case.normed.then_some((q_norm.as_slice(), k_norm.as_slice(), 1e-6));

    let mut out: Vec<Vec<f32>> = case.lengths.iter().map(|n| vec![0.0; n * heads * head_dim]).collect();
    let mut done = vec![0; case.lengths.len()];
    let mut turn = 0;
    while (0..done.len()).any(|s| done[s] < case.lengths[s]) {
        let mut positions = vec![];
        let mut ragged = Ragged::default();
        ragged.clear(case.window);
        let (mut qkv, mut places, mut ran) = (vec![], vec![], vec![]);
        for s in 0..done.len() {
            let count = chunks.rows.min(case.lengths[s] - done[s]);
            if count == 0 || !chunks.together && s != turn % done.len() {
                continue;
            }
            let first: usize = needed[..s].iter().sum();
            let table = &order[first..first + needed[s]];
            for position in done[s]..done[s] + count {
                let mut row = values(case.seed ^ (s as u32) << 16 ^ position as u32, case.shape.width(), 2.0);
                if let Some((_, column, value)) = case.broken.filter(|(at, ..)| s == 0 && *at == position) {
                    row[column] = value;
                }
                qkv.extend(row);
                positions.push(position as u32);
                let block = table[position / chunks.block_tokens];
                places.push(KvSlot { block, offset: (position % chunks.block_tokens) as u32 });
            }
            // The table begins anywhere up to the first block that the chunk sees.
            let seen = case.window.map_or(0, |window| (done[s] + 1).saturating_sub(window as usize));
            let begin = if turn.is_multiple_of(2) { seen / chunks.block_tokens } else { 0 };
            let blocks = &table[begin..(done[s] + count).div_ceil(chunks.block_tokens)];
            let rows: Vec<u32> = (done[s] as u32..(done[s] + count) as u32).collect();
            ragged.push(&rows, begin as u32, blocks.iter().copied(), chunks.block_tokens);
            ran.push((s, done[s], count));
            done[s] += count;
        }
        turn += 1;
        if ran.is_empty() {
            continue;
        }
        finish_qkv(&pool, isa, case.shape, &mut qkv, norms, &rope, &positions, &places, &mut kv, &layout);
        let mut attended = vec![0.0; positions.len() * heads * head_dim];
        attention(&pool, isa, case.shape, &qkv, &ragged, &kv, &layout, head_dim as f64, &mut attended);
        let mut at = 0;
        for (s, first, count) in ran {
            let width = heads * head_dim;
            out[s][first * width..(first + count) * width].copy_from_slice(&attended[at..at + count * width]);
            at += count * width;
        }
    }
    out
}

/// Reference attention in f64.
fn reference_attention(case: &Case) -> Vec<Vec<f64>> {
    let QkvShape { heads, kv_heads, head_dim } = case.shape;
    // Rounds a key or a value as the pool does.
    let round = |mut x: Vec<f64>| {
        let scale = x.iter().fold(0.0f64, |most, x| most.max(x.abs())) / 127.0;
        for x in &mut x {
            *x = match case.dtype {
                KvDtype::Plain(Dtype::F32) => *x,
                KvDtype::Plain(Dtype::Bf16) => f64::from(half::bf16::from_f64(*x)),
                KvDtype::Plain(Dtype::F16) => f64::from(half::f16::from_f64(*x)),
                KvDtype::Int8 => (*x / scale).round() * scale,
            };
        }
        x
    };
    let (q_norm, k_norm) = (values(case.seed, head_dim, 1.5), values(!case.seed, head_dim, 1.5));
    let finish = |x: &[f32], position: usize, norm: &[f32]| -> Vec<f64> {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / head_dim as f64;
        let scale = if case.normed { 1.0 / (mean + 1e-6).sqrt() } else { 1.0 };
        let weight = |i: usize| if case.normed { f64::from(norm[i]) } else { 1.0 };
        let x: Vec<f64> = (0..head_dim).map(|i| f64::from(x[i]) * scale * weight(i)).collect();
        (0..head_dim)
            .map(|i| {
                let half = head_dim / 2;
                let frequency = 10_000f64.powf(-(2.0 * (i % half) as f64) / head_dim as f64);
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                if i < half { x[i] * cos - x[i + half] * sin } else { x[i] * cos + x[i - half] * sin }
            })
            .collect()
    };
    let mut out = Vec::new();
    for (s, length) in case.lengths.iter().enumerate() {
        let rows: Vec<Vec<f32>> = (0..*length)
            .map(|p| values(case.seed ^ (s as u32) << 16 ^ p as u32, case.shape.width(), 2.0))
            .collect();
        let mut result = vec![0.0; length * heads * head_dim];
        for position in 0..*length {
            let low = case.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            for head in 0..heads {
                let q = finish(&rows[position][head * head_dim..][..head_dim], position, &q_norm);
                let kv_head = head / (heads / kv_heads);
                let score = |p: usize| {
                    let k = round(finish(&rows[p][(heads + kv_head) * head_dim..][..head_dim], p, &k_norm));
                    q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() / (head_dim as f64).sqrt()
                };
                let scores: Vec<f64> = (low..=position).map(score).collect();
                let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - best).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (i, weight) in weights.iter().enumerate() {
                    let v = &rows[low + i][(heads + kv_heads + kv_head) * head_dim..][..head_dim];
                    let v = round(v.iter().copied().map(f64::from).collect());
                    for d in 0..head_dim {
                        let at = (position * heads + head) * head_dim + d;
                        result[at] += weight / total * v[d];
                    }
                }
            }
        }
        out.push(result);
    }
    out
}

/// Tolerance against f64, which may round a key differently; over int8, queries and weights may be bf16.
fn tolerance(dtype: KvDtype) -> f64 {
    match dtype {
        KvDtype::Plain(Dtype::F32) => 2e-5,
        KvDtype::Plain(Dtype::F16) => 4e-3,
        KvDtype::Plain(Dtype::Bf16) | KvDtype::Int8 => 3e-2,
    }
}

fn case() -> impl Strategy<Value = Case> {
    let head_dim =
        prop::sample::select(vec![2usize, 6, 16, 24, 32, 64, 112, 128, 254][..size(9, 5)].to_vec());
    let lengths =
        prop::collection::vec(prop_oneof![1usize..size(20, 5), size(20, 5)..size(80, 18)], 1..size(4, 3));
    let window = prop_oneof![Just(None), (1u32..50).prop_map(Some)];
    (1..size(4, 3), 1..size(6, 3), head_dim, 0usize..4, lengths, window, any::<bool>(), any::<u32>())
        .prop_map(|(kv_heads, group, head_dim, dtype, lengths, window, normed, seed)| Case {
            shape: QkvShape { heads: kv_heads * group, kv_heads, head_dim },
            dtype: [Dtype::F32.into(), Dtype::Bf16.into(), Dtype::F16.into(), KvDtype::Int8][dtype],
            lengths,
            window,
            normed,
            seed,
            broken: None,
        })
}

proptest! {
    #![proptest_config(crate::test_size::cases(48))]

    #[test]
    fn attention_is_correct_for_any_chunks_blocks_batch_and_threads(
        case in case(), rows in 2usize..40, block in 0u32..7, threads in 1usize..4, seed in any::<u32>(),
    ) {
        let expected = reference_attention(&case);
        for isa in Isa::tested() {
            let one = Chunks { rows: 1, block_tokens: 16, threads: 1, together: false, seed: 0 };
            let alone = run(isa, &case, one);
            let many = Chunks { rows, block_tokens: 1 << block, threads, together: true, seed };
            let together = run(isa, &case, many);
            let tolerance = tolerance(case.dtype);
            for s in 0..case.lengths.len() {
                for i in 0..expected[s].len() {
                    let error = (f64::from(alone[s][i]) - expected[s][i]).abs();
                    prop_assert!(error < tolerance, "{} sequence {s} at {i}: off by {error:e}", isa.name());
                    let same = alone[s][i].to_bits() == together[s][i].to_bits();
                    prop_assert!(same, "{} sequence {s} at {i}: other bits", isa.name());
                }
            }
        }
    }
}

/// Cases with sequences and windows of several spans, and realistic group sizes.
fn long_case() -> impl Strategy<Value = Case> {
    let head_dim = prop::sample::select(vec![16usize, 34, 64, 80]);
    let group = prop::sample::select(vec![1usize, 3, 7, 8, 14]);
    let lengths = prop::collection::vec(65usize..260, 1..3);
    let window = prop_oneof![Just(None), (1u32..200).prop_map(Some)];
    (1usize..3, group, head_dim, 0usize..4, lengths, window, any::<u32>()).prop_map(
        |(kv_heads, group, head_dim, dtype, lengths, window, seed)| Case {
            shape: QkvShape { heads: kv_heads * group, kv_heads, head_dim },
            dtype: [Dtype::F32.into(), Dtype::Bf16.into(), Dtype::F16.into(), KvDtype::Int8][dtype],
            lengths,
            window,
            normed: true,
            seed,
            broken: None,
        },
    )
}

proptest! {
    #![proptest_config(crate::test_size::cases(24))]

    /// The reference is plain Rust one row at a time, which the test above compares with f64.
    #[test]
    #[cfg_attr(miri, ignore = "too long for an interpreter")]
    fn long_sequences_have_the_same_bits_in_any_chunks_on_every_isa(
        case in long_case(), rows in 2usize..150, block in 0u32..7, threads in 1usize..4, seed in any::<u32>(),
    ) {
        let one = Chunks { rows: 1, block_tokens: 16, threads: 1, together: false, seed: 0 };
        let plain = run(Isa::PORTABLE, &case, one);
        for isa in Isa::tested() {
            let alone = run(isa, &case, one);
            let together = run(isa, &case, Chunks { rows, block_tokens: 1 << block, threads, together: true, seed });
            for s in 0..case.lengths.len() {
                for i in 0..plain[s].len() {
                    let error = f64::from((alone[s][i] - plain[s][i]).abs());
                    prop_assert!(error < tolerance(case.dtype), "{} sequence {s} at {i}: off by {error:e}", isa.name());
                    let same = alone[s][i].to_bits() == together[s][i].to_bits();
                    prop_assert!(same, "{} sequence {s} at {i}: other bits", isa.name());
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::test_size::cases(48))]

    #[test]
    fn infinities_and_nan_reach_every_row_that_sees_them_and_no_other(
        case in prop_oneof![case(), long_case()], at in any::<prop::sample::Index>(), column in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]), rows in 2usize..40,
    ) {
        let QkvShape { heads, kv_heads, head_dim } = case.shape;
        let (at, column) = (at.index(case.lengths[0]), column.index(case.shape.width()));
        // Head of the element in [queries, keys, values], and the query heads that see it.
        let head = column / head_dim;
        let group = heads / kv_heads;
        let seen_by = if head < heads { head..head + 1 } else { (head - heads) % kv_heads * group..((head - heads) % kv_heads + 1) * group };
        for isa in Isa::tested() {
            let chunks = Chunks { rows, block_tokens: 16, threads: 1, together: true, seed: 0 };
            let sound = run(isa, &case, chunks);
            let broken = run(isa, &Case { broken: Some((at, column, value)), ..case.clone() }, chunks);
            for (s, (sound, broken)) in sound.iter().zip(&broken).enumerate() {
                for (nth, (sound, broken)) in sound.chunks(head_dim).zip(broken.chunks(head_dim)).enumerate() {
                    let (position, head_of_row) = (nth / heads, nth % heads);
                    let last = if head < heads { at } else { case.window.map_or(usize::MAX, |window| at + window as usize - 1) };
                    let sees = s == 0 && seen_by.contains(&head_of_row) && (at..=last).contains(&position);
                    let expected = if sees { broken.iter().all(|x| x.is_nan()) } else { bits_of(sound) == bits_of(broken) };
                    prop_assert!(expected, "{} {case:?} position {at} column {column}: sequence {s} position {position} head \
                                  {head_of_row}, {sees}: {broken:?}", isa.name());
                }
            }
        }
    }
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn llama3_frequencies_keep_short_wavelengths_and_stretch_long_ones() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    };
    let plain = inverse_frequencies(128, 500_000.0, &RopeScaling::None);
    let scaled = inverse_frequencies(128, 500_000.0, &scaling);
    let ratios: Vec<f32> = plain.iter().zip(&scaled).map(|(a, b)| a / b).collect();
    assert!(ratios.windows(2).all(|pair| pair[0] <= pair[1] * 1.000_001), "{ratios:?}");
    assert_eq!((ratios[0], ratios[63]), (1.0, 8.0));
    assert!(ratios.iter().any(|ratio| *ratio > 1.1 && *ratio < 7.9), "no wavelength lies between");
}
