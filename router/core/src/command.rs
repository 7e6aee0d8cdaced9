//! What a router sends a worker in a session, free of the wire format.

use std::time::Duration;

use inflight_contract::{SamplingParams, Service};

use crate::IncarnationCounters;

/// Message to a worker.
#[derive(Debug)]
pub enum WorkerCommand {
    /// Runs a request.
    Submit(Box<Submission>),
    /// Cancels a submission, or one choice of it.
    Cancel {
        /// Id of the submission.
        submission: u64,
        /// The choice; `None` cancels all.
        choice: Option<u32>,
    },
    /// Reports whether requests wait at the router that the worker could run.
    Backlog {
        /// At least one waits.
        waiting: bool,
    },
    /// Forwards service counters of another incarnation, for routers that connect later.
    ServiceTable(IncarnationCounters),
    /// Requests a snapshot of the prefix cache.
    ResyncPrefixCache,
}

/// A request as a worker runs it: the prompt, and what earlier attempts generated.
#[derive(Debug)]
pub struct Submission {
    /// Id of the submission, unique in the router.
    pub id: u64,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Request id, for logs.
    pub request_id: String,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Output of earlier attempts, one entry per choice; empty in a first attempt.
    pub resumed: Vec<ResumedChoice>,
    /// Validated sampling parameters.
    pub sampling: SamplingParams,
    /// Maximum tokens of each choice.
    pub max_tokens: u32,
    /// Tenant that the service is charged to.
    pub tenant: String,
    /// Fair-share weight.
    pub weight: f32,
    /// Priority; higher goes first.
    pub priority: i32,
    /// Time left until the deadline.
    pub deadline: Option<Duration>,
    /// W3C `traceparent`; empty if not traced.
    pub traceparent: String,
    /// W3C `tracestate`.
    pub tracestate: String,
    /// Virtual start time of the request in the router's fair queue.
    pub virtual_start_time: Option<Service>,
    /// Minimum virtual start time of the requests that still wait at the router.
    pub min_waiting_virtual_time: Option<Service>,
}

/// Output of earlier attempts of one choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumedChoice {
    /// Index of the choice.
    pub choice: u32,
    /// Its tokens so far.
    pub tokens: Vec<u32>,
    /// It has ended and is not run again.
    pub finished: bool,
}
