use std::sync::Arc;

use inflight_contract::{FinishReason, SamplingParams, Service, Weight};
use inflight_worker_core::Time;

use crate::runtime::PositionLogprobs;

/// Names a session for as long as the worker lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// A router's handle for a request, with the session it is unique in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey {
    /// Which session.
    pub session: SessionId,
    /// The handle.
    pub request: u64,
}

/// A request to run.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its name.
    pub key: RequestKey,
    /// Echoed in every event.
    pub attempt: u32,
    /// Prompt; at least one token.
    pub prompt: Arc<[u32]>,
    /// Most tokens of each choice, those of earlier attempts included.
    pub max_tokens: u32,
    /// How tokens are chosen.
    pub sampling: Arc<SamplingParams>,
    /// What earlier attempts produced; one entry for each choice, in order.
    pub choices: Vec<Resumed>,
    /// Whom the work is for: its share of the service, and the key of its prefix cache.
    pub tenant: Arc<str>,
    /// The tenant's share.
    pub weight: Weight,
    /// A higher number is more important.
    pub priority: i32,
    /// What its tenant had cluster-wide over its weight when the router handed it over: its turn among those that wait.
    pub order: Option<Service>,
    /// When to give up.
    pub deadline: Option<Time>,
    /// The request's span; phases become its children.
    pub span: tracing::Span,
}

/// Where a choice starts from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Tokens it has.
    pub tokens: Vec<u32>,
    /// It is over and is not run.
    pub finished: bool,
}

/// What the shell tells the engine.
#[derive(Debug)]
pub enum Command {
    /// A session began: it is granted its share of the capacity.
    Open(SessionId),
    /// A session is over: cancel what it has, and forget it.
    Close(SessionId),
    /// Whether anything waits at the session's router.
    Backlog {
        /// The session.
        session: SessionId,
        /// Something waits.
        waits: bool,
    },
    /// Run a request.
    Submit(Box<Request>),
    /// Withdraw a request or one choice of it.
    Cancel {
        /// Which request.
        key: RequestKey,
        /// Which choice; `None` is all.
        choice: Option<u32>,
    },
}

/// What happened to one choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its request.
    pub key: RequestKey,
    /// Its attempt.
    pub attempt: u32,
    /// Which choice.
    pub choice: u32,
    /// A new token.
    pub token: Option<u32>,
    /// Its log probabilities, if asked for.
    pub logprobs: Option<Box<PositionLogprobs>>,
    /// Tokens computed before the first new one; set with it.
    pub computed_tokens: u32,
    /// Set once, with the last event.
    pub finish: Option<Finish>,
}

/// How a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Finish {
    /// As the reason says.
    Ended(FinishReason),
    /// It was refused or failed.
    Failed(Failure),
}

/// Why a request was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The request breaks the contract: the router should not have sent it.
    #[error("{0}")]
    Invalid(String),
    /// A queue is full.
    #[error("{0}")]
    Overloaded(String),
    /// The worker takes nothing new.
    #[error("the worker is draining")]
    Draining,
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
}
