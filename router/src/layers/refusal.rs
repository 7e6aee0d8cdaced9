//! Response of the layers to a call that they refuse, by protocol.

use tonic::body::Body;
use tonic::codegen::http::Response;

use crate::outcome::Outcome;

/// Renders the outcome of a refused call on a path.
pub(crate) type Refuse = fn(path: &str, outcome: Outcome) -> Response<Body>;

/// Refuses a gRPC call.
pub(crate) fn grpc(_: &str, outcome: Outcome) -> Response<Body> {
    outcome.into_status().into_http()
}
