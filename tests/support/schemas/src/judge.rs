//! Judgement of what is allowed and refused, and how often each kind was judged.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::case::{Case, KINDS};
use crate::scalars::FORMATTED;
use crate::{Decimal, Json, Validator};

/// What is said of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It must be allowed.
    Required,
    /// It may be allowed: it is valid, but written otherwise, or what is known to be left out.
    Permitted,
    /// It must not be allowed.
    Forbidden,
}

/// Judge of the texts under one schema.
#[derive(Debug)]
pub struct Judge {
    exact: Validator,
    enforced: Validator,
    /// Absent if it would round numbers of the schema.
    second: Option<jsonschema::Validator>,
    has_pattern: bool,
    has_other_names: bool,
    has_large_bound: bool,
    has_multiple: bool,
    /// Several of them, of which common multiples are written with all decimals, or one with bounds that have decimals, which the compiler
    /// divides as doubles.
    has_multiples: bool,
    /// Formats in the schema.
    formats: Vec<&'static str>,
}

/// Keywords of bounds.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

impl Judge {
    /// Creates the judge of a schema.
    ///
    /// # Panics
    /// The schema is invalid.
    pub fn new(schema: &Value) -> Self {
        let mut is_exact = true;
        Json::from(schema).visit(&mut |value| {
            if let Json::Number(text) = value {
                is_exact &= text.parse::<i64>().is_ok()
                    || value.decimal().is_some_and(|number| !number.is_beyond_doubles());
            }
        });
        let second = jsonschema::options().should_validate_formats(false).build(schema);
        let second = Some(second.unwrap_or_else(|error| panic!("{schema}: {error}"))).filter(|_| is_exact);
        let text = schema.to_string();
        let mut has_other_names =
            text.contains("\"patternProperties\"") || text.contains("\"propertyNames\"");
        let (mut has_large_bound, mut has_decimal_bound) = (false, false);
        let mut enforced = schema.clone();
        each_object(&mut enforced, &mut |object| {
            has_other_names |= object.get("additionalProperties").is_some_and(Value::is_object);
            for keyword in BOUNDS {
                let Some(bound) = object.get(keyword).filter(|bound| bound.is_number()) else { continue };
                let bound = Json::from(bound).decimal().unwrap();
                has_large_bound |= bound.is_beyond_doubles();
                has_decimal_bound |= !bound.is_integer();
                // Bounds beyond those of 64 bits are the range of a type, and not enforced.
                let (least, most) =
                    (Decimal::parse("-9223372036854775808"), Decimal::parse("9223372036854775808"));
                let is_wide =
                    if keyword.ends_with("aximum") { most < Some(bound) } else { Some(bound) < least };
                if is_wide {
                    object.remove(keyword);
                }
            }
        });
        let has_multiples =
            text.matches("multipleOf").count() > 1 || (text.contains("multipleOf") && has_decimal_bound);
        let formats = FORMATTED.iter().map(|(format, _)| *format);
        let formats = formats.filter(|format| text.contains(&format!("\"format\":\"{format}\""))).collect();
        let (exact, enforced) = (Validator::new(schema.clone()), Validator::new(enforced));
        Self {
            exact,
            enforced,
            second,
            has_pattern: text.contains("attern"),
            has_other_names,
            has_large_bound,
            has_multiple: text.contains("multipleOf"),
            has_multiples,
            formats,
        }
    }

    /// Returns the verdict on a text, which is a value as [`Case`] writes it if `is_plain`.
    ///
    /// # Panics
    /// The two validators disagree.
    pub fn verdict(&self, text: &str, is_plain: bool) -> Verdict {
        let Some(value) = Json::parse(text) else { return Verdict::Forbidden };
        let is_valid = self.exact.allows(&value);
        if let (Some(second), Some(same)) = (&self.second, as_doubles(&value, self.has_multiple)) {
            assert_eq!(
                second.is_valid(&same),
                is_valid,
                "the validators disagree about {text} under {:?}",
                self.exact
            );
        }
        match is_valid {
            true if is_plain && !self.is_left_out(&value) => Verdict::Required,
            true => Verdict::Permitted,
            false if self.enforced.allows(&value) => Verdict::Permitted,
            false => Verdict::Forbidden,
        }
    }

    /// Whether a value is known to be left out, though it is valid.
    fn is_left_out(&self, value: &Json) -> bool {
        let mut left_out = false;
        value.visit(&mut |value| match value {
            // A bound beyond 2^53 is narrowed to the next number that a double holds.
            Json::Number(_) if self.has_large_bound => {
                left_out |= value.decimal().is_some_and(|number| number.is_beyond_doubles());
            }
            // Bounded numbers have no exponent.
            Json::Number(text) => {
                left_out |= text.contains(['e', 'E']) || (self.has_multiples && text.contains('.'))
            }
            Json::Text(text) => {
                // The validators take formats for annotations.
                left_out |= match &self.formats[..] {
                    [] => false,
                    [one] => !FORMATTED
                        .iter()
                        .any(|(format, texts)| format == one && texts.contains(&text.as_str())),
                    _ => true,
                };
                for c in text.chars() {
                    // The raw character is no JSON to the compiler; with names of which some are listed, no character is written by its code.
                    left_out |= c == '\u{7f}' || (c == '\0' && self.has_pattern);
                    left_out |= c < ' ' && !"\n\r\t\u{8}\u{c}".contains(c) && self.has_other_names;
                }
            }
            _ => {}
        });
        left_out
    }
}

/// Calls a function with all objects of a schema, of data among them, too.
fn each_object(schema: &mut Value, visit: &mut dyn FnMut(&mut serde_json::Map<String, Value>)) {
    match schema {
        Value::Object(object) => {
            visit(object);
            object.values_mut().for_each(|value| each_object(value, visit));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| each_object(value, visit)),
        _ => {}
    }
}

/// Returns a value as the second validator reads it; `None` if that is not exact, as with divisions of large integers.
fn as_doubles(value: &Json, divides: bool) -> Option<Value> {
    let text = value.to_string();
    let read: Value = serde_json::from_str(&text).ok()?;
    let mut exact = true;
    value.visit(&mut |value| {
        if let Json::Number(text) = value {
            let digits = text.bytes().filter(u8::is_ascii_digit).count();
            exact &= if divides {
                digits <= 15 && !text.contains(['e', 'E'])
            } else {
                digits <= 15 || text.parse::<i64>().is_ok()
            };
        }
    });
    exact.then_some(read)
}

/// How often each kind was judged, and refused.
#[derive(Debug, Default)]
pub struct Coverage {
    judged: BTreeMap<&'static str, (usize, usize, usize)>,
    pairs: usize,
    schemas: usize,
    refused: usize,
}

impl Coverage {
    /// Counts a schema that was taken, with a number of texts.
    pub fn taken(&mut self, case: &Case, texts: usize) {
        self.pairs += texts;
        self.schemas += 1;
        for kind in &case.kinds {
            let counts = self.judged.entry(kind).or_default();
            *counts = (counts.0 + texts, counts.1 + 1, counts.2);
        }
    }

    /// Counts a schema that was refused.
    pub fn refused(&mut self, case: &Case) {
        self.refused += 1;
        for kind in &case.kinds {
            self.judged.entry(kind).or_default().2 += 1;
        }
    }

    /// Pairs of a schema and a text.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Pairs of the kind that has fewest.
    pub fn least(&self) -> usize {
        KINDS.iter().map(|kind| self.judged.get(kind).map_or(0, |counts| counts.0)).min().unwrap_or(0)
    }

    /// Prints the table, and checks that each kind was judged, and that not more schemas are refused than is known.
    ///
    /// # Panics
    /// A kind was judged less than `least` times, or more than `refused` percent of all schemas are refused.
    pub fn check(&self, least: usize, refused: f64) {
        println!("{:28} {:>9} {:>8} {:>8}", "kind", "pairs", "schemas", "refused");
        for kind in KINDS {
            let (pairs, taken, refused) = self.judged.get(kind).copied().unwrap_or_default();
            let share = 100.0 * refused as f64 / (taken + refused).max(1) as f64;
            println!("{kind:28} {pairs:9} {taken:8} {share:6.1} %");
        }
        let share = 100.0 * self.refused as f64 / (self.schemas + self.refused).max(1) as f64;
        println!("{:28} {:9} {:8} {share:6.1} %", "all", self.pairs, self.schemas);
        for kind in KINDS {
            let pairs = self.judged.get(kind).map_or(0, |counts| counts.0);
            assert!(pairs >= least, "{kind} was judged {pairs} times only");
        }
        assert!(share <= refused, "{share:.1} % of the schemas are refused");
    }
}
