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

use crate::metrics;
use crate::watch::Watched;

/// How often files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{} holds no {what} in PEM", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
    },
    /// A certificate authority's certificate is not usable.
    #[error("{}: not a usable certificate authority: {reason}", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key do not go together.
    #[error("certificate {} with key {}: {reason}", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Only one of two files that belong together was named.
    #[error("a certificate needs its key and a key its certificate; name both files or neither")]
    Half,
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let empty = || TlsError::Empty { path: path.to_owned(), what: "certificate" };
    let pem = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    found.ok().filter(|found| !found.is_empty()).ok_or_else(empty)
}

/// The files of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTlsFiles {
    /// Its certificate, and those between it and a known authority.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
    /// Authorities whose clients are let in; without it clients show no certificate.
    pub client_ca: Option<PathBuf>,
    /// Whether a client may also come without a certificate.
    pub client_optional: bool,
}

impl ServerTlsFiles {
    fn load(&self) -> Result<ServerConfig, TlsError> {
        let chain = certificates(&self.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| TlsError::Empty { path: self.key.clone(), what: "private key" })?;
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
                let refuse = |reason: String| TlsError::Authority { path: path.clone(), reason };
                let mut roots = RootCertStore::empty();
                for authority in certificates(path)? {
                    roots.add(authority).map_err(|error| refuse(error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = if self.client_optional { verifier.allow_unauthenticated() } else { verifier };
                let verifier = verifier.build().map_err(|error| refuse(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        [Some(self.certificate.clone()), Some(self.key.clone()), self.client_ca.clone()].into_iter().flatten()
    }
}

/// A server's side of TLS. When a file changes, new connections get what it says now; if that is unusable, the old stays.
#[derive(Clone)]
pub struct ServerTls {
    files: ServerTlsFiles,
    /// As the files were before they were first read.
    watched: Watched,
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerTls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(files: ServerTlsFiles) -> Result<Self, TlsError> {
        let watched = Watched::new(files.paths());
        let config = Arc::new(RwLock::new(Arc::new(files.load()?)));
        Ok(Self { files, watched, config })
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Reads the files again.
    ///
    /// # Errors
    /// [`TlsError`]; then what was read before stays in force.
    pub fn reload(&self) -> Result<(), TlsError> {
        let config = Arc::new(self.files.load()?);
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// Reads the files again whenever one has changed, for as long as it is polled.
    pub async fn follow(self) {
        let mut watched = self.watched.clone();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
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

/// A client's side of TLS; its files are read for each connection anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Authorities that servers are trusted by.
    pub ca: PathBuf,
    /// The client's own certificate and key, where servers ask for one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that a server's certificate must have, if not that of its address.
    pub server_name: Option<String>,
}

impl ClientTls {
    /// Of options as they are given.
    ///
    /// # Errors
    /// [`TlsError::Half`].
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

    /// Reads the files, and tries whether they can be used.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(&self) -> Result<ClientTlsConfig, TlsError> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.ca)? {
            let refuse = |error: rustls::Error| TlsError::Authority {
                path: self.ca.clone(),
                reason: error.to_string(),
            };
            roots.add(authority).map_err(refuse)?;
        }
        if let Some((certificate, key)) = &self.identity {
            let chain = certificates(certificate)?;
            let parsed = PrivateKeyDer::from_pem_slice(&read(key)?)
                .map_err(|_| TlsError::Empty { path: key.clone(), what: "private key" })?;
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
