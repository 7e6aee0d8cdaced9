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
        let chain = certificates(&self.certificate)?;
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
                for authority in certificates(path)? {
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
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.ca)? {
            let unusable = |error: rustls::Error| TlsError::Authority {
                path: self.ca.clone(),
                reason: error.to_string(),
            };
            roots.add(authority).map_err(unusable)?;
        }
        if let Some((certificate, key)) = &self.identity {
            let chain = certificates(certificate)?;
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
        Ok(config)
    }
}
