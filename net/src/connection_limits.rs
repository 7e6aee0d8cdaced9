//! Limits of a listener's connections.

use std::time::Duration;

/// Limits of the connections of one listener.
///
/// A connection counts as authenticated after a call on it has authenticated
/// ([`Peer::set_authenticated`](crate::Peer::set_authenticated)); where authentication is off, after any
/// call. Before that it may be evicted for another connection, so unauthenticated ones cannot exhaust a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Maximum open connections. Beyond it, one connection is evicted: the oldest unauthenticated one of the
    /// address with most of those, else the longest idle one. If all are in use, the new one is rejected.
    pub connections_max: usize,
    /// Maximum open connections of one address (one /64 for IPv6), enforced by eviction within the address.
    pub per_address_max: usize,
    /// Maximum duration of a TLS handshake.
    pub handshake_max: Duration,
    /// Maximum time from accepting a connection to its first call, headers included.
    pub first_call_max: Duration,
    /// Maximum time without an open call on an unauthenticated connection.
    pub unauthenticated_idle_max: Duration,
    /// Maximum time without an open call on an authenticated connection.
    pub idle_max: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            per_address_max: 1024,
            handshake_max: Duration::from_secs(10),
            first_call_max: Duration::from_secs(10),
            unauthenticated_idle_max: Duration::from_secs(30),
            idle_max: Duration::from_secs(3600),
        }
    }
}
