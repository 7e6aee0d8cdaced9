//! Names and addresses of the servers under test.

use std::str::FromStr;

use hyper::Uri;

use crate::client::{BenchClient, Connector};
use crate::grpc::Grpc;
use crate::openai::OpenAi;

/// Server under test, written `[NAME=]URL`. A URL without a path is a router; one with a path, such as `/v1`,
/// is the base URL of an OpenAI-compatible API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Name in reports.
    pub name: String,
    /// Base URL.
    pub url: String,
    authority: String,
    /// Path without trailing slash; empty for a router.
    base: String,
}

impl Endpoint {
    /// Creates a client, without connecting. With `resume`, a client of a router continues streams that break
    /// off.
    pub fn client(&self, resume: bool) -> BenchClient {
        let connector = Connector::Tcp(self.authority.clone());
        match self.base.as_str() {
            "" => BenchClient::Grpc(Grpc::new(connector, self.url.clone(), resume)),
            base => BenchClient::OpenAi(OpenAi::new(connector, self.authority.clone(), base.to_owned())),
        }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, url) = match text.split_once('=') {
            Some((name, url)) if !name.contains("://") => (name, url),
            _ => ("", text),
        };
        let uri: Uri = url.parse().map_err(|error| {
            format!("{error}; write it like http://HOST:PORT or NAME=http://HOST:PORT/v1")
        })?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err("TLS is not spoken here; measure behind it, over http".to_owned()),
            _ => return Err("write it like http://HOST:PORT or NAME=http://HOST:PORT/v1".to_owned()),
        }
        let host = uri.host().unwrap_or_default();
        let port = match uri.authority().and_then(|authority| authority.as_str().strip_prefix(host)) {
            Some("") => 80,
            _ => uri.port_u16().ok_or("its port is no number up to 65535")?,
        };
        let authority = format!("{host}:{port}");
        let path = uri.path().trim_end_matches('/');
        let base = path.strip_suffix("/completions").unwrap_or(path).to_owned();
        let name = if name.is_empty() { authority.clone() } else { name.to_owned() };
        let url = format!("http://{authority}{base}");
        Ok(Self { name, url, authority, base })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_with_a_path_is_an_openai_api_and_one_without_a_router() {
        let endpoint = |text: &str| text.parse::<Endpoint>().unwrap();
        let router = endpoint("http://127.0.0.1:8650/");
        assert_eq!((router.name.as_str(), router.url.as_str()), ("127.0.0.1:8650", "http://127.0.0.1:8650"));
        assert_eq!(router.client(false).protocol(), "grpc");
        let peer = endpoint("peer=http://h/v1/completions");
        assert_eq!((peer.name.as_str(), peer.url.as_str()), ("peer", "http://h:80/v1"));
        assert_eq!(peer.client(false).protocol(), "openai");
        for text in ["", "h:1", "a=", "https://h/v1", "ftp://h", "http://", "x=http://h:99999"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
