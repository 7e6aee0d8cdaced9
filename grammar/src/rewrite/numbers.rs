//! Bounds and constants of numbers.
//!
//! The compiler computes with doubles and writes them with their shortest digits, where JSON Schema has exact numbers. Beyond 2^53, a
//! constant or bound that is no double would be another number. Its expressions of ranges have three gaps: an exclusive bound that is an
//! integer belongs to the range if the other bound has the same integer part, decimals that are a prefix of those of a bound are left
//! out, and bounds from 10^18 on need an opposite one.

use serde_json::{Map, Number, Value, json};

use super::push;
use crate::GrammarError;

/// Largest integer up to which every integer is a double.
const EXACT_MAX: u128 = 1 << 53;
/// Largest magnitude of a bound that is enforced: the compiler counts integers of 64 bits. Generators of schemas write those beyond as the
/// range of a type.
const RANGE: i128 = 1 << 63;
/// Largest double below [`RANGE`].
const RANGE_DOUBLE: i128 = RANGE - 1024;
/// Magnitude from which the compiler supports a bound only together with its opposite bound.
const FAR: i128 = 10_i128.pow(18);
/// Number that stands for the smallest one above zero.
const SMALLEST: f64 = 1e-20;

/// Direction of a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Lower,
    Upper,
}

/// Keyword that bounds numbers.
#[derive(Debug, Clone, Copy)]
struct Bound {
    keyword: &'static str,
    side: Side,
    exclusive: bool,
}

const BOUNDS: [Bound; 4] = [
    Bound { keyword: "minimum", side: Side::Lower, exclusive: false },
    Bound { keyword: "exclusiveMinimum", side: Side::Lower, exclusive: true },
    Bound { keyword: "maximum", side: Side::Upper, exclusive: false },
    Bound { keyword: "exclusiveMaximum", side: Side::Upper, exclusive: true },
];

impl Bound {
    fn inclusive(self) -> &'static str {
        if self.side == Side::Lower { "minimum" } else { "maximum" }
    }

    /// Returns a number as a lower bound has it.
    fn turned<T: std::ops::Neg<Output = T>>(self, value: T) -> T {
        if self.side == Side::Lower { value } else { -value }
    }

    fn has_opposite(self, object: &Map<String, Value>) -> bool {
        BOUNDS.iter().any(|bound| bound.side != self.side && object.contains_key(bound.keyword))
    }

    /// Replaces the bound by an inclusive one.
    fn replace(self, object: &mut Map<String, Value>, value: impl Into<Value>) {
        let inclusive = self.inclusive();
        if self.exclusive {
            object.shift_remove(self.keyword);
        }
        if self.exclusive && object.contains_key(inclusive) {
            push(object, json!({inclusive: value.into()}));
        } else {
            object.insert(inclusive.to_owned(), value.into());
        }
    }
}

/// Refuses constants that would become other numbers, and rewrites bounds so that the compiler enforces them: those beyond 2^53 become the
/// nearest double inside them, those beyond 2^63 are dropped.
///
/// # Errors
/// [`GrammarError::Refused`] for a constant beyond 2^53 that may not be exact, and for a bound that the compiler cannot count from.
pub(super) fn numbers(object: &mut Map<String, Value>) -> Result<(), GrammarError> {
    for keyword in ["const", "enum"] {
        if let Some(number) = object.get(keyword).and_then(inexact) {
            return Err(GrammarError::Refused(format!(
                "{keyword} has the number {number}, which is beyond 2^53 and may not be written exactly; let the value be a string"
            )));
        }
    }
    flags(object);
    for bound in BOUNDS {
        let Some(value) = object.get(bound.keyword).and_then(large) else { continue };
        if bound.turned(value) < -RANGE {
            object.shift_remove(bound.keyword);
        }
    }
    let is_integer = object.get("type").is_some_and(|name| name == "integer");
    for bound in BOUNDS {
        let Some(number) = object.get(bound.keyword).and_then(Value::as_number) else { continue };
        match large_number(number) {
            Some(value) => beyond_doubles(object, bound, value, is_integer)?,
            None if is_integer => {}
            None => number.as_f64().into_iter().for_each(|value| small(object, bound, value)),
        }
    }
    Ok(())
}

/// In draft 4 and OpenAPI 3.0, the exclusive keywords say how the others are meant.
fn flags(object: &mut Map<String, Value>) {
    for (inclusive, exclusive) in [("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")] {
        let Some(Value::Bool(excludes)) = object.get(exclusive) else { continue };
        match object.get(inclusive).filter(|_| *excludes).cloned() {
            Some(value) => {
                object.shift_remove(inclusive);
                object.insert(exclusive.to_owned(), value);
            }
            None => _ = object.shift_remove(exclusive),
        }
    }
}

/// Replaces a bound beyond 2^53 by the nearest double inside it.
fn beyond_doubles(
    object: &mut Map<String, Value>,
    bound: Bound,
    value: i128,
    is_integer: bool,
) -> Result<(), GrammarError> {
    let first = bound.turned(value) + i128::from(bound.exclusive);
    // The compiler takes it for the largest integer of 64 bits.
    if is_integer && bound.side == Side::Upper && first < -RANGE + 2 {
        bound.replace(object, i64::MAX);
        return Ok(());
    }
    let mut inside = next_double(first).max(-RANGE_DOUBLE);
    if !is_integer && shown(inside) < first {
        inside = next_double(inside + 1);
    }
    if inside >= RANGE || (inside >= FAR && !bound.has_opposite(object)) {
        return Err(GrammarError::Refused(format!(
            "{} is {value}, a bound that integers cannot be counted from; use one within ±10^18",
            bound.keyword
        )));
    }
    // Below 2^63, as is checked above.
    bound.replace(object, bound.turned(inside) as i64);
    Ok(())
}

/// Rewrites a bound within 2^53: an integer that is excluded, and is the one nearest to zero.
fn small(object: &mut Map<String, Value>, bound: Bound, value: f64) {
    let turned = bound.turned(value);
    if bound.exclusive && value.fract() == 0.0 && turned >= 0.0 {
        let inside = if turned == 0.0 { SMALLEST } else { turned.next_up() };
        bound.replace(object, bound.turned(inside));
    }
}

/// Adds the numbers that the compiler leaves out of a range: those whose decimals are a prefix of those of the bound that is farther from
/// zero.
pub(super) fn decimals(object: &mut Map<String, Value>) {
    if object.get("type").is_some_and(|name| name == "integer") {
        return;
    }
    for bound in BOUNDS {
        let Some(value) = object.get(bound.keyword).and_then(Value::as_f64) else { continue };
        let left_out = if bound.turned(value) < 0.0 { prefixes(value) } else { Vec::new() };
        if !left_out.is_empty()
            && let Some(given) = object.shift_remove(bound.keyword)
        {
            push(object, json!({"anyOf": [{bound.keyword: given}, {"enum": left_out}]}));
        }
    }
}

/// Returns the numbers whose digits are the first ones of a number's, from one decimal on.
fn prefixes(value: f64) -> Vec<f64> {
    let text = value.to_string();
    let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let shorter = (1..decimals).map(|dropped| &text[..text.len() - dropped]);
    shorter.filter(|text| !text.ends_with('0')).filter_map(|text| text.parse().ok()).collect()
}

/// Returns a number in a constant that is not written exactly.
fn inexact(value: &Value) -> Option<&Number> {
    match value {
        Value::Number(number) => {
            let exact = match number.as_i64() {
                Some(value) => is_double(value.into()) && value != i64::MIN,
                // A float of this size may have been rounded when it was parsed.
                None => number.as_f64().is_some_and(|float| float.abs() < EXACT_MAX as f64),
            };
            (!exact).then_some(number)
        }
        Value::Array(values) => values.iter().find_map(inexact),
        Value::Object(fields) => fields.values().find_map(inexact),
        _ => None,
    }
}

fn large(value: &Value) -> Option<i128> {
    large_number(value.as_number()?)
}

/// Returns a number that is an integer from 2^53 on.
fn large_number(number: &Number) -> Option<i128> {
    let most = (4 * RANGE) as f64;
    let integer = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
    let whole = || number.as_f64().map(|float| float.clamp(-most, most) as i128);
    integer.or_else(whole).filter(|bound| bound.unsigned_abs() >= EXACT_MAX)
}

fn is_double(value: i128) -> bool {
    (value as f64) as i128 == value
}

/// Returns the smallest double that is at least this integer.
fn next_double(value: i128) -> i128 {
    let nearest = value as f64;
    if (nearest as i128) < value { nearest.next_up() as i128 } else { nearest as i128 }
}

/// Returns the integer that the shortest digits of a double show.
fn shown(double: i128) -> i128 {
    (double as f64).to_string().parse().unwrap_or(double)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(mut schema: Value) -> Value {
        numbers(schema.as_object_mut().unwrap()).unwrap();
        decimals(schema.as_object_mut().unwrap());
        schema
    }

    #[test]
    fn bounds_beyond_2_53_are_doubles_within_them_and_beyond_2_63_none() {
        let integer = |keyword: &str, value: i64| json!({"type": "integer", keyword: value});
        for (given, expected) in [
            (integer("minimum", 9_007_199_254_740_991), integer("minimum", 9_007_199_254_740_991)),
            (integer("minimum", 9_007_199_254_740_993), integer("minimum", 9_007_199_254_740_994)),
            (integer("maximum", 9_007_199_254_740_993), integer("maximum", 9_007_199_254_740_992)),
            (integer("exclusiveMinimum", 9_007_199_254_740_992), integer("minimum", 9_007_199_254_740_994)),
            (integer("exclusiveMaximum", -9_007_199_254_740_992), integer("maximum", -9_007_199_254_740_994)),
            (integer("maximum", -9_007_199_254_740_993), integer("maximum", -9_007_199_254_740_994)),
            (integer("minimum", 1 << 58), integer("minimum", 1 << 58)),
            // Its shortest digits are those of a smaller number.
            (json!({"minimum": 1_i64 << 58}), json!({"minimum": (1_i64 << 58) + 64})),
            (json!({"maximum": 1_i64 << 58}), json!({"maximum": 1_i64 << 58})),
            (
                json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
                json!({"type": "integer", "minimum": -RANGE_DOUBLE as i64, "maximum": i64::MAX}),
            ),
            (
                json!({"minimum": i64::MIN, "maximum": i64::MAX}),
                json!({"minimum": -RANGE_DOUBLE as i64, "maximum": RANGE_DOUBLE as i64}),
            ),
            (json!({"minimum": 0, "maximum": u64::MAX}), json!({"minimum": 0})),
            (json!({"minimum": -3.4e38, "maximum": 1.7e308}), json!({})),
            (json!({"exclusiveMinimum": -1e300, "exclusiveMaximum": 1e300}), json!({})),
            (
                json!({"type": "integer", "minimum": FAR as i64, "maximum": FAR as i64 + 1}),
                json!({"type": "integer", "minimum": FAR as i64, "maximum": FAR as i64}),
            ),
        ] {
            assert_eq!(of(given.clone()), expected, "{given}");
        }
    }

    #[test]
    fn exclusive_integers_and_prefixes_of_decimals_are_written_out() {
        for (given, expected) in [
            (json!({"exclusiveMinimum": 0, "maximum": 0.5}), json!({"maximum": 0.5, "minimum": 1e-20})),
            (json!({"exclusiveMaximum": 0}), json!({"maximum": -1e-20})),
            (
                json!({"minimum": 3, "exclusiveMinimum": 3}),
                json!({"minimum": 3, "allOf": [{"minimum": 3.000_000_000_000_000_4}]}),
            ),
            (json!({"minimum": 3, "exclusiveMinimum": true}), json!({"minimum": 3.000_000_000_000_000_4})),
            (json!({"minimum": 3, "exclusiveMinimum": false}), json!({"minimum": 3})),
            (json!({"exclusiveMinimum": true}), json!({})),
            // Away from zero, the compiler is right.
            (
                json!({"exclusiveMaximum": 5, "exclusiveMinimum": -5}),
                json!({"exclusiveMaximum": 5, "exclusiveMinimum": -5}),
            ),
            (
                json!({"type": "integer", "exclusiveMinimum": 0}),
                json!({"type": "integer", "exclusiveMinimum": 0}),
            ),
            (json!({"minimum": 0.25, "maximum": -0.25}), json!({"minimum": 0.25, "maximum": -0.25})),
            (
                json!({"maximum": 0.205, "minimum": -99.99}),
                json!({"allOf": [
                    {"anyOf": [{"minimum": -99.99}, {"enum": [-99.9]}]},
                    {"anyOf": [{"maximum": 0.205}, {"enum": [0.2]}]},
                ]}),
            ),
        ] {
            assert_eq!(of(given.clone()), expected, "{given}");
        }
    }

    #[test]
    fn bounds_from_which_nothing_can_be_counted_are_refused() {
        let lower = ["minimum", "exclusiveMinimum"].map(|keyword| {
            [json!(i64::MAX), json!(u64::MAX), json!(1e19), json!(1e300)].map(|value| (keyword, value))
        });
        let upper = ["maximum", "exclusiveMaximum"].map(|keyword| {
            [json!(i64::MIN), json!(-1e19), json!(-1e300), json!(-FAR as i64)].map(|value| (keyword, value))
        });
        for (keyword, value) in lower.into_iter().chain(upper).flatten() {
            let mut schema = json!({"type": "integer", keyword: value});
            let refused = numbers(schema.as_object_mut().unwrap()).unwrap_err();
            assert!(refused.to_string().contains("within ±10^18"), "{keyword} {value}: {refused}");
        }
        let mut opposite_is_dropped = json!({"minimum": FAR as i64, "maximum": u64::MAX});
        assert!(numbers(opposite_is_dropped.as_object_mut().unwrap()).is_err());
    }

    #[test]
    fn constants_that_are_no_doubles_are_refused() {
        for value in [
            json!(9_007_199_254_740_993_i64),
            json!([{"id": u64::MAX}]),
            json!(1e20),
            json!(1_u64 << 63),
            json!(i64::MIN),
        ] {
            let mut schema = json!({"const": value});
            let refused = numbers(schema.as_object_mut().unwrap()).unwrap_err();
            assert!(refused.to_string().contains("let the value be a string"), "{refused}");
        }
        let exact = json!({"enum": [1_i64 << 60, 0.1, -3, "9007199254740993"]});
        assert_eq!(of(exact.clone()), exact);
    }
}
