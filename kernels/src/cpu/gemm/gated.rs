//! GEMM with a fused gate: the gate and up projections of an MLP.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::matrix::{PackedMatrix, panel_columns};
use super::super::pool::Pool;
use super::super::rows::{Activation, GateFn, GeluTanh, Silu, gate};
use super::super::simd::{LANES_MAX, Simd};
use super::{AccumulatorInit, Activations, Epilogue, GemmTask, ROW_BLOCK, Tiles, gemm, tile_rows};

/// Computes y[rows, n / 2] = activation(x G^T) * (x U^T) from x[rows, k], where W[n, k] is G[n / 2, k] above U[n /
/// 2, k]. `between` is scratch for [rows, n]. The bits are those of [`gemm`] followed by [`gate`]; with
/// many rows the intermediate values stay in the second-level cache.
///
/// # Panics
/// If shapes do not match or n is odd.
pub fn gemm_gated(
    pool: &Pool,
    activation: Activation,
    w: &PackedMatrix,
    x: &[f32],
    rows: usize,
    bias: Option<&[f32]>,
    between: &mut [f32],
    y: &mut [f32],
    scratch: &mut Activations,
) {
    let half = w.n / 2;
    assert!(w.n.is_multiple_of(2), "n is odd");
    assert_eq!(x.len(), rows * w.k, "x is not [rows, k]");
    assert_eq!(y.len(), rows * half, "y is not [rows, n / 2]");
    assert!(bias.is_none_or(|bias| bias.len() == w.n), "the bias is not [n]");
    let start = bias.map_or(AccumulatorInit::Zero, AccumulatorInit::Bias);
    // Fusion needs panels that belong to one half; and few rows are faster with interleaved panels.
    let unfused = !half.is_multiple_of(panel_columns(w.isa)) || Tiles::new(rows, tile_rows(w)).count() < 2;
    if unfused {
        let between = &mut between[..rows * w.n];
        gemm(pool, w, x, rows, start, between, scratch);
        gate(pool, w.isa, activation, between, half, y);
    } else {
        let epilogue = Epilogue::Gate(activation);
        super::gemm_with_epilogue(pool, w, x, rows, start, y.as_mut_ptr(), epilogue, scratch);
    }
}

/// Accumulators of one gate panel and one up panel for the rows of a block; [2, rows, columns].
pub(super) struct GateUpSums([[MaybeUninit<f32>; ROW_BLOCK * 2 * LANES_MAX]; 2]);

impl GateUpSums {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([const { [const { MaybeUninit::uninit() }; ROW_BLOCK * 2 * LANES_MAX] }; 2])
    }

    /// Returns a pointer that is relative to row 0 and column 0 of y, for a buffer that begins at row `row`
    /// of `panel`, and the elements between rows.
    #[inline(always)]
    pub(super) fn sums<S: Simd>(&mut self, part: usize, row: usize, panel: usize) -> (*mut f32, usize) {
        let columns = 2 * S::LANES;
        let first = self.0[part].as_mut_ptr().cast::<f32>();
        (first.wrapping_sub(row * columns + panel * columns), columns)
    }

    /// Writes activation(gate) * up of some rows for the columns of up panel `panel`.
    ///
    /// # Safety
    /// The caller guarantees `S`'s instruction set, that the accumulators of these rows, at most
    /// [`ROW_BLOCK`], were written, and that no other thread writes the panel's columns.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        &self,
        activation: Activation,
        job: &GemmTask<'_>,
        rows: Range<usize>,
        panel: usize,
    ) {
        // SAFETY: as of the caller.
        unsafe {
            match activation {
                Activation::Silu => self.write_as::<S, Silu>(job, rows, panel),
                Activation::GeluTanh => self.write_as::<S, GeluTanh>(job, rows, panel),
            }
        }
    }

    #[inline(always)]
    unsafe fn write_as<S: Simd, A: GateFn>(&self, job: &GemmTask<'_>, rows: Range<usize>, panel: usize) {
        let columns = 2 * S::LANES;
        let half = job.w.n / 2;
        let [gates, ups] = [0, 1].map(|part: usize| self.0[part].as_ptr().cast::<f32>());
        let y = job.y.wrapping_add(panel * columns - half);
        for (i, row) in rows.enumerate() {
            for lane in (0..columns).step_by(S::LANES) {
                let at = i * columns + lane;
                // SAFETY: the caller guarantees written accumulators and exclusive columns of y.
                unsafe {
                    let out = A::mul::<S>(S::load(gates.add(at)), S::load(ups.add(at)));
                    S::store(y.add(row * half + lane), out);
                }
            }
        }
    }
}
