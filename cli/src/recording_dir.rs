//! Directory in which `inflight up --record` collects the recordings of its processes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::exit::{CommandError, Exit};

/// Extension of recordings.
const EXTENSION: &str = "rec";

/// Directory of recordings; without any when it was opened.
#[derive(Debug, Clone)]
pub struct RecordingDir(PathBuf);

impl RecordingDir {
    /// Opens a directory for new recordings, and creates it if necessary.
    ///
    /// # Errors
    /// The directory cannot be created or read, or contains recordings already.
    pub fn open(path: &Path) -> Result<Self, CommandError> {
        let failed = |error: std::io::Error| {
            CommandError::new(Exit::Failure, format!("--record {}: {error}", path.display()))
        };
        std::fs::create_dir_all(path).map_err(failed)?;
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let found = entry.map_err(failed)?.path();
            if found.extension().is_some_and(|extension| extension == EXTENSION) {
                let message = format!(
                    "--record {}: there is a recording already, {}; choose another directory, or move it away",
                    path.display(),
                    found.file_name().unwrap_or_default().display()
                );
                return Err(CommandError::new(Exit::Usage, message));
            }
        }
        Ok(Self(path.to_owned()))
    }

    /// Returns the file of a process at its start number `start`, from 1: `worker-0.rec`, `worker-0.2.rec`, …
    pub fn file(&self, process: &str, start: u32) -> PathBuf {
        let restart = if start <= 1 { String::new() } else { format!(".{start}") };
        self.0.join(format!("{process}{restart}.{EXTENSION}"))
    }

    /// Returns the flag with which a process records at its start number `start`.
    pub fn flag(&self, process: &str, start: u32) -> OsString {
        let mut flag = OsString::from("--record=");
        flag.push(self.file(process, start));
        flag
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_created_and_refused_once_it_has_recordings() {
        let temporary = inflight_fixtures::TempDir::new("recordings").unwrap();
        let path = temporary.path().join("a/b");
        let directory = RecordingDir::open(&path).unwrap();
        assert_eq!(directory.file("router", 1), path.join("router.rec"));
        assert_eq!(directory.file("worker-1", 2), path.join("worker-1.2.rec"));
        std::fs::write(path.join("notes.txt"), "").unwrap();
        RecordingDir::open(&path).unwrap();
        std::fs::write(directory.file("worker-1", 3), "").unwrap();
        let refused = RecordingDir::open(&path).unwrap_err().to_string();
        assert!(refused.contains("worker-1.3.rec"), "{refused}");
    }
}
