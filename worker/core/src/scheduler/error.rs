use crate::TransferId;

/// Why a sequence was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The waiting queue is full.
    #[error("the worker's waiting queue is full ({waiting} sequences); try again later")]
    QueueFull {
        /// Sequences waiting.
        waiting: u32,
    },
    /// There is nothing to compute or nothing to generate.
    #[error("a sequence needs at least one known token and one to generate")]
    Empty,
    /// It could never run to its end.
    #[error("the sequence may reach {tokens} tokens, but at most {most} fit")]
    TooLong {
        /// Tokens at its full length.
        tokens: u64,
        /// The longest that runs here.
        most: u32,
    },
}

/// The outcome does not belong to the oldest iteration in flight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// No iteration was planned, or another one is to be committed first.
    #[error("iteration {given} is not the oldest in flight (that is {in_flight:?})")]
    UnknownIteration {
        /// The number given.
        given: u64,
        /// The one expected.
        in_flight: Option<u64>,
    },
    /// One verdict is needed for each sampling chunk.
    #[error("the iteration samples {expected} tokens, but {given} verdicts came")]
    Verdicts {
        /// Sampling chunks.
        expected: usize,
        /// Verdicts given.
        given: usize,
    },
    /// No such transfer was started, or it was reported before.
    #[error("transfer {0:?} is not under way")]
    UnknownTransfer(TransferId),
}
