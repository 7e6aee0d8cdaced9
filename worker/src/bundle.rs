//! Model bundle: the files that a router fetches from a worker, named by their digest.

use std::sync::Arc;

/// Files that a router needs to serve a model: tokenizer, chat template, generation config.
#[derive(Debug, Clone)]
pub struct Bundle {
    files: Arc<[(String, Vec<u8>)]>,
    digest: Arc<str>,
}

impl Bundle {
    /// Creates a bundle of `files`, pairs of name and content.
    pub fn new(mut files: Vec<(String, Vec<u8>)>) -> Self {
        files.sort_by(|a, b| a.0.cmp(&b.0));
        let named = files.iter().map(|(name, data)| (name.as_str(), data.as_slice()));
        let digest = inflight_proto::bundle_digest(named).into();
        Self { files: files.into(), digest }
    }

    /// Returns the content of a file.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|(known, _)| known == name).map(|(_, data)| data.as_slice())
    }

    /// SHA-256 over names and contents, in hex.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Iterates over (name, chunk) with chunks of at most `bytes_max` bytes, in order; an empty file has one
    /// empty chunk. Each is copied when the iterator reaches it.
    pub fn chunks(&self, bytes_max: usize) -> impl Iterator<Item = (String, Vec<u8>)> + use<> {
        let files = self.files.clone();
        let (mut file, mut start) = (0, 0);
        std::iter::from_fn(move || {
            let (name, data) = files.get(file)?;
            let end = data.len().min(start + bytes_max);
            let chunk = (name.clone(), data[start..end].to_vec());
            (file, start) = if end == data.len() { (file + 1, 0) } else { (file, end) };
            Some(chunk)
        })
    }
}
