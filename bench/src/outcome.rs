//! Outcome of a request, and the token usage that the server reported for it.

/// Token usage that a server reported for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReportedUsage {
    /// Tokens of the prompt, if reported.
    pub prompt_tokens: Option<u32>,
    /// Generated tokens, if reported.
    pub output_tokens: Option<u32>,
}

/// Outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The stream ended regularly.
    Completed(ReportedUsage),
    /// The server rejected the request because of overload, such as a full queue.
    Refused {
        /// Stable name of the refusal, such as a status code.
        kind: String,
        /// Message of the server.
        message: String,
    },
    /// The request failed for any other reason.
    Failed {
        /// Stable name of the failure, such as a status code.
        kind: String,
        /// Description of the failure.
        message: String,
    },
}

impl RequestOutcome {
    /// Creates a [`RequestOutcome::Failed`].
    pub fn failed(kind: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Failed { kind: kind.into(), message: message.into() }
    }
}
