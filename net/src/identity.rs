//! Identity of a client, from its TLS certificate.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};
use tokio_rustls::rustls::pki_types::CertificateDer;

/// Names and digest of a client certificate whose chain the TLS handshake has verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Subject alternative names: DNS names, and URIs such as SPIFFE ids.
    pub names: Vec<String>,
    /// SHA-256 of the certificate's DER bytes, as `sha256:` and lower-case hex.
    pub digest: String,
}

impl Identity {
    /// Parses a certificate. One that does not parse has a digest and no names.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        let mut digest = String::from("sha256:");
        for byte in Sha256::digest(certificate) {
            // Writing to a string cannot fail.
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

    /// Returns whether `name` equals the digest or one of the names.
    pub fn is(&self, name: &str) -> bool {
        self.digest == name || self.names.iter().any(|own| own == name)
    }
}
