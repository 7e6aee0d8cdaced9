//! Progress of a download.

/// Receiver of a download's progress, called from several threads.
pub trait Progress: Sync {
    /// A file begins: its bytes, and those that an earlier download left.
    fn begin(&self, file: &str, bytes: u64, present: u64);
    /// Bytes of a file arrived.
    fn advance(&self, file: &str, bytes: u64);
    /// A file is complete.
    fn end(&self, file: &str);
    /// Something else happened, in a sentence: another process has the file, the connection was lost.
    fn note(&self, text: &str);
}

/// Receiver that ignores all progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn begin(&self, _: &str, _: u64, _: u64) {}
    fn advance(&self, _: &str, _: u64) {}
    fn end(&self, _: &str) {}
    fn note(&self, _: &str) {}
}
