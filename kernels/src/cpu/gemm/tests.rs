//! Property tests of GEMM, packing and fused SwiGLU.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::cpu::{Isa, WeightRows};
use crate::dtype::Dtype;
use crate::encoding::Encoding;
use crate::test_size::size;

/// Pseudo-random values in [-scale, scale], by formula.
fn values(seed: u32, n: usize, scale: f32) -> Vec<f32> {
    let value = |i| (crate::philox4x32([i, 1, 0, 0], [seed, 0])[0] as f32 / 2f32.powi(31) - 1.0) * scale;
    (0..n as u32).map(value).collect()
}

/// Returns `values` as a checkpoint stores them, and the rounded values.
fn stored(dtype: Dtype, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let bytes: Vec<u8> = match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
    };
    let mut rounded = vec![0.0; values.len()];
    crate::widen(dtype, &bytes, &mut rounded);
    (bytes, rounded)
}

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

#[derive(Debug, Clone, Copy)]
enum StartKind {
    Zero,
    Bias,
    Output,
}

/// Returns the GEMM of rows `from..to` of x alone.
fn run_gemm(
    pool: &Pool,
    w: &PackedMatrix,
    x: &[f32],
    start_kind: StartKind,
    bias: &[f32],
    y: &[f32],
    rows: Range<usize>,
) -> Vec<f32> {
    let mut y = y[rows.start * w.n()..rows.end * w.n()].to_vec();
    let start = match start_kind {
        StartKind::Zero => AccumulatorInit::Zero,
        StartKind::Bias => AccumulatorInit::Bias(bias),
        StartKind::Output => AccumulatorInit::Output,
    };
    let x = &x[rows.start * w.k()..rows.end * w.k()];
    gemm(pool, w, x, rows.len(), start, &mut y, &mut Activations::default());
    y
}

fn check(
    n: usize,
    k: usize,
    rows: usize,
    dtype: Dtype,
    start_kind: StartKind,
    threads: usize,
    split_row: usize,
    seed: u32,
) -> Result<(), TestCaseError> {
    let (many, single) = (Pool::new(threads).unwrap(), Pool::new(1).unwrap());
    let (bytes, weights) = stored(dtype, &values(seed, n * k, 1.0));
    let (x, bias, y) =
        (values(seed ^ 1, rows * k, 1.0), values(seed ^ 2, n, 1.0), values(seed ^ 3, rows * n, 1.0));
    for isa in Isa::tested() {
        // Two sources, as for concatenated query, key and value projections.
        let split = n / 3;
        let at = split * k * dtype.bytes();
        let sources = [
            WeightRows { encoding: dtype.into(), bytes: &bytes[..at], rows: split, interleaved: None },
            WeightRows { encoding: dtype.into(), bytes: &bytes[at..], rows: n - split, interleaved: None },
        ];
        let w = PackedMatrix::pack(&many, isa, k, &sources, WeightFormat::of(&sources)).unwrap();
        let all = run_gemm(&many, &w, &x, start_kind, &bias, &y, 0..rows);
        for row in 0..rows {
            for column in 0..n {
                let (x, w) = (&x[row * k..][..k], &weights[column * k..][..k]);
                let rounded = |v: f32| if dtype == Dtype::Bf16 { bf16::from_f32(v).to_f32() } else { v };
                let start = match start_kind {
                    StartKind::Zero => 0.0,
                    StartKind::Bias => bias[column],
                    StartKind::Output => y[row * n + column],
                };
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(rounded(*x)) * f64::from(*w));
                let exact = f64::from(start) + terms.clone().sum::<f64>();
                let size = f64::from(start).abs() + terms.map(f64::abs).sum::<f64>();
                let error = (f64::from(all[row * n + column]) - exact).abs();
                prop_assert!(
                    error <= 1e-6 * (k as f64).sqrt() * size.max(1e-6),
                    "{} {dtype:?} row {row} column {column}: off by {error:e} of {size}",
                    isa.name()
                );
            }
        }
        // The same rows in two calls, on one thread, and one by one.
        let split_row = split_row.min(rows);
        let mut parts = run_gemm(&single, &w, &x, start_kind, &bias, &y, 0..split_row);
        parts.extend(run_gemm(&many, &w, &x, start_kind, &bias, &y, split_row..rows));
        prop_assert!(bits(&parts) == bits(&all), "{} {dtype:?}: split at {split_row}", isa.name());
        for row in (0..rows).step_by(rows / 8 + 1) {
            let alone = run_gemm(&many, &w, &x, start_kind, &bias, &y, row..row + 1);
            prop_assert!(
                bits(&alone) == bits(&all[row * n..(row + 1) * n]),
                "{} {dtype:?}: row {row}",
                isa.name()
            );
        }
    }
    Ok(())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(crate::test_size::cases(64))]

    #[test]
    fn gemm_is_correct_and_rows_do_not_affect_each_other(
        n in 1..size(200, 70), k in 1..size(300, 40), rows in 1..size(40, 7), dtype in 0usize..3, start_kind in 0usize..3,
        threads in 1usize..4, split_row in 0usize..40, seed in any::<u32>(),
    ) {
        let start_kind = [StartKind::Zero, StartKind::Bias, StartKind::Output][start_kind];
        check(n, k, rows, DTYPES[dtype], start_kind, threads, split_row, seed)?;
    }
}

#[test]
#[cfg_attr(miri, ignore = "too long for an interpreter")]
fn cache_blocks_of_rows_and_of_k_do_not_change_bits() {
    for dtype in DTYPES {
        check(70, 1500, 530, dtype, StartKind::Bias, 2, 517, 9).unwrap();
        let start_kinds = [StartKind::Output, StartKind::Zero, StartKind::Bias];
        for start_kind in start_kinds.into_iter().take(if inflight_fixtures::is_thorough() { 3 } else { 1 }) {
            check(40, 14_000, 75, dtype, start_kind, 2, 61, 10).unwrap();
        }
    }
}

#[test]
fn sources_of_different_dtypes_become_f32() {
    let pool = Pool::new(1).unwrap();
    let (half, half_values) = stored(Dtype::F16, &values(4, 5 * 3, 1.0));
    let (brain, brain_values) = stored(Dtype::Bf16, &values(5, 2 * 3, 1.0));
    let rows = [
        WeightRows { encoding: Encoding::Plain(Dtype::F16), bytes: &half, rows: 5, interleaved: None },
        WeightRows { encoding: Encoding::Plain(Dtype::Bf16), bytes: &brain, rows: 2, interleaved: None },
    ];
    for isa in Isa::tested() {
        let w = PackedMatrix::pack(&pool, isa, 3, &rows, WeightFormat::of(&rows)).unwrap();
        assert_eq!((w.format(), w.n(), w.k()), (WeightFormat::F32, 7, 3));
        let mut y = vec![0.0; 7 * 3];
        let identity = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        gemm(&pool, &w, &identity, 3, AccumulatorInit::Zero, &mut y, &mut Activations::default());
        let all: Vec<f32> = half_values.iter().chain(&brain_values).copied().collect();
        assert!((0..21).all(|i| y[i % 3 * 7 + i / 3] == all[i]), "{}", isa.name());
    }
}

/// Checks integer GEMM against f64 within half a quantization step per operand, and for batch invariance.
fn check_integers(
    n: usize,
    k: usize,
    rows: usize,
    group: usize,
    four: bool,
    threads: usize,
    split_row: usize,
    seed: u32,
) {
    let (many, single) = (Pool::new(threads).unwrap(), Pool::new(1).unwrap());
    let (bytes, weights) = stored(Dtype::Bf16, &values(seed, n * k, 1.0));
    let (x, bias) = (values(seed ^ 1, rows * k, 1.0), values(seed ^ 2, n, 1.0));
    let format = if four { WeightFormat::Int4 { group } } else { WeightFormat::Int8 { group } };
    let source = [WeightRows { encoding: Dtype::Bf16.into(), bytes: &bytes, rows: n, interleaved: None }];
    let mut first: Option<Vec<f32>> = None;
    for isa in Isa::tested() {
        let w = PackedMatrix::pack(&many, isa, k, &source, format).unwrap();
        assert_eq!((w.format(), w.bytes()), (format, format.packed_bytes(isa, n, k)));
        let all = run_gemm(&many, &w, &x, StartKind::Bias, &bias, &vec![0.0; rows * n], 0..rows);
        for row in 0..rows {
            for column in 0..n {
                let (x, w) = (&x[row * k..][..k], &weights[column * k..][..k]);
                let (mut exact, mut allowed) = (f64::from(bias[column]), 1e-3);
                for (x, w) in x.chunks(group).zip(w.chunks(group)) {
                    let largest = |v: &[f32]| v.iter().fold(0.0f32, |most, v| most.max(v.abs()));
                    // Half a step per operand; for 4 bits a whole one, as extremes may be clamped.
                    let step_x = f64::from(largest(x)) / 127.0 * 0.51;
                    let step_w = f64::from(largest(w)) * if four { 1.01 / 6.9 } else { 0.51 / 127.0 };
                    for (x, w) in x.iter().zip(w) {
                        let (x, w) = (f64::from(*x), f64::from(*w));
                        exact += x * w;
                        allowed += step_x * w.abs() + step_w * x.abs() + step_x * step_w;
                    }
                }
                let error = (f64::from(all[row * n + column]) - exact).abs();
                assert!(error <= allowed, "{} {format} row {row} column {column}: {error:e}", isa.name());
            }
        }
        let split_row = split_row.min(rows);
        let mut parts = run_gemm(&single, &w, &x, StartKind::Bias, &bias, &vec![0.0; rows * n], 0..split_row);
        parts.extend(run_gemm(&many, &w, &x, StartKind::Bias, &bias, &vec![0.0; rows * n], split_row..rows));
        assert!(bits(&parts) == bits(&all), "{} {format}: split at {split_row}", isa.name());
        for row in (0..rows).step_by(rows / 8 + 1) {
            let alone = run_gemm(&many, &w, &x, StartKind::Bias, &bias, &vec![0.0; rows * n], row..row + 1);
            assert!(bits(&alone) == bits(&all[row * n..(row + 1) * n]), "{} {format}: row {row}", isa.name());
        }
        // Sums within groups are exact, so instruction sets differ only by the rounding of sums over groups.
        match &first {
            None => first = Some(all),
            Some(first) => {
                let far = first.iter().zip(&all).find(|(a, b)| (*a - *b).abs() > 1e-4 * a.abs().max(1.0));
                assert!(far.is_none(), "{} {format}: {far:?}", isa.name());
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::test_size::cases(48))]

    #[test]
    fn integer_gemm_is_within_rounding_and_rows_do_not_affect_each_other(
        n in 1..size(140, 70), k in 1..size(300, 40), rows in 1..size(30, 7), group in 1usize..=16, four in any::<bool>(),
        threads in 1usize..4, split_row in 0usize..30, seed in any::<u32>(),
    ) {
        check_integers(n, k, rows, group * 8, four, threads, split_row, seed);
    }
}

proptest! {
    #![proptest_config(crate::test_size::cases(96))]

    #[test]
    fn infinities_and_nan_reach_every_output_of_their_row_and_no_other(
        n in 1..size(140, 70), k in 1..size(300, 40), rows in 1..size(30, 7), group in 1usize..=16, format in 0usize..5,
        at in any::<prop::sample::Index>(), value in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        seed in any::<u32>(),
    ) {
        let pool = Pool::new(1).unwrap();
        // Without zeros, whose product with an infinity is NaN in any case.
        let weights: Vec<f32> = values(seed, n * k, 1.0).iter().map(|w| w + 0.125 * w.signum()).collect();
        let dtype = DTYPES[format.min(2)];
        let (bytes, _) = stored(dtype, &weights);
        let source = [WeightRows { encoding: dtype.into(), bytes: &bytes, rows: n, interleaved: None }];
        let format = match format {
            3 => WeightFormat::Int8 { group: group * 8 },
            4 => WeightFormat::Int4 { group: group * 8 },
            _ => WeightFormat::of(&source),
        };
        let x = values(seed ^ 1, rows * k, 1.0);
        let mut broken = x.clone();
        let at = at.index(x.len());
        broken[at] = value;
        for isa in Isa::tested() {
            let w = PackedMatrix::pack(&pool, isa, k, &source, format).unwrap();
            let none = vec![0.0; rows * n];
            let sound = run_gemm(&pool, &w, &x, StartKind::Zero, &[], &none, 0..rows);
            let outputs = run_gemm(&pool, &w, &broken, StartKind::Zero, &[], &none, 0..rows);
            for row in 0..rows {
                let (sound, outputs) = (&sound[row * n..(row + 1) * n], &outputs[row * n..(row + 1) * n]);
                let expected = match row == at / k {
                    true => outputs.iter().all(|y| !y.is_finite()),
                    false => bits(sound) == bits(outputs),
                };
                prop_assert!(expected, "{} {format} element {at} of row {}: row {row}: {outputs:?}", isa.name(), at / k);
            }
        }
    }
}

proptest! {
    #![proptest_config(crate::test_size::cases(256))]

    #[test]
    fn vectorised_and_scalar_packing_give_the_same_bytes(
        k in 1..size(300, 40), rows in 1..size(20, 5), group in 1usize..=32, offset in prop::sample::select(vec![8, 128]),
        tallest in 1usize..=8, seed in any::<u32>(),
        odd in prop::collection::vec(
            (any::<prop::sample::Index>(), prop::sample::select(vec![
                f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-31, -1e-38, -0.0,
            ])), 0..6),
    ) {
        let mut x = values(seed, rows * k, 3.0);
        odd.iter().for_each(|(at, value)| *at.get_mut(&mut x) = *value);
        activations::tests::check_group(&x, k, group * 8, offset, Tiles::new(rows, tallest))?;
    }
}

#[test]
#[cfg_attr(miri, ignore = "too long for an interpreter")]
fn integer_gemm_of_many_rows_and_long_sums_keeps_its_bits() {
    check_integers(70, 1500, 530, 64, false, 2, 517, 9);
    check_integers(40, 1500, 300, 32, true, 2, 211, 10);
    check_integers(70, 14_000, 95, 128, false, 2, 61, 11);
    check_integers(40, 28_000, 50, 32, true, 2, 33, 12);
}

#[test]
#[cfg_attr(miri, ignore = "too long for an interpreter")]
fn the_largest_integers_of_either_sign_do_not_overflow() {
    let pool = Pool::new(1).unwrap();
    let (n, k) = (20, 256 + 8);
    for signs in [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]] {
        let (bytes, weights) = stored(Dtype::Bf16, &vec![signs[0] * 0.875; n * k]);
        let source = [WeightRows { encoding: Dtype::Bf16.into(), bytes: &bytes, rows: n, interleaved: None }];
        let exact = weights[..k].iter().sum::<f32>() * signs[1] * 2.0;
        for group in [8, 24, 32, 40, 64, 256] {
            for format in [WeightFormat::Int8 { group }, WeightFormat::Int4 { group }] {
                for isa in Isa::tested() {
                    let w = PackedMatrix::pack(&pool, isa, k, &source, format).unwrap();
                    for rows in [1, 2, 7] {
                        let x = vec![signs[1] * 2.0; rows * k];
                        let mut y = vec![0.0; rows * n];
                        gemm(&pool, &w, &x, rows, AccumulatorInit::Zero, &mut y, &mut Activations::default());
                        let near = |y: &f32| (y - exact).abs() <= 1e-2 * exact.abs();
                        assert!(y.iter().all(near), "{} {format}: {y:?}, not {exact}", isa.name());
                    }
                }
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too long for an interpreter")]
fn gguf_blocks_keep_every_bit() {
    let pool = Pool::new(1).unwrap();
    let k = 64;
    for (encoding, format) in [
        (Encoding::Q8_0, WeightFormat::Int8 { group: 32 }),
        (Encoding::Q4_0, WeightFormat::Int4 { group: 32 }),
        (Encoding::Q5_0, WeightFormat::Int8 { group: 32 }),
        (Encoding::Iq4Nl, WeightFormat::Int8 { group: 32 }),
        (Encoding::Mxfp4, WeightFormat::Int8 { group: 32 }),
    ] {
        let random = |i: usize| crate::philox4x32([i as u32, 0, 0, 0], [7, 0])[0] as u8;
        let mut bytes: Vec<u8> = (0..encoding.bytes(5 * k)).map(random).collect();
        for block in bytes.chunks_exact_mut(encoding.block_bytes()) {
            match encoding {
                Encoding::Mxfp4 => block[0] = 118 + block[0] % 5,
                _ => block[..2].copy_from_slice(&f16::from_f32(0.013).to_le_bytes()),
            }
        }
        let mut weights = vec![0.0; 5 * k];
        encoding.widen(&bytes, &mut weights);
        let rows = [WeightRows { encoding, bytes: &bytes, rows: 5, interleaved: None }];
        assert_eq!(WeightFormat::of(&rows), format);
        for isa in Isa::tested() {
            let w = PackedMatrix::pack(&pool, isa, k, &rows, format).unwrap();
            let mut unit = vec![0.0; k * k];
            (0..k).for_each(|i| unit[i * k + i] = 127.0);
            let mut y = vec![0.0; k * 5];
            gemm(&pool, &w, &unit, k, AccumulatorInit::Zero, &mut y, &mut Activations::default());
            for i in 0..k * 5 {
                let (row, column) = (i / 5, i % 5);
                let exact = 127.0 * weights[column * k + row];
                assert!((y[i] - exact).abs() <= 1e-6 * exact.abs(), "{} {encoding}: {i}", isa.name());
            }
        }
    }
}

/// Checks the fused gate against two kernels for `half` gates and as many ups; the activation changes with the seed.
fn check_gated(half: usize, k: usize, rows: usize, format: Option<WeightFormat>, threads: usize, seed: u32) {
    let pool = Pool::new(threads).unwrap();
    let activation = if seed.is_multiple_of(2) { Activation::Silu } else { Activation::GeluTanh };
    let (bytes, _) = stored(Dtype::Bf16, &values(seed, 2 * half * k, 1.0));
    let (x, bias) = (values(seed ^ 1, rows * k, 1.0), values(seed ^ 2, 2 * half, 1.0));
    let source =
        [WeightRows { encoding: Dtype::Bf16.into(), bytes: &bytes, rows: 2 * half, interleaved: None }];
    let format = format.unwrap_or(WeightFormat::of(&source));
    for isa in Isa::tested() {
        let w = PackedMatrix::pack(&pool, isa, k, &source, format).unwrap();
        for bias in [None, Some(&bias[..])] {
            let scratch = &mut Activations::default();
            let (mut between, mut unfused) = (vec![0.0; rows * 2 * half], vec![0.0; rows * half]);
            gemm(
                &pool,
                &w,
                &x,
                rows,
                bias.map_or(AccumulatorInit::Zero, AccumulatorInit::Bias),
                &mut between,
                scratch,
            );
            crate::cpu::gate(&pool, isa, activation, &between, half, &mut unfused);
            let mut fused = vec![f32::NAN; rows * half];
            gemm_gated(&pool, activation, &w, &x, rows, bias, &mut between, &mut fused, scratch);
            let name = isa.name();
            assert!(bits(&fused) == bits(&unfused), "{name} {format}: {half} {k} {rows} seed {seed}");
        }
    }
}

proptest! {
    #![proptest_config(crate::test_size::cases(32))]

    #[test]
    fn a_fused_gate_does_not_change_bits(
        panels in 1..size(5, 3), odd in 0usize..2, k in 1..size(200, 40), rows in 1..size(60, 7), kind in 0usize..3,
        threads in 1usize..4, seed in any::<u32>(),
    ) {
        let group = 32;
        let format = [None, Some(WeightFormat::Int8 { group }), Some(WeightFormat::Int4 { group })][kind];
        check_gated(panels * 32 + odd * 5, k, rows, format, threads, seed);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too long for an interpreter")]
fn a_fused_gate_of_many_rows_and_long_sums_does_not_change_bits() {
    check_gated(96, 2500, 530, None, 2, 11);
    check_gated(64, 2500, 300, Some(WeightFormat::Int8 { group: 64 }), 2, 12);
    check_gated(64, 300, 600, None, 2, 13);
    check_gated(64, 8_000, 60, None, 2, 14);
    check_gated(64, 14_000, 60, Some(WeightFormat::Int8 { group: 64 }), 2, 15);
}
