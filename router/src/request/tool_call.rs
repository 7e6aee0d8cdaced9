//! Tool calls of earlier messages, as a request repeats them.

use minijinja::value::Value as TemplateValue;
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

/// Returns a call of an earlier message. Its arguments are an object, or a text: that of an object becomes one, and any other, as a model may
/// have written it, is given to the template as it is.
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
    let refused = |json: &str| {
        let reason = || format!("{place} has arguments that are neither a JSON object nor a text");
        Outcome::field(top, escapes::refusal(&format!("{place}.arguments"), json).unwrap_or_else(reason))
    };
    let given = arguments.map(RawValue::get).filter(|given| *given != "null");
    let quoted = given.filter(|given| given.starts_with('"'));
    let text = quoted.map(|quoted| serde_json::from_str::<String>(quoted).map_err(|_| refused(quoted)));
    let text = text.transpose()?;
    // Clients send what an earlier output had, which may be nothing.
    let json = text.as_deref().or(given).map(str::trim).filter(|json| !json.is_empty()).unwrap_or("{}");
    let mut object: Option<TemplateValue> = None;
    if json.starts_with('{') {
        check_values(top, json_values(json))?;
        object = serde_json::from_str(json).ok();
    }
    let arguments = match (object, &text) {
        (Some(object), _) => object,
        (None, Some(text)) => text.as_str().into(),
        (None, None) => return Err(refused(json)),
    };
    Ok(MessageCall { id, name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_an_object_or_a_text() {
        let of = |given: Option<&str>| {
            let given = given.map(|json| RawValue::from_string(json.to_owned()).unwrap());
            let place = "messages[0].tool_calls[0]";
            let call = message_call(place, String::new(), "f".to_owned(), given.as_deref());
            call.map(|call| serde_json::to_string(&call.arguments).unwrap())
                .map_err(|outcome| outcome.message())
        };
        for (given, arguments) in [
            (r#"{"a": 9007199254740993}"#, r#"{"a":9007199254740993}"#),
            (r#""{\"a\": 1}""#, r#"{"a":1}"#),
            (r#"" {} ""#, "{}"),
            (r#""""#, "{}"),
            ("null", "{}"),
            (r#""{\"a\": ""#, r#""{\"a\": ""#),
            (r#""[1]""#, r#""[1]""#),
            (r#""ls -l""#, r#""ls -l""#),
        ] {
            assert_eq!(of(Some(given)).as_deref(), Ok(arguments), "{given}");
        }
        assert_eq!(of(None).as_deref(), Ok("{}"));
        for given in ["[1]", "7", "true"] {
            assert!(of(Some(given)).unwrap_err().contains("neither a JSON object nor a text"), "{given}");
        }
        for given in [r#"{"a": "\ud83d"}"#, r#""\ud83d""#] {
            assert!(
                of(Some(given)).unwrap_err().contains("tool_calls[0].arguments has the escape"),
                "{given}"
            );
        }
    }
}
