//! Convolution before the delta rule, and the norms of queries and keys.

use super::super::rows::{GateFn as _, Silu};
use super::super::simd::{Kernel, Simd};
use super::job::{DeltaJob, DeltaSequence, DeltaShape};

/// Queries and keys of a key head, for all rows of a sequence.
pub(super) struct KeyRows<'a> {
    pub job: &'a DeltaJob<'a>,
    pub sequence: usize,
    pub head: usize,
}

impl Kernel for KeyRows<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { job, sequence, head } = self;
        let DeltaShape { key_heads, key_dim, .. } = job.shape;
        // SAFETY: the piece belongs to this task, and has the log before the inputs of the convolution.
        unsafe {
            let kept = job.piece(sequence, head).add(job.shape.log() * key_dim);
            for (part, scale) in [1.0 / (key_dim as f32).sqrt(), 1.0].into_iter().enumerate() {
                let column = (part * key_heads + head) * key_dim;
                convolve::<S>(job, sequence, column, key_dim, kept.add(part * key_dim), 2 * key_dim);
                for row in job.sequences[sequence].rows.clone() {
                    normalize::<S>(job.channels(row, column), key_dim, scale);
                }
            }
        }
    }
}

/// Divides a vector by its length, and multiplies it with `scale`.
///
/// # Safety
/// The machine supports `S`'s instruction set, and `x` is valid for `width` elements, whole vectors.
#[inline(always)]
unsafe fn normalize<S: Simd>(x: *mut f32, width: usize, scale: f32) {
    // SAFETY: the caller guarantees the elements.
    unsafe {
        let mut sum = S::splat(0.0);
        for at in (0..width).step_by(S::LANES) {
            let v = S::load(x.add(at));
            sum = S::fma(v, v, sum);
        }
        let factor = S::splat(scale / (S::sum(sum) + 1e-6).sqrt());
        for at in (0..width).step_by(S::LANES) {
            S::store(x.add(at), S::mul(S::load(x.add(at)), factor));
        }
    }
}

/// Convolves `width` channels from `column` on of a sequence's rows in place, with the activation behind it. The inputs of the last
/// positions are kept, at `kept` with `stride` elements from one to the next.
///
/// # Safety
/// The machine supports `S`'s instruction set; the channels and what is kept of them belong to the caller.
#[inline(always)]
pub(super) unsafe fn convolve<S: Simd>(
    job: &DeltaJob<'_>,
    sequence: usize,
    column: usize,
    width: usize,
    kept: *mut f32,
    stride: usize,
) {
    let DeltaSequence { ref rows, position, .. } = job.sequences[sequence];
    let (taps, inputs, channels) = (job.shape.taps, job.shape.inputs(), job.shape.channels());
    // SAFETY: `check` has bounded rows, weights and places; columns and vectors are whole.
    unsafe {
        // The inputs before the first row; zeros before the sequence.
        let mut before = vec![0.0f32; (taps - 1) * width];
        for (back, input) in before.chunks_exact_mut(width).rev().enumerate() {
            if let Some(at) = position.checked_sub(back + 1) {
                std::ptr::copy_nonoverlapping(kept.add(at % inputs * stride), input.as_mut_ptr(), width);
            }
        }
        for nth in rows.len().saturating_sub(inputs)..rows.len() {
            let to = kept.add((position + nth) % inputs * stride);
            std::ptr::copy_nonoverlapping(job.channels(rows.start + nth, column), to, width);
        }
        let weights = job.weights.convolution.as_ptr().add(column);
        let one = S::splat(1.0);
        // From the last row on, so that no input is overwritten before it is used.
        for nth in (0..rows.len()).rev() {
            let to = job.channels(rows.start + nth, column);
            for at in (0..width).step_by(S::LANES) {
                let mut sum = S::splat(0.0);
                for tap in 0..taps {
                    let from = match (nth + tap).checked_sub(taps - 1) {
                        Some(nth) => job.channels(rows.start + nth, column).cast_const(),
                        None => before.as_ptr().add((nth + tap) * width),
                    };
                    sum = S::fma(S::load(weights.add(tap * channels + at)), S::load(from.add(at)), sum);
                }
                S::store(to.add(at), Silu::mul::<S>(sum, one));
            }
        }
    }
}
