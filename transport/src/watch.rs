use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What a file looks like from outside. Links are followed, so that the swap of a mounted secret is seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileState(Option<(SystemTime, u64, u64)>);

impl FileState {
    /// As it is now; a file that is not there has a state too.
    pub fn of(path: &Path) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = std::fs::metadata(path).ok();
        Self(metadata.and_then(|file| Some((file.modified().ok()?, file.len(), file.ino()))))
    }
}

/// Files that are looked at from time to time, to read them again when one has changed.
#[derive(Debug, Clone)]
pub struct Watched {
    files: Vec<(PathBuf, FileState)>,
}

impl Watched {
    /// Watches from now on: to be made before the files are read, or a change in between is missed.
    pub fn new(files: impl IntoIterator<Item = PathBuf>) -> Self {
        let files = files.into_iter().map(|path| {
            let state = FileState::of(&path);
            (path, state)
        });
        Self { files: files.collect() }
    }

    /// Whether any of them changed since this was asked last.
    pub fn changed(&mut self) -> bool {
        let mut changed = false;
        for (path, state) in &mut self.files {
            let now = FileState::of(path);
            changed |= std::mem::replace(state, now.clone()) != now;
        }
        changed
    }
}
