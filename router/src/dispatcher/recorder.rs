//! File that records the dispatcher's events.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};

use inflight_router_core::Recording;

/// Recording with its file.
#[derive(Debug)]
pub(super) struct Recorder {
    /// Events and digests of their commands.
    pub(super) log: Recording,
    file: BufWriter<File>,
}

impl Recorder {
    pub(super) fn new(file: File, log: Recording) -> Self {
        Self { log, file: BufWriter::new(file) }
    }

    /// Writes what was recorded through to the file.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.write_all(&self.log.take())?;
        self.file.flush()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // The router ends; a lost end of the recording shortens the replay.
        let _ = self.flush();
    }
}
