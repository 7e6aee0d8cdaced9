//! Exact decimal numbers.

use std::cmp::Ordering;

/// Decimal number of any size: 0.`digits` * 10^`exponent`, without leading and trailing zeros among the digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decimal {
    negative: bool,
    digits: Vec<u8>,
    exponent: i128,
}

impl Decimal {
    /// Reads a JSON number.
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, unsigned) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
        let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
        let (whole, decimals) =
            mantissa.split_once('.').map_or((mantissa, None), |(whole, part)| (whole, Some(part)));
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let is_whole = is_digits(whole) && (whole == "0" || !whole.starts_with('0'));
        let unsigned_exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        if !is_whole || !decimals.is_none_or(is_digits) || !is_digits(unsigned_exponent) {
            return None;
        }
        let all: Vec<u8> =
            whole.bytes().chain(decimals.unwrap_or_default().bytes()).map(|byte| byte - b'0').collect();
        let zeros = all.iter().take_while(|digit| **digit == 0).count();
        let mut digits = all[zeros..].to_vec();
        digits.truncate(digits.iter().rposition(|digit| *digit != 0).map_or(0, |last| last + 1));
        if digits.is_empty() {
            return Some(Self { negative: false, digits, exponent: 0 });
        }
        let exponent = exponent.strip_prefix('+').unwrap_or(exponent);
        // Beyond what 128 bits hold, only the sign matters.
        let limit = if exponent.starts_with('-') { i128::MIN / 4 } else { i128::MAX / 4 };
        let exponent = exponent.parse::<i128>().unwrap_or(limit).clamp(i128::MIN / 4, i128::MAX / 4);
        Some(Self { negative, digits, exponent: exponent + whole.len() as i128 - zeros as i128 })
    }

    /// Whether it has no fraction.
    pub fn is_integer(&self) -> bool {
        self.exponent >= self.digits.len() as i128
    }

    /// Whether it is a whole multiple of another one, which is not zero.
    pub fn is_multiple_of(&self, other: &Self) -> bool {
        // Both as integers, over the power of ten of the smaller unit.
        let unit = |number: &Self| number.exponent - number.digits.len() as i128;
        let smallest = unit(self).min(unit(other));
        let divisor = other.digits.iter().fold(0_u128, |value, digit| value * 10 + u128::from(*digit));
        let zeros = |number: &Self| (unit(number) - smallest) as usize;
        let Some(divisor) =
            10_u128.checked_pow(zeros(other) as u32).and_then(|scale| scale.checked_mul(divisor))
        else {
            return self.digits.is_empty();
        };
        let digits = self.digits.iter().copied().chain(std::iter::repeat_n(0, zeros(self)));
        digits.fold(0, |rest, digit| (rest * 10 + u128::from(digit)) % divisor) == 0
    }

    /// Whether its magnitude is at least 2^52, from which on doubles have no fractions.
    pub fn is_beyond_doubles(&self) -> bool {
        let magnitude = Self { negative: false, ..self.clone() };
        Self::parse("4503599627370496").is_some_and(|limit| magnitude >= limit)
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        let sign = |number: &Self| match (number.digits.is_empty(), number.negative) {
            (true, _) => 0,
            (false, negative) => {
                if negative {
                    -1
                } else {
                    1
                }
            }
        };
        let magnitudes = || self.exponent.cmp(&other.exponent).then_with(|| self.digits.cmp(&other.digits));
        sign(self).cmp(&sign(other)).then_with(|| match sign(self) {
            0 => Ordering::Equal,
            1 => magnitudes(),
            _ => magnitudes().reverse(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Decimal {
        Decimal::parse(text).unwrap()
    }

    #[test]
    fn numbers_are_compared_exactly() {
        let ascending = [
            "-1e99999999999999999999999999999999999999999",
            "-1e400",
            "-9007199254740993",
            "-9007199254740992",
            "-1.5",
            "-1",
            "-1e-400",
            "0",
            "1e-400",
            "0.1",
            "0.10000000000000001",
            "1",
            "9007199254740992",
            "9007199254740993",
            "18446744073709551615",
            "18446744073709551616",
            "1e400",
        ];
        for pair in ascending.windows(2) {
            assert!(of(pair[0]) < of(pair[1]), "{pair:?}");
        }
        assert_eq!(of("100"), of("1E+2"));
        assert_eq!(of("-0.0"), of("0"));
        assert!(of("1.0").is_integer() && of("15e-1") == of("1.50") && !of("1.5").is_integer());
        assert!(
            of("-0.3").is_multiple_of(&of("0.1"))
                && !of("1e30").is_multiple_of(&of("7e2"))
                && of("0").is_multiple_of(&of("3"))
        );
        assert!(
            of("9007199254740993").is_multiple_of(&of("9007199254740993"))
                && !of("0.35").is_multiple_of(&of("0.1"))
        );
        for wrong in ["", "-", "01", "1.", ".5", "+1", "1e", "1e+", "0x1", "1 "] {
            assert_eq!(Decimal::parse(wrong), None, "{wrong}");
        }
    }
}
