use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};
use tokio_rustls::rustls::pki_types::CertificateDer;

/// Whom a client certificate names. The chain behind it was verified in the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Names in the certificate (subject alternative names): hosts, and URIs such as SPIFFE ids.
    pub names: Vec<String>,
    /// `sha256:` and the certificate's digest in hex.
    pub digest: String,
}

impl Identity {
    /// Reads a certificate. One that does not parse names nobody.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        let mut digest = String::from("sha256:");
        for byte in Sha256::digest(certificate) {
            // A string takes everything.
            let _ = write!(digest, "{byte:02x}");
        }
        let names = match webpki::EndEntityCert::try_from(certificate) {
            Ok(parsed) => {
                parsed.valid_dns_names().chain(parsed.valid_uri_names()).map(str::to_owned).collect()
            }
            Err(_) => Vec::new(),
        };
        Self { names, digest }
    }

    /// Whether the certificate goes by this name or digest.
    pub fn is(&self, name: &str) -> bool {
        self.digest == name || self.names.iter().any(|own| own == name)
    }
}
