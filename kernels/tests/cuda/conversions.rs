//! Tests of the harness's 16-bit and FP8 conversions.

use inflight_kernel_harness::{
    Harness, from_e4m3_on_harness, narrow_on_harness, to_e4m3_on_harness, widen_on_harness,
};
use inflight_kernels::cuda::HalfDtype;

use crate::{SeededRng, e4m3};

#[test]
fn the_harness_converts_like_the_half_crate() {
    if !Harness::AVAILABLE {
        return;
    }
    for half in [HalfDtype::Bf16, HalfDtype::F16] {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (widen_on_harness(half, bits), half.widen(bits));
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{half:?} {bits:#x}"
            );
        }
        let mut rng = SeededRng::new(7);
        for _ in 0..300_000 {
            let x = f32::from_bits(rng.word());
            if !x.is_nan() && (half == HalfDtype::F16 || x.is_finite()) {
                assert_eq!(narrow_on_harness(half, x), half.narrow(x), "{half:?} {x:e}");
            }
        }
    }
}

/// Reference for `cvt.rn.satfinite.e4m3x2.f32` by the definition of E4M3: the nearest value, ties to even
/// mantissa, saturated, with the sign of `x`. NaN saturates.
pub(crate) fn nearest_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(if x.is_nan() { f32::INFINITY } else { x.abs() });
    if magnitude >= 448.0 {
        return sign | 0x7e;
    }
    let above = (0..=0x7eu8).find(|byte| e4m3::value(*byte) >= magnitude).unwrap();
    let Some(below) = above.checked_sub(1) else { return sign };
    let (down, up) = (magnitude - e4m3::value(below), e4m3::value(above) - magnitude);
    let nearest = match down.total_cmp(&up) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Greater => above,
        std::cmp::Ordering::Equal => [below, above].into_iter().find(|byte| byte % 2 == 0).unwrap(),
    };
    sign | nearest
}

#[test]
fn the_harness_rounds_to_e4m3_as_the_instruction_is_documented() {
    if !Harness::AVAILABLE {
        return;
    }
    for byte in e4m3::bytes() {
        assert_eq!(f64::from(from_e4m3_on_harness(byte)), e4m3::value(byte), "{byte:#x}");
        assert_eq!(from_e4m3_on_harness(byte).is_sign_negative(), byte >= 0x80, "{byte:#x}");
    }
    let check = |x: f32| assert_eq!(to_e4m3_on_harness(x), nearest_e4m3(x), "{x:e}");
    // Every value, every midpoint, and their neighbours.
    for byte in 0..0x7eu8 {
        let (low, high) = (e4m3::value(byte), e4m3::value(byte + 1));
        for x in [low, (low + high) / 2.0, high] {
            for bits in (x as f32).to_bits().saturating_sub(2)..=(x as f32).to_bits() + 2 {
                check(f32::from_bits(bits));
                check(-f32::from_bits(bits));
            }
        }
    }
    for x in [0.0, f32::MIN_POSITIVE, 1e-45, 464.0, 480.0, 1e9, f32::MAX, f32::INFINITY, f32::NAN] {
        check(x);
        check(-x);
    }
    let mut rng = SeededRng::new(11);
    for _ in 0..300_000 {
        check(f32::from_bits(rng.word()));
        // Of a magnitude that E4M3 represents.
        check(rng.value() * 2f32.powi(rng.below(20) as i32 - 10));
    }
}
