/// Why a sequence ended. Exactly one is reported for every choice of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token id or (decided by the router) a stop string.
    Stop,
    /// `max_tokens` were produced or the model's context is full.
    Length,
    /// The client cancelled, went away, or the router withdrew the request.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
    /// The worker could not go on; the accompanying message says why.
    Error,
}

impl FinishReason {
    /// A stable, lower-case label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Error => "error",
        }
    }
}
