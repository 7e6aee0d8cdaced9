//! Owner of a chunk, as an observer sees it.

use inflight_contract::Tenant;

use super::request::RequestKey;

/// Choice that a chunk of an iteration belongs to. It may have ended since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkOwner {
    /// Request of the choice.
    pub key: RequestKey,
    /// Attempt of the request.
    pub attempt: u32,
    /// Index of the choice.
    pub choice: u32,
    /// Tenant; `None` if the scheduler does not know the sequence any more.
    pub tenant: Option<Tenant>,
}
