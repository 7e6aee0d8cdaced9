//! Contents of messages: a string, or parts of which only text is supported.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::protocols::http::fields::{parse, parse_object};

/// Part of a content, of any API.
#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

/// Returns the text of a content; its text parts are joined by line breaks. Null and an absent content are
/// empty.
///
/// # Errors
/// A part is not text; the message names it and its position under `name`.
pub(crate) fn text(name: &str, content: Option<&RawValue>) -> Result<String, Outcome> {
    text_of_parts(name, content, part)
}

/// Returns the text of a content whose parts that are objects are read by `part`.
///
/// # Errors
/// A part is not text.
pub(crate) fn text_of_parts(
    name: &str,
    content: Option<&RawValue>,
    part: impl Fn(&str, &RawValue) -> Result<Option<String>, Outcome>,
) -> Result<String, Outcome> {
    let Some(content) = content else { return Ok(String::new()) };
    let expected = "a string or an array of parts";
    match content.get().as_bytes().first() {
        Some(b'[') => {}
        Some(b'n') => return Ok(String::new()),
        _ => return parse(name, content, expected),
    }
    let parts: Vec<&RawValue> = parse(name, content, expected)?;
    let mut texts = Vec::with_capacity(parts.len());
    for (at, raw) in parts.into_iter().enumerate() {
        let name = format!("{name}[{at}]");
        if raw.get().starts_with('"') {
            texts.push(parse::<String>(&name, raw, "text")?);
            continue;
        }
        texts.extend(part(&name, raw)?);
    }
    Ok(texts.join("\n"))
}

/// Returns the text of a part that is an object; `None` if the part is one that has no effect on the prompt.
///
/// # Errors
/// It is not text.
pub(crate) fn part(name: &str, part: &RawValue) -> Result<Option<String>, Outcome> {
    part_text(name, parse_object(name, part, "a part with a type")?)
}

/// Returns the text of a part; `None` if the part is one that has no effect on the prompt.
fn part_text(name: &str, part: Part) -> Result<Option<String>, Outcome> {
    let refused = |what: &str| {
        let top = name.split(['.', '[']).next().unwrap_or(name);
        Err(Outcome::field(
            top,
            format!("{name} is of type {:?}: {what} not supported; send text", part.kind),
        ))
    };
    match part.kind.as_str() {
        "text" | "input_text" | "output_text" => match part.text {
            Some(text) => Ok(Some(text)),
            None => refused("a part without text is"),
        },
        "refusal" => Ok(part.refusal),
        // Reasoning of earlier turns is not part of a prompt.
        "thinking" | "redacted_thinking" | "reasoning_text" | "summary_text" => Ok(None),
        "image_url" | "input_image" | "image" => refused("images are"),
        "input_audio" | "audio" => refused("audio is"),
        "video_url" | "input_video" | "video" => refused("video is"),
        "file" | "input_file" | "document" => refused("files are"),
        "tool_use" | "tool_result" | "server_tool_use" => refused("a tool block is here"),
        _ => refused("this type is"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_parts_are_joined_and_others_refused_by_kind() {
        let of = |json: &str| {
            let raw: &RawValue = serde_json::from_str(json).unwrap();
            text("messages[0].content", Some(raw)).map_err(|outcome| outcome.message())
        };
        assert_eq!(of("\"hi\""), Ok("hi".to_owned()));
        assert_eq!(of("null"), Ok(String::new()));
        assert_eq!(
            of(r#"[{"type":"text","text":"a"},{"type":"thinking"},{"type":"input_text","text":"b"}]"#),
            Ok("a\nb".to_owned())
        );
        for (part, words) in [
            (r#"{"type":"image_url","image_url":{"url":"x"}}"#, "images are not supported"),
            (r#"{"type":"input_audio"}"#, "audio is not supported"),
            (r#"{"type":"tool_result"}"#, "a tool block is here not supported"),
            (r#"{"type":"text"}"#, "a part without text"),
            (r#"{"type":"hologram"}"#, "this type is not supported"),
            (r#"{"text":"a"}"#, "must be a part with a type"),
            (r#"["text","a"]"#, "must be a part with a type"),
        ] {
            let refused = of(&format!("[{{\"type\":\"text\",\"text\":\"a\"}}, {part}]")).unwrap_err();
            assert!(refused.contains(words) && refused.contains("messages[0].content[1]"), "{refused}");
        }
        assert!(of("7").unwrap_err().contains("must be a string or an array of parts; it is 7"));
    }
}
