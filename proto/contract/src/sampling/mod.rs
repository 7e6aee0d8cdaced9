//! Sampling parameters: what a request asks for, the table of numeric parameters, and validation.

mod error;
mod list_bytes;
mod overrides;
mod params;
mod spec;
mod table;

pub use error::SamplingError;
pub use overrides::{SamplingOverrides, StopConditions};
pub use params::SamplingParams;
pub use spec::SamplingSpec;
pub use table::{NumberKind, SAMPLING_NUMBERS, SamplingNumber};
