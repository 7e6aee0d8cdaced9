//! Reception of request bodies.

use axum::body::Body;
use http_body_util::BodyExt as _;
use inflight_net::ReceiveError;
use tonic::codegen::Bytes;

use crate::api::arrival::receive_budget_exhausted;
use crate::options::Options;
use crate::outcome::Outcome;

/// Receives a whole body, within the limits that the receive layer enforces.
///
/// # Errors
/// The body exceeds a limit, or its connection broke.
pub(super) async fn receive(body: Body, options: &Options) -> Result<Bytes, Outcome> {
    let collected = body.collect().await.map_err(|error| failure(&error, options))?;
    Ok(collected.to_bytes())
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
