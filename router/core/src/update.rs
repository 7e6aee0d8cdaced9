//! What a worker reports in a session, free of the wire format.

use inflight_contract::{
    CostCoefficients, FinishReason, PositionLogprobs, PromptLogprobs, Service, ServiceCounter,
};
use serde::{Deserialize, Serialize};

use crate::{CacheChange, Credits, SubmissionId, WorkerLoad};

/// Result of one scheduler iteration of a worker, for one session.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct WorkerUpdate {
    /// New output, one entry per choice.
    pub sequences: Vec<SequenceUpdate>,
    /// Current grant; `None` leaves the previous one in force.
    pub grant: Option<Grant>,
    /// Whether the worker rejects new requests and finishes those it has.
    pub draining: bool,
    /// Coefficients of the worker's cost model; `None` if unchanged.
    pub cost: Option<CostCoefficients>,
    /// Current load; `None` if unchanged.
    pub load: Option<WorkerLoad>,
    /// Submissions of this session that the worker had received when it computed `load`.
    pub submissions_received: u64,
    /// Part of a prefix-cache snapshot.
    pub cache_snapshot: Option<CacheSnapshot>,
    /// Prefix-cache events since the previous update.
    pub cache_events: Option<CacheEvents>,
    /// Service counters of this worker's incarnation that changed.
    pub services: Vec<TenantCounter>,
    /// Service counters of other incarnations, as other routers reported them.
    pub service_tables: Vec<IncarnationCounters>,
    /// Routers with a session at the worker; 0 if it does not count them.
    pub router_count: u32,
    /// Virtual time of the worker's fair queue.
    pub virtual_time: Service,
}

/// New output of one choice of a submission.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SequenceUpdate {
    /// Id of the submission.
    pub submission: SubmissionId,
    /// Attempt that the output belongs to.
    pub attempt: u32,
    /// Index of the choice.
    pub choice: u32,
    /// Token ids generated since the previous update.
    pub tokens: Vec<u32>,
    /// One entry per token if requested, else empty.
    pub logprobs: Vec<PositionLogprobs>,
    /// Log probabilities of the next prompt tokens, if requested.
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Set once, with the last tokens of the choice.
    pub end: Option<SequenceEnd>,
    /// Prompt and resumed tokens that were not found in the prefix cache; set with the first token.
    pub computed_tokens: u32,
}

/// End of a choice on a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceEnd {
    /// With a reason other than an error.
    Finished(FinishReason),
    /// With an error of the worker.
    Failed {
        /// Whose fault the error is.
        blame: FailureBlame,
        /// `google.rpc.Code` of the error.
        code: i32,
        /// Error message.
        message: String,
    },
}

/// Cause of a worker's error, by its status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureBlame {
    /// The request: another worker would fail it, too.
    Request,
    /// The worker: it counts for outlier ejection.
    Worker,
    /// The worker cannot run the request now (UNAVAILABLE, ABORTED): resubmit it elsewhere.
    Returned,
    /// Values that are not finite took the place of logits (DATA_LOSS): the worker's arithmetic is broken, or that of the model overflows
    /// on this request. Another worker shows which.
    NonFinite,
}

/// Credits of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Grant {
    /// Sequences and KV blocks that may be in flight.
    pub credits: Credits,
    /// Sequences beyond `credits` for requests with a higher priority than another one in flight.
    pub priority_sequences: u32,
}

/// Part of a prefix-cache snapshot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CacheSnapshot {
    /// First part: the previous index is void.
    pub first: bool,
    /// Hashes of blocks in the device pool.
    pub device: Vec<u64>,
    /// Hashes of blocks in the host pool.
    pub host: Vec<u64>,
    /// Set in the last part: number of the first event after the snapshot.
    pub next_event: Option<u64>,
}

/// Consecutive prefix-cache events.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CacheEvents {
    /// Number of the first event.
    pub first: u64,
    /// Events in order.
    pub changes: Vec<CacheChange>,
}

/// Cumulative service counter of one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantCounter {
    /// Name of the tenant.
    pub tenant: String,
    /// Counter and its baseline, as reported and unchecked.
    pub charged: ServiceCounter,
}

/// Service counters of one incarnation of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncarnationCounters {
    /// Random id of the worker process.
    pub incarnation: String,
    /// Its counters, by tenant.
    pub tenants: Vec<TenantCounter>,
}
