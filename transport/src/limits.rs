//! Limits of a listener's connections.

use std::time::Duration;

/// Limits of the connections of one listener.
///
/// A connection counts as authenticated once a call on it was ([`Peer::set_authenticated`](crate::Peer::set_authenticated));
/// where no authentication is configured, once any call was made. Until then it may be closed to make room for others, so
/// connections that show no key keep nobody out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most connections open at once. Past it, the connection that is missed least is closed: one that is not
    /// authenticated, of the address that has most of those, else the one idle for longest. Where every connection is in
    /// use, the new one is refused.
    pub connections_max: usize,
    /// Most connections of one address (of one /64 for IPv6), by the same rule.
    pub per_address_max: usize,
    /// Longest TLS handshake.
    pub handshake_max: Duration,
    /// Longest time from accepting a connection to its first call, headers included.
    pub first_call_max: Duration,
    /// Longest time without an open call on a connection that is not authenticated.
    pub unauthenticated_idle_max: Duration,
    /// Longest time without an open call on an authenticated connection.
    pub idle_max: Duration,
}

impl Default for Limits {
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
