//! Flags of certificates, keys and limits of connections.

use std::path::PathBuf;

use inflight_transport::{ClientTls, ServerTlsFiles, TlsError};

use crate::exit::{Exit, Failure};

fn usage(error: &TlsError) -> Failure {
    Failure::new(Exit::Usage, error.to_string())
}

/// Options of a role that is connected to.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "TLS")]
pub struct ServerArgs {
    /// Certificate chain in PEM; with it, connections are TLS only. Read again when it changes
    #[arg(long, value_name = "FILE", env = "INFLIGHT_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert, in PEM
    #[arg(long, value_name = "FILE", env = "INFLIGHT_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities whose clients are let in; others are refused in the handshake
    #[arg(long, value_name = "FILE", env = "INFLIGHT_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,
    /// Also let clients in that show no certificate at all (those with API keys, say)
    #[arg(long, requires = "tls_client_ca", env = "INFLIGHT_TLS_CLIENT_OPTIONAL")]
    pub tls_client_optional: bool,
}

impl ServerArgs {
    /// The files, if there are any.
    ///
    /// # Errors
    /// One of certificate and key without the other.
    pub fn files(&self) -> Result<Option<ServerTlsFiles>, Failure> {
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
    /// Certificates of the authorities that workers are trusted by; with it, workers are reached by TLS
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_WORKER_TLS_CA")]
    pub worker_tls_ca: Option<PathBuf>,
    /// Certificate chain to show to workers
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_WORKER_TLS_CERT")]
    pub worker_tls_cert: Option<PathBuf>,
    /// Private key of --worker-tls-cert
    #[arg(long, value_name = "FILE", env = "INFLIGHT_ROUTER_WORKER_TLS_KEY")]
    pub worker_tls_key: Option<PathBuf>,
    /// Name that workers' certificates must have [default: that of their address]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_ROUTER_WORKER_TLS_NAME")]
    pub worker_tls_name: Option<String>,
}

impl WorkerClientArgs {
    /// How workers are reached by TLS, if they are.
    ///
    /// # Errors
    /// One of certificate and key without the other, or either without an authority.
    pub fn tls(&self) -> Result<Option<ClientTls>, Failure> {
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
    /// API key to show
    #[arg(long, value_name = "KEY", env = "INFLIGHT_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Certificates of the authorities that the server is trusted by, for https
    #[arg(long, value_name = "FILE", env = "INFLIGHT_CLIENT_TLS_CA")]
    pub tls_ca: Option<PathBuf>,
    /// Certificate chain to show
    #[arg(long, value_name = "FILE", env = "INFLIGHT_CLIENT_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert
    #[arg(long, value_name = "FILE", env = "INFLIGHT_CLIENT_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Name that the server's certificate must have [default: that of its address]
    #[arg(long, value_name = "NAME", env = "INFLIGHT_CLIENT_TLS_NAME")]
    pub tls_name: Option<String>,
}

impl ClientArgs {
    /// How the server is reached by TLS, if it is.
    ///
    /// # Errors
    /// As for [`WorkerClientArgs::tls`].
    pub fn tls(&self) -> Result<Option<ClientTls>, Failure> {
        let tls = ClientTls::new(
            self.tls_ca.clone(),
            self.tls_cert.clone(),
            self.tls_key.clone(),
            self.tls_name.clone(),
        );
        tls.map_err(|error| usage(&error))
    }
}
