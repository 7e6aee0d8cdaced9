//! Structured output: `response_format`, the fields of other servers for it, and the formats of responses and messages.

use std::sync::Arc;

use inflight_contract::{Constraint, Grammar, JsonWhitespace};
use inflight_grammar::ebnf;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::http::fields::{
    Field, Fields, Object, honoured, is_empty, parse, parse_object, refused, wrong_type,
};
use crate::request::draft::Draft;

/// Meaning of `response_format`.
pub(crate) const RESPONSE_FORMAT: &str = "`text`, `json_object`, which may have a `schema`, or `json_schema`; the output matches the schema, whether `strict` or not.";

/// Fields of structured output that other servers know, too.
pub(crate) const GUIDED: &[Field] = &[
    honoured("guided_json", "Extension: JSON schema, as an object or as text, that the output matches."),
    honoured("guided_regex", "Extension: regular expression that matches the whole output."),
    honoured("guided_choice", "Extension: array of texts; the output is one of them."),
    honoured(
        "guided_grammar",
        "Extension: grammar of the output, in llguidance's dialect of Lark, or in EBNF as `grammar`.",
    ),
    honoured(
        "structured_outputs",
        "Extension: object with one of `json`, `json_object`, `regex`, `choice` and `grammar`, as in the fields above.",
    ),
    honoured("json_schema", "Extension: as `guided_json`."),
    honoured("regex", "Extension: as `guided_regex`."),
    honoured("ebnf", "Extension: as `grammar`."),
    honoured(
        "grammar",
        "Extension: grammar of the output in EBNF (GBNF), if it is regular; or an object with `type` (`regex`, `json`, `json_schema` or `lark`) and `value`.",
    ),
    honoured(
        "nvext",
        "Extension: its `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` are as the fields above; others have no effect.",
    ),
];

/// Constraints of other servers and APIs that are refused, wherever text is generated.
pub(crate) const ELSEWHERE: &[Field] = &[
    refused(
        "response_format",
        "it is a field of chat and text completions; responses have text.format, messages output_config.format",
    ),
    refused(
        "text",
        "it is a field of responses; chat and text completions have response_format, messages output_config.format",
    ),
    refused("output_config", "it is a field of messages; send response_format, or text.format in responses"),
    refused("output_format", "it is a field of messages; send response_format, or text.format in responses"),
    refused(
        "format",
        "send response_format, or text.format in responses and output_config.format in messages",
    ),
    refused("extra_body", "clients merge it into the body; send its fields there"),
    refused("structural_tag", "send tools, with strict for their arguments, or guided_grammar"),
    refused("grammar_lazy", "a grammar holds for the whole answer; send tools for calls in free text"),
    refused("grammar_triggers", "a grammar holds for the whole answer; send tools for calls in free text"),
    refused("guided_whitespace_pattern", "the whitespace of JSON is that of the router's --json-whitespace"),
    refused("guided_decoding_guide", "send guided_json, guided_regex, guided_choice or guided_grammar"),
    refused("guided_decoding_guide_type", "send guided_json, guided_regex, guided_choice or guided_grammar"),
    refused("grammar_string", "send grammar"),
    refused("regex_pattern", "send guided_regex"),
    refused("stop_regex", "send the texts that end the output as stop"),
    refused(
        "logits_processors",
        "the router runs no code of clients; send logit_bias, allowed_token_ids, bad_words or a grammar",
    ),
    refused(
        "custom_logit_processor",
        "the router runs no code of clients; send logit_bias, allowed_token_ids, bad_words or a grammar",
    ),
];

/// Grammar of any JSON object. The router's options set its whitespace later, as that of schemas.
const ANY_OBJECT: Grammar = Grammar::JsonObject(JsonWhitespace::OneLine);

/// Grammar that a field gives, with the name of the field.
pub(crate) type NamedGrammar = (&'static str, Grammar);

/// Reads the grammar of chat and text completions into a request.
///
/// # Errors
/// A field has another type, or several give a grammar.
pub(crate) fn read(fields: &Fields<'_>, request: &mut Draft) -> Result<(), Outcome> {
    let format = format("response_format", "response_format", fields.raw("response_format"))?;
    read_with(fields, [format], request)
}

/// Reads the grammar of an API with formats of its own into a request.
///
/// # Errors
/// A field has another type, or several give a grammar.
pub(crate) fn read_with(
    fields: &Fields<'_>,
    formats: impl IntoIterator<Item = Option<NamedGrammar>>,
    request: &mut Draft,
) -> Result<(), Outcome> {
    let mut named: Vec<NamedGrammar> = formats.into_iter().flatten().collect();
    for name in ["guided_json", "json_schema"] {
        if let Some(value) = fields.raw(name) {
            named.push((name, schema(name, name, value)?));
        }
    }
    for name in ["guided_regex", "regex"] {
        named.extend(fields.text(name)?.map(|regex| (name, Grammar::Regex(regex))));
    }
    if let Some(choices) = fields.get("guided_choice", "an array of strings")? {
        named.push(("guided_choice", Grammar::Choice(choices)));
    }
    if let Some(text) = fields.text("guided_grammar")? {
        named.push(("guided_grammar", rules("guided_grammar", "guided_grammar", text)?));
    }
    // Clients of servers that know them send empty ones for none.
    if let Some(text) = fields.text("ebnf")?.filter(|text| !text.is_empty()) {
        named.push(("ebnf", ebnf_rules("ebnf", "ebnf", &text)?));
    }
    named.extend(grammar(fields)?);
    named.extend(structured_outputs(fields)?);
    named.extend(nvext(fields)?);
    if let [(first, _), (second, _), ..] = named[..] {
        let reason = if first == second {
            format!("{first} gives several grammars; give one")
        } else {
            format!("{first} and {second} both give a grammar; give one")
        };
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
    /// Schema of responses and messages, and of JSON objects at other servers.
    #[serde(borrow, default, alias = "value")]
    schema: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct NamedSchema<'a> {
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

impl<'a> Format<'a> {
    /// Returns the schema with its place.
    fn schema(&self, path: &str) -> Result<(String, Option<&'a RawValue>), Outcome> {
        let present = |value: &&RawValue| value.get() != "null";
        let Some(named) = self.json_schema.filter(present) else {
            return Ok((format!("{path}.schema"), self.schema.filter(present)));
        };
        let path = format!("{path}.json_schema");
        let named: NamedSchema<'_> = parse_object(&path, named, "an object with a schema")?;
        Ok((format!("{path}.schema"), named.schema.filter(present)))
    }
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
    let refused = |reason: String| Err(Outcome::field(field, reason));
    match format.kind.as_str() {
        "text" => match format.schema(path)? {
            (_, None) => Ok(None),
            (place, Some(_)) => refused(format!(
                "{place} is given, but {path} is of type text; for JSON set the type json_schema"
            )),
        },
        "json_object" => match format.schema(path)? {
            (place, Some(found)) if !is_empty(found) => Ok(Some((field, schema(field, &place, found)?))),
            _ => Ok(Some((field, ANY_OBJECT))),
        },
        "json_schema" => match format.schema(path)? {
            (place, None) => refused(format!("{place} is missing; give a JSON schema")),
            (place, Some(found)) => Ok(Some((field, schema(field, &place, found)?))),
        },
        other => {
            let instead = match other {
                "json" => "; for any JSON object set the type json_object",
                "regex" | "regex_schema" => "; for a regular expression send guided_regex",
                "ebnf" | "grammar" | "lark_grammar" | "gbnf" => "; for a grammar send guided_grammar",
                "structural_tag" => "; send tools, with strict for their arguments",
                _ => "",
            };
            refused(format!(
                "{path} is of type {other:?}; types are text, json_object and json_schema{instead}"
            ))
        }
    }
}

/// Type of a schema in errors.
const SCHEMA: &str = "a JSON schema";

/// Returns the grammar of a JSON schema, given as it is or as its text.
fn schema(field: &'static str, path: &str, value: &RawValue) -> Result<Grammar, Outcome> {
    let text = match value.get().as_bytes().first() {
        Some(b'"') => parse(path, value, SCHEMA)?,
        Some(b'{' | b't' | b'f') => value.get().to_owned(),
        _ => return Err(wrong_type(path, value, SCHEMA)),
    };
    // OpenAI's object around a schema has no keyword, so as a schema it would allow anything.
    if serde_json::from_str(&text).is_ok_and(|object| is_around_schema(&object)) {
        let reason = format!("{path} is no JSON schema, but an object with one; give its schema");
        return Err(Outcome::field(field, reason));
    }
    Ok(Grammar::json_schema(text))
}

/// Whether an object has a schema beside its name.
fn is_around_schema(Object(entries): &Object<'_>) -> bool {
    let around = ["name", "description", "strict", "schema"];
    let mut keys = entries.iter().map(|(key, _)| &**key);
    keys.clone().any(|key| key == "schema") && keys.all(|key| around.contains(&key))
}

/// Returns the grammar of a text in Lark or EBNF.
fn rules(field: &'static str, path: &str, text: String) -> Result<Grammar, Outcome> {
    if ebnf::is_ebnf(&text) { ebnf_rules(field, path, &text) } else { Ok(Grammar::Lark(text)) }
}

/// Returns the grammar of a text in EBNF.
fn ebnf_rules(field: &'static str, path: &str, text: &str) -> Result<Grammar, Outcome> {
    if text.len() > Grammar::BYTES_MAX {
        // Named with its size, as any other grammar.
        return Ok(Grammar::Lark(text.to_owned()));
    }
    let regex = ebnf::to_regex(text).map_err(|error| Outcome::field(field, format!("{path}: {error}")))?;
    Ok(Grammar::Regex(regex))
}

/// Reads `grammar`: text in EBNF, or a grammar with its type.
fn grammar(fields: &Fields<'_>) -> Result<Option<NamedGrammar>, Outcome> {
    const NAME: &str = "grammar";
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(rename = "type")]
        kind: String,
        #[serde(borrow)]
        value: &'a RawValue,
    }
    let Some(raw) = fields.raw(NAME).filter(|raw| !is_empty(raw)) else { return Ok(None) };
    if raw.get().starts_with('"') {
        return Ok(Some((NAME, ebnf_rules(NAME, NAME, &parse::<String>(NAME, raw, "a string")?)?)));
    }
    let Body { kind, value } =
        parse_object(NAME, raw, "a grammar in EBNF, or an object with type and value")?;
    let path = "grammar.value";
    let text = || parse::<String>(path, value, "a string");
    let grammar = match kind.as_str() {
        "json" | "json_schema" => schema(NAME, path, value)?,
        "regex" => Grammar::Regex(text()?),
        "lark" => Grammar::Lark(text()?),
        other => {
            let reason = format!("grammar is of type {other:?}; types are json, json_schema, regex and lark");
            return Err(Outcome::field(NAME, reason));
        }
    };
    Ok(Some((NAME, grammar)))
}

/// Reads `structured_outputs`.
fn structured_outputs(fields: &Fields<'_>) -> Result<Vec<NamedGrammar>, Outcome> {
    const NAME: &str = "structured_outputs";
    let Some(raw) = fields.raw(NAME) else { return Ok(Vec::new()) };
    let Object(entries) = parse_object(NAME, raw, "an object with one grammar")?;
    let mut named = Vec::new();
    for (key, value) in entries {
        let path = format!("{NAME}.{key}");
        if value.get() == "null" {
            continue;
        }
        let text = || parse::<String>(&path, value, "a string");
        let grammar = match &*key {
            "json" => schema(NAME, &path, value)?,
            "json_object" => match parse(&path, value, "true or false")? {
                true => ANY_OBJECT,
                false => continue,
            },
            "regex" => Grammar::Regex(text()?),
            "choice" => Grammar::Choice(parse(&path, value, "an array of strings")?),
            "grammar" => rules(NAME, &path, text()?)?,
            // There is one implementation of grammars.
            "disable_fallback" => continue,
            _ if is_empty(value) => continue,
            "disable_additional_properties" => {
                let reason =
                    format!("{path} is not supported; set additionalProperties to false in the schema");
                return Err(Outcome::field(NAME, reason));
            }
            _ => {
                let known = "json, json_object, regex, choice and grammar";
                let reason = format!("{path:.80} is not supported; {NAME} may have one of {known}");
                return Err(Outcome::field(NAME, reason));
            }
        };
        named.push((NAME, grammar));
    }
    Ok(named)
}

/// Reads the grammars of `nvext`.
fn nvext(fields: &Fields<'_>) -> Result<Vec<NamedGrammar>, Outcome> {
    const NAME: &str = "nvext";
    let Some(raw) = fields.raw(NAME) else { return Ok(Vec::new()) };
    let Object(entries) = parse_object(NAME, raw, "an object")?;
    let mut named = Vec::new();
    for (key, value) in entries {
        let path = format!("{NAME}.{key}");
        let text = || parse::<String>(&path, value, "a string");
        let grammar = match &*key {
            _ if value.get() == "null" => continue,
            "guided_json" => schema(NAME, &path, value)?,
            "guided_regex" => Grammar::Regex(text()?),
            "guided_choice" => Grammar::Choice(parse(&path, value, "an array of strings")?),
            "guided_grammar" => rules(NAME, &path, text()?)?,
            _ => continue,
        };
        named.push((NAME, grammar));
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocols::http::fields::FieldTable;
    use crate::request::draft::Input;

    static FIELDS: FieldTable = FieldTable {
        api: "test",
        fields: &[&[honoured("response_format", "")], GUIDED],
        elsewhere: ELSEWHERE,
    };

    fn read_body(body: &str) -> Result<(Option<Grammar>, &'static str), Outcome> {
        let mut request = Draft::new(String::new(), Input::TokenIds(Vec::new()));
        read(&FIELDS.read(body.as_bytes()).unwrap(), &mut request)?;
        let grammar = request.sampling.constraint.map(|constraint| constraint.grammar.clone());
        Ok((grammar, request.constraint_field))
    }

    #[test]
    fn each_field_gives_its_grammar_under_its_name() {
        let json = |text: &str| Grammar::json_schema(text);
        let named = r#"{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "null"}}}}"#;
        for (body, grammar, field) in [
            (named, json(r#"{"type": "null"}"#), "response_format"),
            (r#"{"response_format": {"type": "json_object"}}"#, ANY_OBJECT, "response_format"),
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
