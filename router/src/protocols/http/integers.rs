//! Integers of JSON bodies, also where a client writes them as numbers of a whole value (`40.0`, `4e1`): JavaScript and YAML have no
//! other kind of number.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Largest magnitude up to which every integer is a 64-bit floating-point number.
const EXACT_MAX: i128 = 1 << 53;

/// Returns the integer that a JSON text is; `None` for other types, for numbers with a fraction, and for those beyond 128 bits. Written
/// as a floating-point number, it must be one without rounding.
pub(crate) fn integer(text: &str) -> Option<i128> {
    if let Ok(integer) = text.parse() {
        return Some(integer);
    }
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().ok()?),
        None => (text, 0),
    };
    let (negative, mantissa) = match mantissa.strip_prefix('-') {
        Some(magnitude) => (true, magnitude),
        None => (false, mantissa),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [whole, fraction].concat();
    if whole.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let significant = digits.trim_end_matches('0');
    // Power of ten of the last significant digit.
    let power = i64::try_from(digits.len() - significant.len()).ok()?.checked_add(exponent)?;
    let power = power.checked_sub(i64::try_from(fraction.len()).ok()?)?;
    let significant = significant.trim_start_matches('0');
    if significant.is_empty() {
        return Some(0);
    }
    let scale = 10_i128.checked_pow(u32::try_from(power).ok()?)?;
    let magnitude = significant.parse::<i128>().ok()?.checked_mul(scale)?;
    let is_exact = magnitude <= EXACT_MAX || (magnitude as f64) as i128 == magnitude;
    is_exact.then_some(if negative { -magnitude } else { magnitude })
}

/// Array of integers, as [`integer`] reads each.
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements;
        impl<'de> Visitor<'de> for Elements {
            type Value = TokenIds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of token ids")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<TokenIds, A::Error> {
                let mut ids = Vec::new();
                while let Some(element) = sequence.next_element::<&'de RawValue>()? {
                    let id = integer(element.get()).and_then(|id| u32::try_from(id).ok());
                    ids.push(id.ok_or_else(|| A::Error::custom("an element is no token id"))?);
                }
                Ok(TokenIds(ids))
            }
        }
        deserializer.deserialize_seq(Elements)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn whole_numbers_are_integers_and_nothing_is_rounded() {
        for (text, expected) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("-0.0", Some(0)),
            ("0e9", Some(0)),
            ("40.0", Some(40)),
            ("-1.0", Some(-1)),
            ("4e1", Some(40)),
            ("4E+1", Some(40)),
            ("400e-1", Some(40)),
            ("1.50e1", Some(15)),
            ("0.004e3", Some(4)),
            ("1e15", Some(1_000_000_000_000_000)),
            ("9007199254740992.0", Some(1 << 53)),
            ("9007199254740993", Some((1 << 53) + 1)),
            // A client whose numbers are floating-point has rounded another number to it, or has not written it.
            ("9007199254740993.0", None),
            ("1e18", Some(1_000_000_000_000_000_000)),
            ("1.8446744073709551615e19", None),
            ("1.5", None),
            ("1e-1", None),
            ("40.00000000000000000001", None),
            ("1e400", None),
            ("1e99999999999999999999", None),
            ("1e-9223372036854775808", None),
            ("99999999999999999999999999999999999999999999", None),
            ("true", None),
            ("\"5\"", None),
            ("\"e5\"", None),
            ("[1]", None),
            ("{}", None),
        ] {
            assert_eq!(integer(text), expected, "{text}");
        }
    }

    #[test]
    fn arrays_of_whole_numbers_are_token_ids() {
        let read = |text| serde_json::from_str::<TokenIds>(text).ok().map(|ids| ids.0);
        assert_eq!(read("[1, 2.0 ,3e0]"), Some(vec![1, 2, 3]));
        assert_eq!(read("[]"), Some(vec![]));
        for wrong in ["[1.5]", "[-1.0]", "[4294967296.0]", "[\"1\"]", "[[1]]", "1", "{}", "null"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    proptest! {
        /// Decimal texts of 64-bit floating-point numbers of any magnitude, and numbers with a fraction.
        #[test]
        fn every_whole_floating_point_number_is_its_integer(
            mantissa in -(1_i64 << 53)..=1 << 53, shift in 0..40_u32, fraction in 0..1000_u32
        ) {
            let number = mantissa as f64 * f64::from(shift).exp2();
            let expected = i128::from(mantissa) << shift;
            prop_assert_eq!(integer(&format!("{number:.1}")), Some(expected));
            // The shortest text that is read as the number again is another integer beyond.
            if expected.abs() <= EXACT_MAX {
                prop_assert_eq!(integer(&format!("{number:e}")), Some(expected));
            }
            let text = format!("{mantissa}.{fraction:03}");
            let whole = (fraction == 0).then_some(i128::from(mantissa));
            prop_assert_eq!(integer(&text), whole);
        }
    }
}
