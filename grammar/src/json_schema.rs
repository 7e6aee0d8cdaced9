//! Checks of JSON schemas that the grammar compiler would pass or refuse without a clear reason.

use inflight_contract::JsonWhitespace;
use serde_json::{Map, Value};

use crate::GrammarError;
use crate::chains;
use crate::error::shorten;
use crate::nesting::{self, NESTING_MAX};
use crate::rewrite::{Names, rewrite};

/// Dialects that the compiler knows, as it spells them.
const DIALECTS: [&str; 5] = [
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
];

/// Keywords whose values are data, not schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "example"];

/// Keywords whose values are expressions of regular languages.
const PATTERN: &str = "pattern";

/// Options of the compiler, under the key that it reads them from.
const OPTIONS: &str = "x-guidance";

/// Option of the compiler: escapes that strings and names have. Without `u`, two names that differ in a text are different names.
const ESCAPES: (&str, &str) = ("json_allowed_escapes", "nrbtf\\\"");

/// Options of the compiler that say where whitespace is allowed.
const WHITESPACE: [&str; 4] =
    ["whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator"];

/// Parses and checks a schema, rewrites what the compiler does not know, and sets the options of its compilation. With
/// `expand_one_of`, `oneOf` is rewritten, too.
///
/// # Errors
/// [`GrammarError`] of the first violation.
pub(crate) fn prepare(
    text: &str,
    whitespace: JsonWhitespace,
    expand_one_of: bool,
) -> Result<Value, GrammarError> {
    let mut schema: Value =
        serde_json::from_str(text).map_err(|error| GrammarError::NotJson(shorten(&error.to_string())))?;
    match &mut schema {
        Value::Object(object) => {
            let names = checked(object, expand_one_of)?;
            set_options(object, names, whitespace);
        }
        // Schema of any value: an object, so that it can carry the options.
        Value::Bool(true) => {
            let mut object = Map::new();
            set_options(&mut object, Names::Apart, whitespace);
            schema = Value::Object(object);
        }
        Value::Bool(false) => {
            return Err(GrammarError::Refused("the schema `false` allows no value".to_owned()));
        }
        _ => return Err(GrammarError::NotASchema),
    }
    Ok(schema)
}

/// Checks and rewrites a schema within a grammar, which keeps the options that it sets itself. If none of them is of whitespace, its JSON is
/// written on one line.
///
/// # Errors
/// [`GrammarError`] of the first violation.
pub(crate) fn prepare_within(
    schema: &mut Map<String, Value>,
    expand_one_of: bool,
) -> Result<(), GrammarError> {
    let names = checked(schema, expand_one_of)?;
    let mut options = schema.shift_remove(OPTIONS).unwrap_or_else(|| Value::Object(Map::new()));
    // The compiler refuses any other value.
    if let Value::Object(options) = &mut options {
        if !WHITESPACE.iter().any(|option| options.contains_key(*option)) {
            options.extend(whitespace_options(JsonWhitespace::OneLine));
        }
        if names == Names::Plain {
            options.entry(ESCAPES.0).or_insert_with(|| ESCAPES.1.into());
        }
    }
    // The compiler takes them out of the schema and puts its last keyword in their place.
    schema.insert(OPTIONS.to_owned(), options);
    Ok(())
}

/// Checks and rewrites a schema.
fn checked(object: &mut Map<String, Value>, expand_one_of: bool) -> Result<Names, GrammarError> {
    check(object, 0)?;
    chains::check_schema(object)?;
    let names = rewrite(object, expand_one_of)?;
    // References of copied conditions lead to each other, too.
    chains::check_schema(object)?;
    if let Some(Value::String(name)) = object.get_mut("$schema")
        && let Some(known) = dialect(name)
    {
        known.clone_into(name);
    }
    Ok(names)
}

/// Returns the dialect of a name, which may have another scheme and an empty fragment.
fn dialect(name: &str) -> Option<&'static str> {
    let place = |name: &str| name.trim_end_matches('#').split_once("://").map(|(_, place)| place.to_owned());
    DIALECTS.into_iter().find(|known| place(known) == place(name))
}

/// Returns the schema of any JSON object.
pub(crate) fn any_object(whitespace: JsonWhitespace) -> Value {
    let mut schema = Map::new();
    schema.insert("type".to_owned(), "object".into());
    set_options(&mut schema, Names::Apart, whitespace);
    Value::Object(schema)
}

/// Returns the compiler's options for whitespace.
fn whitespace_options(whitespace: JsonWhitespace) -> Map<String, Value> {
    serde_json::from_str(whitespace.compiler_options()).expect("the options are a constant JSON object")
}

fn set_options(schema: &mut Map<String, Value>, names: Names, whitespace: JsonWhitespace) {
    // Only the dialect of JSON Schema is an input: options of the compiler are ours.
    let mut options = whitespace_options(whitespace);
    if names == Names::Plain {
        options.insert(ESCAPES.0.to_owned(), ESCAPES.1.into());
    }
    schema.shift_remove(OPTIONS);
    schema.insert(OPTIONS.to_owned(), Value::Object(options));
}

/// Checks an object of a schema and all in it.
///
/// # Errors
/// [`GrammarError`] of the first violation.
pub(crate) fn check(object: &Map<String, Value>, depth: usize) -> Result<(), GrammarError> {
    if depth > NESTING_MAX {
        return Err(GrammarError::Nesting { depth, most: NESTING_MAX });
    }
    if let Some(Value::String(name)) = object.get("$schema")
        && dialect(name).is_none()
    {
        return Err(GrammarError::Dialect(shorten(name)));
    }
    for keyword in ["$ref", "$dynamicRef", "$recursiveRef"] {
        if let Some(Value::String(reference)) = object.get(keyword)
            && !reference.starts_with('#')
        {
            return Err(GrammarError::RemoteReference(shorten(reference)));
        }
    }
    if let Some(Value::String(pattern)) = object.get(PATTERN) {
        nesting::check(pattern)?;
    }
    for (keyword, value) in object {
        if !DATA.contains(&keyword.as_str()) {
            check_value(value, depth + 1)?;
        }
    }
    Ok(())
}

fn check_value(value: &Value, depth: usize) -> Result<(), GrammarError> {
    match value {
        Value::Object(object) => check(object, depth),
        Value::Array(values) => values.iter().try_for_each(|value| check_value(value, depth + 1)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_out_of_the_schema_other_dialects_and_non_schemas_are_refused_by_name() {
        let refused = |text: &str| {
            prepare(text, JsonWhitespace::OneLine, false).map(|_| ()).map_err(|error| error.to_string())
        };
        let remote = r#"{"properties": {"a": {"$ref": "https://example.com/a.json"}}}"#;
        assert!(refused(remote).unwrap_err().contains("$ref https://example.com/a.json leads out"));
        let relative = r##"{"items": [{"$ref": "other.json#/a"}]}"##;
        assert!(refused(relative).unwrap_err().contains("leads out"));
        let dialect = r#"{"$schema": "http://json-schema.org/draft-03/schema#"}"#;
        assert!(refused(dialect).unwrap_err().contains("draft-03"));
        assert!(refused("[1]").is_err() && refused("{").is_err() && refused("false").is_err());
        for fine in [
            "true",
            "{}",
            r##"{"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "definitions": {"a": {}}}"##,
            r#"{"properties": {"$ref": {"type": "string"}, "$schema": {"const": "x"}}}"#,
            r#"{"const": {"$ref": "data"}}"#,
        ] {
            assert_eq!(refused(fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn options_of_the_compiler_are_not_taken_from_clients() {
        let text = r#"{"type": "string", "x-guidance": {"lenient": true, "key_separator": " : "}}"#;
        for whitespace in [JsonWhitespace::OneLine, JsonWhitespace::Any] {
            let schema = prepare(text, whitespace, false).unwrap();
            let options = schema[OPTIONS].as_object().unwrap();
            assert!(!options.contains_key("lenient"));
            let set = whitespace_options(whitespace);
            assert!(WHITESPACE.iter().all(|option| options.get(*option) == set.get(*option)), "{options:?}");
        }
    }
}
