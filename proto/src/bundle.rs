use sha2::{Digest, Sha256};

/// SHA-256, in hex, of a model bundle: over its files in ascending order of their names, each as the length of
/// the name (u64, little endian), the name, the length of the data, the data.
///
/// Worker and router both compute it here, so that a bundle fetched once serves every worker of the model.
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
    fn the_digest_depends_on_names_and_data_and_not_on_the_order() {
        let (a, b) = (("a", b"1".as_slice()), ("b", b"2".as_slice()));
        assert_eq!(bundle_digest([a, b]), bundle_digest([b, a]));
        assert_ne!(bundle_digest([a, b]), bundle_digest([("a", b"12".as_slice()), ("b", b"")]));
        assert_eq!(bundle_digest([]).len(), 64);
    }
}
