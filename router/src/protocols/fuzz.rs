//! Entry point for fuzzing: any bytes as the body of a request of every HTTP API.

use inflight_contract::SamplingSpec;
use serde_json::Value;

use crate::outcome::Outcome;
use crate::protocols::anthropic::messages;
use crate::protocols::http::fields::{Fate, FieldTable};
use crate::protocols::openai::chat;
use crate::protocols::openai::completions;
use crate::protocols::openai::responses;
use crate::protocols::openai::tokenize;
use crate::request::draft::{Draft, Input};

/// Longest error message, beyond what it quotes of the body.
const MESSAGE_BYTES: usize = 1024;

/// Reads a body as that of every API: an accepted one gives what a general JSON parser finds in it, and a refused one gets a
/// sentence in proportion to the body. Returns whether an API accepts it.
///
/// # Panics
/// If one of these does not hold.
pub(crate) fn read(body: &[u8]) -> bool {
    let parsed = serde_json::from_slice::<Value>(body).ok();
    let mut accepted = false;
    let single = |read: Result<Draft, Outcome>| read.map(|request| vec![request]);
    let chat = single(chat::read(body).map(|(request, _)| request));
    let messages = single(messages::read(body).map(|(request, _)| request));
    for (read, table, limit) in [
        (chat, &chat::FIELDS, "max_completion_tokens"),
        (completions::read(body).map(|(requests, _)| requests), &completions::FIELDS, "max_tokens"),
        (single(responses::read(body).map(|(request, _)| request)), &responses::FIELDS, "max_output_tokens"),
        (messages, &messages::FIELDS, "max_tokens"),
    ] {
        match read {
            Ok(requests) => {
                check(body, honoured(parsed.clone(), table).as_ref(), &requests, limit);
                accepted = true;
            }
            Err(outcome) => check_refusal(body, &outcome),
        }
    }
    for table in [&messages::COUNT_FIELDS, &tokenize::FIELDS] {
        let conversation = table.read(body).and_then(|fields| {
            messages::conversation(&fields)?;
            chat::messages(&fields)
        });
        if let Err(outcome) = conversation {
            check_refusal(body, &outcome);
        }
    }
    let tokens = tokenize::DETOKENIZE_FIELDS.read(body);
    if let Err(outcome) = tokens.and_then(|fields| fields.token_ids("tokens")) {
        check_refusal(body, &outcome);
    }
    accepted
}

/// Keeps the fields that the API honours.
fn honoured(parsed: Option<Value>, table: &FieldTable) -> Option<Value> {
    let Some(Value::Object(mut fields)) = parsed else { return None };
    fields.retain(|name, _| table.iter().any(|field| field.name == name && field.fate == Fate::Honoured));
    Some(Value::Object(fields))
}

fn check(body: &[u8], parsed: Option<&Value>, requests: &[Draft], limit: &str) {
    let mut bytes = 0;
    for request in requests {
        bytes += match &request.input {
            Input::Text(text) | Input::RawText(text) => text.len(),
            Input::TokenIds(ids) => ids.len(),
            Input::Chat(chat) => chat.messages.iter().map(|message| message.text().len()).sum(),
        };
        // The general parser fails where fields without effect hold what it refuses.
        if let Some(parsed) = parsed {
            check_values(parsed, request, limit);
        }
        let stop = request.stop.clone();
        let spec = request.sampling.clone().apply(&stop, &SamplingSpec::default());
        if let Ok(valid) = spec.validate() {
            assert!(valid.temperature.is_finite() && valid.top_p > 0.0 && valid.n > 0, "{valid:?}");
        }
    }
    assert!(bytes <= body.len(), "prompts of {bytes} bytes from a body of {}", body.len());
}

/// Compares numbers and a plain prompt with those of the general parser.
fn check_values(parsed: &Value, request: &Draft, limit: &str) {
    let number = |name: &str| parsed[name].as_f64().map(|number| number as f32);
    let sampling = &request.sampling;
    for (name, found) in [("temperature", sampling.temperature), ("top_p", sampling.top_p)] {
        // Both parsers round; the general one twice.
        let same = match (number(name), found) {
            (Some(theirs), Some(ours)) => {
                theirs == ours || (theirs - ours).abs() <= theirs.abs() * f32::EPSILON
            }
            (theirs, ours) => theirs == ours,
        };
        assert!(same, "{name} is {:?}, read as {found:?}", parsed[name]);
    }
    // Integers may be written as floating-point numbers.
    if let Some(max_tokens) = parsed[limit].as_f64() {
        assert_eq!(request.stop.max_tokens.map(f64::from), Some(max_tokens), "{limit}");
    }
    if let (Some(prompt), Input::Text(text) | Input::RawText(text)) =
        (parsed["prompt"].as_str(), &request.input)
    {
        assert_eq!(prompt, text);
    }
    if let (Some(items), Input::Chat(chat)) = (parsed["messages"].as_array(), &request.input) {
        let plain = items.iter().filter_map(|item| item["content"].as_str());
        let mut found = chat.messages.iter().map(|message| message.text());
        for content in plain {
            assert!(found.any(|other| other == content), "{content:?} is lost or out of order");
        }
    }
}

fn check_refusal(body: &[u8], outcome: &Outcome) {
    let message = outcome.message();
    assert!(!message.is_empty(), "{outcome:?} has no message");
    // Escaped text takes up to ten bytes for one.
    let most = MESSAGE_BYTES + 10 * body.len();
    assert!(message.len() <= most, "{} bytes of error message for {} bytes", message.len(), body.len());
}
