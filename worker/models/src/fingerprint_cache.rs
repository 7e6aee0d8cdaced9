//! Fingerprint cache: digests of the tensors of large weight files, by the identity of the file, so that a
//! worker hashes a model once and not at every start.
//!
//! A file of the cache belongs to one weight file and is valid for one identity of it: device, inode, size,
//! modification and change time. Any other content is a miss: a cache that is broken, or that others could have
//! written, is ignored and reported. An entry is written only for a file that had not changed for
//! [`SETTLED_AGE`], since a later write within the resolution of the file system's clock would leave the
//! identity as it is.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::cache_directory::CacheDirectory;
use super::content::{Digest, hex};
use super::weight_file::{FileIdentity, WeightFile};

/// Version of the entries and of the definition of the digests.
const FORMAT: u32 = 1;
/// Minimum size of cached weight files: smaller ones are hashed in a fraction of a second.
const FILE_BYTES_MIN: u64 = 64 << 20;
/// Minimum time that a file was unchanged before its digests are cached. Clocks of file systems tick within
/// 2 s.
const SETTLED_AGE: Duration = Duration::from_secs(10);
/// Maximum entries; the oldest ones are removed.
const ENTRIES_MAX: usize = 1024;
/// Maximum size of an entry.
const ENTRY_BYTES_MAX: u64 = 64 << 20;

/// Directory of cached digests.
#[derive(Debug)]
pub struct FingerprintCache {
    directory: CacheDirectory,
    file_bytes_min: u64,
    settled_age: Duration,
}

/// Digests of the tensors of a weight file.
#[derive(Serialize, Deserialize)]
struct Entry {
    format: u32,
    file: FileIdentity,
    /// SHA-256 in hex, by tensor.
    tensors: BTreeMap<String, String>,
    /// Checksum of the other fields.
    checksum: String,
}

impl Entry {
    fn checksum(&self) -> String {
        hex(&Sha256::digest(format!("{} {:?} {:?}", self.format, self.file, self.tensors)))
    }
}

impl FingerprintCache {
    /// Creates a cache in `directory`, which is created at the first write.
    pub fn new(directory: PathBuf) -> Self {
        let directory = CacheDirectory::new(directory, "--fingerprint-cache");
        Self { directory, file_bytes_min: FILE_BYTES_MIN, settled_age: SETTLED_AGE }
    }

    /// Returns the cached digests of a file's tensors, by name.
    pub(super) fn look_up(&self, file: &WeightFile) -> Option<BTreeMap<String, Digest>> {
        let identity = self.cached_identity(file)?;
        let name = entry_name(identity);
        let entry = match self.read(&name) {
            Ok(entry) => entry?,
            Err(error) => {
                let path = self.directory.path().join(name);
                tracing::warn!(path = %path.display(), %error, "ignoring an entry of the fingerprint cache");
                return None;
            }
        };
        // Another identity: the weight file was replaced or changed.
        if entry.file != *identity || entry.format != FORMAT {
            return None;
        }
        let digests = entry.tensors.iter().map(|(name, text)| Some((name.clone(), digest(text)?)));
        digests.collect()
    }

    /// Saves the digests of all tensors of a file; a failure is logged.
    pub(super) fn save(&self, file: &WeightFile, digests: &BTreeMap<String, Digest>) {
        let Some(identity) = self.cached_identity(file) else { return };
        if !file.unchanged_for(self.settled_age) {
            tracing::info!(file = file.label(), "fingerprint is not cached: the file was changed just now");
            return;
        }
        let tensors = digests.iter().map(|(name, digest)| (name.clone(), hex(digest))).collect();
        let mut entry = Entry { format: FORMAT, file: *identity, tensors, checksum: String::new() };
        entry.checksum = entry.checksum();
        if let Err(error) = self.write(&entry_name(identity), &entry) {
            let directory = self.directory.path().display();
            tracing::warn!(%directory, %error, "cannot write to the fingerprint cache; the next start hashes the model again");
        }
    }

    /// Identity of a file that is large enough for the cache.
    fn cached_identity<'a>(&self, file: &'a WeightFile) -> Option<&'a FileIdentity> {
        file.identity().filter(|identity| identity.bytes >= self.file_bytes_min)
    }

    /// Reads an entry that only this user can have written; `None` if there is none.
    fn read(&self, name: &str) -> io::Result<Option<Entry>> {
        let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
        let Some(bytes) = self.directory.read(name, ENTRY_BYTES_MAX)? else { return Ok(None) };
        let entry: Entry =
            serde_json::from_slice(&bytes).map_err(|error| invalid(format!("it is broken: {error}")))?;
        if entry.checksum != entry.checksum() {
            return Err(invalid("it is broken: its checksum is wrong".to_owned()));
        }
        Ok(Some(entry))
    }

    fn write(&self, name: &str, entry: &Entry) -> io::Result<()> {
        self.directory.write(name, &serde_json::to_vec(entry)?)?;
        self.remove_oldest()
    }

    /// Removes the oldest entries beyond the maximum.
    fn remove_oldest(&self) -> io::Result<()> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(self.directory.path())? {
            let entry = entry?;
            // The directory may have files of others.
            if !is_entry_name(&entry.file_name().to_string_lossy()) {
                continue;
            }
            // Another worker may have removed it.
            if let Ok(modified) = entry.metadata().and_then(|metadata| metadata.modified()) {
                entries.push((modified, entry.path()));
            }
        }
        entries.sort_unstable();
        let excess = entries.len().saturating_sub(ENTRIES_MAX);
        for (_, path) in entries.iter().take(excess) {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Name of the entry of a weight file.
fn entry_name(identity: &FileIdentity) -> String {
    format!("{:x}-{:x}.json", identity.device, identity.inode)
}

/// Whether a file of this name is an entry.
fn is_entry_name(name: &str) -> bool {
    let hexadecimal = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts = name.strip_suffix(".json").and_then(|parts| parts.split_once('-'));
    parts.is_some_and(|(device, inode)| hexadecimal(device) && hexadecimal(inode))
}

/// Parses 64 hexadecimal digits.
fn digest(text: &str) -> Option<Digest> {
    let mut digest = Digest::default();
    if text.len() != 2 * digest.len() || !text.is_ascii() {
        return None;
    }
    for (i, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use std::fs::{DirBuilder, File};
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    use std::time::SystemTime;

    use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir};

    use super::super::{ModelDir, ModelSource, fingerprint_of};
    use super::*;

    /// Model, and a cache directory for models of any size and age.
    struct Fixture {
        model: TempDir,
        cache: TempDir,
    }

    impl Fixture {
        fn new(shards: usize) -> Self {
            let checkpoint = Checkpoint::new(Arch::Llama2, Dtype::Bf16).sharded(shards);
            Self { model: checkpoint.write_temp().unwrap(), cache: TempDir::new("inflight-cache").unwrap() }
        }

        fn directory(&self) -> PathBuf {
            self.cache.path().join("digests")
        }

        fn open(&self) -> ModelDir {
            ModelDir::open(&ModelSource::Directory(self.model.path().to_owned())).unwrap()
        }

        fn fingerprint(&self) -> String {
            fingerprint_of(&self.open(), "f32", "").unwrap()
        }

        /// Fingerprint by way of the cache, and whether it was in the cache.
        fn cached_fingerprint(&self) -> (String, bool) {
            let cache = FingerprintCache {
                directory: CacheDirectory::new(self.directory(), "--fingerprint-cache"),
                file_bytes_min: 0,
                settled_age: Duration::ZERO,
            };
            let model = self.open().with_fingerprint_cache(cache);
            let cached = model.tensors().all_cached();
            (fingerprint_of(&model, "f32", "").unwrap(), cached)
        }

        fn entries(&self) -> Vec<PathBuf> {
            fs::read_dir(self.directory()).unwrap().map(|entry| entry.unwrap().path()).collect()
        }
    }

    #[test]
    fn a_model_is_hashed_once_until_one_of_its_files_changes() {
        let fixture = Fixture::new(2);
        let plain = fixture.fingerprint();
        assert_eq!(fixture.cached_fingerprint(), (plain.clone(), false));
        assert_eq!(fixture.entries().len(), 2);
        assert_eq!(fixture.cached_fingerprint(), (plain.clone(), true));
        // One bit of the last tensor of a file, under times that the file never had.
        let weights = fixture.model.path().join("model-00002-of-00002.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&weights, bytes).unwrap();
        let past = SystemTime::now() - Duration::from_secs(3600);
        File::options().write(true).open(&weights).unwrap().set_modified(past).unwrap();
        let changed = fixture.fingerprint();
        assert_ne!(changed, plain);
        assert_eq!(fixture.cached_fingerprint(), (changed.clone(), false));
        assert_eq!(fixture.entries().len(), 2, "the entry of the changed file is replaced");
        assert_eq!(fixture.cached_fingerprint(), (changed, true));
    }

    #[test]
    fn broken_and_foreign_entries_are_ignored_and_replaced() {
        let fixture = Fixture::new(1);
        let (plain, _) = fixture.cached_fingerprint();
        let [path] = &fixture.entries()[..] else { panic!("one file has one entry") };
        let whole = fs::read_to_string(path).unwrap();
        let digest = whole.find(":\"").unwrap() + 2;
        let other_digit = if whole.as_bytes()[digest] == b'0' { "1" } else { "0" };
        let mut flipped = whole.clone();
        flipped.replace_range(digest..=digest, other_digit);
        let damages = [
            String::new(),
            whole[..whole.len() / 2].to_owned(),
            flipped,
            whole.replace("\"format\":1", "\"format\":2"),
            whole.replace("model.norm.weight", "model.norm.bias"),
            whole.replacen("\"bytes\":", "\"bytes\":1", 1),
        ];
        for damaged in damages {
            assert_ne!(damaged, whole);
            fs::write(path, &damaged).unwrap();
            assert_eq!(fixture.cached_fingerprint(), (plain.clone(), false), "{damaged}");
            assert_eq!(fixture.cached_fingerprint(), (plain.clone(), true));
        }
        for writable in [path.as_path(), &fixture.directory()] {
            let mode = fs::metadata(writable).unwrap().permissions();
            fs::set_permissions(writable, fs::Permissions::from_mode(mode.mode() | 0o002)).unwrap();
            assert_eq!(fixture.cached_fingerprint(), (plain.clone(), false), "{}", writable.display());
            fs::set_permissions(writable, mode).unwrap();
            fixture.cached_fingerprint();
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_changes_nothing() {
        let fixture = Fixture::new(1);
        fs::write(fixture.directory(), "a file in the place of the directory").unwrap();
        for _ in 0..2 {
            assert_eq!(fixture.cached_fingerprint(), (fixture.fingerprint(), false));
        }
    }

    #[test]
    fn small_files_and_files_changed_just_now_are_not_cached() {
        let fixture = Fixture::new(1);
        let new = || FingerprintCache::new(fixture.directory());
        for cache in [new(), FingerprintCache { file_bytes_min: 0, ..new() }] {
            fingerprint_of(&fixture.open().with_fingerprint_cache(cache), "f32", "").unwrap();
            assert!(!fixture.directory().exists());
        }
        let cache = FingerprintCache { file_bytes_min: 0, settled_age: Duration::ZERO, ..new() };
        let embedded = ModelDir::open(&ModelSource::Embedded).unwrap().with_fingerprint_cache(cache);
        fingerprint_of(&embedded, "f32", "").unwrap();
        assert!(!fixture.directory().exists());
    }

    #[test]
    fn a_full_cache_loses_its_oldest_entries_and_no_other_file() {
        let fixture = Fixture::new(1);
        DirBuilder::new().mode(0o700).create(fixture.directory()).unwrap();
        let past = SystemTime::now() - Duration::from_secs(3600);
        for i in 0..ENTRIES_MAX + 3 {
            let file = File::create(fixture.directory().join(format!("fe-{i:x}.json"))).unwrap();
            file.set_modified(past + Duration::from_secs(i as u64)).unwrap();
        }
        let others = ["1.json", "notes-1.json", "1-2"].map(|name| fixture.directory().join(name));
        for other in &others {
            File::create(other).unwrap().set_modified(past - Duration::from_secs(1)).unwrap();
        }
        fixture.cached_fingerprint();
        assert_eq!(fixture.entries().len(), ENTRIES_MAX + others.len());
        assert!(others.iter().all(|other| other.exists()));
        for i in 0..4 {
            assert!(!fixture.directory().join(format!("fe-{i:x}.json")).exists());
        }
        assert!(fixture.cached_fingerprint().1);
    }
}
