use inflight_kernels::cuda::{Half, Harness, narrow_on_harness, widen_on_harness};

use crate::Dice;

#[test]
fn the_harness_has_the_numbers_of_the_half_crate() {
    if !Harness::AVAILABLE {
        return;
    }
    for half in [Half::Bf16, Half::F16] {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (widen_on_harness(half, bits), half.widen(bits));
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{half:?} {bits:#x}"
            );
        }
        let mut dice = Dice::new(7);
        for _ in 0..300_000 {
            let x = f32::from_bits(dice.word());
            if !x.is_nan() && (half == Half::F16 || x.is_finite()) {
                assert_eq!(narrow_on_harness(half, x), half.narrow(x), "{half:?} {x:e}");
            }
        }
    }
}
