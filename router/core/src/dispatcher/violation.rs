//! Protocol violations by workers.

use serde::Serialize;

use crate::{JournalError, SubmissionId};

/// Message that no correct worker sends: its session is closed and its requests fail over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize)]
pub enum Violation {
    /// Tokens or ends that do not fit the request.
    #[error("request {request}: {error}")]
    Journal {
        /// Submission of the update.
        request: SubmissionId,
        /// Contradiction to the tokens and ends received before.
        error: JournalError,
    },
    /// Submission that is not in flight in this session: never submitted, or already ended.
    #[error("update for unknown request {request}, choice {choice}")]
    UnknownRequest {
        /// Submission of the update.
        request: SubmissionId,
        /// Index of the choice.
        choice: u32,
    },
    /// Attempt other than the one that the submission started.
    #[error("request {request}: update for attempt {attempt}, but the submission is attempt {submitted}")]
    WrongAttempt {
        /// Submission of the update.
        request: SubmissionId,
        /// Attempt of the update.
        attempt: u32,
        /// Attempt of the submission.
        submitted: u32,
    },
    /// Token id outside the vocabulary.
    #[error("request {request}: token id {token} exceeds the vocabulary of {vocab_size}")]
    UnknownToken {
        /// Submission of the update.
        request: SubmissionId,
        /// The token id.
        token: u32,
        /// Tokens in the vocabulary.
        vocab_size: u32,
    },
    /// More top logprobs than requested.
    #[error("request {request}: {entries} top logprobs, limit {most}")]
    Alternatives {
        /// Submission of the update.
        request: SubmissionId,
        /// Number of entries.
        entries: usize,
        /// Maximum allowed value.
        most: usize,
    },
    /// Grant far beyond the worker's capacity; a negative number decodes to one, too.
    #[error("grant of {granted} {what}, but the worker has {has}")]
    Grant {
        /// Kind of the entries or credits, for the message.
        what: &'static str,
        /// Granted credits.
        granted: u32,
        /// Capacity of the worker.
        has: u32,
    },
    /// More entries in one update than possible for the submissions in flight.
    #[error("update with {entries} {what}, limit {most}")]
    Oversized {
        /// Kind of the entries or credits, for the message.
        what: &'static str,
        /// Number of entries.
        entries: usize,
        /// Maximum allowed value.
        most: usize,
    },
    /// More service than possible, in total or since the previous update.
    #[error("service counter {cost} exceeds the limit of {most}")]
    Charge {
        /// Reported service, in total or since the previous update.
        cost: u64,
        /// Maximum allowed value.
        most: u64,
    },
    /// More routers than a worker can have sessions with.
    #[error("router count {routers} exceeds the limit of {most}")]
    Routers {
        /// Reported number of routers.
        routers: u32,
        /// Maximum allowed value.
        most: u32,
    },
    /// More updates per second than allowed.
    #[error("more than {most} updates in a second")]
    Flood {
        /// Maximum allowed value.
        most: u32,
    },
}

impl Violation {
    /// Returns the submission that it is about, if any.
    pub fn request(&self) -> Option<SubmissionId> {
        match self {
            Self::Journal { request, .. }
            | Self::UnknownRequest { request, .. }
            | Self::WrongAttempt { request, .. }
            | Self::UnknownToken { request, .. }
            | Self::Alternatives { request, .. } => Some(*request),
            Self::Grant { .. }
            | Self::Oversized { .. }
            | Self::Flood { .. }
            | Self::Charge { .. }
            | Self::Routers { .. } => None,
        }
    }

    /// Returns a stable label for metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Journal { .. } => "journal",
            Self::UnknownRequest { .. } => "unknown_request",
            Self::WrongAttempt { .. } => "wrong_attempt",
            Self::UnknownToken { .. } => "unknown_token",
            Self::Alternatives { .. } => "top_logprobs",
            Self::Grant { .. } => "grant",
            Self::Oversized { .. } => "oversized",
            Self::Flood { .. } => "flood",
            Self::Charge { .. } => "service_counter",
            Self::Routers { .. } => "router_count",
        }
    }
}
