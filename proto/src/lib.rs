//! Message and service types generated from the .proto files, and conversions to the types of
//! `inflight-contract`.
//!
//! Only this crate and the RPC layers of router, worker and CLI use protobuf types.

#![forbid(unsafe_code)]

mod bundle;
mod call_proof;
mod codec;
mod convert;
mod decoded_size;
#[doc(hidden)]
pub mod fuzz;

pub use bundle::bundle_digest;
pub use call_proof::{
    AnswerProof, CHALLENGE_AGE_MAX, CallProof, Challenges, ProofError, ProveError, SESSION_PATH, prove,
};
pub use codec::StrictCodec;

/// Version 1 of the API, documented in the .proto files.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::large_futures)]
pub mod v1 {
    tonic::include_proto!("inflight.v1");
}

/// KServe v2 (Open Inference Protocol) with Triton's streaming inference call.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::large_futures)]
pub mod kserve {
    tonic::include_proto!("inference");
}

/// Encoded file descriptors of all services, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inflight.bin"));

/// Version of the session protocol between router and worker that this build implements.
pub const PROTOCOL_VERSION: u32 = 2;

/// First protocol version in which a hello may have groups of layers (`Hello.layer_groups`).
pub const LAYER_GROUPS_VERSION: u32 = 2;

/// Returns the maximum encoded size in bytes of a `Submit` to a worker with a context of `context_tokens`.
///
/// It covers the prompt and the tokens generated so far of all choices, at five bytes a token (the longest
/// varint of a u32), plus 1 MiB for all other fields. Requests that a router accepts stay below it.
pub fn submit_bytes_max(context_tokens: u32) -> usize {
    const TOKEN_BYTES: usize = 5;
    const REST: usize = 1 << 20;
    let sequences = 1 + inflight_contract::SamplingSpec::CHOICES_MAX as usize;
    (context_tokens as usize).saturating_mul(TOKEN_BYTES * sequences).saturating_add(REST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message as _;

    #[test]
    fn the_largest_submission_of_a_model_is_within_its_size_bound() {
        for context in [1, 1000, 100_000] {
            let tokens = vec![u32::MAX; context as usize];
            let choices = 0..inflight_contract::SamplingSpec::CHOICES_MAX;
            let resumed = choices.map(|choice| v1::ResumedChoice {
                choice,
                token_ids: tokens.clone(),
                finished: false,
            });
            let submit = v1::Submit {
                prompt_token_ids: tokens.clone(),
                resumed: resumed.collect(),
                ..Default::default()
            };
            let (size, bound) = (submit.encoded_len(), submit_bytes_max(context));
            assert!(size <= bound && bound <= size + (1 << 20), "{size} bytes, {bound} allowed");
        }
    }
}
