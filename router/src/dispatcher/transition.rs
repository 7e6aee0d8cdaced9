//! Transition of a request, which its observer and the live view report.

use inflight_contract::FinishReason;
use inflight_router_core::{
    ChoiceOutput, RequestPlaced, ResubmissionReason, RetryWait, SubmissionId, WorkerId,
};

use crate::outcome::Outcome;

/// Transition of a request, from its arrival to the end of its call.
#[derive(Debug)]
pub(crate) enum Transition<'a> {
    /// It was not admitted to the queue.
    Rejected,
    /// It was dispatched to the worker at this address.
    Placed { placed: &'a RequestPlaced, address: &'a str },
    /// Its worker was sent this submission.
    Submitted { worker: WorkerId, submission: SubmissionId, attempt: u32 },
    /// Output arrived from its worker.
    Delivered(&'a ChoiceOutput),
    /// Its client has fallen behind its output.
    Stalled,
    /// It runs on no worker until its client reads again.
    Paused,
    /// Its client reads again.
    Resumed,
    /// Its worker does not finish it, and another one will.
    Resubmitted { reason: ResubmissionReason, attempt: u32, wait: RetryWait },
    /// Its next attempt no longer waits for the retry budget.
    Requeued,
    /// It has failed.
    Failed(&'a Outcome),
    /// Tokens were generated that its client neither gets nor pays for.
    Discarded { tokens: usize },
    /// The client's stream has taken the end of a choice.
    ChoiceFinished(FinishReason),
    /// The client's stream has ended.
    Ended(RequestEnd<'a>),
    /// Its call has ended and holds nothing any more.
    Released,
}

/// End of a client's stream.
#[derive(Debug)]
pub(crate) struct RequestEnd<'a> {
    pub(crate) outcome: &'a Outcome,
    /// Tokens of all choices that the client got.
    pub(crate) completion_tokens: u32,
    /// Choices without a finish reason.
    pub(crate) unfinished: usize,
}
