//! Reception of request bodies.

use axum::body::{Body, HttpBody as _};
use http_body_util::BodyExt as _;
use inflight_net::ReceiveError;
use tonic::codegen::Bytes;

use crate::layers::arrival::receive_budget_exhausted;
use crate::options::Options;
use crate::outcome::Outcome;

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
