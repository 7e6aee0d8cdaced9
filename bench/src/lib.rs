//! Load generator for routers and OpenAI-compatible servers.
//!
//! A [`BenchWorkload`] is a pure function of its seed. A [`Comparison`] sends it to one server at a time, in rounds
//! that alternate between the servers; a [`Meter`] records latencies and counts, and a [`BenchReport`] renders
//! them.

#![forbid(unsafe_code)]

mod client;
mod comparison;
mod endpoint;
mod error;
mod event_lines;
mod grpc;
mod lengths;
mod load;
mod measure;
mod openai;
mod outcome;
mod rate_search;
mod report;
mod tenants;
#[cfg(test)]
mod tests;
mod workload;

pub use client::{BenchClient, GenerationSettings, PromptForm, ServerInfo};
pub use comparison::{Comparison, PlannedLoad};
pub use endpoint::Endpoint;
pub use error::{BenchError, ErrorKind};
pub use lengths::Lengths;
pub use load::LoadPattern;
pub use measure::{Meter, Quota, RoundMeasurements, Slo};
pub use rate_search::RateSearch;
pub use report::{BenchReport, LoadPoint};
pub use tenants::Tenant;
pub use workload::{Arrivals, BenchWorkload, LengthSource, PlannedRequest, PromptKey, PromptKeys};
