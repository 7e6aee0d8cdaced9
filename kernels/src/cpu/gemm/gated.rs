//! The first two products of a feed-forward part together with what joins them.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::matrix::{PackedMatrix, panel_columns};
use super::super::pool::Pool;
use super::super::rows::{gated, swiglu};
use super::super::simd::{LANES_MAX, Simd};
use super::{Activations, Multiply, ROW_BLOCK, Start, Tiles, Writes, gemm, tile_rows};

/// y[rows, n / 2] = silu(x G^T) * (x U^T), where W[n, k] is G[n / 2, k] above U[n / 2, k], from x[rows, k]. `between` is
/// room for [rows, n]. The bits are those of [`gemm`] and [`swiglu`] one after the other; with many rows what lies
/// between them does not leave the second-level cache.
///
/// # Panics
/// If shapes do not match or n is odd.
pub fn gemm_swiglu(
    pool: &Pool,
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
    let start = bias.map_or(Start::Zero, Start::Bias);
    // A panel must belong to one half. And few rows are read from memory faster by panels abreast.
    let apart = !half.is_multiple_of(panel_columns(w.isa)) || Tiles::new(rows, tile_rows(w)).count() < 2;
    if apart {
        let between = &mut between[..rows * w.n];
        gemm(pool, w, x, rows, start, between, scratch);
        swiglu(pool, w.isa, between, half, y);
    } else {
        super::multiply(pool, w, x, rows, start, y.as_mut_ptr(), Writes::Gated, scratch);
    }
}

/// Sums of one panel of gates and one of ups, for the rows of a block; [2, rows, columns].
pub(super) struct Room([[MaybeUninit<f32>; ROW_BLOCK * 2 * LANES_MAX]; 2]);

impl Room {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([const { [const { MaybeUninit::uninit() }; ROW_BLOCK * 2 * LANES_MAX] }; 2])
    }

    /// Where the sums of row 0 and column 0 would be if the block's first row is `row` and the panel is `panel`, and
    /// the numbers from one row to the next.
    #[inline(always)]
    pub(super) fn sums<S: Simd>(&mut self, part: usize, row: usize, panel: usize) -> (*mut f32, usize) {
        let columns = 2 * S::LANES;
        let first = self.0[part].as_mut_ptr().cast::<f32>();
        (first.wrapping_sub(row * columns + panel * columns), columns)
    }

    /// Writes what the gates and the ups of some rows come to, for the ups' panel.
    ///
    /// # Safety
    /// As [`Simd`]; the sums of these rows, at most [`ROW_BLOCK`], were written, and nobody else writes this panel's columns.
    #[inline(always)]
    pub(super) unsafe fn join<S: Simd>(&self, job: &Multiply<'_>, rows: Range<usize>, panel: usize) {
        let columns = 2 * S::LANES;
        let half = job.w.n / 2;
        let [gates, ups] = [0, 1].map(|part: usize| self.0[part].as_ptr().cast::<f32>());
        let y = job.y.wrapping_add(panel * columns - half);
        for (i, row) in rows.enumerate() {
            for lane in (0..columns).step_by(S::LANES) {
                let at = i * columns + lane;
                // SAFETY: passed on to the caller.
                unsafe {
                    let out = gated::<S>(S::load(gates.add(at)), S::load(ups.add(at)));
                    S::store(y.add(row * half + lane), out);
                }
            }
        }
    }
}
