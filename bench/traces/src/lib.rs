//! Inputs of the load generator and of the simulator: readers of published traces, and a random number generator
//! whose sequence depends on the seed alone.

#![forbid(unsafe_code)]

mod split_mix64;
mod trace;

pub use split_mix64::SplitMix64;
pub use trace::{
    ServedRequest, TRACED_BLOCK_TOKENS, TraceError, TracedRequest, read_lengths, read_trace, read_vtc,
};
