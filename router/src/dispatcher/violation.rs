//! Protocol violations by workers.

use inflight_router_core::JournalError;

/// Message that no correct worker sends: its session is closed and its requests fail over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    /// Tokens or ends that do not fit the request.
    #[error("request {request}: {error}")]
    Journal { request: u64, error: JournalError },
    /// Submission that is not in flight in this session: never submitted, or already ended.
    #[error("update for unknown request {request}, choice {choice}")]
    UnknownRequest { request: u64, choice: u32 },
    /// Token id outside the vocabulary.
    #[error("request {request}: token id {token} exceeds the vocabulary of {vocab_size}")]
    UnknownToken { request: u64, token: u32, vocab_size: u32 },
    /// More top logprobs than requested.
    #[error("request {request}: {entries} top logprobs, limit {most}")]
    Alternatives { request: u64, entries: usize, most: usize },
    /// Grant far beyond the worker's capacity; a negative number decodes to one, too.
    #[error("grant of {granted} {what}, but the worker has {has}")]
    Grant { what: &'static str, granted: u32, has: u32 },
    /// More entries in one update than possible for the submissions in flight.
    #[error("update with {entries} {what}, limit {most}")]
    Oversized { what: &'static str, entries: usize, most: usize },
    /// More service than possible, in total or since the previous update.
    #[error("service counter {cost} exceeds the limit of {most}")]
    Charge { cost: u64, most: u64 },
    /// More routers than a worker can have sessions with.
    #[error("router count {routers} exceeds the limit of {most}")]
    Routers { routers: u32, most: u32 },
    /// More updates per second than allowed.
    #[error("more than {most} updates in a second")]
    Flood { most: u32 },
}

impl Violation {
    /// Returns the submission that it is about, if any.
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

    /// Returns a stable label for metrics.
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
