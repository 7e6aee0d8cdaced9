use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::super::simd;
use super::super::simd::Simd;
use super::{Format, LINE, Multiply, Place};

/// How bytes are multiplied. The result is exact, hence the same for every way.
pub(super) trait Bytes<S: Simd> {
    unsafe fn dot(sum: S::I, w: S::I, x: S::I) -> S::I;
}

/// With whatever the instruction set has.
pub(super) struct Widened;

impl<S: Simd> Bytes<S> for Widened {
    #[inline(always)]
    unsafe fn dot(sum: S::I, w: S::I, x: S::I) -> S::I {
        // SAFETY: passed on to the caller.
        unsafe { S::dot_bytes(sum, w, x) }
    }
}

/// With the instruction made for it.
#[cfg(target_arch = "x86_64")]
pub(super) struct Vnni;

#[cfg(target_arch = "x86_64")]
impl Bytes<simd::Avx512> for Vnni {
    #[inline(always)]
    unsafe fn dot(
        sum: <simd::Avx512 as Simd>::I,
        w: <simd::Avx512 as Simd>::I,
        x: <simd::Avx512 as Simd>::I,
    ) -> <simd::Avx512 as Simd>::I {
        // SAFETY: passed on to the caller.
        unsafe { simd::dot_int8(sum, w, x) }
    }
}

/// Integers of 8 bits or, with `FOUR`, of 4, by group. A step is a group: the bytes' products add up exactly, and
/// the sum of groups is one chain in f32 with one step for each group.
pub(super) struct Integers<B, const FOUR: bool>(PhantomData<B>);

impl<S: Simd, B: Bytes<S>, const FOUR: bool> Format<S> for Integers<B, FOUR> {
    // Each row takes twice as many registers as with floats: for the group's sum and for the whole.
    const ROWS: usize = S::TILE_ROWS / 2;

    #[inline(always)]
    unsafe fn tile<const M: usize, const P: usize>(job: &Multiply<'_>, place: Place) {
        let Place { row, panel, gap, step, steps, next } = place;
        let columns = 2 * S::LANES;
        let vector = 4 * S::LANES;
        // SAFETY: panel, step and row are within the packed operands, see `Multiply::all`; `load_sums` and
        // `store_sums` stay within `y`, of which this thread alone touches its panels' columns.
        unsafe {
            let group = job.w.format.group().unwrap_or(0);
            // Words that a row's activations have in one group, and vectors that a panel has.
            let words = group / 4;
            let vectors = if FOUR { group / 8 } else { group / 4 };
            let record = 2 * columns + vectors * 2 * vector;
            let mut w = job.w.data.as_ptr().add(panel * job.w.panel_bytes + step * record);
            let mut x = job.x.add(row * job.row_words + step * M * (2 + words));
            let mut sums = job.load_sums::<S, M, P>(&place);
            // A vector of each half asks for at most two lines, as it reads two, and a group for one more, as it has factors; without
            // branches, as with floats.
            let stride = next.bytes.div_ceil(steps * vectors);
            let second = if stride > LINE { LINE } else { 0 };
            let mut soon = if stride > 0 { next.from } else { w };
            for _ in 0..steps {
                let mut parts = [[[S::splat_int(0); 2]; P]; M];
                // Sixteen times what upper halves come to: with few rows it pays to shift sums instead of weights.
                let mut uppers = [[[S::splat_int(0); 2]; P]; M];
                for m in 0..M {
                    parts[m] = [[S::splat_int(x.add(m).read() as i32); 2]; P];
                }
                let scales = x.add(M);
                x = x.add(2 * M);
                let mut at = w.add(2 * columns);
                for _ in 0..vectors {
                    if P == 1 {
                        S::prefetch_far(soon);
                        S::prefetch_far(soon.wrapping_add(second));
                        soon = soon.wrapping_add(stride);
                    }
                    for p in 0..P {
                        let from = at.add(p * gap * job.w.panel_bytes);
                        let (w0, w1) = (S::load_int(from), S::load_int(from.add(vector)));
                        if FOUR && P > 1 {
                            let (low0, low1) = (S::nibbles(w0).0, S::nibbles(w1).0);
                            let (high0, high1) = (S::upper_halves(w0), S::upper_halves(w1));
                            for m in 0..M {
                                let x0 = S::splat_int(x.add(m).read() as i32);
                                let x1 = S::splat_int(x.add(M + m).read() as i32);
                                parts[m][p][0] = B::dot(parts[m][p][0], low0, x0);
                                parts[m][p][1] = B::dot(parts[m][p][1], low1, x0);
                                uppers[m][p][0] = B::dot(uppers[m][p][0], high0, x1);
                                uppers[m][p][1] = B::dot(uppers[m][p][1], high1, x1);
                            }
                        } else if FOUR {
                            let ((low0, high0), (low1, high1)) = (S::nibbles(w0), S::nibbles(w1));
                            for m in 0..M {
                                let x0 = S::splat_int(x.add(m).read() as i32);
                                let x1 = S::splat_int(x.add(M + m).read() as i32);
                                parts[m][p][0] = B::dot(B::dot(parts[m][p][0], low0, x0), high0, x1);
                                parts[m][p][1] = B::dot(B::dot(parts[m][p][1], low1, x0), high1, x1);
                            }
                        } else {
                            for m in 0..M {
                                let x = S::splat_int(x.add(m).read() as i32);
                                parts[m][p][0] = B::dot(parts[m][p][0], w0, x);
                                parts[m][p][1] = B::dot(parts[m][p][1], w1, x);
                            }
                        }
                    }
                    at = at.add(2 * vector);
                    x = x.add(if FOUR { 2 * M } else { M });
                }
                if P == 1 {
                    S::prefetch_far(soon.wrapping_sub(stride).wrapping_add(2 * second));
                }
                for p in 0..P {
                    let from = w.add(p * gap * job.w.panel_bytes).cast::<u16>();
                    let factors = [S::load_f16(from), S::load_f16(from.add(S::LANES))];
                    for m in 0..M {
                        let scale = S::splat(f32::from_bits(scales.add(m).read()));
                        for v in 0..2 {
                            let mut part = parts[m][p][v];
                            if FOUR && P > 1 {
                                part = S::add_sixteenth(part, uppers[m][p][v]);
                            }
                            let part = S::mul(S::int_to_f32(part), scale);
                            sums[m][p][v] = S::fma(part, factors[v], sums[m][p][v]);
                        }
                    }
                }
                w = w.add(record);
            }
            job.store_sums::<S, M, P>(&place, &sums);
        }
    }
}
