//! Commands to the engine and events from it.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{FinishReason, SamplingParams, Service, Weight};
use inflight_grammar::{CompiledGrammar, GrammarError};
use inflight_runtime::{PositionLogprobs, PromptLogprobs};
use inflight_worker_core::Time;

/// Id of a session, unique within the worker process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

impl SessionId {
    /// Session of the worker's own self-tests; those of routers are numbered from 1. It has no grant, its tokens are not cached, and
    /// nothing is reported of it.
    pub const SELF_TEST: Self = Self(u64::MAX);
}

/// Key of a request: session, and the submission id that is unique within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey {
    /// Session of the router that submitted the request.
    pub session: SessionId,
    /// Submission id.
    pub request: u64,
}

/// Request to run.
#[derive(Debug, Clone)]
pub struct Request {
    /// Key for cancellation and events.
    pub key: RequestKey,
    /// Attempt number, echoed in every event.
    pub attempt: u32,
    /// Prompt token ids; at least one.
    pub prompt: Arc<[u32]>,
    /// Maximum output tokens per choice, including those of earlier attempts.
    pub max_tokens: u32,
    /// Sampling parameters.
    pub sampling: Arc<SamplingParams>,
    /// Output of earlier attempts by choice; `n` entries.
    pub choices: Vec<ResumedChoice>,
    /// Prompt tokens whose log probabilities earlier attempts have delivered.
    pub prompt_logprobs_received: u32,
    /// Tenant that the service is accounted to and whose prefix cache is used.
    pub tenant: Arc<str>,
    /// Weight of the tenant.
    pub weight: Weight,
    /// Priority; higher is more important.
    pub priority: i32,
    /// Virtual start time: the tenant's cluster-wide service over its weight at dispatch.
    pub virtual_start_time: Option<Service>,
    /// Time at which the request is aborted.
    pub deadline: Option<Time>,
    /// Time since its arrival at the router, when it was submitted; `None` if earlier attempts have output.
    pub queued: Option<Duration>,
    /// Compiled grammar of the constraint in `sampling`, or why it is refused. `None`: the engine looks it up, and compiles it on its
    /// thread if it is not cached.
    pub grammar: Option<Result<Arc<CompiledGrammar>, GrammarError>>,
    /// Tracing span of the request; spans of phases are its children.
    pub span: tracing::Span,
}

/// State of a choice after earlier attempts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResumedChoice {
    /// Output token ids so far.
    pub tokens: Vec<u32>,
    /// The choice has finished and is not run.
    pub finished: bool,
}

/// Command of a session to the engine.
#[derive(Debug)]
pub enum Command {
    /// Session opened: it gets a grant.
    Open(SessionId),
    /// Session closed: cancel its requests and withdraw its grant.
    Close(SessionId),
    /// The backlog at the session's router changed.
    Backlog {
        /// Session that reports.
        session: SessionId,
        /// Requests wait in the router's queue.
        has_waiting: bool,
    },
    /// Run a request.
    Submit(Box<Request>),
    /// Cancel a request or one choice of it.
    Cancel {
        /// Key of the request.
        key: RequestKey,
        /// Index of the choice; `None`: all choices.
        choice: Option<u32>,
    },
}

/// Progress or end of one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct ChoiceEvent {
    /// Key of the request.
    pub key: RequestKey,
    /// Attempt number of the request.
    pub attempt: u32,
    /// Index of the choice.
    pub choice: u32,
    /// New output token.
    pub token: Option<u32>,
    /// Log probabilities of `token`, if requested.
    pub logprobs: Option<Box<PositionLogprobs>>,
    /// Log probabilities of the next prompt tokens, if requested; they precede the first token.
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Tokens computed before the first new token; set with that token, else 0.
    pub computed_tokens: u32,
    /// End of the choice; set in the last event.
    pub finish: Option<Finish>,
}

/// End of a choice.
#[derive(Debug, Clone, PartialEq)]
pub enum Finish {
    /// Regular end.
    Ended(FinishReason),
    /// Rejection or failure.
    Failed(Failure),
}

/// Reason why a request was rejected or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The request is invalid; a correct router does not send it.
    #[error("{0}")]
    Invalid(String),
    /// The waiting queue is full.
    #[error("{0}")]
    Overloaded(String),
    /// The worker is draining.
    #[error("the worker is draining")]
    Draining,
    /// The choice's grammar cannot go on.
    #[error("the output cannot match its grammar: {0}")]
    Constraint(String),
    /// The model's logits are not all finite: its arithmetic has overflowed, or the device is broken. The text says where.
    #[error("the model's logits are infinite or NaN {0}")]
    NonFinite(&'static str),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
}
