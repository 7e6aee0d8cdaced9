//! Limits of a draft's fields that can be checked before its model is known.

use inflight_contract::{SamplingError, SamplingSpec};

use crate::outcome::Outcome;
use crate::request::bad_words::BadWords;
use crate::request::draft::{Draft, Input};
use crate::request::message_list::MessageList;

/// Maximum bytes of `tenant`, `request_id` and `require_fingerprint`.
const NAME_BYTES_MAX: usize = 128;
/// Maximum stop strings of a request.
const STOPS_MAX: usize = 16;
/// Maximum bytes of a stop string.
const STOP_BYTES_MAX: usize = 256;
/// Maximum bytes of a model's name, as for the names that workers report.
const MODEL_BYTES_MAX: usize = 512;

/// Checks the number of messages. To be called before a request waits for anything.
pub(crate) fn check_input(input: &Input) -> Result<(), Outcome> {
    match input {
        Input::Chat(chat) => MessageList::check_count(chat.messages.len()),
        _ => Ok(()),
    }
}

/// Checks the sizes of the fields that every prompt of a call copies. To be called before the copies are made.
pub(crate) fn check_shared(request: &Draft) -> Result<(), Outcome> {
    if request.model.len() > MODEL_BYTES_MAX {
        let bytes = request.model.len();
        let reason = format!("model has {bytes} bytes; at most {MODEL_BYTES_MAX} are allowed");
        return Err(Outcome::field("model", reason));
    }
    check_names(request)?;
    let Draft { sampling, stop, .. } = request;
    check_stops("stop", &stop.stop)?;
    BadWords::check(&sampling.bad_words)?;
    let counts = [
        ("stop_token_ids", stop.stop_token_ids.len(), SamplingSpec::STOP_TOKEN_IDS_MAX),
        ("logit_bias", sampling.logit_bias.len(), SamplingSpec::LOGIT_BIAS_MAX),
        ("allowed_token_ids", sampling.allowed_token_ids.len(), SamplingSpec::ALLOWED_TOKEN_IDS_MAX),
    ];
    match counts.into_iter().find(|(_, len, most)| len > most) {
        Some((name, len, most)) => Err(Outcome::field(name, SamplingError::TooMany { name, len, most })),
        None => Ok(()),
    }
}

/// Checks the sizes of names.
pub(super) fn check_names(request: &Draft) -> Result<(), Outcome> {
    let names = [
        ("tenant", &request.tenant),
        ("request_id", &request.request_id),
        ("require_fingerprint", &request.require_fingerprint),
    ];
    for (name, value) in names {
        if value.len() > NAME_BYTES_MAX {
            let reason = format!("{name} has {} bytes; at most {NAME_BYTES_MAX} are allowed", value.len());
            return Err(Outcome::field(name, reason));
        }
    }
    Ok(())
}

/// Checks the stop strings in the field `name`.
pub(crate) fn check_stops(name: &str, stop: &[String]) -> Result<(), Outcome> {
    if stop.len() > STOPS_MAX {
        let reason = format!("{name} has {} strings; at most {STOPS_MAX} are allowed", stop.len());
        return Err(Outcome::field(name, reason));
    }
    for (index, text) in stop.iter().enumerate() {
        if text.is_empty() || text.len() > STOP_BYTES_MAX {
            let bytes = text.len();
            let reason = format!("{name}[{index}] has {bytes} bytes; each must have 1 to {STOP_BYTES_MAX}");
            return Err(Outcome::field(name, reason));
        }
    }
    Ok(())
}
