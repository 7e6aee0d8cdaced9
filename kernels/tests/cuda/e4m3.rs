//! Values of FP8 E4M3, from its definition.

/// Returns the value of a byte other than NaN.
pub(crate) fn value(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
    let magnitude =
        if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

/// Yields the bytes with values: all except the two NaNs.
pub(crate) fn bytes() -> impl Iterator<Item = u8> {
    (0..=u8::MAX).filter(|byte| byte & 0x7f != 0x7f)
}

/// Returns the distance from `x` to the nearest value.
pub(crate) fn distance(x: f64) -> f64 {
    bytes().map(|byte| (value(byte) - x).abs()).fold(f64::INFINITY, f64::min)
}

#[test]
fn the_largest_value_is_448_and_steps_are_an_eighth_of_a_power_of_two() {
    assert_eq!(bytes().map(value).fold(0.0, f64::max), 448.0);
    assert_eq!(value(0x38), 1.0);
    assert_eq!(value(0x39), 1.125);
    assert_eq!(value(0x01), 2f64.powi(-9));
    // Half a step for normal values: the relative error that tests allow.
    for i in 0..20_000 {
        let x = 2f64.powi(-6) * (448.0 * 64.0f64).powf(f64::from(i) / 20_000.0);
        assert!(distance(x) <= x * 2f64.powi(-4), "{x}");
    }
}
