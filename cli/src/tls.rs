//! TLS flags: certificates and private keys of servers and clients, and API keys.

use std::path::PathBuf;

use inflight_net::{ClientTls, ServerTlsFiles, TlsError};

use crate::exit::{self, CommandError, Exit};

fn usage(error: &TlsError) -> CommandError {
    CommandError::new(Exit::Usage, error.to_string())
}

/// Options of a role that is connected to.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "TLS")]
pub struct ServerArgs {
    /// Server certificate chain in PEM, reloaded when it changes; enables TLS
    #[arg(long, value_name = "FILE", env = "INFLIGHT_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert, in PEM
    #[arg(long, value_name = "FILE", env = "INFLIGHT_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// CA certificates to verify client certificates with; clients without a valid one are rejected
    #[arg(long, value_name = "FILE", env = "INFLIGHT_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,
    /// Accept clients without a certificate too, such as those with API keys
    #[arg(long, requires = "tls_client_ca", env = "INFLIGHT_TLS_CLIENT_OPTIONAL")]
    pub tls_client_optional: bool,
}

impl ServerArgs {
    /// Returns the TLS files; `None` without TLS.
    ///
    /// # Errors
    /// Only one of certificate and key is given, or a client CA without them.
    pub fn files(&self) -> Result<Option<ServerTlsFiles>, CommandError> {
        match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Ok(Some(ServerTlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                client_ca: self.tls_client_ca.clone(),
                client_optional: self.tls_client_optional,
            })),
            (None, None) if self.tls_client_ca.is_none() => Ok(None),
            _ => Err(usage(&TlsError::Half)),
        }
    }
}

/// Options of a router for its connections to workers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "TLS to workers")]
pub struct WorkerClientArgs {
    /// CA certificates to verify workers with; enables TLS to workers
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_WORKER_TLS_CA")]
    pub worker_tls_ca: Option<PathBuf>,
    /// Client certificate chain for workers
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_WORKER_TLS_CERT")]
    pub worker_tls_cert: Option<PathBuf>,
    /// Private key of --worker-tls-cert
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_WORKER_TLS_KEY")]
    pub worker_tls_key: Option<PathBuf>,
    /// Server name to verify in workers' certificates [default: the worker's host]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_ROUTER_WORKER_TLS_NAME")]
    pub worker_tls_name: Option<String>,
}

impl WorkerClientArgs {
    /// Returns the TLS configuration for connections to workers; `None` without TLS.
    ///
    /// # Errors
    /// Only one of certificate and key is given, or either without CA certificates.
    pub fn tls(&self) -> Result<Option<ClientTls>, CommandError> {
        let tls = ClientTls::new(
            self.worker_tls_ca.clone(),
            self.worker_tls_cert.clone(),
            self.worker_tls_key.clone(),
            self.worker_tls_name.clone(),
        );
        tls.map_err(|error| usage(&error))
    }
}

/// Options of commands that call a router or a worker.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub struct ClientArgs {
    /// API key
    #[arg(long, value_name = "KEY", env = "INFLIGHT_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// CA certificates to verify the server with, for https
    #[arg(long, value_name = "FILE", env = "INFLIGHT_CLIENT_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
    /// Client certificate chain
    #[arg(long, value_name = "FILE", env = "INFLIGHT_CLIENT_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert
    #[arg(long, value_name = "FILE", env = "INFLIGHT_CLIENT_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Server name to verify in the certificate [default: the host of the endpoint]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_CLIENT_TLS_NAME")]
    pub tls_name: Option<String>,
}

impl ClientArgs {
    /// Returns the TLS configuration for connections to the server; `None` without TLS.
    ///
    /// # Errors
    /// Only one of certificate and key is given, or either without CA certificates.
    pub fn tls(&self) -> Result<Option<ClientTls>, CommandError> {
        let tls = ClientTls::new(
            self.tls_ca.clone(),
            self.tls_cert.clone(),
            self.tls_key.clone(),
            self.tls_name.clone(),
        );
        tls.map_err(|error| usage(&error))
    }
    /// Warns, once, if the API key would be sent over a network without TLS to one of these endpoints.
    pub fn warn_of_plaintext_key<'a>(&self, endpoints: impl IntoIterator<Item = &'a str>) {
        if self.api_key.is_none() {
            return;
        }
        if let Some(endpoint) = endpoints.into_iter().find(|endpoint| is_plaintext_network(endpoint)) {
            exit::print_stderr(format_args!(
                "warning: the API key is sent to {endpoint} without encryption; use https:// (--tls-ca)"
            ));
        }
    }
}

/// Whether an endpoint is reached over a network and without TLS.
fn is_plaintext_network(endpoint: &str) -> bool {
    let Ok(uri) = endpoint.parse::<tonic::codegen::http::Uri>() else { return false };
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let loopback = host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    uri.scheme_str() == Some("http") && !loopback
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plaintext_over_a_network_exposes_a_key() {
        let safe =
            ["http://127.0.0.1:8650", "http://[::1]:8650", "http://localhost:1", "https://router:1", "?"];
        assert_eq!(safe.map(is_plaintext_network), [false; 5]);
        let exposed = ["http://router:8650", "http://192.0.2.1:8650", "http://[2001:db8::1]:8650"];
        assert_eq!(exposed.map(is_plaintext_network), [true; 3]);
    }
}
