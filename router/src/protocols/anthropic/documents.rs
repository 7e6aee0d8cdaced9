//! Documents and search results in Anthropic's messages, as text with their titles.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::http::content;
use crate::protocols::http::fields::{parse, parse_object};

/// Block that may be a document or a search result.
#[derive(Deserialize)]
struct Block<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow, default)]
    source: Option<&'a RawValue>,
    #[serde(default)]
    title: Option<String>,
    #[serde(default)]
    context: Option<String>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

/// Source of a document.
#[derive(Deserialize)]
struct Source<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    data: Option<String>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

/// Returns the text of a block that may be a document or a search result; `None` if the block has no effect on the prompt.
///
/// # Errors
/// It is neither of these, nor text.
pub(super) fn part(place: &str, raw: &RawValue) -> Result<Option<String>, Outcome> {
    let block: Block<'_> = parse_object(place, raw, "a block with a type")?;
    let missing = |what: &str| Outcome::field("messages", format!("{place} has no {what}"));
    let title = block.title.filter(|title| !title.is_empty());
    match &*block.kind {
        "document" => {
            let place = format!("{place}.source");
            let source: Source<'_> =
                parse_object(&place, block.source.ok_or_else(|| missing("source"))?, "a source")?;
            let text = match &*source.kind {
                "text" => source.data.ok_or_else(|| missing("source.data"))?,
                "content" => content::text(&format!("{place}.content"), source.content)?,
                other => {
                    let reason = format!(
                        "{place} is of type {other:?}; send the document's text, as a source of type text"
                    );
                    return Err(Outcome::field("messages", reason));
                }
            };
            let context = block.context.filter(|context| !context.is_empty());
            Ok(Some(titled(&[("Document", title), ("Context", context)], &text)))
        }
        "search_result" => {
            let text = content::text(&format!("{place}.content"), block.content)?;
            let source =
                block.source.map(|source| parse::<String>(&format!("{place}.source"), source, "a string"));
            Ok(Some(titled(&[("Search result", title), ("Source", source.transpose()?)], &text)))
        }
        _ => content::part(place, raw),
    }
}

/// Returns a text behind lines with its title and what else is known of it.
fn titled(lines: &[(&str, Option<String>)], text: &str) -> String {
    let mut whole = String::new();
    for (at, (name, value)) in lines.iter().enumerate() {
        match value {
            Some(value) => whole.push_str(&format!("{name}: {value}\n")),
            // The first says what it is.
            None if at == 0 => whole.push_str(&format!("{name}:\n")),
            None => {}
        }
    }
    whole + "\n" + text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_and_search_results_are_text_with_their_titles() {
        let of = |json: &str| part("messages[0].content[1]", serde_json::from_str(json).unwrap());
        for (block, text) in [
            (
                r#"{"type": "document", "title": "T", "context": "C", "citations": {"enabled": true},
                    "source": {"type": "text", "media_type": "text/plain", "data": "x\ny"}}"#,
                "Document: T\nContext: C\n\nx\ny",
            ),
            (
                r#"{"type": "document", "title": null, "source": {"type": "content", "content": [{"type": "text", "text": "a"},
                    {"type": "text", "text": "b"}]}}"#,
                "Document:\n\na\nb",
            ),
            (
                r#"{"type": "search_result", "source": "https://x", "title": "T", "content": [{"type": "text", "text": "a"}]}"#,
                "Search result: T\nSource: https://x\n\na",
            ),
            (r#"{"type": "text", "text": "plain"}"#, "plain"),
        ] {
            assert_eq!(of(block), Ok(Some(text.to_owned())), "{block}");
        }
        for (block, words) in [
            (
                r#"{"type": "document", "source": {"type": "base64", "data": "x"}}"#,
                "is of type \"base64\"; send the document's text",
            ),
            (r#"{"type": "document", "source": {"type": "text"}}"#, "has no source.data"),
            (r#"{"type": "document"}"#, "has no source"),
            (
                r#"{"type": "search_result", "content": [{"type": "image"}]}"#,
                "content[1].content[0] is of type \"image\"",
            ),
            (r#"{"type": "image"}"#, "images are not supported"),
        ] {
            let refused = of(block).unwrap_err().message();
            assert!(refused.contains(words), "{block}: {refused}");
        }
    }
}
