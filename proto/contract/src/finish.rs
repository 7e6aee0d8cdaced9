//! Finish reasons of a sequence.

/// Reason for which a sequence finished; exactly one is reported for each choice of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub enum FinishReason {
    /// EOS token, stop token id or, detected by the router, stop string.
    Stop,
    /// `max_tokens` were generated, or the model's context is full.
    Length,
    /// Cancelled by the client, by its disconnect, or by the router.
    Cancelled,
    /// Deadline of the request exceeded.
    Deadline,
    /// Failure on the worker, described by the accompanying message.
    Error,
    /// The grammar of the output allows nothing more. Unlike with [`FinishReason::Stop`], the last token is output; clients
    /// get both as one reason.
    Complete,
}

impl FinishReason {
    /// Returns the stable, lower-case label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Error => "error",
            Self::Complete => "complete",
        }
    }
}
