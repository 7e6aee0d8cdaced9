//! JSON schemas within Lark grammars: those of `%json {...}` are checked and rewritten as those of requests are, and `%text {...}`
//! becomes the expression of its strings.

use serde_json::{Deserializer, Map, Value};

use crate::GrammarError;
use crate::chains::lark;
use crate::{json_schema, text};

const KEYWORD: &str = "%json";
const TEXT_KEYWORD: &str = "%text";

/// Returns a grammar with its schemas rewritten. With `expand_one_of`, `oneOf` is rewritten, too. Lines keep their numbers.
///
/// # Errors
/// [`GrammarError`] of the first violation of a schema.
pub(crate) fn rewritten(text: &str, expand_one_of: bool) -> Result<String, GrammarError> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => lark::delimited(rest, '"'),
            '#' => lark::line(rest),
            '/' if rest[1..].starts_with('/') => lark::line(rest),
            '/' => lark::delimited(rest, '/'),
            '<' => lark::special_token(rest),
            '%' if rest.starts_with(TEXT_KEYWORD) => {
                let mut values = Deserializer::from_str(&rest[TEXT_KEYWORD.len()..]).into_iter::<Value>();
                let value = values.next();
                let length = TEXT_KEYWORD.len() + values.byte_offset();
                if let Some(Ok(Value::Object(schema))) = value {
                    json_schema::check(&schema, 0)?;
                    out.push_str(&text::expression(&schema)?);
                    out.push_str(&"\n".repeat(rest[..length].matches('\n').count()));
                    rest = &rest[length..];
                    continue;
                }
                length
            }
            '%' if rest.starts_with(KEYWORD) => {
                let mut values = Deserializer::from_str(&rest[KEYWORD.len()..]).into_iter::<Value>();
                let value = values.next();
                let length = KEYWORD.len() + values.byte_offset();
                let schema = match value {
                    Some(Ok(Value::Object(schema))) => Some(schema),
                    // As in a schema by itself: an object, so that it can carry options.
                    Some(Ok(Value::Bool(true))) => Some(Map::new()),
                    _ => None,
                };
                if let Some(mut schema) = schema {
                    json_schema::prepare_within(&mut schema, expand_one_of)?;
                    let mut schema = Value::Object(schema).to_string();
                    // White space before its last bracket.
                    let lines = rest[..length].matches('\n').count();
                    schema.insert_str(schema.len() - 1, &"\n".repeat(lines));
                    out.push_str(KEYWORD);
                    out.push(' ');
                    out.push_str(&schema);
                    rest = &rest[length..];
                    continue;
                }
                length
            }
            first => first.len_utf8(),
        };
        let (taken, after) = rest.split_at(length);
        out.push_str(taken);
        rest = after;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use inflight_contract::JsonWhitespace;

    use super::*;

    #[test]
    fn schemas_are_rewritten_where_they_are_no_text_and_lines_keep_their_numbers() {
        let text = "start: \"%json {\" a /%json {}\\/ \"/ # %json {\"format\": \"x\"}\na: %json {\"format\": \"x\",\n \"type\": \"string\"\n} b\nb: <[7]> %json true c";
        let expected = "start: \"%json {\" a /%json {}\\/ \"/ # %json {\"format\": \"x\"}\na: %json {\"type\":\"string\",OPTIONS\n\n} b\nb: <[7]> %json {OPTIONS} c";
        let options = format!("\"x-guidance\":{}", JsonWhitespace::OneLine.compiler_options());
        assert_eq!(rewritten(text, false), Ok(expected.replace("OPTIONS", &options)));
        let options = r#"start: %json {"x-guidance": {"item_separator": ", "}, "properties": {"a": true}, "patternProperties": {"b": true}}"#;
        let found = rewritten(options, false).unwrap();
        assert!(found.contains(r#""x-guidance":{"item_separator":", ","json_allowed_escapes":"#), "{found}");
        assert!(rewritten(r#"start: %json {"const": 9007199254740993}"#, false).is_err());
        assert!(rewritten("start: %json {", false).is_ok(), "the compiler refuses it");
    }
}
