//! One vocabulary of vector operations, so that a kernel is written once and compiled for each instruction set.

use super::isa::{Isa, Path};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{
    Avx512, add_sixteenth, bf16_pairs, dot_bf16, dot_bf16_where, dot_int8, largest_of, transpose,
    upper_halves,
};
pub(crate) use portable::Portable;

/// Most lanes of any instruction set.
pub(crate) const LANES_MAX: usize = 16;

/// Vectors of f32 and what kernels do with them.
///
/// # Safety
/// Every function needs the instruction set of the implementing type, which [`run`] establishes, and pointers valid
/// for the lanes read or written; they may be unaligned.
pub(crate) trait Simd: Copy + 'static {
    /// A vector of `LANES` f32.
    type V: Copy;
    /// A vector of `LANES` 32-bit integers, each also four bytes.
    type I: Copy;
    /// Lanes of a vector; a power of two up to [`LANES_MAX`].
    const LANES: usize;
    /// Vectors that the processor has room for.
    const REGISTERS: usize;
    /// Rows of the tallest GEMM tile; with two vectors per row its sums fit the registers.
    const TILE_ROWS: usize;
    /// The same with integers, of which each row has the sums of a group, too.
    const INTEGER_ROWS: usize;
    /// Queries that attention treats at once.
    const QUERIES: usize;

    /// Runs a part of a kernel, as a function of its own where the compiler uses registers better so.
    unsafe fn run_part<P: Part<Self>>(part: P);
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn load_f16(from: *const u16) -> Self::V;
    /// Reads signed bytes.
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// Reads pairs of bf16; first members and second members apart.
    unsafe fn load_bf16_pairs(from: *const u32) -> (Self::V, Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the instruction set can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest integer, ties to even; for |v| < 2^22.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `a` times 2 to the power of an integer in [-126, 127], where that is a normal number; 0 or a number below 2^-126 for -127.
    unsafe fn times_exp2(a: Self::V, v: Self::V) -> Self::V;
    /// `a < b ? x : y`, lane by lane.
    unsafe fn if_less(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The sum of all lanes, in an order that is part of the instruction set's arithmetic.
    unsafe fn sum(v: Self::V) -> f32;
    /// Asks for a cache line that will be read soon; any address will do.
    unsafe fn prefetch(at: *const u8);
    /// The same for what will be read later: into the second-level cache.
    unsafe fn prefetch_far(at: *const u8);
    /// The largest lane.
    unsafe fn largest(v: Self::V) -> f32;
    unsafe fn splat_int(x: i32) -> Self::I;
    unsafe fn load_int(from: *const u8) -> Self::I;
    /// The lower and the upper half of each byte, each in a byte of its own.
    unsafe fn nibbles(v: Self::I) -> (Self::I, Self::I);
    /// Of the four unsigned bytes of each lane, numbers of 16 bits: the first and the third, then the second and the fourth.
    unsafe fn halves(v: Self::I) -> (Self::I, Self::I);
    /// Adds to each lane the products of its two pairs of signed 16-bit numbers.
    unsafe fn dot_halves(sum: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Adds to the two 16-bit sums of each lane the products of two of its pairs of bytes each, those of `w` unsigned, those
    /// of `x` signed. No sum, nor any two products, may exceed 16 bits.
    unsafe fn dot_bytes(sums: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Adds to each lane of `a` the two signed 16-bit numbers of `b`.
    unsafe fn add_halves(a: Self::I, b: Self::I) -> Self::I;
    /// Each integer, which is below 2^24 in magnitude, as f32.
    unsafe fn int_to_f32(v: Self::I) -> Self::V;

    /// 2^x for x up to 127, within 3 units in the last place; 2^0 is 1 exactly. Below -126 it may be taken as 0, and 2^-inf is 0. Of
    /// larger x it makes any number.
    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        // SAFETY: passed on to the caller.
        unsafe {
            // Two to the power of -127 is made as 0.
            let clamped = Self::max(Self::splat(-127.0), x);
            let n = Self::round(clamped);
            let r = Self::sub(clamped, n);
            // Minimax polynomial of 2^r on [-0.5, 0.5] that is 1 at 0 and has the right slope there.
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

/// A kernel that can be compiled for any instruction set.
pub(crate) trait Kernel {
    /// The body. Implementations are `#[inline(always)]`, so that they take on the features of their caller. Closures that use
    /// vectors, such as those given to `map`, need not be inlined, and are then compiled without these features.
    ///
    /// # Safety
    /// The machine has `S`'s instruction set.
    unsafe fn run<S: Simd>(self);
}

/// A part of a kernel for one instruction set.
pub(crate) trait Part<S: Simd> {
    /// The body; see [`Kernel::run`].
    ///
    /// # Safety
    /// The machine has `S`'s instruction set.
    unsafe fn run(self);
}

/// Runs a kernel in the form that `isa` names.
#[inline]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) {
    match isa.0 {
        // SAFETY: plain Rust needs no feature.
        Path::Portable => unsafe { kernel.run::<Portable>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` exists only where its features were detected.
        Path::Avx2 => unsafe { run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Path::Avx512 | Path::Avx512Vnni | Path::Avx512Bf16 => unsafe { run_avx512(kernel) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: the caller and the attribute above establish the features.
    unsafe { kernel.run::<Avx2>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    // SAFETY: the caller and the attribute above establish the features.
    unsafe { kernel.run::<Avx512>() }
}

/// As [`run`] for the form with dot products of 8-bit integers.
///
/// # Safety
/// The machine has AVX-512 with VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(crate) unsafe fn run_avx512_vnni<K: Kernel>(kernel: K) {
    // SAFETY: the caller and the attribute above establish the features.
    unsafe { kernel.run::<Avx512>() }
}

/// As [`run`] for the form with dot products of bf16 numbers.
///
/// # Safety
/// The machine has AVX-512 with BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) {
    // SAFETY: the caller and the attribute above establish the features.
    unsafe { kernel.run::<Avx512>() }
}

/// Lanes of a vector of `isa`.
pub(crate) fn lanes(isa: Isa) -> usize {
    match isa.0 {
        Path::Portable => Portable::LANES,
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => Avx2::LANES,
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 | Path::Avx512Vnni | Path::Avx512Bf16 => Avx512::LANES,
    }
}

/// The same address, of which the compiler knows nothing more.
#[inline(always)]
#[allow(
    clippy::pointers_in_nomem_asm_block,
    reason = "there is no instruction that could read what is there"
)]
pub(crate) fn opaque<T>(at: *const T) -> *const T {
    #[cfg(target_arch = "x86_64")]
    {
        let mut same = at;
        // SAFETY: there is no instruction.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) same, options(pure, nomem, nostack, preserves_flags))
        };
        same
    }
    #[cfg(not(target_arch = "x86_64"))]
    at
}

/// Below it e^x is not a normal number any more, and taken as 0.
pub(crate) const EXP_MIN: f32 = -87.336_54;
const EXP_MAX: f32 = 88.37;

/// e^x within 2 units in the last place; 0 below [`EXP_MIN`], at most e^88.37.
///
/// # Safety
/// The machine has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: passed on to the caller.
    unsafe {
        let clamped = S::max(S::splat(EXP_MIN), S::min(S::splat(EXP_MAX), x));
        let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts; the first has so few bits that its product with n is exact without fma, too.
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

/// Loads `lanes` numbers and fills the other lanes with `rest`.
///
/// # Safety
/// As [`Simd`], for `lanes` numbers.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Simd>(from: *const f32, lanes: usize, rest: f32) -> S::V {
    let mut whole = [rest; LANES_MAX];
    // SAFETY: `from` holds `lanes` numbers by contract; `whole` holds a vector.
    unsafe {
        std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), lanes.min(S::LANES));
        S::load(whole.as_ptr())
    }
}

/// Stores the first `lanes` lanes.
///
/// # Safety
/// As [`Simd`], for `lanes` numbers.
#[inline(always)]
pub(crate) unsafe fn store_part<S: Simd>(to: *mut f32, lanes: usize, v: S::V) {
    let mut whole = [0.0; LANES_MAX];
    // SAFETY: `whole` holds a vector; `to` takes `lanes` numbers by contract.
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
                // SAFETY: both chunks hold as many numbers as are loaded and stored.
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
    fn exp_is_within_two_units_in_the_last_place_on_every_path() {
        let mut xs: Vec<f32> = (-873_000..=883_000).map(|i| i as f32 * 1e-4).collect();
        xs.extend((0..100_000).map(|i| (i as f32 - 50_000.0) * 1e-9));
        for isa in Isa::available() {
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
    fn exp2_is_within_three_units_in_the_last_place_on_every_path() {
        let mut xs: Vec<f32> = (-1_259_990..=1_270_000).map(|i| i as f32 * 1e-4).collect();
        xs.extend((0..100_000).map(|i| (i as f32 - 50_000.0) * 1e-9));
        for isa in Isa::available() {
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
