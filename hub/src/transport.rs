//! Requests to the Hub and to where it redirects.

use std::io::Read as _;
use std::time::Duration;

use serde::de::DeserializeOwned;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::{HubError, Settings};

/// Maximum redirections of one request.
const REDIRECTS_MAX: usize = 6;
/// Time for a connection, for the head of a response, and for the next bytes of a body.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum bytes of a response in JSON.
const JSON_BYTES_MAX: u64 = 32 << 20;
/// Attempts of a request.
pub(crate) const ATTEMPTS: u32 = 6;
/// Attempts of a first request that gets no response.
const UNREACHED_ATTEMPTS: u32 = 3;
/// Maximum pause that a server may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Client of one Hub.
#[derive(Debug)]
pub(crate) struct Transport {
    agent: Agent,
    settings: Settings,
}

/// Listener of the heads of responses.
type Visit<'a> = dyn FnMut(&Response<Body>) + 'a;

/// Request.
#[derive(Debug, Clone, Copy)]
struct Ask<'a> {
    url: &'a str,
    /// First byte, and the one behind the last.
    range: Option<(u64, u64)>,
    head_only: bool,
}

/// Failure of one attempt.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It would fail again.
    Final(HubError),
    /// It may succeed later, after the pause that the server asks for.
    Passing(HubError, Option<Duration>),
    /// There was no response.
    Unreached(HubError),
}

impl Failure {
    pub(crate) fn into_error(self) -> HubError {
        match self {
            Self::Final(error) | Self::Passing(error, _) | Self::Unreached(error) => error,
        }
    }
}

/// Head of a response at the end of its redirections.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// Address at which the bytes are.
    pub(crate) url: String,
    body: Body,
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub(crate) fn into_reader(self) -> impl std::io::Read {
        self.body.into_reader()
    }
}

impl Transport {
    pub(crate) fn new(settings: &Settings) -> Self {
        // Those of the system or of SSL_CERT_FILE; a container without any uses those of the program.
        let system = rustls_native_certs::load_native_certs().certs;
        let roots = if system.is_empty() {
            RootCerts::WebPki
        } else {
            let certificates: Vec<Certificate<'static>> =
                system.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect();
            RootCerts::new_with_certs(&certificates)
        };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("inflight/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .max_idle_connections_per_host(settings.connections.max(1))
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .build();
        Self { agent: Agent::new_with_config(config), settings: settings.clone() }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the address of a path of the Hub.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.settings.endpoint)
    }

    /// Sends one request, and follows redirections. The Hub alone gets the token. `visit` sees the head of each response on the way.
    fn attempt(&self, ask: Ask<'_>, visit: &mut Visit<'_>) -> Result<Head, Failure> {
        let Ask { url, range, head_only } = ask;
        let mut url = url.to_owned();
        let hub = origin(&self.settings.endpoint);
        for _ in 0..REDIRECTS_MAX {
            let mut request = if head_only { self.agent.head(&url) } else { self.agent.get(&url) };
            if let Some(token) = self.settings.token.as_ref().filter(|_| origin(&url) == hub) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if let Some((from, to)) = range {
                request = request.header("range", format!("bytes={from}-{}", to - 1));
            }
            let response = request.header("accept-encoding", "identity").call();
            let response = response.map_err(|error| {
                let is_passing = !matches!(
                    error,
                    ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl
                );
                let error = HubError::Hub { url: without_query(&url), reason: reason(&error) };
                if is_passing { Failure::Unreached(error) } else { Failure::Final(error) }
            })?;
            visit(&response);
            let status = response.status();
            let location = response.headers().get("location").and_then(|value| value.to_str().ok());
            if let (true, Some(location)) = (status.is_redirection(), location) {
                let next = absolute(&url, location);
                if url.starts_with("https://") && !next.starts_with("https://") {
                    let reason = "it redirects to an address without TLS".to_owned();
                    return Err(Failure::Final(HubError::Hub { url: without_query(&url), reason }));
                }
                // Where the bytes are elsewhere, the Hub has said what there is to say of them.
                if !head_only || origin(&next) == origin(&url) {
                    url = next;
                    continue;
                }
            }
            let (parts, body) = response.into_parts();
            let head = Head { status, headers: parts.headers, url, body };
            let is_good = status.is_success() || (head_only && status.is_redirection());
            return if is_good { Ok(head) } else { Err(failure(&head, origin(&head.url) == hub)) };
        }
        let reason = format!("more than {REDIRECTS_MAX} redirections");
        Err(Failure::Final(HubError::Hub { url: without_query(&url), reason }))
    }

    /// Sends a request once.
    pub(crate) fn get_once(&self, url: &str, range: Option<(u64, u64)>) -> Result<Head, Failure> {
        self.attempt(Ask { url, range, head_only: false }, &mut |_| {})
    }

    /// Asks for the heads of a file, again while it may succeed. `visit` sees the head of each response on the way.
    pub(crate) fn head(&self, url: &str, visit: &mut Visit<'_>) -> Result<Head, HubError> {
        self.ask(Ask { url, range: None, head_only: true }, visit)
    }

    /// Sends a request, again while it may succeed. `visit` sees the head of each response on the way.
    pub(crate) fn get(&self, url: &str, visit: &mut Visit<'_>) -> Result<Head, HubError> {
        self.ask(Ask { url, range: None, head_only: false }, visit)
    }

    fn ask(&self, ask: Ask<'_>, visit: &mut Visit<'_>) -> Result<Head, HubError> {
        let mut attempts = 0;
        loop {
            match self.attempt(ask, visit) {
                Ok(head) => return Ok(head),
                // Someone may be waiting who has no network.
                Err(Failure::Unreached(_)) if attempts + 1 < UNREACHED_ATTEMPTS => {
                    std::thread::sleep(self.pause(attempts, None));
                    attempts += 1;
                }
                Err(Failure::Passing(_, pause)) if attempts + 1 < ATTEMPTS => {
                    std::thread::sleep(self.pause(attempts, pause));
                    attempts += 1;
                }
                Err(failure) => return Err(failure.into_error()),
            }
        }
    }

    /// Returns the pause after an attempt.
    pub(crate) fn pause(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        let own = self.settings.retry_pause * (1 << attempt.min(5));
        asked.map_or(own, |asked| asked.min(PAUSE_MAX)).max(own)
    }

    /// Reads a response in JSON.
    pub(crate) fn json<T: DeserializeOwned>(&self, url: &str) -> Result<T, HubError> {
        self.json_after(url, &mut |_| {})
    }

    /// Reads a response in JSON; `visit` sees the heads before it. One that is cut off is asked for again.
    pub(crate) fn json_after<T: DeserializeOwned>(
        &self,
        url: &str,
        visit: &mut Visit<'_>,
    ) -> Result<T, HubError> {
        let refused = |reason: String| HubError::Hub { url: url.to_owned(), reason };
        let mut attempts = 0;
        loop {
            let head = self.get(url, visit)?;
            let mut text = Vec::new();
            let read = head.into_reader().take(JSON_BYTES_MAX + 1).read_to_end(&mut text);
            match read {
                Ok(_) if text.len() as u64 > JSON_BYTES_MAX => {
                    return Err(refused(format!("the answer has more than {JSON_BYTES_MAX} bytes")));
                }
                Ok(_) => {
                    let parsed = serde_json::from_slice(&text);
                    return parsed
                        .map_err(|error| refused(format!("the answer is not what the Hub sends: {error}")));
                }
                Err(error) if attempts + 1 == ATTEMPTS => return Err(refused(error.to_string())),
                Err(_) => std::thread::sleep(self.pause(attempts, None)),
            }
            attempts += 1;
        }
    }
}

/// Returns the failure of a status, of the Hub or of where it redirects.
fn failure(head: &Head, is_hub: bool) -> Failure {
    let message = head.header("x-error-message").unwrap_or_default();
    let colon = if message.is_empty() { "" } else { ": " };
    let reason = format!("HTTP status {}{colon}{message}", head.status.as_u16());
    let error = HubError::Hub { url: without_query(&head.url), reason };
    let passes = matches!(head.status.as_u16(), 408 | 425 | 429 | 500 | 502 | 503 | 504);
    let pause = head.header("retry-after").and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
    // The Hub signs another address the next time.
    let expired = !is_hub && matches!(head.status.as_u16(), 401 | 403 | 410);
    if passes || expired { Failure::Passing(error, pause) } else { Failure::Final(error) }
}

/// Returns the scheme and the host of an address.
fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    &url[..end]
}

/// Returns an address without what may be a signature.
fn without_query(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or_default().to_owned()
}

/// Returns the address that a redirection names.
fn absolute(url: &str, location: &str) -> String {
    if location.contains("://") {
        return location.to_owned();
    }
    if let Some(rest) = location.strip_prefix("//") {
        let scheme = url.split("://").next().unwrap_or("https");
        return format!("{scheme}://{rest}");
    }
    if location.starts_with('/') {
        return format!("{}{location}", origin(url));
    }
    let path = without_query(url);
    let base = path.rsplit_once('/').map_or(path.as_str(), |(base, _)| base);
    format!("{base}/{location}")
}

/// Says why a request failed, and what to do where that is known.
fn reason(error: &ureq::Error) -> String {
    let text = match error {
        ureq::Error::HostNotFound => "the host is not known".to_owned(),
        ureq::Error::Timeout(_) => format!("no answer for {} s", PATIENCE.as_secs()),
        error => error.to_string(),
    };
    // Both TLS errors and I/O errors around them say so.
    if text.contains("certificate") {
        return format!(
            "{text}; if a proxy or mirror has certificates of its own, set SSL_CERT_FILE to a file with theirs"
        );
    }
    format!(
        "{text}; check the network, set HTTPS_PROXY behind a proxy or HF_ENDPOINT for a mirror; a directory or GGUF file needs none"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_are_relative_to_where_they_come_from() {
        for (url, location, expected) in [
            ("https://a/b/c?x", "/d", "https://a/d"),
            ("https://a/b/c?x", "d", "https://a/b/d"),
            ("https://a/b", "https://e/f?g", "https://e/f?g"),
            ("http://a:1/b", "//e/f", "http://e/f"),
        ] {
            assert_eq!(absolute(url, location), expected);
        }
        assert_eq!(origin("https://a:1/b/c"), "https://a:1");
        assert_eq!(origin("https://a?b"), "https://a");
    }
}
