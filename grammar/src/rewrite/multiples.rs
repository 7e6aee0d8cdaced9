//! `multipleOf`: the compiler divides with 32 bits, also by the smallest common multiple of several that hold together, without a check, and
//! writes some multiples with all of the decimals only.

use serde_json::{Map, Value, json};

use super::{each_object, is_true, push};
use crate::GrammarError;

/// Keywords that hold in the place of a schema.
const IN_PLACE: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// Decimal number: `digits` / 10^`decimals`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Decimal {
    digits: u64,
    decimals: u32,
}

/// Checks the `multipleOf` of all schemas in one.
///
/// # Errors
/// [`GrammarError::Refused`] for one that the compiler cannot count with, or several whose common multiple may be too large.
pub(super) fn multiples(schema: &mut Map<String, Value>) -> Result<(), GrammarError> {
    let (mut found, mut combined) = (Vec::new(), false);
    each_object(schema, &mut |object| {
        let value = object.get("multipleOf").and_then(Value::as_f64);
        if let Some(value) = value {
            found.push(decimal(value).ok_or_else(|| {
                GrammarError::Refused(format!(
                    "multipleOf is {value}, which cannot be enforced; use an integer of up to eight digits, or a fraction that stays exact when it is \
                     multiplied by 10 in floating point, such as 0.01 or 0.25"
                ))
            })?);
        }
        combined |= holds_with_others(object);
        Ok(())
    })?;
    found.sort_unstable();
    found.dedup();
    let decimals = found.iter().map(|value| value.decimals).max().unwrap_or(0);
    let scaled = |value: &Decimal| value.digits.checked_mul(10_u64.checked_pow(decimals - value.decimals)?);
    // The compiler multiplies a common multiple with another one before it divides.
    let common = found.iter().try_fold(1_u64, |common, value| {
        let value = scaled(value)?;
        let product = common.checked_mul(value)?;
        Some(product / greatest_divisor(common, value))
    });
    let largest = found.iter().filter_map(scaled).max().unwrap_or(1);
    let fits = common.is_some_and(|common| {
        can_divide_by(common, decimals) && common.saturating_mul(largest) <= u64::from(u32::MAX)
    });
    if !fits && combined && !found.is_empty() {
        return Err(GrammarError::Refused(
            "multipleOf has values whose common multiple is too large, beside allOf, anyOf, oneOf, $ref or patternProperties; use smaller \
             ones"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Whether other schemas hold together with this one, or parts of it with each other.
fn holds_with_others(object: &Map<String, Value>) -> bool {
    let others = object.iter().filter(|(keyword, value)| {
        !is_true(value)
            && !matches!(keyword.as_str(), "$defs" | "definitions" | "$schema" | "title" | "description")
    });
    let all = object.get("allOf").and_then(Value::as_array).is_some_and(|all| all.len() > 1);
    let in_place = IN_PLACE.iter().any(|keyword| object.contains_key(*keyword));
    all || (in_place && others.count() > 1) || object.contains_key("patternProperties")
}

/// Returns the decimal that the compiler makes of a number, if it has its value.
fn decimal(value: f64) -> Option<Decimal> {
    if value <= 0.0 {
        return None;
    }
    let (mut scaled, mut decimals) = (value, 0);
    while scaled.fract() != 0.0 {
        scaled *= 10.0;
        decimals += 1;
    }
    if scaled > f64::from(u32::MAX) || decimals > 9 || !can_divide_by(scaled as u64, decimals) {
        return None;
    }
    let mut digits = scaled as u64;
    while decimals > 0 && digits.is_multiple_of(10) {
        digits /= 10;
        decimals -= 1;
    }
    let decimal = Decimal { digits, decimals };
    (decimal.text() == value.to_string()).then_some(decimal)
}

/// Whether no step of a division, which appends a digit, exceeds 32 bits.
fn can_divide_by(digits: u64, decimals: u32) -> bool {
    digits.saturating_mul(10).saturating_add(9 * 10_u64.pow(decimals.min(10))) <= u64::from(u32::MAX)
}

impl Decimal {
    fn text(self) -> String {
        let decimals = self.decimals as usize;
        let text = format!("{:0>width$}", self.digits, width = decimals + 1);
        let (whole, part) = text.split_at(text.len() - decimals);
        if decimals == 0 { whole.to_owned() } else { format!("{whole}.{part}") }
    }

    /// Returns the multiples among the numbers of fewer decimals.
    fn of_decimals(self, decimals: u32) -> Self {
        let unit = 10_u64.pow(self.decimals - decimals);
        Self { digits: self.digits / greatest_divisor(self.digits, unit), decimals }
    }
}

fn greatest_divisor(mut one: u64, mut two: u64) -> u64 {
    while two > 0 {
        (one, two) = (two, one % two);
    }
    one
}

/// Adds the multiples that the compiler leaves out: those with fewer decimals than the unit, if that has more than one digit.
pub(super) fn decimals(object: &mut Map<String, Value>) {
    let Some(value) = object.get("multipleOf").and_then(Value::as_f64).and_then(decimal) else { return };
    if value.digits < 10 || value.decimals < 2 || object.get("type").is_some_and(|name| name == "integer") {
        return;
    }
    let shorter = (1..value.decimals).map(|decimals| value.of_decimals(decimals).text());
    let units = shorter.filter_map(|text| text.parse::<f64>().ok()).filter(|unit| decimal(*unit).is_some());
    let alternatives: Vec<Value> = units.map(|unit| json!({"multipleOf": unit})).collect();
    if let Some(given) = object.shift_remove("multipleOf") {
        let all = std::iter::once(json!({"multipleOf": given})).chain(alternatives);
        push(object, json!({"anyOf": all.collect::<Vec<_>>()}));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn multiples_that_the_compiler_cannot_count_with_are_refused() {
        for (value, expected) in [
            (0.01, Some((1, 2))),
            (0.25, Some((25, 2))),
            (2.5, Some((25, 1))),
            (1e3, Some((1000, 0))),
            (0.0, None),
            (-1.0, None),
            (0.07, None),
            (1e-12, None),
            (1e10, None),
            (429_496_728.0, Some((429_496_728, 0))),
            (429_496_730.0, None),
            (f64::MIN_POSITIVE, None),
        ] {
            let found = decimal(value).map(|decimal| (decimal.digits, decimal.decimals));
            assert_eq!(found, expected, "{value}");
        }
        let check =
            |mut schema: Value| multiples(schema.as_object_mut().unwrap()).map_err(|error| error.to_string());
        let both = json!({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]});
        assert!(check(both).unwrap_err().contains("common multiple is too large"));
        assert_eq!(
            check(json!({"allOf": [{"multipleOf": 6}, {"multipleOf": 0.1}, {"multipleOf": 6}]})),
            Ok(())
        );
        assert!(check(json!({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65537}]})).is_err());
        assert_eq!(check(json!({"allOf": [{"multipleOf": 4096}, {"minimum": 0}]})), Ok(()));
        let apart = json!({"properties": {"a": {"multipleOf": 65537}, "b": {"multipleOf": 65539}}});
        assert_eq!(check(apart), Ok(()));
        assert!(check(json!({"items": {"multipleOf": 0}})).unwrap_err().contains("multipleOf is 0"));
    }

    #[test]
    fn multiples_of_fewer_decimals_are_written_out() {
        let of = |mut schema: Value| {
            decimals(schema.as_object_mut().unwrap());
            schema
        };
        let all = |units: &[f64]| -> Value {
            units.iter().map(|unit| json!({"multipleOf": unit})).collect::<Vec<_>>().into()
        };
        assert_eq!(of(json!({"multipleOf": 0.25})), json!({"allOf": [{"anyOf": all(&[0.25, 0.5])}]}));
        assert_eq!(of(json!({"multipleOf": 0.375})), json!({"allOf": [{"anyOf": all(&[0.375, 1.5, 0.75])}]}));
        for right in [
            json!({"multipleOf": 0.05}),
            json!({"multipleOf": 2.5}),
            json!({"multipleOf": 12}),
            json!({"type": "integer", "multipleOf": 0.25}),
        ] {
            assert_eq!(of(right.clone()), right);
        }
    }
}
