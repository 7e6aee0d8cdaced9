//! Rewriting of JSON schemas: keywords that the compiler does not know become others that say the same.
//!
//! Each rule is exact: the schema allows the same values before and after. Exceptions are bounds beyond 2^53, the smallest numbers above an
//! exclusive bound, and U+0000 in classes of characters ([`numbers`], [`patterns`]). A keyword without a rule stays, and the compiler refuses it. Rules are applied from the outside
//! in, since what a keyword such as `unevaluatedProperties` means depends on the original subschemas. New constraints are appended to
//! `allOf`, so that references by position stay valid. Passes over the whole follow ([`multiples`], [`numbers::decimals`], [`open_objects`]).

mod conditions;
mod exclusion;
mod multiples;
mod negation;
mod numbers;
mod open_objects;
pub(crate) mod patterns;
mod references;
mod unevaluated;

use std::cell::Cell;

use serde_json::{Map, Number, Value, json};

use crate::GrammarError;
pub(crate) use open_objects::Names;
pub(crate) use references::References;

/// Maximum values in the schemas that rules copy.
const COPIED_MAX: usize = 20_000;
/// Maximum subschemas and property names visited to find what a schema evaluates; references can make a small schema a large
/// tree.
const VISITED_MAX: usize = 20_000;

/// Keywords whose values are counts; JSON has them as 2 or as 2.0.
const COUNTS: [&str; 8] = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
];

/// Keywords whose value is a schema, a list of schemas, and a map of schemas.
const ONE: [&str; 12] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
];
const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
const MAPS: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// Types of JSON values.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Dialects, by the year or number in their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Dialect {
    Draft4,
    Draft6,
    Draft7,
    Draft2019,
    Draft2020,
}

impl Dialect {
    /// Returns the dialect that a schema names; the newest if it names none.
    pub(crate) fn of(schema: &Map<String, Value>) -> Self {
        let name = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let known = [
            ("draft-04", Self::Draft4),
            ("draft-06", Self::Draft6),
            ("draft-07", Self::Draft7),
            ("2019-09", Self::Draft2019),
        ];
        known.iter().find(|(part, _)| name.contains(part)).map_or(Self::Draft2020, |(_, dialect)| *dialect)
    }
}

/// Rewrites a schema. With `expand_one_of`, `oneOf` is rewritten, too, as far as its alternatives can be negated.
///
/// # Errors
/// [`GrammarError::Refused`] if the schema becomes too large, or has what no rule makes enforceable.
pub(crate) fn rewrite(schema: &mut Map<String, Value>, expand_one_of: bool) -> Result<Names, GrammarError> {
    apply_rules(schema, expand_one_of)?;
    multiples::multiples(schema)?;
    each_object(schema, &mut |object| {
        numbers::decimals(object);
        multiples::decimals(object);
        Ok(())
    })?;
    open_objects::open_objects(schema)
}

/// Applies the rules that concern a schema and its surroundings.
fn apply_rules(schema: &mut Map<String, Value>, expand_one_of: bool) -> Result<(), GrammarError> {
    let original = schema.clone();
    let mut rewriter = Rewriter {
        references: References::new(&original),
        dialect: Dialect::of(&original),
        expand_one_of,
        copied: 0,
        visited: Cell::new(0),
    };
    rewriter.object(schema)?;
    loop {
        let hoisted = std::mem::take(&mut rewriter.references.hoisted);
        if hoisted.is_empty() {
            return Ok(());
        }
        let definitions = schema.entry("$defs").or_insert_with(|| json!({}));
        for (name, mut target) in hoisted {
            rewriter.schema(&mut target)?;
            if let Value::Object(definitions) = &mut *definitions {
                definitions.insert(name, target);
            }
        }
    }
}

/// Rule that is applied to one schema after another.
type Visit<'a> = dyn FnMut(&mut Map<String, Value>) -> Result<(), GrammarError> + 'a;

/// Visits all schemas in a schema and itself, from the inside out.
fn each_object(object: &mut Map<String, Value>, visit: &mut Visit<'_>) -> Result<(), GrammarError> {
    let mut within = |schema: &mut Value| match schema {
        Value::Object(object) => each_object(object, visit),
        _ => Ok(()),
    };
    for keyword in ONE {
        object.get_mut(keyword).map_or(Ok(()), &mut within)?;
    }
    for keyword in LISTS {
        let Some(Value::Array(schemas)) = object.get_mut(keyword) else { continue };
        schemas.iter_mut().try_for_each(&mut within)?;
    }
    for keyword in MAPS {
        let Some(Value::Object(schemas)) = object.get_mut(keyword) else { continue };
        schemas.iter_mut().try_for_each(|(_, schema)| within(schema))?;
    }
    visit(object)
}

struct Rewriter<'a> {
    references: References<'a>,
    dialect: Dialect,
    expand_one_of: bool,
    /// Values in the schemas copied so far.
    copied: usize,
    /// Subschemas and property names visited so far to find what a schema evaluates.
    visited: Cell<usize>,
}

impl Rewriter<'_> {
    fn schema(&mut self, schema: &mut Value) -> Result<(), GrammarError> {
        match schema {
            Value::Object(object) => self.object(object),
            _ => Ok(()),
        }
    }

    fn object(&mut self, object: &mut Map<String, Value>) -> Result<(), GrammarError> {
        counts(object);
        self.references.rewrite(object, &mut self.copied)?;
        if self.dialect >= Dialect::Draft2019 {
            self.unevaluated(object)?;
        }
        self.dependencies(object)?;
        self.contains(object);
        unique_items(object);
        formats(object);
        patterns::patterns(object)?;
        numbers::numbers(object)?;
        self.property_names(object);
        self.conditional(object)?;
        self.negated(object)?;
        self.one_of(object)?;
        for keyword in ONE {
            object.get_mut(keyword).map_or(Ok(()), |schema| self.schema(schema))?;
        }
        for keyword in LISTS {
            let Some(Value::Array(schemas)) = object.get_mut(keyword) else { continue };
            schemas.iter_mut().try_for_each(|schema| self.schema(schema))?;
        }
        for keyword in MAPS {
            let Some(Value::Object(schemas)) = object.get_mut(keyword) else { continue };
            schemas.iter_mut().try_for_each(|(_, schema)| self.schema(schema))?;
        }
        Ok(())
    }

    /// Copies a subschema.
    fn copy(&mut self, schema: &Value) -> Result<Value, GrammarError> {
        copy(schema, &mut self.copied)
    }

    /// Counts visits; `None` beyond [`VISITED_MAX`].
    fn visit(&self, count: usize) -> Option<()> {
        self.visited.set(self.visited.get() + count);
        (self.visited.get() <= VISITED_MAX).then_some(())
    }

    /// `contains` of nothing, of anything, or of no item at all.
    fn contains(&self, object: &mut Map<String, Value>) {
        if self.dialect < Dialect::Draft6 {
            return;
        }
        let known = self.dialect >= Dialect::Draft2019;
        let count = |keyword: &str| object.get(keyword).filter(|_| known).map(Value::as_u64);
        let (least, most) = match (count("minContains"), count("maxContains")) {
            (Some(None), _) | (_, Some(None)) => return,
            (least, most) => (least.flatten().unwrap_or(1), most.flatten()),
        };
        let replacement = match object.get("contains") {
            None => None,
            Some(_) if least == 0 && most.is_none() => None,
            Some(schema) if is_true(schema) => {
                let mut bounds = json!({"minItems": least});
                most.into_iter().for_each(|most| bounds["maxItems"] = most.into());
                Some(bounds)
            }
            Some(Value::Bool(false)) if least == 0 => None,
            Some(Value::Bool(false)) => Some(json!({"type": except(&["array"])})),
            Some(_) => return,
        };
        object.shift_remove("contains");
        if known {
            object.shift_remove("minContains");
            object.shift_remove("maxContains");
        }
        replacement.into_iter().for_each(|bounds| push(object, bounds));
    }

    /// `propertyNames` of a list of names, of a pattern, or of a length.
    fn property_names(&self, object: &mut Map<String, Value>) {
        if self.dialect < Dialect::Draft6 {
            return;
        }
        let Some(names) = object.get("propertyNames") else { return };
        let closed =
            |keyword: &str, keys: Map<String, Value>| json!({keyword: keys, "additionalProperties": false});
        let texts = |values: &[Value]| {
            let texts = values.iter().filter_map(Value::as_str);
            closed("properties", texts.map(|name| (name.to_owned(), true.into())).collect())
        };
        let of_pattern =
            |pattern: String| closed("patternProperties", Map::from_iter([(pattern, true.into())]));
        let rules: Option<Vec<(&str, &Value)>> = match names {
            Value::Bool(_) => Some(Vec::new()),
            Value::Object(rules) => {
                Some(rules.iter().map(|(keyword, value)| (keyword.as_str(), value)).collect())
            }
            _ => None,
        };
        let replacement = match (names, rules.as_deref()) {
            (Value::Bool(false), _) => Some(json!({"maxProperties": 0})),
            (_, Some([])) => None,
            (_, Some([("const", Value::String(_))])) => Some(texts(&[names["const"].clone()])),
            (_, Some([("enum", Value::Array(values))])) => Some(texts(values)),
            (_, Some([("pattern", Value::String(pattern))])) => Some(of_pattern(pattern.clone())),
            (_, Some([("maxLength", most)])) if most.as_u64().is_some_and(|most| most <= 1000) => {
                Some(of_pattern(format!("^[^]{{0,{most}}}$")))
            }
            (_, Some([("minLength", least)])) if least.as_u64().is_some_and(|least| least <= 1000) => {
                Some(of_pattern(format!("^[^]{{{least},}}$")))
            }
            _ => return,
        };
        object.shift_remove("propertyNames");
        replacement.into_iter().for_each(|schema| push(object, schema));
    }
}

/// Copies a schema and adds its size to that of earlier copies.
fn copy(schema: &Value, copied: &mut usize) -> Result<Value, GrammarError> {
    *copied += size(schema);
    if *copied > COPIED_MAX {
        let reason = format!(
            "the schema's conditions and references expand to more than {COPIED_MAX} values; simplify it"
        );
        return Err(GrammarError::Refused(reason));
    }
    Ok(schema.clone())
}

/// Appends a constraint.
fn push(object: &mut Map<String, Value>, schema: Value) {
    if let Value::Array(all) = object.entry("allOf").or_insert_with(|| json!([])) {
        all.push(schema);
    }
}

/// Whether a schema allows every value.
fn is_true(schema: &Value) -> bool {
    matches!(schema, Value::Bool(true)) || schema.as_object().is_some_and(Map::is_empty)
}

/// Returns all types but these.
fn except(types: &[&str]) -> Vec<&'static str> {
    TYPES.iter().copied().filter(|name| !types.contains(name)).collect()
}

/// Number of values in a schema.
fn size(schema: &Value) -> usize {
    match schema {
        Value::Object(object) => 1 + object.values().map(size).sum::<usize>(),
        Value::Array(values) => 1 + values.iter().map(size).sum::<usize>(),
        _ => 1,
    }
}

/// Counts that are written as floating-point numbers.
fn counts(object: &mut Map<String, Value>) {
    for keyword in COUNTS {
        let Some(Value::Number(number)) = object.get_mut(keyword) else { continue };
        let float = number.as_f64().filter(|_| !number.is_u64());
        if let Some(float) = float.filter(|float| float.fract() == 0.0 && (0.0..1e9).contains(float)) {
            *number = Number::from(float as u64);
        }
    }
}

/// `uniqueItems` that is false, or of arrays of at most one item.
fn unique_items(object: &mut Map<String, Value>) {
    let single = object.get("maxItems").and_then(Value::as_u64).is_some_and(|most| most <= 1);
    match object.get("uniqueItems") {
        Some(Value::Bool(unique)) if !unique || single => _ = object.shift_remove("uniqueItems"),
        _ => {}
    }
}

/// Formats of the compiler.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Formats that are a regular language and that the compiler does not know, and those that are annotations: all others, as JSON Schema
/// says and as generators of schemas use them.
fn formats(object: &mut Map<String, Value>) {
    let pattern = match object.get("format").and_then(Value::as_str) {
        None => return,
        Some(known) if FORMATS.contains(&known) => return,
        Some("json-pointer") => Some("^(/([^~/]|~[01])*)*$"),
        Some("relative-json-pointer") => Some("^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$"),
        Some(_) => None,
    };
    object.shift_remove("format");
    pattern.into_iter().for_each(|pattern| push(object, json!({"pattern": pattern})));
}

#[cfg(test)]
mod tests;
