//! JSON schemas within Lark grammars, `%json {...}`: checked and rewritten like schemas that are grammars of their own.

use serde_json::{Deserializer, Map, Value};

use crate::chains::{JSON_KEYWORDS, delimited, line, special_token};
use crate::{GrammarError, json_schema};

/// Keyword that a schema follows.
const SCHEMA: &str = "%json";

/// Returns a Lark grammar with its schemas prepared for the compiler.
///
/// # Errors
/// [`GrammarError`] of the first schema that cannot be used. Faults of the grammar around them are left to the compiler.
pub(crate) fn prepare(text: &str, expand_one_of: bool) -> Result<String, GrammarError> {
    let mut prepared = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let keyword = JSON_KEYWORDS.into_iter().find(|keyword| rest.starts_with(keyword));
        let length = match (first, keyword) {
            (_, Some(keyword)) => {
                let mut values =
                    Deserializer::from_str(&rest[keyword.len()..]).into_iter::<Map<String, Value>>();
                let value = values.next();
                let length = keyword.len() + values.byte_offset();
                if let (Some(Ok(schema)), true) = (value, keyword == SCHEMA) {
                    let schema = json_schema::prepare_embedded(schema, expand_one_of)?;
                    prepared.push_str(&format!("{SCHEMA} {schema}"));
                    rest = &rest[length..];
                    continue;
                }
                length
            }
            ('"', _) => delimited(rest, '"'),
            ('#', _) => line(rest),
            ('/', _) if rest[1..].starts_with('/') => line(rest),
            ('/', _) => delimited(rest, '/'),
            ('<', _) => special_token(rest),
            _ => first.len_utf8(),
        };
        prepared.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    Ok(prepared)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_are_rewritten_and_all_else_stays() {
        let around = |schema: &str| {
            format!(
                "start: \"%json {{}}\" | /%json \\/ {{}}/ | a // %json {{\"format\": 1}}\n# %json {{\"format\": 1}}\na: {schema} | <[3]> | %regex {{\"substring_chars\": \"%json {{}}\"}}\n"
            )
        };
        let schema = json!({"type": "string", "format": "of tomorrow"}).to_string();
        let prepared = prepare(&around(&format!("%json {schema}")), false).unwrap();
        let begin = prepared.find("a: %json ").unwrap() + 9;
        let end = begin + prepared[begin..].find(" | <[3]>").unwrap();
        let found: Value = serde_json::from_str(&prepared[begin..end]).unwrap();
        assert_eq!((found.get("format"), &found["type"]), (None, &json!("string")));
        assert!(found.get("x-guidance").is_some(), "{found}");
        assert_eq!(prepared[..begin], around("%json ")[..begin]);
        let compact = json!({"type": "string", "x-guidance": {"whitespace_flexible": false}});
        let kept = prepare(&format!("start: %json {compact}"), false).unwrap();
        assert_eq!(kept, format!("start: %json {compact}"));
        let refused = prepare("start: %json {\"$ref\": \"https://x\"}", false);
        assert_eq!(refused, Err(GrammarError::RemoteReference("https://x".to_owned())));
        assert_eq!(prepare("start: %json {\"a\"", false).unwrap(), "start: %json {\"a\"");
    }
}
