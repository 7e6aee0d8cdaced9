//! Vocabulary shared by router and worker, without I/O: request validation, cost model, block hashes,
//! fairness.
//!
//! Both validate requests with this crate, so a worker never rejects the parameters of a request that a
//! router has admitted.

#![forbid(unsafe_code)]

mod admission_cost;
mod block_hash;
mod constraint;
mod cost;
mod finish;
mod json_whitespace;
mod limits;
mod logprobs;
mod memory_shape;
mod sampling;
mod service_counter;
mod service_table;
mod virtual_token_counters;

pub use admission_cost::AdmissionCost;
pub use block_hash::BlockHash;
pub use constraint::{Constraint, ConstraintError, Grammar};
pub use cost::CostCoefficients;
pub use finish::FinishReason;
pub use json_whitespace::JsonWhitespace;
pub use limits::{ModelLimits, PRIORITY_MAX, Priority, RequestError, RequestShape};
pub use logprobs::{PositionLogprobs, PromptLogprobs, TokenLogprob};
pub use memory_shape::{GROUPS_MAX, LayerGroup, MemoryShape, SPAN_BLOCKS_MAX, ShapeError};
pub use sampling::{
    NumberKind, SAMPLING_NUMBERS, SamplingError, SamplingNumber, SamplingOverrides, SamplingParams,
    SamplingSpec, StopConditions,
};
pub use service_counter::{ServiceCounter, TenantCharge};
pub use service_table::{ExpiredService, SERVICE_COUNTER_MAX, ServiceTable, plausible_growth};
pub use virtual_token_counters::{Service, Tenant, TokenCost, VirtualTokenCounters, Weight, WeightError};
