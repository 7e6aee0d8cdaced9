//! Portable vector operations: a kernel is written once and compiled for each instruction set.

use super::isa::{Isa, IsaKind};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{
    Avx512, add_sixteenth, bf16_pairs, dot_bf16, dot_bf16_where, dot_int8, high_nibbles,
    largest_magnitude_of, largest_of, transpose,
};
pub(crate) use portable::Portable;

/// Maximum lanes of any instruction set.
pub(crate) const LANES_MAX: usize = 16;

/// Vector operations on f32 and integers.
///
/// # Safety
/// Every function requires the instruction set of the implementing type, which [`run`] establishes, and
/// pointers valid for the lanes read or written; they may be unaligned.
pub(crate) trait Simd: Copy + 'static {
    /// Vector of `LANES` f32.
    type V: Copy;
    /// Vector of `LANES` 32-bit integers, each also four bytes.
    type I: Copy;
    /// Lanes per vector; a power of two up to [`LANES_MAX`].
    const LANES: usize;
    /// Number of vector registers.
    const REGISTERS: usize;
    /// Rows of the tallest float GEMM tile, whose accumulators (two vectors per row) fit the registers.
    const TILE_ROWS: usize;
    /// Rows of the tallest integer GEMM tile, which also holds a group's integer sums per row.
    const INTEGER_ROWS: usize;
    /// Queries that attention processes at once.
    const QUERIES: usize;

    /// Runs a subkernel, as a separate function where register allocation benefits.
    unsafe fn run_subkernel<P: SubKernel<Self>>(subkernel: P);
    /// Runs a subkernel that needs no more than this instruction set as a separate function: a kernel with many variants inlined into it
    /// takes the compiler a time that grows faster than their number.
    unsafe fn run_outlined<P: SubKernel<Self>>(subkernel: P);
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// Loads `LANES` signed bytes as f32.
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Loads `LANES` pairs of bf16 and returns the first and the second elements.
    unsafe fn load_bf16_pairs(from: *const u32) -> (Self::V, Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// Returns the larger; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Returns the smaller; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b + c`, rounded once where the instruction set can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even; for |v| < 2^22.
    unsafe fn round(v: Self::V) -> Self::V;
    /// Returns `a * 2^v` for integers `v` in [-126, 127] with a normal result; -127 gives at most 2^-126.
    unsafe fn times_exp2(a: Self::V, v: Self::V) -> Self::V;
    /// Returns `a < b ? x : y`, lane by lane.
    unsafe fn if_less(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Returns the sum of all lanes, in an order that is part of the instruction set's arithmetic.
    unsafe fn sum(v: Self::V) -> f32;
    /// Prefetches a cache line into the first-level cache; any address is allowed.
    unsafe fn prefetch(at: *const u8);
    /// Prefetches a cache line into the second-level cache; any address is allowed.
    unsafe fn prefetch_far(at: *const u8);
    /// Returns the largest lane.
    unsafe fn largest(v: Self::V) -> f32;
    unsafe fn splat_int(x: i32) -> Self::I;
    unsafe fn load_int(from: *const u8) -> Self::I;
    /// Splits each byte into its low and its high nibble, each in a byte.
    unsafe fn nibbles(v: Self::I) -> (Self::I, Self::I);
    /// Widens the four unsigned bytes of each lane to 16 bits: first and third, then second and fourth.
    unsafe fn halves(v: Self::I) -> (Self::I, Self::I);
    /// Adds to each lane the dot product of its two pairs of signed 16-bit integers.
    unsafe fn dot_halves(sum: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Adds to the two 16-bit sums of each lane the products of two byte pairs each, with unsigned `w` and
    /// signed `x`. Neither a sum nor any two products may exceed 16 bits.
    unsafe fn dot_bytes(sums: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Adds to each lane of `a` the two signed 16-bit integers of `b`.
    unsafe fn add_halves(a: Self::I, b: Self::I) -> Self::I;
    /// Converts integers below 2^24 in magnitude to f32.
    unsafe fn int_to_f32(v: Self::I) -> Self::V;

    /// Returns 2^x for x up to 127, within 3 ulp; exactly 1 at 0. Below -126 it may return 0, and 2^-inf is
    /// 0. Larger `x` give unspecified values.
    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        // SAFETY: the caller guarantees `Self`'s instruction set; no memory is accessed.
        unsafe {
            // 2^-127 becomes 0.
            let clamped = Self::max(Self::splat(-127.0), x);
            let n = Self::round(clamped);
            let r = Self::sub(clamped, n);
            // Minimax polynomial of 2^r on [-0.5, 0.5] that is 1 at 0 with the exact slope there.
            let p = Self::splat(1.330_061_7e-3);
            let p = Self::fma(p, r, Self::splat(9.669_694e-3));
            let p = Self::fma(p, r, Self::splat(5.550_558_5e-2));
            let p = Self::fma(p, r, Self::splat(2.402_228_3e-1));
            let p = Self::fma(p, r, Self::splat(std::f32::consts::LN_2));
            let p = Self::fma(p, r, Self::splat(1.0));
            Self::times_exp2(p, n)
        }
    }
}

/// Kernel that can be compiled for any instruction set.
pub(crate) trait Kernel {
    /// Runs the kernel. Implementations are `#[inline(always)]`, so that they inherit the target features of
    /// their caller. Closures over vectors, as in `map`, may not be inlined and then lack these features.
    ///
    /// # Safety
    /// The machine supports `S`'s instruction set.
    unsafe fn run<S: Simd>(self);
}

/// Part of a kernel for one instruction set, see [`Simd::run_subkernel`].
pub(crate) trait SubKernel<S: Simd> {
    /// Runs the subkernel; inlining as for [`Kernel::run`].
    ///
    /// # Safety
    /// The machine supports `S`'s instruction set.
    unsafe fn run(self);
}

/// Runs a kernel compiled for `isa`.
#[inline]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) {
    match isa.0 {
        // SAFETY: plain Rust needs no target feature.
        IsaKind::Portable => unsafe { kernel.run::<Portable>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this kind exists only where AVX2, FMA and F16C were detected.
        IsaKind::Avx2 => unsafe { run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of these kinds exists only where AVX-512 F, BW, DQ and VL were detected.
        IsaKind::Avx512 | IsaKind::Avx512Vnni | IsaKind::Avx512Bf16 => unsafe { run_avx512(kernel) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: the caller guarantees AVX2, FMA and F16C, which the attribute enables.
    unsafe { kernel.run::<Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    // SAFETY: the caller guarantees AVX-512 F, BW, DQ and VL, which the attribute enables.
    unsafe { kernel.run::<Avx512>() }
}

/// Runs a kernel compiled for AVX-512 with int8 dot products (VNNI).
///
/// # Safety
/// The machine supports AVX-512 with VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn run_avx512_vnni<K: Kernel>(kernel: K) {
    // SAFETY: the caller guarantees AVX-512 with VNNI, which the attribute enables.
    unsafe { kernel.run::<Avx512>() }
}

/// Runs a kernel compiled for AVX-512 with bf16 dot products.
///
/// # Safety
/// The machine supports AVX-512 with BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) {
    // SAFETY: the caller guarantees AVX-512 with BF16, which the attribute enables.
    unsafe { kernel.run::<Avx512>() }
}

/// Returns the f32 lanes per vector of `isa`.
pub(crate) fn lanes(isa: Isa) -> usize {
    match isa.0 {
        IsaKind::Portable => Portable::LANES,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx2 => Avx2::LANES,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 | IsaKind::Avx512Vnni | IsaKind::Avx512Bf16 => Avx512::LANES,
    }
}

/// Returns the same address but hides its origin from the optimiser.
#[inline(always)]
#[allow(
    clippy::pointers_in_nomem_asm_block,
    reason = "the block has no instruction, so nothing reads through the pointer"
)]
pub(crate) fn opaque<T>(at: *const T) -> *const T {
    // Miri interprets no assembly.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let mut same = at;
        // SAFETY: the block contains no instruction.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) same, options(pure, nomem, nostack, preserves_flags))
        };
        same
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    at
}

/// Lower bound for [`exp`]: below it e^x is subnormal and returned as 0.
pub(crate) const EXP_MIN: f32 = -87.336_54;
const EXP_MAX: f32 = 88.37;

/// Returns e^x within 2 ulp; 0 below [`EXP_MIN`], at most e^88.37.
///
/// # Safety
/// The machine supports `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller guarantees `S`'s instruction set; no memory is accessed.
    unsafe {
        let clamped = S::max(S::splat(EXP_MIN), S::min(S::splat(EXP_MAX), x));
        let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts; the first is short enough that its product with n is exact without fma.
        let r = S::fma(n, S::splat(-0.693_359_4), clamped);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        // Minimax polynomial of (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2].
        let p = S::splat(1.987_569_1e-4);
        let p = S::fma(p, r, S::splat(1.398_199_9e-3));
        let p = S::fma(p, r, S::splat(8.333_452e-3));
        let p = S::fma(p, r, S::splat(4.166_579_6e-2));
        let p = S::fma(p, r, S::splat(1.666_666_5e-1));
        let p = S::fma(p, r, S::splat(0.5));
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::if_less(x, S::splat(EXP_MIN), S::splat(0.0), S::times_exp2(p, n))
    }
}

/// Loads `lanes` elements and fills the other lanes with `rest`.
///
/// # Safety
/// The machine supports `S`'s instruction set, and `from` is valid for reads of `lanes` elements.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Simd>(from: *const f32, lanes: usize, rest: f32) -> S::V {
    let mut whole = [rest; LANES_MAX];
    // SAFETY: the caller guarantees `lanes` readable elements; `whole` holds a full vector.
    unsafe {
        std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), lanes.min(S::LANES));
        S::load(whole.as_ptr())
    }
}

/// Stores the first `lanes` lanes.
///
/// # Safety
/// The machine supports `S`'s instruction set, and `to` is valid for writes of `lanes` elements.
#[inline(always)]
pub(crate) unsafe fn store_part<S: Simd>(to: *mut f32, lanes: usize, v: S::V) {
    let mut whole = [0.0; LANES_MAX];
    // SAFETY: `whole` holds a full vector; the caller guarantees `lanes` writable elements at `to`.
    unsafe {
        S::store(whole.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(whole.as_ptr(), to, lanes.min(S::LANES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Base {
        E,
        Two,
    }

    struct ExpAll<'a>(Base, &'a [f32], &'a mut [f32]);

    impl Kernel for ExpAll<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for (x, y) in self.1.chunks(S::LANES).zip(self.2.chunks_mut(S::LANES)) {
                // SAFETY: both chunks hold the number of elements that are loaded and stored.
                unsafe {
                    let v = load_part::<S>(x.as_ptr(), x.len(), 0.0);
                    let v = match self.0 {
                        Base::E => exp::<S>(v),
                        Base::Two => S::exp2(v),
                    };
                    store_part::<S>(y.as_mut_ptr(), y.len(), v);
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too long for an interpreter")]
    fn exp_is_within_two_ulp_on_every_instruction_set() {
        let mut xs: Vec<f32> = (-873_000..=883_000).map(|i| i as f32 * 1e-4).collect();
        xs.extend((0..100_000).map(|i| (i as f32 - 50_000.0) * 1e-9));
        for isa in Isa::tested() {
            let mut ys = vec![0.0; xs.len()];
            run(isa, ExpAll(Base::E, &xs, &mut ys));
            for (x, y) in xs.iter().zip(&ys) {
                let exact = libm::exp(f64::from(*x));
                let ulp = f64::from((exact as f32).to_bits().wrapping_add(1)).max(1.0);
                let ulp = f64::from(f32::from_bits(ulp as u32)) - f64::from(exact as f32);
                assert!(
                    (f64::from(*y) - exact).abs() <= 2.0 * ulp,
                    "{}: e^{x} = {y}, not {exact}",
                    isa.name()
                );
            }
            let mut ends = [f32::NEG_INFINITY, -1e30, -88.0, 0.0, -0.0, 1000.0, f32::INFINITY];
            let from = ends;
            run(isa, ExpAll(Base::E, &from, &mut ends));
            assert_eq!(ends[..5], [0.0, 0.0, 0.0, 1.0, 1.0], "{}", isa.name());
            assert!(ends[5] > 2e38 && ends[6] == ends[5] && ends[5].is_finite(), "{}", isa.name());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too long for an interpreter")]
    fn exp2_is_within_three_ulp_on_every_instruction_set() {
        let mut xs: Vec<f32> = (-1_259_990..=1_270_000).map(|i| i as f32 * 1e-4).collect();
        xs.extend((0..100_000).map(|i| (i as f32 - 50_000.0) * 1e-9));
        for isa in Isa::tested() {
            let mut ys = vec![0.0; xs.len()];
            run(isa, ExpAll(Base::Two, &xs, &mut ys));
            for (x, y) in xs.iter().zip(&ys) {
                let exact = libm::exp2(f64::from(*x));
                let nearest = exact as f32;
                let ulp = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
                assert!(
                    (f64::from(*y) - exact).abs() <= 3.0 * ulp,
                    "{}: 2^{x} = {y}, not {exact}",
                    isa.name()
                );
            }
            let mut ends = [f32::NEG_INFINITY, -1e30, -151.0, 0.0, -0.0, f32::NAN];
            let from = ends;
            run(isa, ExpAll(Base::Two, &from, &mut ends));
            assert_eq!(ends[..5], [0.0, 0.0, 0.0, 1.0, 1.0], "{}", isa.name());
            assert!(ends[5].is_nan(), "{}", isa.name());
        }
    }
}
