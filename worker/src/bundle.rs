use std::sync::Arc;

/// The files a router needs to speak for a model: tokenizer, chat template, generation config.
#[derive(Debug, Clone)]
pub struct Bundle {
    files: Arc<[(String, Vec<u8>)]>,
    digest: Arc<str>,
}

impl Bundle {
    /// A bundle of these files, each with its name.
    pub fn new(mut files: Vec<(String, Vec<u8>)>) -> Self {
        files.sort_by(|a, b| a.0.cmp(&b.0));
        let named = files.iter().map(|(name, data)| (name.as_str(), data.as_slice()));
        let digest = inflight_proto::bundle_digest(named).into();
        Self { files: files.into(), digest }
    }

    /// SHA-256 of the content, in hex.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The files cut into pieces of at most `most` bytes, in order; an empty file is one empty piece.
    pub fn pieces(&self, most: usize) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().flat_map(move |(name, data)| {
            let empty = data.is_empty().then_some((name.as_str(), data.as_slice()));
            data.chunks(most).map(move |piece| (name.as_str(), piece)).chain(empty)
        })
    }
}
