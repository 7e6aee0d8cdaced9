//! Digest that names a model bundle.

use sha2::{Digest, Sha256};

/// Returns the SHA-256 digest of a model bundle, in hex.
///
/// The hash input is, for each file in ascending order of name: the length of the name (u64, little endian),
/// the name, the length of the data (u64, little endian), the data.
///
/// Workers and routers share this function, so a bundle fetched once serves all workers of the model.
pub fn bundle_digest<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> String {
    let mut files: Vec<_> = files.into_iter().collect();
    files.sort_unstable_by_key(|(name, _)| *name);
    let mut hash = Sha256::new();
    for (name, data) in files {
        for part in [name.as_bytes(), data] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundle_digest_depends_on_names_and_data_but_not_on_file_order() {
        let (a, b) = (("a", b"1".as_slice()), ("b", b"2".as_slice()));
        assert_eq!(bundle_digest([a, b]), bundle_digest([b, a]));
        assert_ne!(bundle_digest([a, b]), bundle_digest([("a", b"12".as_slice()), ("b", b"")]));
        assert_eq!(bundle_digest([]).len(), 64);
    }
}
