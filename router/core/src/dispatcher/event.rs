//! Inputs of the dispatcher.

use std::time::Duration;

use inflight_contract::{MemoryShape, ModelLimits, Priority, Weight};
use serde::{Deserialize, Serialize};

use crate::{
    BlockHashChain, Credits, LaneId, QueueLimits, RequestId, ResubmissionReason, SessionId, WorkerId,
    WorkerUpdate,
};

/// Input of the dispatcher: an arrival, a change of a session, a read of a client; the argument of [`Dispatcher::apply`](crate::Dispatcher::apply).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Event {
    /// Discovery has found a worker, reachable or not.
    WorkerJoined {
        /// The worker.
        worker: WorkerId,
    },
    /// Discovery has removed a worker: it gets nothing new, and its streams end or move.
    WorkerRetired {
        /// The worker.
        worker: WorkerId,
    },
    /// The task of a removed worker has ended.
    WorkerLeft {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker's session has opened.
    SessionOpened {
        /// Id of the session.
        session: SessionId,
        /// The worker's hello message.
        worker: Box<WorkerInfo>,
    },
    /// A worker has sent an update.
    Updated {
        /// The worker.
        worker: WorkerId,
        /// Session of the update.
        session: SessionId,
        /// The update.
        update: Box<WorkerUpdate>,
    },
    /// A session has closed.
    SessionClosed {
        /// The worker.
        worker: WorkerId,
        /// Id of the session.
        session: SessionId,
        /// Reason for the resubmission of its requests.
        reason: ResubmissionReason,
    },
    /// A validated request has arrived.
    Arrived {
        /// Id that the router's shell has given it.
        request: RequestId,
        /// Size, tenant, priority and deadline of the request.
        call: Box<RequestSpec>,
    },
    /// The router has ended a choice, for example at a stop string.
    ChoiceWithdrawn {
        /// The request.
        request: RequestId,
        /// Index of the choice.
        choice: u32,
    },
    /// The client has not read its stream for so long that its buffer is full.
    ClientBehind {
        /// The request.
        request: RequestId,
    },
    /// The client of a paused request reads again.
    ClientResumed {
        /// The request.
        request: RequestId,
    },
    /// The client has read nothing for the stall timeout.
    ClientStalled {
        /// The request.
        request: RequestId,
        /// The stall timeout.
        waited: Duration,
    },
    /// The client's call has ended.
    Released {
        /// The request.
        request: RequestId,
    },
    /// Time has passed; sent every [`Dispatcher::TICK`](crate::Dispatcher::TICK).
    Tick,
}

/// Description of a worker, from the hello message of its session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// The worker.
    pub worker: WorkerId,
    /// Name of the served model.
    pub model: String,
    /// Architecture of the model.
    pub architecture: String,
    /// Digest of the model bundle (tokenizer, template, generation config).
    pub bundle_digest: String,
    /// Numerics fingerprint: workers with equal ones generate equal tokens.
    pub fingerprint: String,
    /// Random id of the worker process.
    pub incarnation: String,
    /// Limits of the model on this worker.
    pub limits: ModelLimits,
    /// Groups of layers, and tokens of a span.
    pub shape: MemoryShape,
    /// Total sequences and KV blocks.
    pub capacity: Credits,
    /// Blocks of the host pool.
    pub host_blocks: u32,
    /// Interval of heartbeats.
    pub heartbeat: Duration,
}

/// Properties of a request that decide its scheduling: size, tenant, priority, deadline. Prompt, sampling
/// parameters and stop strings stay in the router's shell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RequestSpec {
    /// Lane of its model.
    pub lane: LaneId,
    /// Tenant that the service is charged to.
    pub tenant: String,
    /// Fair-share weight.
    pub weight: Weight,
    /// Priority; higher goes first.
    pub priority: Priority,
    /// Bounds on the waiting requests of its tenant.
    pub bounds: QueueLimits,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Maximum output tokens of each choice.
    pub max_tokens: u32,
    /// Number of choices.
    pub choices: u32,
    /// Number of top log probabilities per token; `None` without log probabilities.
    pub logprobs: Option<u32>,
    /// Number of top log probabilities per prompt token; `None` without log probabilities of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Deadline, as time since the epoch.
    pub deadline: Option<Duration>,
    /// The only numerics fingerprint it may run on, if requested: all of it, or its first
    /// [`FINGERPRINT_PREFIX`](Self::FINGERPRINT_PREFIX) bytes or more.
    pub require_fingerprint: Option<String>,
    /// Output of earlier calls that this one resumes: tokens of each choice by index; empty for a new request.
    pub resumed: Vec<Vec<u32>>,
    /// Hash chains of the prompt, one per block size; empty if the placement policy ignores prefixes.
    pub chains: Vec<BlockHashChain>,
}

impl RequestSpec {
    /// Minimum length of a prefix that stands for a fingerprint, in bytes.
    pub const FINGERPRINT_PREFIX: usize = 16;

    /// Returns the maximum tokens of the request: prompt and output of all choices.
    pub fn tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.max_tokens) * u64::from(self.choices)
    }

    /// Returns the maximum tokens of its longest sequence.
    pub fn sequence_tokens(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.max_tokens)
    }

    /// Returns the number of prompt tokens whose log probabilities are requested: all but the first.
    pub fn scored_tokens(&self) -> u32 {
        self.prompt_logprobs.map_or(0, |_| self.prompt_tokens.saturating_sub(1))
    }

    /// Whether it may run on a worker with this fingerprint.
    pub fn accepts(&self, fingerprint: &str) -> bool {
        self.require_fingerprint.as_ref().is_none_or(|required| Self::matches(required, fingerprint))
    }

    /// Whether a required fingerprint, or a prefix of one, means this fingerprint.
    pub fn matches(required: &str, fingerprint: &str) -> bool {
        required == fingerprint
            || (required.len() >= Self::FINGERPRINT_PREFIX && fingerprint.starts_with(required))
    }
}
