//! From an argument to files: a path, what the cache has, or a download.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::blob::{self, Source};
use crate::cache::{Cache, files};
use crate::listing::{Blob, Listing, file_url, is_commit};
use crate::selection::{INDEX, Selection, part_names, select};
use crate::transport::Transport;
use crate::{HubError, ModelName, Progress, Settings};

/// Maximum bytes of an index of a checkpoint.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Place of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Directory, or GGUF file.
    pub path: PathBuf,
    /// Name, if it is of the Hub.
    pub name: Option<ModelName>,
    /// Commit, if it is of the Hub.
    pub commit: Option<String>,
}

/// Finds the model of an argument: a path that exists, a directory of a cache, or a name on the Hub, which is fetched if
/// the cache lacks it.
///
/// # Errors
/// [`HubError`] with what to do.
pub fn locate(argument: &str, settings: &Settings, progress: &dyn Progress) -> Result<Located, HubError> {
    let path = Path::new(argument);
    if path.exists() {
        let path = Cache::snapshot_of_directory(path).unwrap_or_else(|| path.to_owned());
        return Ok(Located { path, name: None, commit: None });
    }
    match ModelName::of_argument(argument)? {
        Some(name) => fetch(&name, settings, progress),
        None => Err(HubError::NoPath { path: argument.to_owned(), hint: hint(argument) }),
    }
}

/// Says what a path that does not exist may have been meant for.
fn hint(argument: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    if !argument.is_empty() && argument.chars().all(is_bare) {
        return format!(", and a model of the Hub is named with its organisation, as in Qwen/{argument}");
    }
    String::new()
}

/// Weights of an index.
#[derive(Deserialize)]
struct Index {
    weight_map: std::collections::BTreeMap<String, String>,
}

/// Fetches a model, or finds it in the cache.
///
/// # Errors
/// [`HubError`] with what to do. What has arrived stays, and the next call continues there.
pub fn fetch(name: &ModelName, settings: &Settings, progress: &dyn Progress) -> Result<Located, HubError> {
    let cache = Cache::new(settings.cache.clone());
    let cached = |error: Option<HubError>| {
        let found = cache
            .commit(name.repo(), name.revision())
            .and_then(|commit| Some((complete(&cache.snapshot(name.repo(), &commit), name.file())?, commit)));
        match (found, error) {
            (Some((path, commit)), error) => {
                if let Some(error) = error {
                    progress.note(&format!("{error}; using commit {commit} of {name} from the cache"));
                }
                Ok(Located { path, name: Some(name.clone()), commit: Some(commit) })
            }
            (None, Some(error)) => Err(error),
            (None, None) => {
                let cache = cache.directory().display().to_string();
                Err(HubError::Offline { name: name.to_string(), cache })
            }
        }
    };
    // A commit never changes.
    if settings.offline || is_commit(name.revision()) {
        match cached(None) {
            Err(_) if !settings.offline => {}
            outcome => return outcome,
        }
    }
    let transport = Transport::new(settings);
    let listing = match Listing::of(&transport, name) {
        Ok(listing) => listing,
        // The network is down, not the model gone.
        Err(error @ HubError::Hub { .. }) => return cached(Some(error)),
        Err(error) => return Err(error),
    };
    let fetcher = Fetcher { transport: &transport, cache: &cache, name, commit: &listing.commit, progress };
    let refused = |reason: String| HubError::Files { repo: name.repo().to_owned(), reason };
    let path = match select(&listing.files, name.file()).map_err(refused)? {
        Selection::Gguf(files) => {
            fetcher.files(&files)?;
            cache.snapshot(name.repo(), &listing.commit).join(&files[0])
        }
        Selection::Directory { mut files, index } => {
            if index {
                files.extend(fetcher.indexed(&listing.files)?);
            }
            fetcher.files(&files)?;
            cache.snapshot(name.repo(), &listing.commit)
        }
    };
    cache.set_commit(name.repo(), name.revision(), &listing.commit)?;
    Ok(Located { path, name: Some(name.clone()), commit: Some(listing.commit) })
}

/// Returns the model of a snapshot if it has all that it needs.
fn complete(snapshot: &Path, file: Option<&str>) -> Option<PathBuf> {
    if let Some(file) = file {
        let parts = part_names(file);
        if parts.iter().all(|part| snapshot.join(part).is_file()) {
            return Some(snapshot.join(&parts[0]));
        }
    }
    let within = |path: PathBuf| path.strip_prefix(snapshot).ok()?.to_str().map(str::to_owned);
    let entries: Vec<String> =
        files(snapshot).into_iter().filter(|path| path.exists()).filter_map(within).collect();
    if let Selection::Gguf(parts) = select(&entries, file).ok()? {
        return parts.first().map(|first| snapshot.join(first));
    }
    let has = |name: &str| entries.iter().any(|entry| entry == name);
    if !has("config.json") {
        return None;
    }
    if let Ok(text) = std::fs::read(snapshot.join(INDEX)) {
        let Index { weight_map } = serde_json::from_slice(&text).ok()?;
        if !weight_map.values().all(|file| has(file)) {
            return None;
        }
    }
    Some(snapshot.to_owned())
}

struct Fetcher<'a> {
    transport: &'a Transport,
    cache: &'a Cache,
    name: &'a ModelName,
    commit: &'a str,
    progress: &'a dyn Progress,
}

impl Fetcher<'_> {
    /// Fetches the index of a checkpoint; returns the files that it names.
    fn indexed(&self, files: &[String]) -> Result<BTreeSet<String>, HubError> {
        self.file(INDEX)?;
        let path = self.cache.snapshot(self.name.repo(), self.commit).join(INDEX);
        let refused = |reason: String| HubError::Files { repo: self.name.repo().to_owned(), reason };
        if std::fs::metadata(&path).map_err(HubError::file("read", &path))?.len() > INDEX_BYTES_MAX {
            return Err(refused(format!("{INDEX} has more than {INDEX_BYTES_MAX} bytes")));
        }
        let text = std::fs::read(&path).map_err(HubError::file("read", &path))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| refused(format!("{INDEX} is no index: {error}")))?;
        let named: BTreeSet<String> = index.weight_map.into_values().collect();
        match named.iter().find(|file| !files.contains(file) || !file.ends_with(".safetensors")) {
            Some(missing) => {
                Err(refused(format!("{INDEX} names {missing}, which the repository does not have")))
            }
            None => Ok(named),
        }
    }

    /// Downloads files, weights last: an error about a small file then costs no download of gigabytes.
    fn files(&self, files: &[String]) -> Result<(), HubError> {
        let is_large =
            |file: &&String| file.ends_with(".safetensors") || file.to_ascii_lowercase().ends_with(".gguf");
        let (large, small): (Vec<&String>, Vec<&String>) = files.iter().partition(is_large);
        small.into_iter().chain(large).try_for_each(|file| self.file(file))
    }

    fn file(&self, file: &str) -> Result<(), HubError> {
        let (repo, commit) = (self.name.repo(), self.commit);
        let link = self.cache.snapshot(repo, commit).join(file);
        if link.exists() {
            return Ok(());
        }
        let blob = Blob::of(self.transport, repo, commit, file)?;
        let target = self.cache.blob(repo, &blob.etag);
        let present = || std::fs::metadata(&target).is_ok_and(|metadata| metadata.len() == blob.bytes);
        if !present() {
            let parent = target.parent().unwrap_or(&target);
            std::fs::create_dir_all(parent).map_err(HubError::file("create", parent))?;
            let _lock = self.cache.lock(repo, &blob.etag, self.progress)?;
            // Another process may have fetched it meanwhile.
            if !present() {
                let url = file_url(self.transport, repo, commit, file);
                blob::fetch(self.transport, Source { file, url: &url, blob: &blob }, &target, self.progress)?;
            }
        }
        self.cache.link(repo, commit, file, &blob.etag)
    }
}
