use inflight_router_core::JournalError;

/// A worker said something that no sound worker says: its session is closed, and its streams go on elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    /// Tokens or ends that do not fit the request.
    #[error("request {request}: {error}")]
    Journal { request: u64, error: JournalError },
    /// A handle that is not in submitted in this session: never submitted, or ended already.
    #[error("update for unknown request {request}, choice {choice}")]
    UnknownRequest { request: u64, choice: u32 },
    /// A token that the model does not have.
    #[error("request {request}: token id {token} exceeds the vocabulary of {vocab_size}")]
    UnknownToken { request: u64, token: u32, vocab_size: u32 },
    /// More alternatives to a token than were asked for.
    #[error("request {request}: {entries} top logprobs, limit {most}")]
    Alternatives { request: u64, entries: usize, most: usize },
    /// Credits that no worker of its size has; a negative number looks like this too.
    #[error("grant of {granted} {what}, but the worker has {has}")]
    Grant { what: &'static str, granted: u32, has: u32 },
    /// More in one update than all that is in submitted could bring.
    #[error("update with {entries} {what}, limit {most}")]
    Oversized { what: &'static str, entries: usize, most: usize },
    /// More service than any worker can have given, altogether or since its update before.
    #[error("service counter {cost} exceeds the limit of {most}")]
    Charge { cost: u64, most: u64 },
    /// More routers than a worker has sessions for.
    #[error("router count {routers} exceeds the limit of {most}")]
    Routers { routers: u32, most: u32 },
    /// More updates than a router should have to read.
    #[error("more than {most} updates in a second")]
    Flood { most: u32 },
}

impl Violation {
    /// The handle of the request that it was about, if it was about one.
    pub(crate) fn request(&self) -> Option<u64> {
        match self {
            Self::Journal { request, .. }
            | Self::UnknownRequest { request, .. }
            | Self::UnknownToken { request, .. }
            | Self::Alternatives { request, .. } => Some(*request),
            Self::Grant { .. }
            | Self::Oversized { .. }
            | Self::Flood { .. }
            | Self::Charge { .. }
            | Self::Routers { .. } => None,
        }
    }

    /// A stable label for metrics.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Journal { .. } => "journal",
            Self::UnknownRequest { .. } => "unknown_request",
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
