//! Structured output: `response_format`, `guided_*`, `structured_outputs`, and `text.format` of responses.

use std::sync::Arc;

use inflight_contract::{Constraint, Grammar};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::http::fields::{Field, Fields, honoured, is_empty, parse, parse_object, wrong_type};
use crate::request::draft::Draft;

/// Meaning of `response_format`.
pub(crate) const RESPONSE_FORMAT: &str =
    "`text`, `json_object` or `json_schema`, whose schema the output matches, whether `strict` or not.";

/// Fields of structured output that other servers know, too.
pub(crate) const GUIDED: &[Field] = &[
    honoured("guided_json", "Extension: JSON schema, as an object or as text, that the output matches."),
    honoured("guided_regex", "Extension: regular expression that matches the whole output."),
    honoured("guided_choice", "Extension: array of texts; the output is one of them."),
    honoured("guided_grammar", "Extension: grammar of the output, in llguidance's dialect of Lark."),
    honoured(
        "structured_outputs",
        "Extension: object with one of `json`, `json_object`, `regex`, `choice` and `grammar`, as in the fields above.",
    ),
];

/// Grammar that a field gives, with the name of the field.
pub(crate) type NamedGrammar = (&'static str, Grammar);

/// Reads the grammar of chat and text completions into a request.
///
/// # Errors
/// A field has another type, or several give a grammar.
pub(crate) fn read(fields: &Fields<'_>, request: &mut Draft) -> Result<(), Outcome> {
    let mut named: Vec<NamedGrammar> = Vec::new();
    named.extend(format("response_format", "response_format", fields.raw("response_format"))?);
    if let Some(value) = fields.raw("guided_json") {
        named.push(("guided_json", schema("guided_json", value)?));
    }
    if let Some(regex) = fields.text("guided_regex")? {
        named.push(("guided_regex", Grammar::Regex(regex)));
    }
    if let Some(choices) = fields.get("guided_choice", "an array of strings")? {
        named.push(("guided_choice", Grammar::Choice(choices)));
    }
    if let Some(grammar) = fields.text("guided_grammar")? {
        named.push(("guided_grammar", Grammar::Lark(grammar)));
    }
    named.extend(structured_outputs(fields)?);
    if let [(first, _), (second, _), ..] = named[..] {
        let reason = format!("{first} and {second} both give a grammar; give one");
        return Err(Outcome::field(second, reason));
    }
    if let Some(grammar) = named.pop() {
        constrain(request, grammar);
    }
    Ok(())
}

/// Sets the constraint of a request.
pub(crate) fn constrain(request: &mut Draft, (field, grammar): NamedGrammar) {
    request.constraint_field = field;
    request.sampling.constraint = Some(Arc::new(Constraint { grammar, begins_after: None }));
}

#[derive(Deserialize)]
struct Format<'a> {
    #[serde(rename = "type")]
    kind: String,
    /// Schema under a name, in chat completions.
    #[serde(borrow, default)]
    json_schema: Option<&'a RawValue>,
    /// Schema of responses and messages.
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct NamedSchema<'a> {
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

/// Reads a format; `None` for text. `path` is its place in the body, in the field `field`.
///
/// # Errors
/// It has another type, no schema, or a kind that is not supported.
pub(crate) fn format(
    field: &'static str,
    path: &str,
    value: Option<&RawValue>,
) -> Result<Option<NamedGrammar>, Outcome> {
    let Some(value) = value.filter(|value| value.get() != "null") else { return Ok(None) };
    let format: Format<'_> = parse_object(path, value, "an object with a type")?;
    match format.kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some((field, Grammar::JsonObject))),
        "json_schema" => {
            let (schema_path, found) = match format.json_schema {
                Some(named) => {
                    let path = format!("{path}.json_schema");
                    let named: NamedSchema<'_> = parse_object(&path, named, "an object with a schema")?;
                    (format!("{path}.schema"), named.schema)
                }
                None => (format!("{path}.schema"), format.schema),
            };
            let found = found.filter(|schema| schema.get() != "null");
            let found = found.ok_or_else(|| {
                Outcome::field(field, format!("{schema_path} is missing; give a JSON schema"))
            })?;
            Ok(Some((field, schema(&schema_path, found)?)))
        }
        other => Err(Outcome::field(
            field,
            format!("{path} is of type {other:?}; types are text, json_object and json_schema"),
        )),
    }
}

/// Type of a schema in errors.
const SCHEMA: &str = "a JSON schema";

/// Returns the grammar of a JSON schema, given as it is or as its text.
fn schema(path: &str, value: &RawValue) -> Result<Grammar, Outcome> {
    let text = value.get();
    match text.as_bytes().first() {
        Some(b'"') => Ok(Grammar::JsonSchema(parse(path, value, SCHEMA)?)),
        Some(b'{' | b't' | b'f') => Ok(Grammar::JsonSchema(text.to_owned())),
        _ => Err(wrong_type(path, value, SCHEMA)),
    }
}

/// Reads `structured_outputs`.
fn structured_outputs(fields: &Fields<'_>) -> Result<Option<NamedGrammar>, Outcome> {
    const NAME: &str = "structured_outputs";
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow, default)]
        json: Option<&'a RawValue>,
        #[serde(default)]
        json_object: Option<bool>,
        #[serde(default)]
        regex: Option<String>,
        #[serde(default)]
        choice: Option<Vec<String>>,
        #[serde(default)]
        grammar: Option<String>,
        #[serde(borrow, default)]
        structural_tag: Option<&'a RawValue>,
    }
    let Some(body) = fields.object::<Body<'_>>(NAME, "an object with one grammar")? else { return Ok(None) };
    if body.structural_tag.is_some_and(|tag| !is_empty(tag)) {
        let reason = "structured_outputs.structural_tag is not supported; give a grammar";
        return Err(Outcome::field(NAME, reason));
    }
    let json = body.json.filter(|json| json.get() != "null");
    let json = json.map(|json| schema("structured_outputs.json", json)).transpose()?;
    let given = [
        json,
        body.json_object.filter(|wanted| *wanted).map(|_| Grammar::JsonObject),
        body.regex.map(Grammar::Regex),
        body.choice.map(Grammar::Choice),
        body.grammar.map(Grammar::Lark),
    ];
    let mut given: Vec<Grammar> = given.into_iter().flatten().collect();
    if given.len() > 1 {
        return Err(Outcome::field(NAME, "structured_outputs gives several grammars; give one"));
    }
    Ok(given.pop().map(|grammar| (NAME, grammar)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocols::http::fields::FieldTable;
    use crate::request::draft::Input;

    static FIELDS: FieldTable =
        FieldTable { api: "test", fields: &[&[honoured("response_format", "")], GUIDED] };

    fn read_body(body: &str) -> Result<(Option<Grammar>, &'static str), Outcome> {
        let mut request = Draft::new(String::new(), Input::TokenIds(Vec::new()));
        read(&FIELDS.read(body.as_bytes()).unwrap(), &mut request)?;
        let grammar = request.sampling.constraint.map(|constraint| constraint.grammar.clone());
        Ok((grammar, request.constraint_field))
    }

    #[test]
    fn each_field_gives_its_grammar_under_its_name() {
        let json = |text: &str| Grammar::JsonSchema(text.to_owned());
        let named = r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "null"}}}}"#;
        for (body, grammar, field) in [
            (named, json(r#"{"type": "null"}"#), "response_format"),
            (r#"{"response_format": {"type": "json_object"}}"#, Grammar::JsonObject, "response_format"),
            (r#"{"guided_json": {"a": 1}}"#, json(r#"{"a": 1}"#), "guided_json"),
            (r#"{"guided_json": "{\"a\": 1}"}"#, json(r#"{"a": 1}"#), "guided_json"),
            (r#"{"guided_regex": "a+"}"#, Grammar::Regex("a+".to_owned()), "guided_regex"),
            (
                r#"{"guided_choice": ["x", "y"]}"#,
                Grammar::Choice(vec!["x".into(), "y".into()]),
                "guided_choice",
            ),
            (
                r#"{"guided_grammar": "start: \"a\""}"#,
                Grammar::Lark("start: \"a\"".to_owned()),
                "guided_grammar",
            ),
            (r#"{"structured_outputs": {"json": true}}"#, json("true"), "structured_outputs"),
            (
                r#"{"structured_outputs": {"choice": ["x"]}}"#,
                Grammar::Choice(vec!["x".into()]),
                "structured_outputs",
            ),
        ] {
            assert_eq!(read_body(body), Ok((Some(grammar), field)), "{body}");
        }
        for none in
            ["{}", r#"{"response_format": {"type": "text"}, "guided_json": null, "structured_outputs": {}}"#]
        {
            assert_eq!(read_body(none).unwrap().0, None, "{none}");
        }
    }

    #[test]
    fn wrong_types_missing_schemas_and_two_grammars_name_the_field() {
        for (body, field, words) in [
            (r#"{"response_format": "json"}"#, "response_format", "an object with a type"),
            (r#"{"response_format": {"type": "xml"}}"#, "response_format", "types are text"),
            (r#"{"response_format": {"type": "json_schema"}}"#, "response_format", "is missing"),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}"#,
                "response_format",
                "is missing",
            ),
            (
                r#"{"response_format": {"type": "json_schema", "json_schema": 3}}"#,
                "response_format",
                "an object with a schema",
            ),
            (r#"{"guided_choice": "x"}"#, "guided_choice", "an array of strings"),
            (r#"{"guided_regex": 3}"#, "guided_regex", "a string"),
            (r#"{"guided_regex": "a", "guided_choice": ["x"]}"#, "guided_choice", "both give a grammar"),
            (r#"{"structured_outputs": {"regex": "a", "json": {}}}"#, "structured_outputs", "several"),
            (r#"{"structured_outputs": {"structural_tag": "x"}}"#, "structured_outputs", "structural_tag"),
            (r#"{"structured_outputs": []}"#, "structured_outputs", "an object"),
        ] {
            match read_body(body) {
                Err(Outcome::InvalidField { field: found, reason }) => {
                    assert!(found == field && reason.contains(words), "{body}: {found}: {reason}");
                }
                other => panic!("{body}: {other:?}"),
            }
        }
    }
}
