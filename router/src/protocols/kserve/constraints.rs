//! Constraints of the output in tensors, parameters and `sampling_parameters`: the fields of the HTTP APIs, as text.

use std::collections::BTreeMap;

use serde_json::value::{RawValue, to_raw_value};

use crate::outcome::Outcome;
use crate::protocols::http::fields::{Field, Fields};
use crate::protocols::http::structured;
use crate::request::draft::Draft;

/// Format of text completions.
const RESPONSE_FORMAT: &str = "response_format";

/// Returns the names of the constraints.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    structured::GUIDED.iter().map(|field| field.name).chain([RESPONSE_FORMAT])
}

/// Returns the constraint of this name.
pub(super) fn known(name: &str) -> Option<&'static str> {
    names().find(|known| *known == name)
}

/// Returns the refusal of a constraint of other servers.
pub(super) fn refusal(name: &str) -> Option<Outcome> {
    let elsewhere = structured::ELSEWHERE.iter().find(|field| field.name == name && known(name).is_none());
    elsewhere.map(|Field { name, note, .. }| Outcome::field(*name, format!("{name} is refused: {note}")))
}

/// Returns the JSON of a constraint that is given as text.
///
/// # Errors
/// It has several texts, or is no JSON where it must be.
pub(super) fn of_texts(name: &'static str, texts: &[String]) -> Result<Box<RawValue>, Outcome> {
    if name == "guided_choice" {
        let list = match texts {
            [text] => serde_json::from_str::<Vec<String>>(text).ok(),
            _ => None,
        };
        return raw(name, &list.as_deref().unwrap_or(texts));
    }
    let [text] = texts else {
        return Err(Outcome::field(name, format!("{name} has {} elements; give one", texts.len())));
    };
    let is_object = text.trim_start().starts_with('{');
    if is_object && matches!(name, RESPONSE_FORMAT | "structured_outputs" | "nvext" | "grammar") {
        let value = RawValue::from_string(text.trim().to_owned());
        return value.map_err(|error| Outcome::field(name, format!("{name} is not JSON: {error}")));
    }
    raw(name, text)
}

fn raw<T: serde::Serialize + ?Sized>(name: &'static str, value: &T) -> Result<Box<RawValue>, Outcome> {
    to_raw_value(value).map_err(|error| Outcome::field(name, error))
}

/// Reads constraints into a request.
///
/// # Errors
/// One has another type, or several give a grammar.
pub(super) fn read(
    given: &BTreeMap<&'static str, Box<RawValue>>,
    request: &mut Draft,
) -> Result<(), Outcome> {
    let fields = Fields::new(given.iter().map(|(name, value)| (*name, &**value)).collect());
    structured::read(&fields, request)
}
