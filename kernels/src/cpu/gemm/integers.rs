//! Integer GEMM microkernels: exact int32 sums within quantization groups, accumulated in f32 over groups.

use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::super::simd;
use super::super::simd::Simd;
use super::{GemmTask, LINE, MicroKernel, PrefetchRange, TilePosition};

/// Dot product of a quantization group. The result is exact, hence the same for every implementation.
///
/// # Safety
/// The caller guarantees `S`'s instruction set, and pointers valid for a group of weights and of activations.
pub(super) trait GroupDot<S: Simd> {
    /// Whether a byte holds two 4-bit integers.
    const FOUR: bool;
    /// Words of a row's activations per vector of weights.
    const WORDS: usize;

    /// Returns the rows' initial sums plus the dot products of a group's weights (P panels) and activations
    /// (M rows).
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: GroupWeights,
        starts: *const u32,
        x: *const u32,
        prefetch: &mut WeightPrefetch,
    ) -> GroupSums<S, M, P>;
}

/// Sums of a group for each row, panel and vector of its columns.
type GroupSums<S, const M: usize, const P: usize> = [[[<S as Simd>::I; 2]; P]; M];

/// Loads the rows' initial sums of a group.
#[inline(always)]
unsafe fn initial_sums<S: Simd, const M: usize, const P: usize>(starts: *const u32) -> GroupSums<S, M, P> {
    // SAFETY: the caller guarantees `S`'s instruction set and M readable words at `starts`.
    unsafe {
        let mut group_sums = [[[S::splat_int(0); 2]; P]; M];
        for m in 0..M {
            group_sums[m] = [[S::splat_int(starts.add(m).read() as i32); 2]; P];
        }
        group_sums
    }
}

/// Integer weights of a group in some panels.
#[derive(Clone, Copy)]
pub(super) struct GroupWeights {
    from: *const u8,
    /// Bytes between panels.
    gap: usize,
    /// Vectors per half of a panel's columns.
    vectors: usize,
}

/// Address sequence for weight prefetches, one or two cache lines at a time.
pub(super) struct WeightPrefetch {
    address: *const u8,
    stride: usize,
    second: usize,
}

impl WeightPrefetch {
    /// Spreads `next` over `times` prefetches. Branch-free: unneeded prefetches hit a cached line.
    #[inline(always)]
    fn new(next: PrefetchRange, times: usize, cached: *const u8) -> Self {
        let stride = next.bytes.div_ceil(times);
        let second = if stride > LINE { LINE } else { 0 };
        Self { address: if stride > 0 { next.from } else { cached }, stride, second }
    }

    /// Prefetches the next one or two cache lines.
    #[inline(always)]
    unsafe fn prefetch_step<S: Simd>(&mut self) {
        // SAFETY: the caller guarantees `S`'s instruction set; prefetching never faults.
        unsafe {
            S::prefetch_far(self.address);
            S::prefetch_far(self.address.wrapping_add(self.second));
        }
        self.address = self.address.wrapping_add(self.stride);
    }

    /// Prefetches the additional cache line of a group's scales.
    #[inline(always)]
    unsafe fn prefetch_scales<S: Simd>(&self) {
        // SAFETY: the caller guarantees `S`'s instruction set; prefetching never faults.
        unsafe { S::prefetch_far(self.address.wrapping_sub(self.stride).wrapping_add(2 * self.second)) };
    }
}

/// Integer GEMM microkernel. A step is a group: its sums are exact, and each f32 accumulator is one chain
/// over groups.
pub(super) struct IntegerKernel<G>(PhantomData<G>);

impl<S: Simd, G: GroupDot<S>> MicroKernel<S> for IntegerKernel<G> {
    const ROWS: usize = S::INTEGER_ROWS;

    #[inline(always)]
    unsafe fn tile<const M: usize, const P: usize>(job: &GemmTask<'_>, position: TilePosition) {
        let TilePosition { row, panel, gap, step, steps, next } = position;
        let columns = 2 * S::LANES;
        let vector = 4 * S::LANES;
        // SAFETY: panel, step and row are within the packed operands, see `GemmTask::run_all`; `load_sums`
        // and `store_sums` stay within `y`, whose columns in these panels belong to this thread.
        unsafe {
            let group = job.w.format.group().unwrap_or(0);
            let vectors = if G::FOUR { group / 8 } else { group / 4 };
            let record = 2 * columns + vectors * 2 * vector;
            let mut w = job.w.data.as_ptr().add(panel * job.w.panel_bytes + step * record);
            let mut x = job.x.add(row * job.row_words + step * M * (2 + vectors * G::WORDS));
            let mut sums = job.load_sums::<S, M, P>(&position);
            let mut prefetch = WeightPrefetch::new(next, steps * vectors, w);
            for _ in 0..steps {
                let (starts, scales) = (x, x.add(M));
                let weights =
                    GroupWeights { from: w.add(2 * columns), gap: gap * job.w.panel_bytes, vectors };
                let group_sums = G::multiply::<M, P>(weights, starts, x.add(2 * M), &mut prefetch);
                x = x.add((2 + vectors * G::WORDS) * M);
                if P == 1 {
                    prefetch.prefetch_scales::<S>();
                }
                for p in 0..P {
                    let from = w.add(p * gap * job.w.panel_bytes).cast::<u16>();
                    let factors = [S::load_f16(from), S::load_f16(from.add(S::LANES))];
                    for m in 0..M {
                        let scale = S::splat(f32::from_bits(scales.add(m).read()));
                        for v in 0..2 {
                            let part = S::mul(S::int_to_f32(group_sums[m][p][v]), scale);
                            sums[m][p][v] = S::fma(part, factors[v], sums[m][p][v]);
                        }
                    }
                }
                w = w.add(record);
            }
            job.store_sums::<S, M, P>(&position, &sums);
        }
    }
}

/// 8-bit weights, multiplied as 16-bit integers.
pub(super) struct Int8Widened;

impl<S: Simd> GroupDot<S> for Int8Widened {
    const FOUR: bool = false;
    const WORDS: usize = 2;

    #[inline(always)]
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: GroupWeights,
        starts: *const u32,
        mut x: *const u32,
        prefetch: &mut WeightPrefetch,
    ) -> GroupSums<S, M, P> {
        let GroupWeights { from: mut at, gap, vectors } = weights;
        let vector = 4 * S::LANES;
        // SAFETY: the caller guarantees `S`'s instruction set and a valid group of weights and activations.
        unsafe {
            let mut group_sums = initial_sums::<S, M, P>(starts);
            for _ in 0..vectors {
                if P == 1 {
                    prefetch.prefetch_step::<S>();
                }
                for p in 0..P {
                    let from = at.add(p * gap);
                    let (even0, odd0) = S::halves(S::load_int(from));
                    let (even1, odd1) = S::halves(S::load_int(from.add(vector)));
                    for m in 0..M {
                        let x0 = S::splat_int(x.add(2 * m).read() as i32);
                        let x1 = S::splat_int(x.add(2 * m + 1).read() as i32);
                        let part = &mut group_sums[m][p];
                        part[0] = S::dot_halves(S::dot_halves(part[0], even0, x0), odd0, x1);
                        part[1] = S::dot_halves(S::dot_halves(part[1], even1, x0), odd1, x1);
                    }
                }
                at = at.add(2 * vector);
                x = x.add(2 * M);
            }
            group_sums
        }
    }
}

/// Vectors of 4-bit integers whose products fit 16-bit sums; each adds four products to a sum.
const NIBBLE_VECTORS: usize = (i16::MAX / (4 * 15 * 127)) as usize;

/// 4-bit weights, summed in 16 bits.
pub(super) struct Int4Widened;

impl Int4Widened {
    /// Returns 16-bit sums of the products of at most [`NIBBLE_VECTORS`] vectors.
    #[inline(always)]
    unsafe fn dot_16_bit<S: Simd, const M: usize, const P: usize>(
        weights: GroupWeights,
        mut x: *const u32,
        prefetch: &mut WeightPrefetch,
    ) -> GroupSums<S, M, P> {
        let GroupWeights { from: mut at, gap, vectors } = weights;
        let vector = 4 * S::LANES;
        // SAFETY: the caller guarantees `S`'s instruction set and a valid group of weights and activations.
        unsafe {
            let mut sums = [[[S::splat_int(0); 2]; P]; M];
            for _ in 0..vectors {
                if P == 1 {
                    prefetch.prefetch_step::<S>();
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

impl<S: Simd> GroupDot<S> for Int4Widened {
    const FOUR: bool = true;
    const WORDS: usize = 2;

    #[inline(always)]
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: GroupWeights,
        starts: *const u32,
        x: *const u32,
        prefetch: &mut WeightPrefetch,
    ) -> GroupSums<S, M, P> {
        // SAFETY: the caller guarantees `S`'s instruction set and a valid group of weights and activations.
        unsafe {
            let mut done = weights.vectors.min(NIBBLE_VECTORS);
            let sums = Self::dot_16_bit::<S, M, P>(GroupWeights { vectors: done, ..weights }, x, prefetch);
            // Loaded late, so that they occupy no registers before.
            let mut group_sums = initial_sums::<S, M, P>(starts);
            add_halves::<S, M, P>(&mut group_sums, &sums);
            while done < weights.vectors {
                let vectors = (weights.vectors - done).min(NIBBLE_VECTORS);
                let from = weights.from.add(done * 8 * S::LANES);
                let sums = Self::dot_16_bit::<S, M, P>(
                    GroupWeights { from, vectors, ..weights },
                    x.add(done * 2 * M),
                    prefetch,
                );
                add_halves::<S, M, P>(&mut group_sums, &sums);
                done += vectors;
            }
            group_sums
        }
    }
}

/// Adds pairs of 16-bit sums to 32-bit sums.
#[inline(always)]
unsafe fn add_halves<S: Simd, const M: usize, const P: usize>(
    group_sums: &mut GroupSums<S, M, P>,
    sums: &GroupSums<S, M, P>,
) {
    for m in 0..M {
        for p in 0..P {
            for v in 0..2 {
                // SAFETY: the caller guarantees `S`'s instruction set.
                group_sums[m][p][v] = unsafe { S::add_halves(group_sums[m][p][v], sums[m][p][v]) };
            }
        }
    }
}

/// 8-bit or, with `FOUR`, 4-bit weights, multiplied by the VNNI dot product.
#[cfg(target_arch = "x86_64")]
pub(super) struct Vnni<const FOUR: bool>;

#[cfg(target_arch = "x86_64")]
impl<const FOUR_BITS: bool> GroupDot<simd::Avx512> for Vnni<FOUR_BITS> {
    const FOUR: bool = FOUR_BITS;
    const WORDS: usize = if FOUR_BITS { 2 } else { 1 };

    #[inline(always)]
    unsafe fn multiply<const M: usize, const P: usize>(
        weights: GroupWeights,
        starts: *const u32,
        mut x: *const u32,
        prefetch: &mut WeightPrefetch,
    ) -> GroupSums<simd::Avx512, M, P> {
        type S = simd::Avx512;
        let dot = simd::dot_int8;
        let GroupWeights { from: mut at, gap, vectors } = weights;
        let vector = 4 * S::LANES;
        // SAFETY: the caller guarantees AVX-512 VNNI and a valid group of weights and activations.
        unsafe {
            let mut group_sums = initial_sums::<S, M, P>(starts);
            // Sums of high nibbles, scaled by 16: with few rows it is cheaper to shift sums than weights.
            let mut uppers = [[[S::splat_int(0); 2]; P]; M];
            for _ in 0..vectors {
                if P == 1 {
                    prefetch.prefetch_step::<S>();
                }
                for p in 0..P {
                    let from = at.add(p * gap);
                    let (w0, w1) = (S::load_int(from), S::load_int(from.add(vector)));
                    if FOUR_BITS && P > 1 {
                        let (low0, low1) = (S::nibbles(w0).0, S::nibbles(w1).0);
                        let (high0, high1) = (simd::high_nibbles(w0), simd::high_nibbles(w1));
                        for m in 0..M {
                            let x0 = S::splat_int(x.add(m).read() as i32);
                            let x1 = S::splat_int(x.add(M + m).read() as i32);
                            group_sums[m][p][0] = dot(group_sums[m][p][0], low0, x0);
                            group_sums[m][p][1] = dot(group_sums[m][p][1], low1, x0);
                            uppers[m][p][0] = dot(uppers[m][p][0], high0, x1);
                            uppers[m][p][1] = dot(uppers[m][p][1], high1, x1);
                        }
                    } else if FOUR_BITS {
                        let ((low0, high0), (low1, high1)) = (S::nibbles(w0), S::nibbles(w1));
                        for m in 0..M {
                            let x0 = S::splat_int(x.add(m).read() as i32);
                            let x1 = S::splat_int(x.add(M + m).read() as i32);
                            group_sums[m][p][0] = dot(dot(group_sums[m][p][0], low0, x0), high0, x1);
                            group_sums[m][p][1] = dot(dot(group_sums[m][p][1], low1, x0), high1, x1);
                        }
                    } else {
                        for m in 0..M {
                            let x = S::splat_int(x.add(m).read() as i32);
                            group_sums[m][p][0] = dot(group_sums[m][p][0], w0, x);
                            group_sums[m][p][1] = dot(group_sums[m][p][1], w1, x);
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
                            group_sums[m][p][v] = simd::add_sixteenth(group_sums[m][p][v], uppers[m][p][v]);
                        }
                    }
                }
            }
            group_sums
        }
    }
}
