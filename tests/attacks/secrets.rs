//! Files of secrets.

use std::path::PathBuf;

use anyhow::Result;
use inflight_fixtures::TempDir;

/// Secret of the cluster.
pub const OLD: &str = "0123456789abcdef0123456789abcdef";
/// Another secret.
pub const NEW: &str = "fedcba9876543210fedcba9876543210";

/// Folder with a file of secrets.
pub struct Secrets(TempDir);

impl Secrets {
    /// Writes a file with these lines.
    pub fn new(lines: &[&str]) -> Result<Self> {
        let secrets = Self(TempDir::new("secrets")?);
        secrets.write(lines)?;
        Ok(secrets)
    }

    /// Path of the file.
    pub fn path(&self) -> PathBuf {
        self.0.path().join("secret")
    }

    /// Replaces the content by another file, as Kubernetes does.
    pub fn write(&self, lines: &[&str]) -> Result<()> {
        let next = self.0.path().join("next");
        std::fs::write(&next, lines.join("\n"))?;
        Ok(std::fs::rename(next, self.path())?)
    }

    /// Flag `name` with the file.
    pub fn flag(&self, name: &str) -> String {
        format!("--{name}={}", self.path().display())
    }
}
