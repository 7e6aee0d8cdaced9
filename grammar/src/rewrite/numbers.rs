//! Integers beyond 2^53, which doubles do not represent exactly.
//!
//! The compiler computes with doubles, and JSON Schema with exact numbers: between 2^53 and 2^63, a constant or a bound that is not
//! representable as a double would be rounded to another number.

use serde_json::{Map, Number, Value, json};

use super::{Dialect, push};
use crate::GrammarError;

/// Largest integer up to which every integer is a double.
const EXACT_MAX: u128 = 1 << 53;
/// Bounds of at least this magnitude are dropped: they state the range of a 64-bit type, as generators of schemas write it.
const RANGE: i128 = 1 << 63;

/// Magnitude from which the compiler supports a bound only together with its opposite bound.
const FAR: i128 = 10_i128.pow(18);

/// Direction of a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Lower,
    Upper,
}

const BOUNDS: [(&str, Side, bool); 4] = [
    ("minimum", Side::Lower, false),
    ("exclusiveMinimum", Side::Lower, true),
    ("maximum", Side::Upper, false),
    ("exclusiveMaximum", Side::Upper, true),
];

/// Refuses constants that would become other numbers; narrows bounds to the nearest double inside them; drops bounds of at least 2^63.
///
/// # Errors
/// [`GrammarError::Refused`] for a constant beyond 2^53 that may not be exact, and for a bound that the compiler cannot count from.
pub(super) fn numbers(object: &mut Map<String, Value>, dialect: Dialect) -> Result<(), GrammarError> {
    for keyword in ["const", "enum"] {
        if let Some(number) = object.get(keyword).and_then(inexact) {
            return Err(GrammarError::Refused(format!(
                "{keyword} has the number {number}, which is beyond 2^53 and may not be written exactly; let the value be a string"
            )));
        }
    }
    for (keyword, side, exclusive) in BOUNDS {
        let Some(bound) = object.get(keyword).and_then(large) else { continue };
        let (flag, other) = match side {
            Side::Lower => ("exclusiveMinimum", ["maximum", "exclusiveMaximum"]),
            Side::Upper => ("exclusiveMaximum", ["minimum", "exclusiveMinimum"]),
        };
        // In draft 4, the exclusive keywords say how the others are meant.
        let excludes =
            exclusive || (dialect == Dialect::Draft4 && object.get(flag) == Some(&Value::Bool(true)));
        let is_integer = object.get("type").is_some_and(|name| name == "integer");
        let is_range = match side {
            Side::Lower => bound <= -RANGE,
            // The compiler counts integers up to 2^63 - 1.
            Side::Upper if is_integer => bound >= RANGE,
            Side::Upper => bound >= RANGE - 1,
        };
        if is_range {
            object.remove(keyword);
            if excludes && !exclusive {
                object.remove(flag);
            }
            continue;
        }
        let narrowed = match side {
            Side::Lower => next_double(bound + i128::from(excludes)),
            Side::Upper => -next_double(i128::from(excludes) - bound),
        };
        let counted = !excludes && side == Side::Upper && bound == RANGE - 1;
        let far = if side == Side::Lower { bound >= FAR } else { bound <= -FAR };
        let is_open = far && other.iter().all(|keyword| object.get(*keyword).is_none());
        if !counted && (narrowed.abs() >= RANGE || is_open) {
            return Err(GrammarError::Refused(format!(
                "{keyword} is {}, a bound that integers cannot be counted from; use one within ±10^18",
                object[keyword]
            )));
        }
        if counted || (!excludes && narrowed == bound) {
            continue;
        }
        object.remove(keyword);
        if excludes && !exclusive {
            object.remove(flag);
        }
        let inclusive = if side == Side::Lower { "minimum" } else { "maximum" };
        // Below 2^63, as is checked above.
        push(object, json!({inclusive: narrowed as i64}));
    }
    Ok(())
}

/// Returns a number in a constant that is not written exactly.
fn inexact(value: &Value) -> Option<&Number> {
    match value {
        // A float of this size may have been rounded when it was parsed.
        Value::Number(number) => {
            let rounded = || number.as_f64().is_some_and(|float| float.abs() >= EXACT_MAX as f64);
            integer(number).map_or_else(rounded, |value| !is_double(value)).then_some(number)
        }
        Value::Array(values) => values.iter().find_map(inexact),
        Value::Object(fields) => fields.values().find_map(inexact),
        _ => None,
    }
}

/// Returns a bound that is an integer from 2^53 on.
fn large(value: &Value) -> Option<i128> {
    let number = value.as_number()?;
    let most = (4 * RANGE) as f64;
    let whole = || number.as_f64().map(|float| float.clamp(-most, most) as i128);
    integer(number).or_else(whole).filter(|bound| bound.unsigned_abs() >= EXACT_MAX)
}

fn integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

fn is_double(value: i128) -> bool {
    (value as f64) as i128 == value
}

/// Returns the smallest double that is at least this integer, which is below 2^63 in magnitude.
fn next_double(value: i128) -> i128 {
    let nearest = value as f64;
    if (nearest as i128) < value { nearest.next_up() as i128 } else { nearest as i128 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(mut schema: Value) -> Value {
        numbers(schema.as_object_mut().unwrap(), Dialect::Draft2020).unwrap();
        schema
    }

    #[test]
    fn bounds_are_doubles_within_them_or_gone() {
        let narrowed = |keyword: &str, value: i64| json!({"allOf": [{keyword: value}]});
        for (schema, expected) in [
            (json!({"minimum": 9_007_199_254_740_991_i64}), json!({"minimum": 9_007_199_254_740_991_i64})),
            (json!({"minimum": 9_007_199_254_740_993_i64}), narrowed("minimum", 9_007_199_254_740_994)),
            (json!({"maximum": 9_007_199_254_740_993_i64}), narrowed("maximum", 9_007_199_254_740_992)),
            (
                json!({"exclusiveMinimum": 9_007_199_254_740_992_i64}),
                narrowed("minimum", 9_007_199_254_740_994),
            ),
            (
                json!({"exclusiveMaximum": -9_007_199_254_740_992_i64}),
                narrowed("maximum", -9_007_199_254_740_994),
            ),
            (json!({"maximum": -9_007_199_254_740_993_i64}), narrowed("maximum", -9_007_199_254_740_994)),
            (json!({"minimum": 1_i64 << 58}), json!({"minimum": 1_i64 << 58})),
            (json!({"minimum": i64::MIN, "maximum": i64::MAX}), json!({})),
            (
                json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
                json!({"type": "integer", "maximum": i64::MAX}),
            ),
            (json!({"minimum": 0, "maximum": u64::MAX}), json!({"minimum": 0})),
            (json!({"minimum": -3.4e38, "maximum": 1.7e308}), json!({})),
            (json!({"minimum": -1.5, "maximum": 7}), json!({"minimum": -1.5, "maximum": 7})),
            (json!({"minimum": -0.0, "maximum": i64::MAX}), json!({"minimum": -0.0})),
            (json!({"exclusiveMinimum": -1e300, "exclusiveMaximum": 1e300}), json!({})),
            (json!({"minimum": FAR as i64, "maximum": FAR as i64 + 1}), {
                json!({"minimum": FAR as i64, "allOf": [{"maximum": FAR as i64}]})
            }),
        ] {
            assert_eq!(of(schema.clone()), expected, "{schema}");
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
            let refused = numbers(schema.as_object_mut().unwrap(), Dialect::Draft2020).unwrap_err();
            assert!(refused.to_string().contains("within ±10^18"), "{keyword} {value}: {refused}");
        }
    }

    #[test]
    fn constants_that_are_no_doubles_are_refused() {
        for value in [json!(9_007_199_254_740_993_i64), json!([{"id": u64::MAX}]), json!(1e20)] {
            let mut schema = json!({"const": value});
            let refused = numbers(schema.as_object_mut().unwrap(), Dialect::Draft2020).unwrap_err();
            assert!(refused.to_string().contains("let the value be a string"), "{refused}");
        }
        let exact = json!({"enum": [1_i64 << 60, 0.1, -3, "9007199254740993"]});
        assert_eq!(of(exact.clone()), exact);
    }
}
