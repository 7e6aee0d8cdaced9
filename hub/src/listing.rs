//! What a repository has: the commit of a revision, its files, and the blob of each.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use crate::name::is_suffix;
use crate::transport::Transport;
use crate::{HubError, ModelName};

/// Characters that stand in a segment of a path.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// Maximum files of a repository that are looked at.
const FILES_MAX: usize = 20_000;
/// Revisions that are named beside one that does not exist.
const NEAR_MAX: usize = 5;

/// Files of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listing {
    /// Commit, in hexadecimal digits.
    pub(crate) commit: String,
    /// Paths of the files.
    pub(crate) files: Vec<String>,
}

/// Bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blob {
    /// Name of the blob in the cache, which is its digest.
    pub(crate) etag: String,
    /// Number of bytes.
    pub(crate) bytes: u64,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

#[derive(Deserialize)]
struct Refs {
    #[serde(default)]
    branches: Vec<Ref>,
    #[serde(default)]
    tags: Vec<Ref>,
}

#[derive(Deserialize)]
struct Ref {
    name: String,
}

fn segment(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

fn path(text: &str) -> String {
    text.split('/').map(segment).collect::<Vec<_>>().join("/")
}

/// Whether a text is a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

impl Listing {
    /// Asks for the files of a model's revision.
    pub(crate) fn of(transport: &Transport, name: &ModelName) -> Result<Self, HubError> {
        let url = transport.url(&format!("api/models/{}/revision/{}", name.repo(), segment(name.revision())));
        let mut code = (0, String::new());
        let answer = transport.json_after(&url, &mut |response| {
            let header = response.headers().get("x-error-code").and_then(|value| value.to_str().ok());
            code = (response.status().as_u16(), header.unwrap_or_default().to_owned());
        });
        let Revision { sha, siblings } = match answer {
            Ok(revision) => revision,
            Err(error) => return Err(Self::refusal(transport, name, (code.0, &code.1), error)),
        };
        let refused = |reason: &str| HubError::Hub { url: url.clone(), reason: reason.to_owned() };
        if !is_commit(&sha) {
            return Err(refused("the answer names no commit"));
        }
        if siblings.len() > FILES_MAX {
            return Err(refused("the repository has more than 20000 files"));
        }
        let files = siblings.into_iter().map(|sibling| sibling.rfilename);
        // Names that would lead out of the cache.
        Ok(Self { commit: sha.to_lowercase(), files: files.filter(|file| is_suffix(file)).collect() })
    }

    /// Returns the error of a model that was refused.
    fn refusal(transport: &Transport, name: &ModelName, code: (u16, &str), error: HubError) -> HubError {
        let (repo, endpoint) = (name.repo().to_owned(), transport.settings().endpoint.clone());
        let has_token = transport.settings().token.is_some();
        match code {
            (_, "GatedRepo") => HubError::Gated { repo, endpoint },
            (_, "RevisionNotFound") => {
                let (revision, near) = (name.revision().to_owned(), near(transport, name));
                HubError::NoRevision { repo, revision, near }
            }
            (401 | 403 | 404, _) => {
                let hint = if has_token { " and not visible to the account of HF_TOKEN" } else { "" };
                HubError::NoModel { repo, endpoint, hint }
            }
            _ => error,
        }
    }
}

/// Returns words about the revisions of a model that are nearest to one that it does not have.
fn near(transport: &Transport, name: &ModelName) -> String {
    let url = transport.url(&format!("api/models/{}/refs", name.repo()));
    let Ok(Refs { branches, tags }) = transport.json(&url) else { return String::new() };
    let mut names: Vec<String> = branches.into_iter().chain(tags).map(|reference| reference.name).collect();
    names.truncate(1000);
    let wanted = name.revision();
    names.sort_by_key(|other| distance(other, wanted));
    names.truncate(NEAR_MAX);
    if names.is_empty() { String::new() } else { format!("; near are {}", names.join(", ")) }
}

/// Number of characters by which two names differ (Levenshtein).
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().take(100).collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, c) in left.chars().take(100).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (to, other) in right.iter().enumerate() {
            let cost = diagonal + usize::from(c != *other);
            diagonal = row[to + 1];
            row[to + 1] = cost.min(diagonal + 1).min(row[to] + 1);
        }
    }
    row[right.len()]
}

/// Address of a file of a commit.
pub(crate) fn file_url(transport: &Transport, repo: &str, commit: &str, file: &str) -> String {
    transport.url(&format!("{repo}/resolve/{commit}/{}", path(file)))
}

impl Blob {
    /// Asks for what a file is.
    pub(crate) fn of(transport: &Transport, repo: &str, commit: &str, file: &str) -> Result<Self, HubError> {
        let url = file_url(transport, repo, commit, file);
        let (mut etag, mut bytes) = (None::<String>, None::<u64>);
        transport.head(&url, &mut |response| {
            let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            // Where large files are, their own etag means something else.
            etag = header("x-linked-etag").or_else(|| header("etag")).map(plain_etag).or(etag.take());
            let linked = header("x-linked-size")
                .or_else(|| header("content-length").filter(|_| response.status().is_success()));
            bytes = linked.and_then(|size| size.parse().ok()).or(bytes);
        })?;
        let refused = |reason: &str| HubError::Hub { url: url.clone(), reason: reason.to_owned() };
        let bytes = bytes.ok_or_else(|| refused("the answer says no size"))?;
        let etag = etag.filter(|etag| is_blob(etag)).ok_or_else(|| refused("the answer has no etag"))?;
        Ok(Self { etag, bytes })
    }
}

/// Whether an etag can be the name of a blob.
fn is_blob(etag: &str) -> bool {
    (1..=128).contains(&etag.len()) && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Returns an etag without its quotes.
fn plain_etag(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_etags_and_paths() {
        assert_eq!((distance("main", "manin"), distance("", "abc"), distance("v1.0", "v1.1")), (1, 3, 1));
        assert_eq!(plain_etag("W/\"ab\""), "ab");
        assert!(is_blob("ab-1") && !is_blob("../a") && !is_blob(""));
        assert_eq!(path("a b/c#d"), "a%20b/c%23d");
    }
}
