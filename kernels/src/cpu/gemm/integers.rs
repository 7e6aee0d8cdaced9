use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::super::simd;
use super::super::simd::Simd;
use super::{Format, LINE, Multiply, Next, Place};

/// How the bytes of a group are multiplied. The result is exact, hence the same for every way.
///
/// # Safety
/// As [`Simd`]: the instruction set is there and pointers are valid for a group of weights and of activations.
pub(super) trait Group<S: Simd> {
    /// Whether a byte holds two integers of 4 bits.
    const FOUR: bool;
    /// Words of a row's activations that go with a vector of weights.
    const WORDS: usize;

    /// The products of a group's weights, of P panels, and the activations of M rows from `x` on, added to what each row starts
    /// from.
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: Weights,
        starts: *const u32,
        x: *const u32,
        ahead: &mut Ahead,
    ) -> Parts<S, M, P>;
}

/// The sums of a group, for each row, panel and vector of its columns.
type Parts<S, const M: usize, const P: usize> = [[[<S as Simd>::I; 2]; P]; M];

/// What each row starts from.
#[inline(always)]
unsafe fn start<S: Simd, const M: usize, const P: usize>(starts: *const u32) -> Parts<S, M, P> {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut parts = [[[S::splat_int(0); 2]; P]; M];
        for m in 0..M {
            parts[m] = [[S::splat_int(starts.add(m).read() as i32); 2]; P];
        }
        parts
    }
}

/// The integers of a group, of some panels.
#[derive(Clone, Copy)]
pub(super) struct Weights {
    from: *const u8,
    /// Bytes from one panel to the next.
    gap: usize,
    /// Of each half of a panel's columns.
    vectors: usize,
}

/// What is asked for while weights are multiplied, a line or two at a time.
pub(super) struct Ahead {
    soon: *const u8,
    stride: usize,
    second: usize,
}

impl Ahead {
    /// Without branches: what is not needed is a line that is there or on its way.
    #[inline(always)]
    fn new(next: Next, times: usize, there: *const u8) -> Self {
        let stride = next.bytes.div_ceil(times);
        let second = if stride > LINE { LINE } else { 0 };
        Self { soon: if stride > 0 { next.from } else { there }, stride, second }
    }

    #[inline(always)]
    unsafe fn ask<S: Simd>(&mut self) {
        // SAFETY: passed on to the caller; asking never faults.
        unsafe {
            S::prefetch_far(self.soon);
            S::prefetch_far(self.soon.wrapping_add(self.second));
        }
        self.soon = self.soon.wrapping_add(self.stride);
    }

    /// For the line that a group has more than its vectors.
    #[inline(always)]
    unsafe fn ask_more<S: Simd>(&self) {
        // SAFETY: as above.
        unsafe { S::prefetch_far(self.soon.wrapping_sub(self.stride).wrapping_add(2 * self.second)) };
    }
}

/// Integers by group. A step is a group: the bytes' products add up exactly, and the sum of groups is one chain in f32 with
/// one step for each group.
pub(super) struct Integers<G>(PhantomData<G>);

impl<S: Simd, G: Group<S>> Format<S> for Integers<G> {
    const ROWS: usize = S::INTEGER_ROWS;

    #[inline(always)]
    unsafe fn tile<const M: usize, const P: usize>(job: &Multiply<'_>, place: Place) {
        let Place { row, panel, gap, step, steps, next } = place;
        let columns = 2 * S::LANES;
        let vector = 4 * S::LANES;
        // SAFETY: panel, step and row are within the packed operands, see `Multiply::all`; `load_sums` and
        // `store_sums` stay within `y`, of which this thread alone touches its panels' columns.
        unsafe {
            let group = job.w.format.group().unwrap_or(0);
            let vectors = if G::FOUR { group / 8 } else { group / 4 };
            let record = 2 * columns + vectors * 2 * vector;
            let mut w = job.w.data.as_ptr().add(panel * job.w.panel_bytes + step * record);
            let mut x = job.x.add(row * job.row_words + step * M * (2 + vectors * G::WORDS));
            let mut sums = job.load_sums::<S, M, P>(&place);
            let mut ahead = Ahead::new(next, steps * vectors, w);
            for _ in 0..steps {
                let (starts, scales) = (x, x.add(M));
                let weights = Weights { from: w.add(2 * columns), gap: gap * job.w.panel_bytes, vectors };
                let parts = G::multiply::<M, P>(weights, starts, x.add(2 * M), &mut ahead);
                x = x.add((2 + vectors * G::WORDS) * M);
                if P == 1 {
                    ahead.ask_more::<S>();
                }
                for p in 0..P {
                    let from = w.add(p * gap * job.w.panel_bytes).cast::<u16>();
                    let factors = [S::load_f16(from), S::load_f16(from.add(S::LANES))];
                    for m in 0..M {
                        let scale = S::splat(f32::from_bits(scales.add(m).read()));
                        for v in 0..2 {
                            let part = S::mul(S::int_to_f32(parts[m][p][v]), scale);
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

/// Integers of 8 bits, by way of 16.
pub(super) struct Halves;

impl<S: Simd> Group<S> for Halves {
    const FOUR: bool = false;
    const WORDS: usize = 2;

    #[inline(always)]
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: Weights,
        starts: *const u32,
        mut x: *const u32,
        ahead: &mut Ahead,
    ) -> Parts<S, M, P> {
        let Weights { from: mut at, gap, vectors } = weights;
        let vector = 4 * S::LANES;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut parts = start::<S, M, P>(starts);
            for _ in 0..vectors {
                if P == 1 {
                    ahead.ask::<S>();
                }
                for p in 0..P {
                    let from = at.add(p * gap);
                    let (even0, odd0) = S::halves(S::load_int(from));
                    let (even1, odd1) = S::halves(S::load_int(from.add(vector)));
                    for m in 0..M {
                        let x0 = S::splat_int(x.add(2 * m).read() as i32);
                        let x1 = S::splat_int(x.add(2 * m + 1).read() as i32);
                        let part = &mut parts[m][p];
                        part[0] = S::dot_halves(S::dot_halves(part[0], even0, x0), odd0, x1);
                        part[1] = S::dot_halves(S::dot_halves(part[1], even1, x0), odd1, x1);
                    }
                }
                at = at.add(2 * vector);
                x = x.add(2 * M);
            }
            parts
        }
    }
}

/// Vectors of 4-bit integers whose products fit 16 bits: of each vector, four go into a sum.
const NIBBLE_VECTORS: usize = (i16::MAX / (4 * 15 * 127)) as usize;

/// Integers of 4 bits, added in 16.
pub(super) struct Nibbles;

impl Nibbles {
    /// 16-bit sums of the products of some vectors, at most [`NIBBLE_VECTORS`].
    #[inline(always)]
    unsafe fn some<S: Simd, const M: usize, const P: usize>(
        weights: Weights,
        mut x: *const u32,
        ahead: &mut Ahead,
    ) -> Parts<S, M, P> {
        let Weights { from: mut at, gap, vectors } = weights;
        let vector = 4 * S::LANES;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [[[S::splat_int(0); 2]; P]; M];
            for _ in 0..vectors {
                if P == 1 {
                    ahead.ask::<S>();
                }
                for p in 0..P {
                    let from = at.add(p * gap);
                    let (low0, high0) = S::nibbles(S::load_int(from));
                    let (low1, high1) = S::nibbles(S::load_int(from.add(vector)));
                    for m in 0..M {
                        let x0 = S::splat_int(x.add(m).read() as i32);
                        let x1 = S::splat_int(x.add(M + m).read() as i32);
                        let sum = &mut sums[m][p];
                        sum[0] = S::dot_bytes(S::dot_bytes(sum[0], low0, x0), high0, x1);
                        sum[1] = S::dot_bytes(S::dot_bytes(sum[1], low1, x0), high1, x1);
                    }
                }
                at = at.add(2 * vector);
                x = x.add(2 * M);
            }
            sums
        }
    }
}

impl<S: Simd> Group<S> for Nibbles {
    const FOUR: bool = true;
    const WORDS: usize = 2;

    #[inline(always)]
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: Weights,
        starts: *const u32,
        x: *const u32,
        ahead: &mut Ahead,
    ) -> Parts<S, M, P> {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut done = weights.vectors.min(NIBBLE_VECTORS);
            let sums = Self::some::<S, M, P>(Weights { vectors: done, ..weights }, x, ahead);
            // Only now, so that they need not be kept meanwhile.
            let mut parts = start::<S, M, P>(starts);
            add_halves::<S, M, P>(&mut parts, &sums);
            while done < weights.vectors {
                let vectors = (weights.vectors - done).min(NIBBLE_VECTORS);
                let from = weights.from.add(done * 8 * S::LANES);
                let sums =
                    Self::some::<S, M, P>(Weights { from, vectors, ..weights }, x.add(done * 2 * M), ahead);
                add_halves::<S, M, P>(&mut parts, &sums);
                done += vectors;
            }
            parts
        }
    }
}

#[inline(always)]
unsafe fn add_halves<S: Simd, const M: usize, const P: usize>(
    parts: &mut Parts<S, M, P>,
    sums: &Parts<S, M, P>,
) {
    for m in 0..M {
        for p in 0..P {
            for v in 0..2 {
                // SAFETY: passed on to the caller.
                parts[m][p][v] = unsafe { S::add_halves(parts[m][p][v], sums[m][p][v]) };
            }
        }
    }
}

/// Bytes, or with `FOUR` halves of them, with the instruction made for it.
#[cfg(target_arch = "x86_64")]
pub(super) struct Vnni<const FOUR: bool>;

#[cfg(target_arch = "x86_64")]
impl<const FOUR_BITS: bool> Group<simd::Avx512> for Vnni<FOUR_BITS> {
    const FOUR: bool = FOUR_BITS;
    const WORDS: usize = if FOUR_BITS { 2 } else { 1 };

    #[inline(always)]
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: Weights,
        starts: *const u32,
        mut x: *const u32,
        ahead: &mut Ahead,
    ) -> Parts<simd::Avx512, M, P> {
        type S = simd::Avx512;
        let dot = simd::dot_int8;
        let Weights { from: mut at, gap, vectors } = weights;
        let vector = 4 * S::LANES;
        // SAFETY: passed on to the caller.
        unsafe {
            let mut parts = start::<S, M, P>(starts);
            // Sixteen times what upper halves come to: with few rows it pays to shift sums instead of weights.
            let mut uppers = [[[S::splat_int(0); 2]; P]; M];
            for _ in 0..vectors {
                if P == 1 {
                    ahead.ask::<S>();
                }
                for p in 0..P {
                    let from = at.add(p * gap);
                    let (w0, w1) = (S::load_int(from), S::load_int(from.add(vector)));
                    if FOUR_BITS && P > 1 {
                        let (low0, low1) = (S::nibbles(w0).0, S::nibbles(w1).0);
                        let (high0, high1) = (simd::upper_halves(w0), simd::upper_halves(w1));
                        for m in 0..M {
                            let x0 = S::splat_int(x.add(m).read() as i32);
                            let x1 = S::splat_int(x.add(M + m).read() as i32);
                            parts[m][p][0] = dot(parts[m][p][0], low0, x0);
                            parts[m][p][1] = dot(parts[m][p][1], low1, x0);
                            uppers[m][p][0] = dot(uppers[m][p][0], high0, x1);
                            uppers[m][p][1] = dot(uppers[m][p][1], high1, x1);
                        }
                    } else if FOUR_BITS {
                        let ((low0, high0), (low1, high1)) = (S::nibbles(w0), S::nibbles(w1));
                        for m in 0..M {
                            let x0 = S::splat_int(x.add(m).read() as i32);
                            let x1 = S::splat_int(x.add(M + m).read() as i32);
                            parts[m][p][0] = dot(dot(parts[m][p][0], low0, x0), high0, x1);
                            parts[m][p][1] = dot(dot(parts[m][p][1], low1, x0), high1, x1);
                        }
                    } else {
                        for m in 0..M {
                            let x = S::splat_int(x.add(m).read() as i32);
                            parts[m][p][0] = dot(parts[m][p][0], w0, x);
                            parts[m][p][1] = dot(parts[m][p][1], w1, x);
                        }
                    }
                }
                at = at.add(2 * vector);
                x = x.add(Self::WORDS * M);
            }
            if FOUR_BITS && P > 1 {
                for m in 0..M {
                    for p in 0..P {
                        for v in 0..2 {
                            parts[m][p][v] = simd::add_sixteenth(parts[m][p][v], uppers[m][p][v]);
                        }
                    }
                }
            }
            parts
        }
    }
}
