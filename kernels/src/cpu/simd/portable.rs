//! Vector operations in plain Rust.

use super::super::isa::FUSED;
use super::{Simd, SubKernel};
use crate::dtype::{bf16_value, f16_value};

/// Eight lanes of plain Rust, which the compiler vectorises for the target.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const N: usize = 8;

#[inline(always)]
fn zip(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

impl Simd for Portable {
    type V = [f32; N];
    type I = [i32; N];
    const LANES: usize = N;
    const REGISTERS: usize = 16;
    const TILE_ROWS: usize = 2;
    const INTEGER_ROWS: usize = 1;
    const QUERIES: usize = 2;

    #[inline(always)]
    unsafe fn run_subkernel<P: SubKernel<Self>>(subkernel: P) {
        // SAFETY: the caller's guarantees are those of `run_outlined`.
        unsafe { Self::run_outlined(subkernel) }
    }

    #[inline(never)]
    unsafe fn run_outlined<P: SubKernel<Self>>(subkernel: P) {
        // SAFETY: the caller's guarantees are those of `SubKernel::run`; plain Rust needs no target feature.
        unsafe { subkernel.run() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; N] {
        [x; N]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; N] {
        // SAFETY: the caller guarantees that `from` is valid for `N` elements.
        unsafe { from.cast::<[f32; N]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: [f32; N]) {
        // SAFETY: the caller guarantees that `to` is valid for `N` elements.
        unsafe { to.cast::<[f32; N]>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> [f32; N] {
        // SAFETY: the caller guarantees that `from` is valid for `N` elements.
        let raw = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        raw.map(bf16_value)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [f32; N] {
        // SAFETY: the caller guarantees that `from` is valid for `N` elements.
        let raw = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        raw.map(f16_value)
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> [f32; N] {
        // SAFETY: the caller guarantees that `from` is valid for `N` elements.
        unsafe { from.cast::<[i8; N]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u32) -> ([f32; N], [f32; N]) {
        // SAFETY: the caller guarantees that `from` is valid for `N` pairs.
        let raw = unsafe { from.cast::<[u32; N]>().read_unaligned() };
        (raw.map(|pair| f32::from_bits(pair << 16)), raw.map(|pair| f32::from_bits(pair & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn add(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x + y)
    }

    #[inline(always)]
    unsafe fn sub(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x - y)
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x * y)
    }

    #[inline(always)]
    unsafe fn div(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| x / y)
    }

    #[inline(always)]
    unsafe fn max(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| if x > y { x } else { y })
    }

    #[inline(always)]
    unsafe fn min(a: [f32; N], b: [f32; N]) -> [f32; N] {
        zip(a, b, |x, y| if x < y { x } else { y })
    }

    #[inline(always)]
    unsafe fn fma(a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        // Without the instruction, a fused multiply-add would be a call per lane.
        let mut out = c;
        for i in 0..N {
            out[i] = if FUSED { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] };
        }
        out
    }

    #[inline(always)]
    unsafe fn round(v: [f32; N]) -> [f32; N] {
        // Adding 1.5 * 2^23 leaves no bits for a fraction.
        v.map(|x| (x + 12_582_912.0) - 12_582_912.0)
    }

    #[inline(always)]
    unsafe fn times_exp2(a: [f32; N], v: [f32; N]) -> [f32; N] {
        std::array::from_fn(|i| a[i] * f32::from_bits(((v[i] as i32).wrapping_add(127) << 23) as u32))
    }

    #[inline(always)]
    unsafe fn if_less(a: [f32; N], b: [f32; N], x: [f32; N], y: [f32; N]) -> [f32; N] {
        let mut out = y;
        for i in 0..N {
            out[i] = if a[i] < b[i] { x[i] } else { y[i] };
        }
        out
    }

    #[inline(always)]
    unsafe fn sum(v: [f32; N]) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }

    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_at: *const u8) {}

    #[inline(always)]
    unsafe fn largest(v: [f32; N]) -> f32 {
        let mut best = v[0];
        for i in 1..N {
            best = if v[i] > best { v[i] } else { best };
        }
        best
    }

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> [i32; N] {
        [x; N]
    }

    #[inline(always)]
    unsafe fn load_int(from: *const u8) -> [i32; N] {
        // SAFETY: the caller guarantees that `from` is valid for `N` integers.
        unsafe { from.cast::<[i32; N]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn nibbles(v: [i32; N]) -> ([i32; N], [i32; N]) {
        (v.map(|four| four & 0x0f0f_0f0f), v.map(|four| four >> 4 & 0x0f0f_0f0f))
    }

    #[inline(always)]
    unsafe fn halves(v: [i32; N]) -> ([i32; N], [i32; N]) {
        (v.map(|four| four & 0x00ff_00ff), v.map(|four| four >> 8 & 0x00ff_00ff))
    }

    #[inline(always)]
    unsafe fn dot_halves(sum: [i32; N], a: [i32; N], b: [i32; N]) -> [i32; N] {
        std::array::from_fn(|i| {
            let [low, high] = [0, 16].map(|by| ((a[i] >> by) as i16, (b[i] >> by) as i16));
            sum[i] + i32::from(low.0) * i32::from(low.1) + i32::from(high.0) * i32::from(high.1)
        })
    }

    #[inline(always)]
    unsafe fn dot_bytes(sums: [i32; N], w: [i32; N], x: [i32; N]) -> [i32; N] {
        std::array::from_fn(|i| {
            let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
            let product = |j: usize| i16::from(w[j]) * i16::from(x[j] as i8);
            let [low, high] = [sums[i] as i16, (sums[i] >> 16) as i16];
            let (low, high) = (low + product(0) + product(1), high + product(2) + product(3));
            i32::from(low) & 0xffff | i32::from(high) << 16
        })
    }

    #[inline(always)]
    unsafe fn add_halves(a: [i32; N], b: [i32; N]) -> [i32; N] {
        std::array::from_fn(|i| a[i] + i32::from(b[i] as i16) + (b[i] >> 16))
    }

    #[inline(always)]
    unsafe fn int_to_f32(v: [i32; N]) -> [f32; N] {
        v.map(|x| x as f32)
    }
}
