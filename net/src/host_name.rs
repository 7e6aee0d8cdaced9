//! Host headers that name this machine.

use std::net::IpAddr;

/// Returns whether a host header, with or without a port, is an address or `localhost`. Any other name may be that of a web site whose
/// name was rebound to this machine's address.
pub fn is_address_or_localhost(host: &str) -> bool {
    let name = host_name(host);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Returns a host header without its port and the brackets of an IPv6 address.
pub fn host_name(host: &str) -> &str {
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    name.map_or(host, |(name, _)| name).trim_start_matches('[').trim_end_matches(']')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_localhost_are_told_from_names() {
        for host in ["localhost", "LOCALHOST:9", "127.0.0.1", "10.0.0.7:80", "[::1]", "[::1]:8640"] {
            assert!(is_address_or_localhost(host), "{host}");
        }
        for host in ["", "a.example", "localhost.a.example:80", "127.0.0.1.a.example", "localhost:x"] {
            assert!(!is_address_or_localhost(host), "{host}");
        }
        assert_eq!(host_name("a.example:80"), "a.example");
    }
}
