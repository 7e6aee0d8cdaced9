//! Attacks by hostile clients, strangers on the network and lying peers: each is bounded, and tenants are served
//! meanwhile.

mod amplification;
mod arithmetic;
mod certificates;
mod connections;
mod control_frames;
mod endurance;
mod exhaustion;
mod exposure;
mod grammars;
mod lying_router;
mod lying_worker;
mod model_files;
mod secrets;
mod shares;
mod together;
mod tokenizing;
mod wall_clock;
mod worker_port;

use std::path::Path;

use anyhow::Result;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{GenerateRequest, StopConditions};
use tonic::Request;

/// Path of the `inflight` binary of this build.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_inflight"))
}

/// Tenants file with the SHA-256 of the API key `t`.
const TENANTS: &str = "[tenants.t]\nkeys = [{ sha256 = \"e3b98a4da31a127d4bde6e43033f66ba274cab0eb7eb1c70ec41402bf6273dd8\" }]\n";

/// Returns a request for four tokens.
fn short_request() -> GenerateRequest {
    GenerateRequest {
        input: Some(Input::Text("Once upon a time".to_owned())),
        stop: Some(StopConditions { max_tokens: Some(4), ignore_eos: true, ..StopConditions::default() }),
        ..GenerateRequest::default()
    }
}

/// Returns `message` as a request with an API key.
fn with_key<T>(message: T, key: &str) -> Result<Request<T>> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse()?);
    Ok(request)
}
