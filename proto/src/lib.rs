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

/// The descriptors of all services, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inflight.bin"));

/// The session protocol this build speaks.
pub const PROTOCOL_VERSION: u32 = 1;
