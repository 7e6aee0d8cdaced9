//! Errors that end a request.

use std::time::Duration;

use serde::Serialize;

use crate::QueueFull;

/// Why a request ends without its output, or without being admitted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Failure {
    /// Prompt and output together exceed what the router keeps for one request.
    TooManyTokens {
        /// Tokens of the request.
        tokens: u64,
        /// Maximum tokens of a request.
        most: u64,
    },
    /// No connected worker is large enough.
    TooLongForWorkers {
        /// Prompt tokens plus max_tokens, the length of its longest sequence.
        tokens: u64,
    },
    /// No worker has served its model for the configured time.
    Unserved,
    /// No worker has the required fingerprint.
    UnknownFingerprint {
        /// The required fingerprint.
        required: String,
        /// Fingerprints of the connected workers.
        served: Vec<String>,
    },
    /// The queue, or its tenant's share of it, is full.
    QueueFull(QueueFull),
    /// Evicted from the full queue by a request that goes first.
    Displaced,
    /// The predicted first token comes after the deadline.
    Infeasible {
        /// Predicted time to the first token.
        predicted: Duration,
        /// Time left until the deadline.
        left: Duration,
    },
    /// The deadline has passed.
    DeadlineExceeded,
    /// Too many workers in a row were lost while running it, the last one running nothing else.
    AttemptsExhausted {
        /// Number of attempts.
        attempts: u32,
    },
    /// Values that are not finite took the place of the model's logits, on two workers at the same position, or too often.
    NonFinite {
        /// Index of the choice.
        choice: u32,
        /// Output tokens of the choice before them.
        tokens: u32,
        /// Number of attempts that ended so.
        attempts: u32,
    },
    /// Error of the worker.
    Worker {
        /// `google.rpc.Code` of the error.
        code: i32,
        /// Error message.
        message: String,
    },
    /// The client read nothing of its stream for too long.
    ClientStalled {
        /// The stall timeout.
        waited: Duration,
    },
}
