//! Outputs of the dispatcher: messages to workers and clients, and notices for logs and metrics.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{FinishReason, PositionLogprobs, PromptLogprobs, Service};
use serde::Serialize;

use crate::{
    Failure, IncarnationCounters, LaneId, RequestId, ResubmissionReason, RetryWait, SubmissionId, Violation,
    WorkerId,
};

/// Action of the router after an event; actions are carried out in order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Command {
    /// Sends a message to a worker in its open session.
    Worker {
        /// The worker.
        worker: WorkerId,
        /// The message.
        command: WorkerCommand,
    },
    /// Passes output, a change of state or an error to a client's stream.
    Client {
        /// The request.
        request: RequestId,
        /// Output, state or error for the stream.
        command: ClientCommand,
    },
    /// Closes a worker's session after a protocol violation.
    CloseSession {
        /// The worker.
        worker: WorkerId,
        /// The violation.
        violation: Violation,
    },
    /// Workers, sessions or served models have changed: republish readiness and the list of models.
    TopologyChanged,
    /// No worker has served this lane's model for so long that it is forgotten.
    LaneForgotten {
        /// The lane.
        lane: LaneId,
    },
    /// The number of routers that share the workers has changed.
    RoutersChanged {
        /// New number of routers.
        routers: u32,
    },
    /// Logs an occurrence and counts it in metrics.
    Notice(Notice),
}

/// Message to a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum WorkerCommand {
    /// Runs a request.
    Submit(Box<Submission>),
    /// Cancels a submission, or one choice of it.
    Cancel {
        /// Id of the submission.
        submission: SubmissionId,
        /// The choice; `None` cancels all.
        choice: Option<u32>,
    },
    /// Reports whether requests wait at the router that the worker could run.
    Backlog {
        /// Whether at least one request waits.
        waiting: bool,
    },
    /// Forwards service counters of another incarnation, for routers that connect later.
    ServiceTable(IncarnationCounters),
    /// Requests a snapshot of the prefix cache.
    ResyncPrefixCache,
}

/// Attempt of a request on a worker: what earlier attempts generated, and its order among tenants. The shell
/// adds prompt and parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Submission {
    /// Id of the submission.
    pub id: SubmissionId,
    /// The request.
    pub request: RequestId,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Output of earlier attempts, one entry per choice; empty in a first attempt.
    pub resumed: Vec<ResumedChoice>,
    /// Prompt tokens whose log probabilities earlier attempts have delivered.
    pub prompt_logprobs_received: u32,
    /// Time left until the deadline.
    pub deadline: Option<Duration>,
    /// Virtual start time of the request in the router's fair queue.
    pub virtual_start_time: Option<Service>,
    /// Minimum virtual start time of the requests that still wait at the router.
    pub min_waiting_virtual_time: Option<Service>,
}

/// Output of earlier attempts of one choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ResumedChoice {
    /// Index of the choice.
    pub choice: u32,
    /// Tokens of the choice in earlier attempts.
    pub tokens: Vec<u32>,
    /// Whether the choice has ended; an ended choice is not run again.
    pub finished: bool,
}

/// Command for a client's stream: output, a change of state or an error.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum ClientCommand {
    /// Rejection of a request that was not admitted; nothing follows it.
    Reject(Failure),
    /// The request was dispatched to a worker.
    Placed(RequestPlaced),
    /// New output of a choice.
    Deliver(ChoiceOutput),
    /// The request is paused: it runs on no worker until the client reads again ([`Event::ClientResumed`](crate::Event::ClientResumed)).
    Pause,
    /// The request has failed.
    Fail(Failure),
}

/// Dispatch of a request to a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestPlaced {
    /// The worker.
    pub worker: WorkerId,
    /// The worker's numerics fingerprint.
    #[serde(serialize_with = "crate::serialize_str")]
    pub fingerprint: Arc<str>,
    /// Tokens of each choice before a change of fingerprint, after which the output may differ.
    pub changed_after: Option<Vec<u32>>,
    /// Tokens of prompt and earlier output.
    pub tokens: u32,
    /// Tokens expected in the worker's prefix cache.
    pub cached_tokens: u32,
}

/// New output of one choice.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChoiceOutput {
    /// Index of the choice.
    pub choice: u32,
    /// New token ids.
    pub tokens: Vec<u32>,
    /// Log probabilities, one entry per token; empty if not requested.
    pub logprobs: Vec<PositionLogprobs>,
    /// Log probabilities of the prompt tokens that follow those delivered before.
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Finish reason; set with the last tokens of the choice.
    pub finish: Option<FinishReason>,
    /// Prompt tokens that were not found in a prefix cache; set with the request's first tokens.
    pub computed_prompt: Option<u32>,
}

/// Occurrence to be logged and counted in metrics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Notice {
    /// A request was dispatched ahead of a head-of-line request that fit on no worker.
    Bypassed,
    /// Sequence updates of older attempts were dropped.
    StaleUpdates {
        /// Number of dropped updates.
        updates: u32,
    },
    /// Tokens were generated that no client is billed for.
    Unbilled {
        /// The request.
        request: RequestId,
        /// Number of tokens.
        tokens: u32,
    },
    /// A request starts another attempt.
    Resubmitted {
        /// The request.
        request: RequestId,
        /// Reason why its worker does not finish it.
        reason: ResubmissionReason,
        /// Number of the new attempt.
        attempt: u32,
        /// What it waits for.
        wait: RetryWait,
    },
    /// A request whose next attempt waited for the retry budget is in the queue now.
    Requeued {
        /// The request.
        request: RequestId,
    },
    /// A worker is reserved for a quarantined request.
    Quarantined {
        /// The request.
        request: RequestId,
        /// The worker.
        worker: WorkerId,
    },
    /// A worker is ejected from placement after consecutive failures.
    Ejected {
        /// The worker.
        worker: WorkerId,
        /// Duration of the ejection.
        duration: Duration,
    },
    /// A worker drains.
    Draining {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker with another fingerprint than its model's other workers has joined.
    MixedFingerprints {
        /// The worker.
        worker: WorkerId,
        /// Fingerprints of the other workers.
        others: Vec<String>,
    },
    /// The workers report another number of routers, by which tenants' limits are divided.
    Routers {
        /// Number before.
        before: u32,
        /// Number now.
        now: u32,
    },
    /// A gap in a worker's prefix-cache events; a snapshot is requested.
    PrefixIndexLost {
        /// The worker.
        worker: WorkerId,
    },
    /// Prefix-cache events were dropped: the worker reported more blocks than it has.
    PrefixIndexOverfull {
        /// The worker.
        worker: WorkerId,
    },
}

impl From<Notice> for Command {
    fn from(notice: Notice) -> Self {
        Self::Notice(notice)
    }
}
