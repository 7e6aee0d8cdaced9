//! Web sites whose pages may call the HTTP APIs without a key. A browser lets a page of any site send requests to any address that its
//! machine reaches, so without keys every page could use a router on the machine or in the network of its visitor.

use std::net::SocketAddr;

use inflight_net::{host_name, is_address_or_localhost};
use tonic::body::Body;
use tonic::codegen::http::header::{HOST, HeaderName, ORIGIN};
use tonic::codegen::http::{HeaderMap, Method, Request};

use crate::outcome::Outcome;

/// Name that stands for all.
const ANY: &str = "*";
/// Relation of the page's site to the called one, and what the page does, from current browsers.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Sites that callers without a key may belong to, and names under which they may call.
#[derive(Debug, Clone)]
pub(crate) struct Sites {
    /// Origins of pages, such as `https://chat.example` (`--http-cors`).
    pub(crate) origins: Vec<String>,
    /// Names of this router, such as `llm.example` (`--http-hosts`).
    pub(crate) hosts: Vec<String>,
}

/// Check of a call without a key.
pub(crate) type SiteCheck = fn(&Sites, &Request<Body>, Option<SocketAddr>) -> Result<(), Outcome>;

impl Sites {
    /// Checks a gRPC call without a key. A browser says which page calls, and no other client does; a name that was rebound is none of
    /// its hosts', as browsers have HTTP/2 with TLS only, and a certificate is for another name.
    ///
    /// # Errors
    /// It comes from a page of another site, or it names another host on a loopback address.
    pub(crate) fn check_browser<B>(
        &self,
        request: &Request<B>,
        peer: Option<SocketAddr>,
    ) -> Result<(), Outcome> {
        let headers = request.headers();
        let is_browser = headers.contains_key(ORIGIN) || headers.contains_key(&FETCH_SITE);
        if is_browser { self.check(request, peer) } else { Ok(()) }
    }

    /// Checks a call without a key.
    ///
    /// # Errors
    /// It comes from a page of another site, or it names another host on a loopback address.
    pub(crate) fn check<B>(&self, request: &Request<B>, peer: Option<SocketAddr>) -> Result<(), Outcome> {
        let headers = request.headers();
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let host = host.or_else(|| request.uri().authority().map(|authority| authority.as_str()));
        if peer.is_none_or(|peer| peer.ip().to_canonical().is_loopback()) && !self.is_known_host(host) {
            return Err(Outcome::Denied(
                "the host header names another site; call the router by its address or as localhost, or name the host in \
                 --http-hosts"
                    .to_owned(),
            ));
        }
        if self.origins.iter().any(|allowed| allowed == ANY) {
            return Ok(());
        }
        let refused = |site: &str| {
            Err(Outcome::Denied(format!(
                "the call comes from a page of another site{site}; name its origin in --http-cors, or use API keys (a tenants file)"
            )))
        };
        match headers.get(ORIGIN) {
            Some(origin) => {
                let origin = String::from_utf8_lossy(origin.as_bytes());
                let own = origin.split_once("://").map(|(_, authority)| authority);
                let is_own = own.zip(host).is_some_and(|(own, host)| own.eq_ignore_ascii_case(host));
                if is_own || self.origins.iter().any(|allowed| **allowed == *origin) {
                    return Ok(());
                }
                let shown: String = origin.chars().take(100).collect();
                refused(&format!(" ({shown:?})"))
            }
            // Pages load images, scripts and forms with GET, without an origin. Who follows a link sees the answer himself.
            None if is(headers, &FETCH_SITE, "cross-site") => {
                let follows_link = request.method() == Method::GET && is(headers, &FETCH_MODE, "navigate");
                if follows_link { Ok(()) } else { refused("") }
            }
            None => Ok(()),
        }
    }

    /// Whether a host header is an address, localhost, or named: any other name may be that of a site whose name was rebound to this
    /// machine's address.
    fn is_known_host(&self, host: Option<&str>) -> bool {
        let Some(host) = host else {
            // Not from a browser.
            return true;
        };
        let named = |known: &String| known == ANY || known.eq_ignore_ascii_case(host_name(host));
        is_address_or_localhost(host) || self.hosts.iter().any(named)
    }
}

fn is(headers: &HeaderMap, name: &HeaderName, value: &str) -> bool {
    headers.get(name).is_some_and(|given| given.as_bytes() == value.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(sites: &Sites, peer: &str, method: Method, headers: &[(&'static str, &str)]) -> bool {
        let mut request = Request::builder().method(method).uri("/v1/models");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        sites.check(&request.body(()).unwrap(), Some(peer.parse().unwrap())).is_ok()
    }

    #[test]
    fn pages_of_other_sites_are_refused_and_programs_and_own_pages_are_not() {
        let sites =
            Sites { origins: vec!["https://chat.example".to_owned()], hosts: vec!["llm.example".to_owned()] };
        let local = "127.0.0.1:5000";
        let host = ("host", "127.0.0.1:8640");
        let cases: [(&[(&str, &str)], bool); 14] = [
            (&[host], true),
            (&[], true),
            (&[("host", "localhost")], true),
            (&[("host", "[::1]:8640")], true),
            (&[("host", "llm.example:8640")], true),
            (&[("host", "rebound.example:8640")], false),
            (&[("host", "localhost.rebound.example")], false),
            (&[host, ("origin", "https://evil.example")], false),
            (&[host, ("origin", "null")], false),
            (&[host, ("origin", "https://chat.example")], true),
            (&[host, ("origin", "http://127.0.0.1:8640")], true),
            (&[host, ("origin", "http://127.0.0.1:3000")], false),
            (&[host, ("sec-fetch-site", "cross-site")], false),
            (&[host, ("sec-fetch-site", "same-origin")], true),
        ];
        for (headers, allowed) in cases {
            assert_eq!(allows(&sites, local, Method::POST, headers), allowed, "{headers:?}");
        }
        let link = [host, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
        assert!(allows(&sites, local, Method::GET, &link) && !allows(&sites, local, Method::POST, &link));
        // From other machines the name is none of this machine's, and the origin counts as before.
        let remote = "192.0.2.7:5000";
        assert!(allows(&sites, remote, Method::POST, &[("host", "inflight.svc.cluster.local")]));
        assert!(!allows(&sites, remote, Method::POST, &[host, ("origin", "https://evil.example")]));
        // gRPC clients may name any host, but for a browser.
        let check = |headers: &[(&'static str, &str)]| {
            let mut request = Request::builder().uri("/inflight.v1.Inference/Generate");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            sites.check_browser(&request.body(()).unwrap(), Some(local.parse().unwrap())).is_ok()
        };
        assert!(check(&[("host", "router.test")]));
        assert!(check(&[host, ("origin", "https://chat.example")]));
        assert!(!check(&[host, ("origin", "https://evil.example")]));
        assert!(!check(&[host, ("sec-fetch-site", "cross-site")]));
        let open = Sites { origins: vec!["*".to_owned()], hosts: vec!["*".to_owned()] };
        assert!(allows(
            &open,
            local,
            Method::POST,
            &[("host", "a.example"), ("origin", "https://b.example")]
        ));
    }
}
