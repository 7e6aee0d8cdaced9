//! Tool calls of earlier messages, as a request repeats them.

use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::request::escapes;
use crate::request::tool_use::{JSON_VALUES_MAX, Tool, json_values};
use crate::text::MessageCall;

/// Checks the JSON values of the arguments of calls; a refusal names `field`.
///
/// # Errors
/// There are too many.
pub(crate) fn check_values(field: &str, values: usize) -> Result<(), Outcome> {
    if values <= JSON_VALUES_MAX {
        return Ok(());
    }
    let reason = format!(
        "the arguments of calls have up to {values} JSON values; at most {JSON_VALUES_MAX} are allowed in a request: shorten them, or leave \
         out older messages"
    );
    Err(Outcome::field(field, reason))
}

/// Returns a call of an earlier message. Its arguments are an object, or its text.
///
/// # Errors
/// They are neither.
pub(crate) fn message_call(
    place: &str,
    id: String,
    name: String,
    arguments: Option<&RawValue>,
) -> Result<MessageCall, Outcome> {
    let top = place.split(['.', '[']).next().unwrap_or(place);
    // Each result of the call repeats its name.
    if name.len() > Tool::NAME_BYTES_MAX {
        let (bytes, most) = (name.len(), Tool::NAME_BYTES_MAX);
        let reason = format!("{place} calls a tool whose name has {bytes} bytes; at most {most} are allowed");
        return Err(Outcome::field(top, reason));
    }
    let refused = |text: &str| {
        let reason = || format!("{place} has arguments that are no JSON object, nor the text of one");
        Outcome::field(top, escapes::refusal(&format!("{place}.arguments"), text).unwrap_or_else(reason))
    };
    let text: String = match arguments.map(RawValue::get) {
        None | Some("null") => "{}".to_owned(),
        Some(quoted) if quoted.starts_with('"') => {
            serde_json::from_str(quoted).map_err(|_| refused(quoted))?
        }
        Some(object) => object.to_owned(),
    };
    // Clients send what an earlier output had, which may be nothing.
    let text = if text.trim().is_empty() { "{}" } else { text.trim() };
    if !text.starts_with('{') {
        return Err(refused(text));
    }
    check_values(top, json_values(text))?;
    let arguments = serde_json::from_str(text).map_err(|_| refused(text))?;
    Ok(MessageCall { id, name, arguments })
}
