//! Client of routers whose streams survive the loss of any router.
//!
//! [`GenerateStream`] wraps the RPC Generate: when a call breaks off, it continues the stream at another router,
//! from the last cursor and the tokens that it has. The caller sees one stream without gaps or repetitions.

#![forbid(unsafe_code)]

mod generate_stream;
mod policy;

pub use generate_stream::GenerateStream;
pub use policy::ResumePolicy;
