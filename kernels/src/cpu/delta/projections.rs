//! Convolution before the delta rule, and the norms of queries and keys.

use super::super::rows::{GateFn as _, Silu};
use super::super::simd::{Kernel, Simd};
use super::job::{DeltaJob, DeltaSequence, DeltaShape, HEADER};

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
        // SAFETY: the pieces belong to this task; the log of keys is before the inputs of the convolution.
        unsafe {
            let header = job.state(sequence, head);
            let log = job.log(sequence, head).add(job.shape.log() * key_dim);
            for (part, scale) in [1.0 / (key_dim as f32).sqrt(), 1.0].into_iter().enumerate() {
                let column = (part * key_heads + head) * key_dim;
                let inputs = Inputs {
                    log: log.add(part * key_dim),
                    state: header.add(HEADER + part * key_dim),
                    state_at: (*header).to_bits() as usize,
                    stride: 2 * key_dim,
                };
                convolve::<S>(job, sequence, column, key_dim, &inputs);
                for row in job.sequences[sequence].rows.clone() {
                    normalize::<S>(job.channels(row, column), key_dim, scale);
                }
            }
            *header = f32::from_bits(job.keep(sequence) as u32);
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

/// Kept inputs of a convolution.
pub(super) struct Inputs {
    /// Those of the last positions, as a ring.
    pub log: *mut f32,
    /// Those before the position of the state.
    pub state: *mut f32,
    /// Position of the state before the rows.
    pub state_at: usize,
    /// Elements from one position to the next.
    pub stride: usize,
}

/// Convolves `width` channels from `column` on of a sequence's rows in place, with the activation behind it, and keeps the inputs of the last
/// positions and those before the state.
///
/// # Safety
/// The machine supports `S`'s instruction set; the channels and what is kept of them belong to the caller.
#[inline(always)]
pub(super) unsafe fn convolve<S: Simd>(
    job: &DeltaJob<'_>,
    sequence: usize,
    column: usize,
    width: usize,
    kept: &Inputs,
) {
    let DeltaSequence { ref rows, position, .. } = job.sequences[sequence];
    let (taps, inputs, channels) = (job.shape.taps, job.shape.inputs(), job.shape.channels());
    let keep = job.keep(sequence);
    // SAFETY: `check` has bounded rows, weights and places; columns and vectors are whole.
    unsafe {
        let in_log = |at: usize| kept.log.add(at % inputs * kept.stride);
        let in_state = |nth: usize| kept.state.add(nth * kept.stride);
        // The log of a sequence that resumes from a state is of another one.
        if position > 0 && position == kept.state_at {
            for nth in 0..taps - 1 {
                std::ptr::copy_nonoverlapping(in_state(nth), in_log(position + nth + 1 - taps), width);
            }
        }
        // The inputs before the first row; zeros before the sequence.
        let mut before = vec![0.0f32; (taps - 1) * width];
        for (back, input) in before.chunks_exact_mut(width).rev().enumerate() {
            if let Some(at) = position.checked_sub(back + 1) {
                std::ptr::copy_nonoverlapping(in_log(at), input.as_mut_ptr(), width);
            }
        }
        // A state that stays keeps its inputs.
        if keep > 0 && (position == 0 || keep != kept.state_at) {
            for nth in 0..taps - 1 {
                let at = keep + nth + 1 - taps;
                let from = match at.checked_sub(position) {
                    Some(row) => job.channels(rows.start + row, column),
                    None => in_log(at),
                };
                std::ptr::copy_nonoverlapping(from, in_state(nth), width);
            }
        }
        for nth in rows.len().saturating_sub(inputs)..rows.len() {
            std::ptr::copy_nonoverlapping(
                job.channels(rows.start + nth, column),
                in_log(position + nth),
                width,
            );
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
