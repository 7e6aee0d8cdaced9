use inflight_router_core::JournalError;

/// A worker said something that no sound worker says: its session is closed, and its streams go on elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    /// Tokens or ends that do not fit the request.
    #[error("request {request}: {error}")]
    Journal { request: u64, error: JournalError },
    /// A handle that is not in flight in this session: never submitted, or ended already.
    #[error("it spoke of request {request}, choice {choice}, which is not in flight")]
    UnknownRequest { request: u64, choice: u32 },
    /// A token that the model does not have.
    #[error("request {request}: token {token} is outside its vocabulary of {vocab_size}")]
    UnknownToken { request: u64, token: u32, vocab_size: u32 },
    /// More alternatives to a token than were asked for.
    #[error("request {request}: it named {entries} alternatives to a token, more than {most}")]
    Alternatives { request: u64, entries: usize, most: usize },
    /// Credits that no worker of its size has; a negative number looks like this too.
    #[error("it granted {granted} {what}, but said that it has {has}")]
    Grant { what: &'static str, granted: u32, has: u32 },
    /// More in one update than all that is in flight could bring.
    #[error("an update has {entries} {what}, more than {most}")]
    Oversized { what: &'static str, entries: usize, most: usize },
    /// More service than any worker can have given, altogether or since its update before.
    #[error("it says that tenants were served {cost} tokens as weighted, more than {most}")]
    Charge { cost: u64, most: u64 },
    /// More routers than a worker has sessions for.
    #[error("it says that {routers} routers share it, more than {most}")]
    Routers { routers: u32, most: u32 },
    /// More updates than a router should have to read.
    #[error("it sent more than {most} updates within a second")]
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
            Self::Alternatives { .. } => "alternatives",
            Self::Grant { .. } => "grant",
            Self::Oversized { .. } => "oversized",
            Self::Flood { .. } => "flood",
            Self::Charge { .. } => "charge",
            Self::Routers { .. } => "routers",
        }
    }
}
