//! Objects whose properties are not all named.
//!
//! The compiler writes the name of a property that the schema does not list with any escape of JSON, so that `"\u0061"` is another name
//! than `"a"`, and it does not know which names a text already has.

use serde_json::{Map, Value, json};

use super::{each_object, is_true, patterns};
use crate::GrammarError;

/// How names of properties that the schema does not list are kept apart from those that it lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// By the schema.
    Apart,
    /// By texts without `\u` escapes, which no string then has.
    Plain,
}

/// Keywords that hold in the place of a schema, and split the others into those before and behind.
const IN_PLACE: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];
/// Keywords that the compiler reads together.
const GROUPS: [&[&str]; 2] =
    [&["patternProperties", "additionalProperties"], &["prefixItems", "items", "additionalItems"]];

/// Prepares all objects of a schema.
///
/// # Errors
/// [`GrammarError::Refused`] for a `minProperties` that repeated names would satisfy.
pub(super) fn open_objects(schema: &mut Map<String, Value>) -> Result<Names, GrammarError> {
    let (mut lists, mut patterns, mut typed) = (false, false, false);
    each_object(schema, &mut |object| {
        min_properties(object)?;
        GROUPS.iter().for_each(|group| regroup(object, group));
        patterns |= object.contains_key("patternProperties");
        if let Openness::Open { is_typed } = openness(object) {
            lists = true;
            typed |= is_typed;
        }
        Ok(())
    })?;
    match (lists, patterns || typed) {
        (false, _) => Ok(Names::Apart),
        (true, true) => {
            each_object(schema, &mut without_codes)?;
            Ok(Names::Plain)
        }
        // A pattern that each name matches: of names that match patterns, the compiler knows those that are listed, and writes their
        // characters as it writes the listed ones.
        (true, false) => {
            each_object(schema, &mut |object| {
                if let Openness::Open { .. } = openness(object) {
                    object.insert("patternProperties".to_owned(), json!({"": true}));
                    object.insert("additionalProperties".to_owned(), false.into());
                    regroup(object, GROUPS[0]);
                }
                Ok(())
            })?;
            Ok(Names::Apart)
        }
    }
}

/// Removes what has characters that need their code from the patterns of a schema.
///
/// # Errors
/// [`GrammarError::Refused`] for a constant with such a character.
fn without_codes(object: &mut Map<String, Value>) -> Result<(), GrammarError> {
    fn has_code(value: &Value) -> bool {
        match value {
            Value::String(text) => text.contains(patterns::needs_code),
            Value::Array(values) => values.iter().any(has_code),
            Value::Object(fields) => fields.values().any(has_code),
            _ => false,
        }
    }
    for keyword in ["const", "enum"] {
        if object.get(keyword).is_some_and(has_code) {
            return Err(GrammarError::Refused(format!(
                "{keyword} has a control character, which cannot be enforced in a schema that has patternProperties or a schema for other \
                 properties beside named ones; leave out the character, or let additionalProperties be false"
            )));
        }
    }
    if let Some(Value::String(pattern)) = object.get_mut("pattern") {
        *pattern = patterns::without_codes(pattern);
    }
    if let Some(Value::Object(properties)) = object.get_mut("patternProperties") {
        let given = std::mem::take(properties);
        properties
            .extend(given.into_iter().map(|(pattern, schema)| (patterns::without_codes(&pattern), schema)));
    }
    Ok(())
}

/// Whether an object may have other properties than those that it lists.
enum Openness {
    /// It lists none, or has no others.
    Closed,
    /// Others may follow; `is_typed` if not with any value.
    Open { is_typed: bool },
}

fn openness(object: &Map<String, Value>) -> Openness {
    let lists = |keyword: &str| match object.get(keyword) {
        Some(Value::Object(names)) => !names.is_empty(),
        Some(Value::Array(names)) => !names.is_empty(),
        _ => false,
    };
    match object.get("additionalProperties") {
        Some(Value::Bool(false)) => Openness::Closed,
        _ if !lists("properties") && !lists("required") && !lists("patternProperties") => Openness::Closed,
        others => Openness::Open { is_typed: others.is_some_and(|schema| !is_true(schema)) },
    }
}

/// `minProperties`: each required name counts, and of the others one, as a text may repeat it.
fn min_properties(object: &mut Map<String, Value>) -> Result<(), GrammarError> {
    let Some(least) = object.get("minProperties").and_then(Value::as_u64) else { return Ok(()) };
    let required = object.get("required").and_then(Value::as_array);
    let required: std::collections::BTreeSet<&str> =
        required.into_iter().flatten().filter_map(Value::as_str).collect();
    let required = required.len() as u64;
    if least <= required {
        object.shift_remove("minProperties");
        return Ok(());
    }
    if least > required + 1 {
        return Err(GrammarError::Refused(format!(
            "minProperties is {least}, which a text could reach by repeating a name; require {} of the names, or let it be {}",
            least - 1,
            required + 1
        )));
    }
    Ok(())
}

/// Moves keywords that the compiler reads together next to each other, if one that holds in place stands between them.
fn regroup(object: &mut Map<String, Value>, group: &[&str]) {
    let (mut first, mut split, mut is_split) = (false, false, false);
    for keyword in object.keys() {
        let is_member = group.contains(&keyword.as_str());
        is_split |= is_member && split;
        first |= is_member;
        split |= first && IN_PLACE.contains(&keyword.as_str());
    }
    if !is_split {
        return;
    }
    let mut members: Vec<(String, Value)> = Vec::new();
    for keyword in group {
        if let Some(value) = object.get_mut(*keyword) {
            members.push(((*keyword).to_owned(), value.take()));
        }
    }
    for (keyword, value) in std::mem::take(object) {
        if group.contains(&keyword.as_str()) {
            object.extend(members.drain(..));
        } else {
            object.insert(keyword, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(mut schema: Value) -> Result<(Names, Value), GrammarError> {
        let names = open_objects(schema.as_object_mut().unwrap())?;
        Ok((names, schema))
    }

    #[test]
    fn names_that_are_not_listed_are_told_from_those_that_are() {
        let closed = json!({"properties": {"a": true}, "additionalProperties": false});
        assert_eq!(of(closed.clone()), Ok((Names::Apart, closed)));
        let map = json!({"type": "object", "additionalProperties": {"type": "string"}});
        assert_eq!(of(map.clone()), Ok((Names::Apart, map)));
        let open = json!({"properties": {"a": true}});
        let any = json!({"properties": {"a": true}, "patternProperties": {"": true}, "additionalProperties": false});
        assert_eq!(of(open), Ok((Names::Apart, any)));
        for plain in [
            json!({"required": ["a"], "additionalProperties": {"type": "string"}}),
            json!({"patternProperties": {"^x": {"type": "string"}}}),
            json!({"items": {"properties": {"a": true}}, "anyOf": [{"patternProperties": {"b": true}}]}),
        ] {
            assert_eq!(of(plain.clone()), Ok((Names::Plain, plain)));
        }
    }

    #[test]
    fn counts_that_repeated_names_would_reach_are_refused() {
        let counted = |least: u64| json!({"required": ["a", "b", "a"], "minProperties": least, "additionalProperties": false});
        assert!(of(counted(2)).unwrap().1.get("minProperties").is_none());
        assert_eq!(of(counted(3)).unwrap().1["minProperties"], 3);
        assert!(of(counted(4)).unwrap_err().to_string().contains("repeating a name"));
    }

    #[test]
    fn keywords_that_belong_together_stand_together() {
        let order = |text: &str| -> Vec<String> {
            let mut schema: Map<String, Value> = serde_json::from_str(text).unwrap();
            GROUPS.iter().for_each(|group| regroup(&mut schema, group));
            schema.into_iter().map(|(keyword, value)| format!("{keyword} {value}")).collect()
        };
        assert_eq!(
            order(r#"{"additionalItems": 1, "allOf": 2, "items": 3, "type": 4}"#),
            ["items 3", "additionalItems 1", "allOf 2", "type 4"]
        );
        assert_eq!(
            order(r#"{"type": 1, "patternProperties": 2, "$ref": 3, "additionalProperties": 4}"#),
            ["type 1", "patternProperties 2", "additionalProperties 4", "$ref 3"]
        );
        assert_eq!(
            order(r#"{"items": 1, "prefixItems": 2, "anyOf": 3}"#),
            ["items 1", "prefixItems 2", "anyOf 3"]
        );
    }
}
