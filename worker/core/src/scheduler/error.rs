//! Errors of scheduler inputs.

use crate::TransferId;

/// Reason why a submission is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The waiting queue is full.
    #[error("the worker's waiting queue is full ({waiting} sequences, --max-waiting); try again later")]
    QueueFull {
        /// Sequences waiting.
        waiting: u32,
    },
    /// No known token or no token to generate.
    #[error("a sequence needs at least one known token and one to generate")]
    Empty,
    /// The sequence could exceed the maximum length.
    #[error("the sequence may reach {tokens} tokens, but at most {most} fit")]
    TooLong {
        /// Maximum length of the sequence in tokens.
        tokens: u64,
        /// Maximum length supported in tokens.
        most: u32,
    },
}

/// Reason why a completion is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The iteration is not the oldest one in flight.
    #[error("iteration {given} is not the oldest in flight (that is {in_flight:?})")]
    UnknownIteration {
        /// Given iteration number.
        given: u64,
        /// Number of the oldest iteration in flight.
        in_flight: Option<u64>,
    },
    /// Accepted tokens that do not fit the drafted chunks.
    #[error(
        "a chunk with {drafts} drafts had {given} tokens accepted; 1 to {drafts} and one more are possible"
    )]
    Accepted {
        /// Drafts of the chunk; 0 if the iteration has no further chunk with drafts.
        drafts: u32,
        /// Given number of accepted tokens; 0 if none was given.
        given: u32,
    },
    /// Number of verdicts differs from the number of accepted tokens.
    #[error("the iteration has {expected} accepted tokens, but {given} verdicts came")]
    Verdicts {
        /// Number of accepted tokens.
        expected: usize,
        /// Number of given verdicts.
        given: usize,
    },
    /// Unknown or already completed transfer.
    #[error("transfer {0:?} is not in flight")]
    UnknownTransfer(TransferId),
}
