use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::cpu::{Isa, Rows};

/// Pseudo-random numbers in [-scale, scale], by formula.
fn values(seed: u32, n: usize, scale: f32) -> Vec<f32> {
    let value = |i| (crate::philox4x32([i, 1, 0, 0], [seed, 0])[0] as f32 / 2f32.powi(31) - 1.0) * scale;
    (0..n as u32).map(value).collect()
}

/// `values` as a checkpoint stores them, and what they are once rounded.
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
enum Begin {
    Zero,
    Bias,
    Output,
}

/// The product of rows `from..to` of x alone.
fn product(
    pool: &Pool,
    w: &PackedMatrix,
    x: &[f32],
    begin: Begin,
    bias: &[f32],
    y: &[f32],
    rows: Range<usize>,
) -> Vec<f32> {
    let mut y = y[rows.start * w.n()..rows.end * w.n()].to_vec();
    let start = match begin {
        Begin::Zero => Start::Zero,
        Begin::Bias => Start::Bias(bias),
        Begin::Output => Start::Output,
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
    begin: Begin,
    threads: usize,
    cut: usize,
    seed: u32,
) -> Result<(), TestCaseError> {
    let (many, single) = (Pool::new(threads).unwrap(), Pool::new(1).unwrap());
    let (bytes, weights) = stored(dtype, &values(seed, n * k, 1.0));
    let (x, bias, y) =
        (values(seed ^ 1, rows * k, 1.0), values(seed ^ 2, n, 1.0), values(seed ^ 3, rows * n, 1.0));
    for isa in Isa::available() {
        // Two sources, as where queries, keys and values are packed as one.
        let split = n / 3;
        let at = split * k * dtype.bytes();
        let sources = [
            Rows { dtype, bytes: &bytes[..at], rows: split },
            Rows { dtype, bytes: &bytes[at..], rows: n - split },
        ];
        let w = PackedMatrix::pack(&many, isa, k, &sources);
        let all = product(&many, &w, &x, begin, &bias, &y, 0..rows);
        for row in 0..rows {
            for column in 0..n {
                let (x, w) = (&x[row * k..][..k], &weights[column * k..][..k]);
                let rounded = |v: f32| if dtype == Dtype::Bf16 { bf16::from_f32(v).to_f32() } else { v };
                let start = match begin {
                    Begin::Zero => 0.0,
                    Begin::Bias => bias[column],
                    Begin::Output => y[row * n + column],
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
        // The same rows in two products, on one thread, and one by one.
        let cut = cut.min(rows);
        let mut parts = product(&single, &w, &x, begin, &bias, &y, 0..cut);
        parts.extend(product(&many, &w, &x, begin, &bias, &y, cut..rows));
        prop_assert!(bits(&parts) == bits(&all), "{} {dtype:?}: cut at {cut}", isa.name());
        for row in (0..rows).step_by(rows / 8 + 1) {
            let alone = product(&many, &w, &x, begin, &bias, &y, row..row + 1);
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
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn products_are_right_and_rows_do_not_see_each_other(
        n in 1usize..200, k in 1usize..300, rows in 1usize..40, dtype in 0usize..3, begin in 0usize..3,
        threads in 1usize..4, cut in 0usize..40, seed in any::<u32>(),
    ) {
        let begin = [Begin::Zero, Begin::Bias, Begin::Output][begin];
        check(n, k, rows, DTYPES[dtype], begin, threads, cut, seed)?;
    }
}

#[test]
fn cache_blocks_of_rows_and_of_k_leave_the_bits_alone() {
    for dtype in DTYPES {
        check(70, 1500, 530, dtype, Begin::Bias, 2, 517, 9).unwrap();
    }
}

#[test]
fn sources_of_different_dtypes_become_f32() {
    let pool = Pool::new(1).unwrap();
    let (half, half_values) = stored(Dtype::F16, &values(4, 5 * 3, 1.0));
    let (brain, brain_values) = stored(Dtype::Bf16, &values(5, 2 * 3, 1.0));
    let rows = [
        Rows { dtype: Dtype::F16, bytes: &half, rows: 5 },
        Rows { dtype: Dtype::Bf16, bytes: &brain, rows: 2 },
    ];
    for isa in Isa::available() {
        let w = PackedMatrix::pack(&pool, isa, 3, &rows);
        assert_eq!((w.dtype(), w.n(), w.k()), (Dtype::F32, 7, 3));
        let mut y = vec![0.0; 7 * 3];
        let identity = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        gemm(&pool, &w, &identity, 3, Start::Zero, &mut y, &mut Activations::default());
        let all: Vec<f32> = half_values.iter().chain(&brain_values).copied().collect();
        assert!((0..21).all(|i| y[i % 3 * 7 + i / 3] == all[i]), "{}", isa.name());
    }
}
