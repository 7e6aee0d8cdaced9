//! The cache: `models--ORG--NAME/{blobs,refs,snapshots}`, as the Hub's own tools lay it out.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::listing::is_commit;
use crate::{HubError, Progress};

/// Prefix of a model's directory.
const PREFIX: &str = "models--";

/// Cache of models.
#[derive(Debug, Clone)]
pub struct Cache {
    directory: PathBuf,
}

/// Model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// `org/name`.
    pub repo: String,
    /// Bytes of all its files.
    pub bytes: u64,
    /// Its revisions.
    pub revisions: Vec<CachedRevision>,
}

/// Revision of a model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedRevision {
    /// Commit.
    pub commit: String,
    /// Branches and tags that led to it.
    pub names: Vec<String>,
    /// Directory of its files.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
}

/// Lock of a blob against other processes and tools; dropped with the value.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "holds the lock")] File);

impl Cache {
    /// Names a cache.
    pub fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Directory of the cache.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn folder(repo: &str) -> String {
        format!("{PREFIX}{}", repo.replace('/', "--"))
    }

    fn repo(&self, repo: &str) -> PathBuf {
        self.directory.join(Self::folder(repo))
    }

    pub(crate) fn blob(&self, repo: &str, etag: &str) -> PathBuf {
        self.repo(repo).join("blobs").join(etag)
    }

    /// Directory of a commit's files.
    pub(crate) fn snapshot(&self, repo: &str, commit: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit)
    }

    /// Returns the commit that a revision led to at the last download.
    pub(crate) fn commit(&self, repo: &str, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_lowercase());
        }
        let text = fs::read_to_string(self.repo(repo).join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Writes the commit of a revision to its file in `refs`.
    pub(crate) fn set_commit(&self, repo: &str, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.repo(repo).join("refs").join(revision);
        make_parent(&path)?;
        self.replace(repo, &path, |path| fs::write(path, commit)).map_err(HubError::file("write", path))
    }

    /// Locks a blob; waits for another process that has it.
    pub(crate) fn lock(&self, repo: &str, etag: &str, progress: &dyn Progress) -> Result<Lock, HubError> {
        let path = self.directory.join(".locks").join(Self::folder(repo)).join(format!("{etag}.lock"));
        // A file system whose inode numbers change must not keep it waiting for ever.
        const ATTEMPTS: usize = 100;
        let mut attempts = 0;
        loop {
            attempts += 1;
            make_parent(&path)?;
            let file = File::options().create(true).truncate(false).write(true).open(&path);
            let file = file.map_err(HubError::file("lock", &path))?;
            if file.try_lock().is_err() {
                progress.note(&format!("another process is fetching a file of {repo}; waiting for it"));
                file.lock().map_err(HubError::file("lock", &path))?;
            }
            // `remove` deletes lock files while it holds them: one that is no longer at its path excludes no one.
            let locked = file.metadata().map_err(HubError::file("lock", &path))?;
            let is_same = |there: fs::Metadata| (there.dev(), there.ino()) == (locked.dev(), locked.ino());
            if attempts == ATTEMPTS || fs::metadata(&path).is_ok_and(is_same) {
                return Ok(Lock(file));
            }
        }
    }

    /// Links a file of a snapshot to its blob.
    pub(crate) fn link(&self, repo: &str, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let link = self.snapshot(repo, commit).join(file);
        make_parent(&link)?;
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        if fs::read_link(&link).is_ok_and(|known| known == target) {
            return Ok(());
        }
        self.replace(repo, &link, |path| symlink(&target, path)).map_err(HubError::file("link", link))
    }

    /// Makes a file beside the blobs and renames it to `target`, so that other threads and processes find the old file
    /// or the new one, and never none or a part of one.
    fn replace(
        &self,
        repo: &str,
        target: &Path,
        make: impl FnOnce(&Path) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = self.blob(repo, &format!("{}-{number}.replacement", std::process::id()));
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        // Of a process that had the same number and died.
        _ = fs::remove_file(&path);
        make(&path)?;
        fs::rename(&path, target).inspect_err(|_| _ = fs::remove_file(&path))
    }

    /// Returns the models of the cache, by name.
    pub fn models(&self) -> Vec<CachedModel> {
        let mut models: Vec<CachedModel> = entries(&self.directory)
            .into_iter()
            .filter_map(|(name, path)| {
                let (org, model) = name.strip_prefix(PREFIX)?.split_once("--")?;
                Some(Self::model(format!("{org}/{model}"), &path)).filter(|model| !model.revisions.is_empty())
            })
            .collect();
        models.sort_by(|left, right| left.repo.cmp(&right.repo));
        models
    }

    fn model(repo: String, path: &Path) -> CachedModel {
        let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let refs = path.join("refs");
        for file in files(&refs) {
            let commit = fs::read_to_string(&file).unwrap_or_default().trim().to_owned();
            let name = file.strip_prefix(&refs).unwrap_or(&file).display().to_string();
            names.entry(commit).or_default().push(name);
        }
        let size = |path: &PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
        let revisions = entries(&path.join("snapshots")).into_iter().map(|(commit, path)| {
            let names = names.get(&commit).cloned().unwrap_or_default();
            let bytes = files(&path).iter().map(size).sum();
            CachedRevision { commit, names, path, bytes }
        });
        let mut revisions: Vec<CachedRevision> = revisions.collect();
        revisions.sort_by(|left, right| {
            right.names.len().cmp(&left.names.len()).then(left.commit.cmp(&right.commit))
        });
        let bytes = files(&path.join("blobs")).iter().map(size).sum();
        CachedModel { repo, bytes, revisions }
    }

    /// Removes a model; returns the bytes that are free now, or `None` if it is not there.
    ///
    /// # Errors
    /// [`HubError::InUse`] or [`HubError::File`].
    pub fn remove(&self, repo: &str) -> Result<Option<u64>, HubError> {
        let path = self.repo(repo);
        if !path.is_dir() {
            return Ok(None);
        }
        let locks = self.directory.join(".locks").join(Self::folder(repo));
        let mut held = Vec::new();
        for lock in files(&locks) {
            let file = File::options().write(true).open(&lock).map_err(HubError::file("lock", &lock))?;
            if file.try_lock().is_err() {
                return Err(HubError::InUse { repo: repo.to_owned() });
            }
            held.push(file);
        }
        let bytes = Self::model(repo.to_owned(), &path).bytes;
        fs::remove_dir_all(&path).map_err(HubError::file("remove", path))?;
        _ = fs::remove_dir_all(&locks);
        Ok(Some(bytes))
    }

    /// Returns the snapshot of a model's directory in a cache, if a path is one.
    pub(crate) fn snapshot_of_directory(path: &Path) -> Option<PathBuf> {
        let snapshots = path.join("snapshots");
        if !path.file_name()?.to_str()?.starts_with(PREFIX) || !snapshots.is_dir() {
            return None;
        }
        let main =
            fs::read_to_string(path.join("refs/main")).ok().map(|commit| snapshots.join(commit.trim()));
        let only = || match entries(&snapshots).as_slice() {
            [(_, only)] => Some(only.clone()),
            _ => None,
        };
        main.filter(|path| path.is_dir()).or_else(only)
    }
}

fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(HubError::file("create", parent))
}

/// Names and paths in a directory; none if there is none.
fn entries(directory: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect()
}

/// Files below a directory, at most ten levels deep.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    const LEVELS_MAX: usize = 10;
    let mut found = Vec::new();
    let mut level = vec![directory.to_owned()];
    for _ in 0..LEVELS_MAX {
        let next: Vec<PathBuf> =
            level.iter().flat_map(|directory| entries(directory)).map(|(_, path)| path).collect();
        let (directories, files): (Vec<_>, Vec<_>) = next.into_iter().partition(|path| path.is_dir());
        found.extend(files);
        level = directories;
    }
    found
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;

    #[test]
    fn a_link_that_several_make_at_once_is_there_for_each() {
        let folder = inflight_fixtures::TempDir::new("cache").unwrap();
        let cache = Cache::new(folder.path().to_owned());
        std::fs::create_dir_all(cache.repo("org/model").join("blobs")).unwrap();
        std::fs::write(cache.blob("org/model", "etag"), "text").unwrap();
        let commit = "0".repeat(40);
        let (barrier, faults) = (Barrier::new(4), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..200 {
                        barrier.wait();
                        let file = format!("file-{round}");
                        let made = cache.link("org/model", &commit, &file, "etag");
                        let text = fs::read_to_string(cache.snapshot("org/model", &commit).join(file));
                        // A panic of one thread would leave the others at the barrier.
                        if made.is_err() || text.as_ref().ok().is_none_or(|text| text != "text") {
                            faults.lock().unwrap().push(format!("round {round}: {made:?}, {text:?}"));
                        }
                    }
                });
            }
        });
        assert_eq!(faults.into_inner().unwrap(), [""; 0]);
        // No file that was to replace another one is left.
        assert_eq!(entries(&cache.repo("org/model").join("blobs")).len(), 1);
    }
}
