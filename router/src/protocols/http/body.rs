//! Reception of request bodies.

use axum::body::{Body, HttpBody as _};
use http_body_util::BodyExt as _;
use inflight_net::ReceiveError;
use tonic::codegen::Bytes;
use tonic::codegen::http::HeaderMap;
use tonic::codegen::http::header::{CONTENT_ENCODING, CONTENT_TYPE};

use crate::layers::arrival::receive_budget_exhausted;
use crate::options::Options;
use crate::outcome::Outcome;

/// Checks that the headers of a request announce no body that is not read: JSON in UTF-8, as it is.
///
/// # Errors
/// [`Outcome::Undecodable`].
pub(crate) fn check_headers(headers: &HeaderMap) -> Result<(), Outcome> {
    let refused = |header: &'static str, value: &str, instead: &str| {
        let reason = format!("{header} is {value:.80?}; {instead}");
        Err(Outcome::Undecodable { header, reason })
    };
    for value in headers.get_all(CONTENT_ENCODING) {
        let value = String::from_utf8_lossy(value.as_bytes());
        if value.split(',').any(|coding| !matches!(&*coding.trim().to_ascii_lowercase(), "" | "identity")) {
            return refused(
                "Content-Encoding",
                &value,
                "compressed bodies are not read: send the body as it is",
            );
        }
    }
    for value in headers.get_all(CONTENT_TYPE) {
        let value = String::from_utf8_lossy(value.as_bytes());
        let mut parts = value.split(';').map(|part| part.trim().to_ascii_lowercase());
        let instead = "the body is JSON in UTF-8: send it as application/json";
        let charset =
            |part: String| part.strip_prefix("charset=").map(|name| name.trim_matches('"').to_owned());
        let is_form = parts.next().is_some_and(|kind| kind.starts_with("multipart/"));
        let is_other = parts.filter_map(charset).any(|name| !matches!(&*name, "utf-8" | "utf8" | "us-ascii"));
        if is_form || is_other {
            return refused("Content-Type", &value, instead);
        }
    }
    Ok(())
}

/// Receives a whole body, within the limits that the receive layer enforces.
///
/// # Errors
/// The body exceeds a limit, or its connection broke.
pub(crate) async fn receive(mut body: Body, options: &Options) -> Result<Bytes, Outcome> {
    // Copied as they arrive: the pieces of megabytes, kept to be joined at the end, would take as much again.
    // Of an announced length at once, as growing buffers leave holes behind; its pages take memory as they are filled.
    let announced = body.size_hint().lower().min(options.message_bytes_max as u64);
    let mut whole = Vec::with_capacity(usize::try_from(announced).unwrap_or(0));
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| failure(&error, options))?;
        if let Ok(data) = frame.into_data() {
            whole.extend_from_slice(&data);
        }
    }
    Ok(whole.into())
}

fn failure(error: &axum::Error, options: &Options) -> Outcome {
    match ReceiveError::of(error) {
        Some(error @ ReceiveError::TooLarge { .. }) => Outcome::TooLarge(error.to_string()),
        Some(error @ ReceiveError::TooSlow { .. }) => Outcome::ReceiveTimeout(error.to_string()),
        Some(ReceiveError::Exhausted) => {
            receive_budget_exhausted(options.receive_bytes_max, options.retry_delay)
        }
        None => Outcome::invalid(format_args!("the body did not arrive: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_bodies_forms_and_other_charsets_are_refused_by_their_header() {
        for (name, value, refused) in [
            ("content-encoding", "gzip", Some("Content-Encoding")),
            ("content-encoding", "Identity, br", Some("Content-Encoding")),
            ("content-encoding", "identity", None),
            ("content-encoding", "", None),
            ("content-type", "application/json; charset=UTF-8", None),
            ("content-type", "application/json;charset=\"utf-8\"", None),
            ("content-type", "application/json; charset=utf-16", Some("Content-Type")),
            ("content-type", "text/plain; charset=ISO-8859-1", Some("Content-Type")),
            ("content-type", "multipart/form-data; boundary=x", Some("Content-Type")),
            // What curl sends with `--data`.
            ("content-type", "application/x-www-form-urlencoded", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            let found = check_headers(&headers).err();
            assert_eq!(
                found.as_ref().and_then(Outcome::invalid_field).as_deref(),
                refused,
                "{name}: {value}"
            );
            assert_eq!(found.map(|outcome| outcome.http().status), refused.map(|_| 415), "{name}: {value}");
        }
    }
}
