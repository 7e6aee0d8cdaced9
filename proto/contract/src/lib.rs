//! What router and worker agree on, with no I/O.
//!
//! Both sides validate and interpret a request by this one module, so that a request the router admits is
//! never one the worker refuses for its parameters.

mod admission_cost;
mod block_hash;
mod cost;
mod finish;
mod limits;
mod logprobs;
mod sampling;
mod service_table;
mod tenant_service;

pub use admission_cost::AdmissionCost;
pub use block_hash::BlockHash;
pub use cost::CostCoefficients;
pub use finish::FinishReason;
pub use limits::{ModelLimits, PRIORITY_MAX, RequestError, RequestShape, check_priority};
pub use logprobs::{PositionLogprobs, TokenLogprob};
pub use sampling::{SamplingError, SamplingParams, SamplingSpec};
pub use service_table::{Expired, SERVICE_COUNTER_MAX, ServiceTable, plausible_growth};
pub use tenant_service::{Charged, Service, Tenant, TenantService, TokenCost, Weight, WeightError};
