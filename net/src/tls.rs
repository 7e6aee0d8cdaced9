//! TLS of servers and clients: certificates read from PEM files, reloaded by servers when the files change.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::certificate_expiry::earliest_expiry;
use crate::file_watcher::FileWatcher;
use crate::http::Protocols;
use crate::metrics;
use crate::private_file::warn_if_readable_by_all;

/// Interval at which servers check their files for changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Error of certificates or keys that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the file system.
        source: std::io::Error,
    },
    /// A file holds no PEM item of the expected kind.
    #[error("{} holds no {what} in PEM", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
        /// Expected kind: `certificate` or `private key`.
        what: &'static str,
    },
    /// A certificate authority's certificate is not usable.
    #[error("{}: not a usable certificate authority: {reason}", path.display())]
    Authority {
        /// Path of the file.
        path: PathBuf,
        /// Error text of the TLS library.
        reason: String,
    },
    /// Certificate and key do not match.
    #[error("certificate {} with key {}: {reason}", certificate.display(), key.display())]
    Pair {
        /// Path of the certificate.
        certificate: PathBuf,
        /// Path of the private key.
        key: PathBuf,
        /// Error text of the TLS library.
        reason: String,
    },
    /// Only one of two options that require each other was given.
    #[error("a certificate needs its key and a key its certificate; name both files or neither")]
    Half,
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

/// Reads a private key; warns if every user of the machine can.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let key = PrivateKeyDer::from_pem_slice(&read(path)?)
        .map_err(|_| TlsError::Empty { path: path.to_owned(), what: "private key" })?;
    warn_if_readable_by_all(path, "private key");
    Ok(key)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let empty = || TlsError::Empty { path: path.to_owned(), what: "certificate" };
    let pem = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    found.ok().filter(|found| !found.is_empty()).ok_or_else(empty)
}

/// Certificates that are in use, by purpose, with the time at which the first of them expires.
#[derive(Debug, Default)]
struct Expiries(Vec<(&'static str, i64)>);

impl Expiries {
    fn add(&mut self, purpose: &'static str, certificates: &[CertificateDer<'_>]) {
        self.0.extend(earliest_expiry(certificates).map(|at| (purpose, at)));
    }

    /// Sets the metric.
    fn publish(self) {
        for (purpose, at) in self.0 {
            metrics::certificate_expires(purpose, at);
        }
    }
}

/// PEM files of a TLS server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTlsFiles {
    /// Certificate chain of the server, leaf first.
    pub certificate: PathBuf,
    /// Private key of the leaf certificate.
    pub key: PathBuf,
    /// Certificate authorities of client certificates (mutual TLS); `None` requests no client certificate.
    pub client_ca: Option<PathBuf>,
    /// Whether a client may connect without a certificate although `client_ca` is set.
    pub client_optional: bool,
}

impl ServerTlsFiles {
    fn load(&self, protocols: Protocols) -> Result<ServerConfig, TlsError> {
        let mut expiries = Expiries::default();
        let chain = certificates(&self.certificate)?;
        expiries.add("server", &chain);
        let key = private_key(&self.key)?;
        let pair = |error: rustls::Error| TlsError::Pair {
            certificate: self.certificate.clone(),
            key: self.key.clone(),
            reason: error.to_string(),
        };
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(pair)?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let unusable = |reason: String| TlsError::Authority { path: path.clone(), reason };
                let mut roots = RootCertStore::empty();
                let authorities = certificates(path)?;
                expiries.add("client_ca", &authorities);
                for authority in authorities {
                    roots.add(authority).map_err(|error| unusable(error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = if self.client_optional { verifier.allow_unauthenticated() } else { verifier };
                let verifier = verifier.build().map_err(|error| unusable(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
        config.alpn_protocols = match protocols {
            Protocols::Http2 => vec![b"h2".to_vec()],
            Protocols::Any => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        };
        expiries.publish();
        Ok(config)
    }

    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        [Some(self.certificate.clone()), Some(self.key.clone()), self.client_ca.clone()].into_iter().flatten()
    }
}

/// TLS configuration of a server. After a file has changed, new connections use its new content; if that is
/// invalid, the previous configuration stays.
#[derive(Clone)]
pub struct ServerTls {
    files: ServerTlsFiles,
    /// Offered in the handshake.
    protocols: Protocols,
    /// States of the files before they were first read.
    watched: FileWatcher,
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerTls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Loads the files for a gRPC server.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(files: ServerTlsFiles) -> Result<Self, TlsError> {
        Self::load_for(files, Protocols::Http2)
    }

    /// Loads the files for a server of these protocols, which the handshake offers.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load_for(files: ServerTlsFiles, protocols: Protocols) -> Result<Self, TlsError> {
        let watched = FileWatcher::new(files.paths());
        let config = Arc::new(RwLock::new(Arc::new(files.load(protocols)?)));
        Ok(Self { files, protocols, watched, config })
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Reloads the files.
    ///
    /// # Errors
    /// [`TlsError`]; the previous configuration then stays in force.
    pub fn reload(&self) -> Result<(), TlsError> {
        let config = Arc::new(self.files.load(self.protocols)?);
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// Reloads the files whenever one has changed. Never returns; dropping the future ends it.
    pub async fn follow(self) {
        let mut watched = self.watched.clone();
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if !watched.changed() {
                continue;
            }
            let reloaded = self.reload();
            metrics::reloaded("certificate", reloaded.is_ok());
            match reloaded {
                Ok(()) => tracing::info!("TLS certificates reloaded"),
                Err(error) => {
                    tracing::error!(%error, "TLS certificates changed but are invalid; keeping the previous ones")
                }
            }
        }
    }
}

/// TLS configuration of a client; the files are read anew for each connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Certificate authorities of server certificates.
    pub ca: PathBuf,
    /// Certificate and private key of the client, for servers that request one (mutual TLS).
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Name that the server's certificate must have, if not the host of its address.
    pub server_name: Option<String>,
}

impl ClientTls {
    /// Combines command-line options; `None` if TLS is not configured.
    ///
    /// # Errors
    /// [`TlsError::Half`] for a certificate without key or the reverse, or for either or a name without `ca`.
    pub fn new(
        ca: Option<PathBuf>,
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
        server_name: Option<String>,
    ) -> Result<Option<Self>, TlsError> {
        let identity = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(TlsError::Half),
        };
        match ca {
            Some(ca) => Ok(Some(Self { ca, identity, server_name })),
            None if identity.is_some() || server_name.is_some() => Err(TlsError::Half),
            None => Ok(None),
        }
    }

    /// Loads the files and validates them.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(&self) -> Result<ClientTlsConfig, TlsError> {
        let mut expiries = Expiries::default();
        let mut roots = RootCertStore::empty();
        let authorities = certificates(&self.ca)?;
        expiries.add("server_ca", &authorities);
        for authority in authorities {
            let unusable = |error: rustls::Error| TlsError::Authority {
                path: self.ca.clone(),
                reason: error.to_string(),
            };
            roots.add(authority).map_err(unusable)?;
        }
        if let Some((certificate, key)) = &self.identity {
            let chain = certificates(certificate)?;
            expiries.add("client", &chain);
            let parsed = private_key(key)?;
            let pair = |error: rustls::Error| TlsError::Pair {
                certificate: certificate.clone(),
                key: key.clone(),
                reason: error.to_string(),
            };
            ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(pair)?
                .with_root_certificates(roots)
                .with_client_auth_cert(chain, parsed)
                .map_err(pair)?;
        }
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&self.ca)?));
        if let Some((certificate, key)) = &self.identity {
            config = config.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        if let Some(name) = &self.server_name {
            config = config.domain_name(name);
        }
        expiries.publish();
        Ok(config)
    }

    /// Loads the files whenever one has changed, for the metric of their expiry and the log; connections load them themselves. Never
    /// returns; dropping the future ends it.
    pub async fn follow(self) {
        let identity = self.identity.iter().flat_map(|(certificate, key)| [certificate, key]);
        let mut watched = FileWatcher::new([&self.ca].into_iter().chain(identity).cloned());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if watched.changed()
                && let Err(error) = self.load()
            {
                tracing::error!(%error, "TLS certificates for connections to workers changed but are invalid");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::TempDir;
    use metrics_exporter_prometheus::PrometheusBuilder;
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    #[test]
    fn the_expiry_of_loaded_certificates_is_a_metric() {
        let folder = TempDir::new("inflight-expiry").unwrap();
        let path = |name: &str| folder.path().join(name);
        let issue = |name: &str, year| {
            let mut params = CertificateParams::new(vec!["inflight.test".to_owned()]).unwrap();
            params.not_after = date_time_ymd(year, 1, 1);
            let key = KeyPair::generate().unwrap();
            std::fs::write(path(&format!("{name}.crt")), params.self_signed(&key).unwrap().pem()).unwrap();
            std::fs::write(path(&format!("{name}.key")), key.serialize_pem()).unwrap();
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let expires = |purpose: &str, year| {
            let line = format!("{}{{purpose=\"{purpose}\"}} ", metrics::CERTIFICATE_EXPIRY);
            let text = recorder.handle().render();
            let value = text
                .lines()
                .find_map(|text| text.strip_prefix(&line))
                .map(|value| value.parse::<f64>().unwrap());
            assert_eq!(value, Some(date_time_ymd(year, 1, 1).unix_timestamp() as f64), "{purpose}:\n{text}");
        };
        for (name, year) in [("own", 2031), ("ca", 2032), ("client", 2033)] {
            issue(name, year);
        }
        ::metrics::with_local_recorder(&recorder, || {
            let files = ServerTlsFiles {
                certificate: path("own.crt"),
                key: path("own.key"),
                client_ca: Some(path("ca.crt")),
                client_optional: false,
            };
            let server = ServerTls::load(files).unwrap();
            expires("server", 2031);
            expires("client_ca", 2032);
            issue("own", 2041);
            server.reload().unwrap();
            expires("server", 2041);
            // What is not in use does not count.
            issue("own", 2051);
            std::fs::write(path("own.key"), "no key").unwrap();
            server.reload().unwrap_err();
            expires("server", 2041);
            let identity = Some((path("client.crt"), path("client.key")));
            let client = ClientTls { ca: path("ca.crt"), identity, server_name: None };
            client.load().unwrap();
            expires("server_ca", 2032);
            expires("client", 2033);
        });
    }
}
