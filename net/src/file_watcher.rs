//! File watching by polling `stat`: modification time, size and inode.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Modification time, size and inode of a file; `None` inside if the file is missing. Symbolic links are
/// followed, so the swap of a mounted Kubernetes secret shows as a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileState(Option<(SystemTime, u64, u64)>);

impl FileState {
    /// Reads the current state of a file. A missing or unreadable file has a state too.
    pub fn of(path: &Path) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = std::fs::metadata(path).ok();
        Self(metadata.and_then(|file| Some((file.modified().ok()?, file.len(), file.ino()))))
    }
}

/// Set of watched files with their last observed states.
#[derive(Debug, Clone)]
pub struct FileWatcher {
    files: Vec<(PathBuf, FileState)>,
}

impl FileWatcher {
    /// Records the current states of `files`. Call it before reading them, or a change in between is missed.
    pub fn new(files: impl IntoIterator<Item = PathBuf>) -> Self {
        let files = files.into_iter().map(|path| {
            let state = FileState::of(&path);
            (path, state)
        });
        Self { files: files.collect() }
    }

    /// Returns whether any file changed since the previous call, or since `new`.
    pub fn changed(&mut self) -> bool {
        let mut changed = false;
        for (path, state) in &mut self.files {
            let now = FileState::of(path);
            changed |= std::mem::replace(state, now.clone()) != now;
        }
        changed
    }
}
