//! Error envelopes of OpenAI's and Anthropic's APIs.

use serde::Serialize;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::header::{CONTENT_TYPE, HeaderName, RETRY_AFTER};
use tonic::codegen::http::{HeaderValue, Response, StatusCode};

use crate::layers::paths::is_anthropic;
use crate::outcome::Outcome;

/// Tells OpenAI's and Anthropic's clients not to retry a status that they would.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// API whose conventions a path follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
}

impl Dialect {
    pub(crate) fn of(path: &str) -> Self {
        if is_anthropic(path) { Self::Anthropic } else { Self::OpenAi }
    }
}

/// OpenAI's error object.
#[derive(Debug, Serialize)]
pub(crate) struct OpenAiError {
    pub(crate) message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    pub(crate) code: Option<&'static str>,
}

impl OpenAiError {
    pub(crate) fn new(outcome: &Outcome) -> Self {
        let http = outcome.http();
        Self {
            message: outcome.message(),
            kind: http.openai_type,
            param: outcome.invalid_field(),
            code: http.openai_code,
        }
    }
}

/// Anthropic's error object.
#[derive(Debug, Serialize)]
struct AnthropicError {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

/// Returns the message of an outcome in Anthropic's API.
fn anthropic_message(outcome: &Outcome) -> String {
    match outcome {
        Outcome::ContextExceeded(excess) => excess.anthropic_message(),
        outcome => outcome.message(),
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Envelope {
    OpenAi {
        error: OpenAiError,
    },
    Anthropic {
        #[serde(rename = "type")]
        kind: &'static str,
        error: AnthropicError,
    },
}

/// Returns the JSON of an error, as a body and in streams.
pub(crate) fn envelope(dialect: Dialect, outcome: &Outcome) -> Vec<u8> {
    let envelope = match dialect {
        Dialect::OpenAi => Envelope::OpenAi { error: OpenAiError::new(outcome) },
        Dialect::Anthropic => Envelope::Anthropic {
            kind: "error",
            error: AnthropicError {
                kind: outcome.http().anthropic_type,
                message: anthropic_message(outcome),
            },
        },
    };
    // Strings and nothing else: serialization cannot fail.
    serde_json::to_vec(&envelope).unwrap_or_default()
}

/// Returns the response to a call that failed before its response headers.
pub(crate) fn refuse(path: &str, outcome: Outcome) -> Response<Body> {
    let body = Bytes::from(envelope(Dialect::of(path), &outcome));
    let mut response = Response::new(Body::new(http_body_util::Full::new(body)));
    *response.status_mut() =
        StatusCode::from_u16(outcome.http().status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(retry) = outcome.retry_after() {
        let seconds = retry.as_millis().div_ceil(1000).max(1);
        headers.insert(RETRY_AFTER, HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX)));
    }
    let retry_helps_not = matches!(
        outcome,
        Outcome::AttemptsExhausted { .. }
            | Outcome::UnknownFingerprint { .. }
            | Outcome::CursorRejected(_)
            | Outcome::ResumeDiverged { .. }
    );
    if retry_helps_not {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_has_one_envelope() {
        let outcome = Outcome::field("top_p", "top_p is 7");
        let json = |path| String::from_utf8(envelope(Dialect::of(path), &outcome)).unwrap();
        assert_eq!(
            json("/v1/chat/completions"),
            r#"{"error":{"message":"top_p is 7","type":"invalid_request_error","param":"top_p","code":null}}"#
        );
        assert_eq!(
            json("/v1/messages/count_tokens"),
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"top_p is 7"}}"#
        );
        let response = refuse("/v1/models", Outcome::Draining);
        assert_eq!(response.status().as_u16(), 503);
        assert_eq!(response.headers()[RETRY_AFTER], "1");
        let response = refuse("/v1/models", Outcome::AttemptsExhausted { attempts: 3 });
        assert_eq!(response.headers()["x-should-retry"], "false");
    }
}
