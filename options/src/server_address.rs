//! Addresses of routers and workers in arguments: `HOST:PORT`, or a URL.

use std::fmt;
use std::str::FromStr;

/// How an address is written, in errors.
const FORMS: &str = "write it as HOST:PORT or http://HOST:PORT";

/// Address of a router or worker, given as `HOST:PORT` or as a URL without a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    given: String,
    url: String,
}

impl ServerAddress {
    /// Returns the URL, `http://HOST:PORT` unless another scheme was given.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the URL of an address, which may have a path, such as `http://127.0.0.1:8000/v1`. The scheme `http` is added if there is
    /// none, and a slash at the end is removed.
    ///
    /// # Errors
    /// A sentence that says what is wrong and how an address is written.
    pub fn url_with_path(text: &str) -> Result<String, String> {
        let text = text.trim();
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let wrong = |what: &str| Err(format!("{what}; {FORMS}"));
        if scheme != "http" && scheme != "https" {
            return wrong(&format!("the scheme is {scheme:?}, not http or https"));
        }
        let rest = rest.trim_end_matches('/');
        if rest.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return wrong("there is white space in it");
        }
        if rest.contains(['@', '?', '#']) {
            return wrong("it has more than a host, a port and a path");
        }
        let authority = rest.split('/').next().unwrap_or_default();
        let (host, port) = match authority.rsplit_once(':') {
            // The last colon of an address in brackets is a part of it.
            Some((_, tail)) if tail.ends_with(']') => (authority, None),
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        if host.is_empty() {
            return wrong("the host is missing");
        }
        if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
            return wrong("an IPv6 address stands in brackets, as in [::1]:8650");
        }
        match port {
            Some(port) if port.parse::<u16>().is_ok_and(|port| port > 0) => Ok(format!("{scheme}://{rest}")),
            Some(port) => wrong(&format!("the port {port:?} is no number from 1 to 65535")),
            // A URL has the port of its scheme.
            None if text.contains("://") => Ok(format!("{scheme}://{rest}")),
            None => wrong("the port is missing"),
        }
    }
}

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = Self::url_with_path(text)?;
        let authority = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
        if let Some((authority, path)) = authority.split_once('/') {
            return Err(format!(
                "it has the path /{path}, but this command speaks gRPC, which has none: write {authority}, with the port of gRPC"
            ));
        }
        Ok(Self { given: text.trim().to_owned(), url })
    }
}

/// The address as it was given.
impl fmt::Display for ServerAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port_and_urls_name_the_same_server() {
        for (text, url) in [
            ("127.0.0.1:8650", "http://127.0.0.1:8650"),
            ("router.example:8650", "http://router.example:8650"),
            ("[::1]:8650", "http://[::1]:8650"),
            ("http://127.0.0.1:8650/", "http://127.0.0.1:8650"),
            (" https://router:1 ", "https://router:1"),
            ("https://router", "https://router"),
            ("http://[::1]", "http://[::1]"),
        ] {
            let address: ServerAddress = text.parse().unwrap();
            assert_eq!((address.url(), address.to_string().as_str()), (url, text.trim()));
        }
        assert_eq!(ServerAddress::url_with_path("h:1/v1/").unwrap(), "http://h:1/v1");
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_forms_that_are() {
        for (text, clue) in [
            ("", "the host is missing"),
            (":8650", "the host is missing"),
            ("http://", "the host is missing"),
            ("router", "the port is missing"),
            ("[::1]", "the port is missing"),
            ("::1", "brackets"),
            ("::1:8650", "brackets"),
            ("router:0", "\"0\" is no number from 1 to 65535"),
            ("router:grpc", "\"grpc\" is no number"),
            ("http://router:99999", "99999"),
            ("ftp://router:1", "\"ftp\""),
            ("not a url", "white space"),
            ("user@router:1", "more than a host"),
            ("http://127.0.0.1:8640/v1", "it has the path /v1"),
        ] {
            let refused = text.parse::<ServerAddress>().unwrap_err();
            assert!(refused.contains(clue) && refused.contains("write "), "{text}: {refused}");
        }
    }
}
