//! Row-wise kernels between GEMMs: RMS norm and gated activations.

use std::marker::PhantomData;
use std::ops::Range;

use super::isa::Isa;
use super::matrix::SharedPtr;
use super::pool::Pool;
use super::simd::{self, Kernel, LANES_MAX, Simd, load_part, store_part};

/// Elements below which a second thread does not pay.
const SMALL: usize = 1 << 14;

/// Computes y = x / sqrt(mean(x^2) + eps) * weight for each row of x[rows, width].
///
/// # Panics
/// If the shapes do not match.
pub fn rms_norm(pool: &Pool, isa: Isa, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == y.len() && x.len().is_multiple_of(width), "x and y are not [rows, width]");
    let rows = x.len() / width;
    let y = SharedPtr(y.as_mut_ptr());
    pool.split(rows, grain(rows, width), &|rows| {
        simd::run(isa, RmsNorm { x, weight, eps, y: y.get(), rows });
    });
}

/// Activation of the gates of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x * sigmoid(x) (SwiGLU: Shazeer, 2020).
    Silu,
    /// GELU by the approximation with tanh (Hendrycks and Gimpel, 2016).
    GeluTanh,
}

/// Computes y = activation(gate) * up for each row of gate_up[rows, 2 * width]: first the gates, then the ups.
///
/// # Panics
/// If the shapes do not match.
pub fn gate(pool: &Pool, isa: Isa, activation: Activation, gate_up: &[f32], width: usize, y: &mut [f32]) {
    assert!(
        y.len().is_multiple_of(width) && gate_up.len() == 2 * y.len(),
        "gate_up is not [rows, 2 * width]"
    );
    let rows = y.len() / width;
    let y = SharedPtr(y.as_mut_ptr());
    pool.split(rows, grain(rows, width), &|rows| {
        let (y, rows) = (y.get(), rows.clone());
        match activation {
            Activation::Silu => {
                simd::run(isa, Gate::<Silu> { gate_up, width, y, rows, activation: PhantomData })
            }
            Activation::GeluTanh => {
                simd::run(isa, Gate::<GeluTanh> { gate_up, width, y, rows, activation: PhantomData });
            }
        }
    });
}

/// Computes x = x * sigmoid(gates), element by element.
///
/// # Panics
/// If there are not as many gates as elements.
pub fn sigmoid_gate(pool: &Pool, isa: Isa, gates: &[f32], x: &mut [f32]) {
    assert_eq!(gates.len(), x.len(), "an element has a gate each");
    let (elements, x) = (gates.len(), SharedPtr(x.as_mut_ptr()));
    // Ranges are of whole vectors, so that the bits of an element do not depend on the threads.
    let vectors = elements.div_ceil(LANES_MAX);
    pool.split(vectors, SMALL / LANES_MAX, &|range| {
        let range = range.start * LANES_MAX..(range.end * LANES_MAX).min(elements);
        simd::run(isa, SigmoidGate { gates, x: x.get(), range });
    });
}

/// Returns the rows per task: all if they have few elements, else 1.
pub(crate) fn grain(rows: usize, width: usize) -> usize {
    if rows * width < SMALL { rows } else { 1 }
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    y: *mut f32,
    rows: Range<usize>,
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = self.weight.len();
        for row in self.rows {
            let x = &self.x[row * width..(row + 1) * width];
            // SAFETY: rows are within `y`, each in one task; the caller guarantees the instruction set.
            unsafe {
                let y = std::slice::from_raw_parts_mut(self.y.add(row * width), width);
                let scale = rms_scale::<S>(x, self.eps);
                for i in 0..width {
                    y[i] = x[i] * scale * self.weight[i];
                }
            }
        }
    }
}

/// Returns 1 / sqrt(mean(x^2) + eps); NaN if an element is infinite or NaN, or the mean overflows.
///
/// # Safety
/// The machine supports `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn rms_scale<S: Simd>(x: &[f32], eps: f32) -> f32 {
    // SAFETY: the caller guarantees `S`'s instruction set, and every load is within `x`.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        let whole = x.len() / (4 * S::LANES) * (4 * S::LANES);
        for at in (0..whole).step_by(4 * S::LANES) {
            for c in 0..4 {
                let v = S::load(x.as_ptr().add(at + c * S::LANES));
                sums[c] = S::fma(v, v, sums[c]);
            }
        }
        for at in (whole..x.len()).step_by(S::LANES) {
            let v = load_part::<S>(x.as_ptr().add(at), (x.len() - at).min(S::LANES), 0.0);
            sums[0] = S::fma(v, v, sums[0]);
        }
        let sum = S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
        let mean = sum / x.len() as f32 + eps;
        // Squares that overflow would make every element 0, and the row look sound.
        if mean < f32::INFINITY { 1.0 / mean.sqrt() } else { f32::NAN }
    }
}

/// Activation as a function of vectors.
pub(crate) trait GateFn {
    /// Returns activation(gate) * up.
    ///
    /// # Safety
    /// The machine supports `S`'s instruction set.
    unsafe fn mul<S: Simd>(gate: S::V, up: S::V) -> S::V;
}

/// [`Activation::Silu`].
pub(crate) struct Silu;

/// [`Activation::GeluTanh`].
pub(crate) struct GeluTanh;

struct Gate<'a, A> {
    gate_up: &'a [f32],
    width: usize,
    y: *mut f32,
    rows: Range<usize>,
    activation: PhantomData<A>,
}

impl<A: GateFn> Kernel for Gate<'_, A> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = self.width;
        for row in self.rows {
            let (gate, up) = self.gate_up[row * 2 * width..(row + 1) * 2 * width].split_at(width);
            for at in (0..width).step_by(S::LANES) {
                let lanes = (width - at).min(S::LANES);
                // SAFETY: `lanes` elements from `at` on are within the row, which belongs to one task.
                unsafe {
                    let (gate, up) = (gate.as_ptr().add(at), up.as_ptr().add(at));
                    let y = self.y.add(row * width + at);
                    if lanes == S::LANES {
                        S::store(y, A::mul::<S>(S::load(gate), S::load(up)));
                    } else {
                        let part =
                            A::mul::<S>(load_part::<S>(gate, lanes, 0.0), load_part::<S>(up, lanes, 0.0));
                        store_part::<S>(y, lanes, part);
                    }
                }
            }
        }
    }
}

struct SigmoidGate<'a> {
    gates: &'a [f32],
    x: *mut f32,
    range: Range<usize>,
}

impl Kernel for SigmoidGate<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for at in self.range.clone().step_by(S::LANES) {
            let lanes = (self.range.end - at).min(S::LANES);
            // SAFETY: `lanes` elements from `at` on are within the range, which belongs to one task.
            unsafe {
                let gate = load_part::<S>(self.gates.as_ptr().add(at), lanes, 0.0);
                let x = load_part::<S>(self.x.add(at), lanes, 0.0);
                let minus = S::min(S::splat(127.0), S::mul(gate, S::splat(-std::f32::consts::LOG2_E)));
                store_part::<S>(self.x.add(at), lanes, S::div(x, S::add(S::splat(1.0), S::exp2(minus))));
            }
        }
    }
}

impl GateFn for Silu {
    #[inline(always)]
    unsafe fn mul<S: Simd>(gate: S::V, up: S::V) -> S::V {
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe {
            let minus = S::min(S::splat(127.0), S::mul(gate, S::splat(-std::f32::consts::LOG2_E)));
            let silu = S::div(gate, S::add(S::splat(1.0), S::exp2(minus)));
            S::mul(silu, up)
        }
    }
}

impl GateFn for GeluTanh {
    #[inline(always)]
    unsafe fn mul<S: Simd>(gate: S::V, up: S::V) -> S::V {
        // (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), with z = sqrt(2 / pi) (x + 0.044715 x^3).
        const FACTOR: f32 = -2.0 * 0.797_884_6 * std::f32::consts::LOG2_E;
        // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
        unsafe {
            let cube = S::mul(S::mul(gate, gate), gate);
            let minus = S::mul(S::fma(cube, S::splat(0.044_715), gate), S::splat(FACTOR));
            let gelu = S::div(gate, S::add(S::splat(1.0), S::exp2(S::min(S::splat(127.0), minus))));
            S::mul(gelu, up)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_size::size;
    use proptest::prelude::*;

    fn values(seed: u32, n: usize, scale: f32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| (crate::philox4x32([i, 0, 0, 0], [seed, 0])[0] as f32 / 2f32.powi(31) - 1.0) * scale)
            .collect()
    }

    fn exact_gate(activation: Activation, gate: f32, up: f32) -> f64 {
        let (g, u) = (f64::from(gate), f64::from(up));
        match activation {
            Activation::Silu => g / (1.0 + (-g).exp()) * u,
            Activation::GeluTanh => {
                let z = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
                0.5 * g * (1.0 + z.tanh()) * u
            }
        }
    }

    #[test]
    fn sigmoid_gates_are_correct_whatever_the_threads() {
        let (gates, from) = (values(3, 5000, 30.0), values(4, 5000, 3.0));
        for isa in Isa::tested() {
            let [alone, together] = [1, 3].map(|threads| {
                let mut x = from.clone();
                sigmoid_gate(&Pool::new(threads).unwrap(), isa, &gates, &mut x);
                x
            });
            assert_eq!(alone, together);
            for ((gate, before), x) in gates.iter().zip(&from).zip(&alone) {
                let exact = f64::from(*before) / (1.0 + (-f64::from(*gate)).exp());
                assert!((f64::from(*x) - exact).abs() <= 1e-6 * exact.abs().max(1e-3), "{gate}");
            }
        }
    }

    proptest! {
        #![proptest_config(crate::test_size::cases(48))]

        #[test]
        fn norm_and_gates_are_correct_and_independent_of_other_rows(
            seed in any::<u32>(), width in 1..size(300, 40), rows in 1..size(40, 5), threads in 1usize..4,
        ) {
            let (pool, single) = (Pool::new(threads).unwrap(), Pool::new(1).unwrap());
            let x = values(seed, rows * width, 3.0);
            let weight = values(!seed, width, 2.0);
            let gate_up = values(seed ^ 5, rows * width * 2, 30.0);
            for isa in Isa::tested() {
                let (mut y, mut alone) = (vec![0.0; rows * width], vec![0.0; width]);
                rms_norm(&pool, isa, &x, &weight, 1e-5, &mut y);
                for row in 0..rows {
                    let x = &x[row * width..(row + 1) * width];
                    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                    rms_norm(&single, isa, x, &weight, 1e-5, &mut alone);
                    prop_assert_eq!(&y[row * width..(row + 1) * width], &alone[..]);
                    for i in 0..width {
                        let exact = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                        prop_assert!((f64::from(alone[i]) - exact).abs() <= 1e-5 * exact.abs().max(1e-3));
                    }
                }
                for activation in [Activation::Silu, Activation::GeluTanh] {
                    gate(&pool, isa, activation, &gate_up, width, &mut y);
                    for row in 0..rows {
                        let (gates, ups) = gate_up[row * 2 * width..(row + 1) * 2 * width].split_at(width);
                        for i in 0..width {
                            let exact = exact_gate(activation, gates[i], ups[i]);
                            let error = (f64::from(y[row * width + i]) - exact).abs();
                            prop_assert!(error <= 1e-5 * exact.abs().max(1e-2), "{:?} of {}", activation, gates[i]);
                            // A single element, padded to a vector, must have the bits that it has within one.
                            let mut one = [0.0];
                            gate(&single, isa, activation, &[gates[i], ups[i]], 1, &mut one);
                            prop_assert_eq!(one[0].to_bits(), y[row * width + i].to_bits());
                        }
                    }
                }
            }
        }
    }
}
