//! Limits of client connections.

use std::time::Duration;

use inflight_net::ConnectionLimits;
use inflight_options::duration;

/// Limits of client connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct ConnectionOptions {
    /// Maximum client connections
    // Beyond it, one connection is evicted: the oldest unauthenticated one of the address with most of those, else the longest idle one.
    // If all are in use, the new one is rejected.
    #[arg(long, value_name = "N", default_value_t = 4096, env = "INFLIGHT_ROUTER_CONNECTIONS_MAX")]
    pub connections_max: usize,
    /// Maximum client connections from one IP address (one /64 for IPv6)
    // Enforced by eviction within the address.
    #[arg(
        id = "address_connections_max",
        long = "address-connections-max",
        value_name = "N",
        default_value_t = 1024,
        env = "INFLIGHT_ROUTER_ADDRESS_CONNECTIONS_MAX"
    )]
    pub per_address_max: usize,
    /// Timeout of the TLS handshake
    #[arg(
        id = "handshake_timeout",
        long = "handshake-timeout",
        value_name = "DURATION",
        default_value = "10s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_HANDSHAKE_TIMEOUT"
    )]
    pub handshake_max: Duration,
    /// Timeout of a connection's first call
    // From accepting it to its first call's headers.
    #[arg(
        id = "first_call_timeout",
        long = "first-call-timeout",
        value_name = "DURATION",
        default_value = "10s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_FIRST_CALL_TIMEOUT"
    )]
    pub first_call_max: Duration,
    /// Idle timeout of connections that have shown no API key or certificate
    #[arg(
        id = "unauthenticated_idle_timeout",
        long = "unauthenticated-idle-timeout",
        value_name = "DURATION",
        default_value = "30s",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_UNAUTHENTICATED_IDLE_TIMEOUT"
    )]
    pub unauthenticated_idle_max: Duration,
    /// Idle timeout of connections
    // Without an open call, on an authenticated connection.
    #[arg(
        id = "idle_timeout",
        long = "idle-timeout",
        value_name = "DURATION",
        default_value = "60m",
        value_parser = duration,
        env = "INFLIGHT_ROUTER_IDLE_TIMEOUT"
    )]
    pub idle_max: Duration,
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

impl From<ConnectionOptions> for ConnectionLimits {
    fn from(options: ConnectionOptions) -> Self {
        let ConnectionOptions {
            connections_max,
            per_address_max,
            handshake_max,
            first_call_max,
            unauthenticated_idle_max,
            idle_max,
        } = options;
        Self {
            connections_max,
            per_address_max,
            handshake_max,
            first_call_max,
            unauthenticated_idle_max,
            idle_max,
        }
    }
}
