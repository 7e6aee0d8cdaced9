//! What travels: the types generated from the .proto files, and their conversions to the contract's types.
//!
//! Only this crate and the edges of router and worker know protobuf types.

mod bundle;
mod codec;
mod convert;

pub use bundle::bundle_digest;
pub use codec::StrictCodec;

/// Version 1 of the API; the .proto files carry the documentation.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::large_futures)]
pub mod v1 {
    tonic::include_proto!("inflight.v1");
}

/// KServe v2, the Open Inference Protocol, with Triton's streaming call.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::large_futures)]
pub mod kserve {
    tonic::include_proto!("inference");
}

/// The descriptors of all services, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inflight.bin"));

/// The session protocol this build speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// Most bytes of a `Submit` that a worker whose sequences hold `context_tokens` can be sent: a prompt, the tokens of every
/// choice so far, five bytes each, and a mebibyte for everything else. What a router accepts stays below it.
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
    fn no_submission_within_the_limits_of_a_model_is_larger_than_its_bound() {
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
            let (size, most) = (submit.encoded_len(), submit_bytes_max(context));
            assert!(size <= most && most <= size + (1 << 20), "{size} bytes, {most} allowed");
        }
    }
}
