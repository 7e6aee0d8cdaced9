//! Content of a tensor: read in pieces, in parallel, each hashed as it is read.
//!
//! Every byte that leaves this module was hashed in the buffer in which it leaves, and a piece that is read
//! again (by another rank, or as embedding and as LM head) must have the same digest. The fingerprint consists
//! of these digests, so it covers what the runtime has, whatever happens to the file, and whatever its
//! timestamps say. Only where the digest comes from the fingerprint cache are pieces not hashed: then the
//! file's identity, equal to the cached one before the first read and after the last, says that the content is
//! the one that was hashed.
//!
//! Pieces are whole rows of about 4 MiB, so a tensor's digest depends neither on the number of threads nor on
//! how the tensor is divided among ranks.

use std::fmt::Write as _;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use sha2::{Digest as _, Sha256};

use super::error::Error;
use super::weight_file::WeightFile;

/// SHA-256 digest.
pub(super) type Digest = [u8; 32];

/// Maximum bytes of a piece, unless a row is larger.
const PIECE_BYTES_MAX: usize = 4 << 20;
/// Maximum threads that read and hash; more than memory bandwidth can feed.
const THREADS_MAX: usize = 32;

/// Location of a tensor's content, with the digests of the pieces that were read.
#[derive(Debug)]
pub(super) struct TensorContent {
    tensor: String,
    file: Arc<WeightFile>,
    range: Range<u64>,
    piece_bytes: usize,
    pieces: Vec<OnceLock<Digest>>,
    /// Digest from the fingerprint cache.
    cached: OnceLock<Digest>,
}

/// Bytes of a tensor in memory.
#[derive(Debug, Clone)]
pub(super) enum Bytes {
    Owned(Vec<u8>),
    Embedded(&'static [u8]),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Embedded(bytes) => bytes,
        }
    }
}

impl TensorContent {
    /// Locates a tensor of `rows` rows at `range` of a file.
    pub(super) fn new(tensor: &str, file: &Arc<WeightFile>, range: Range<u64>, rows: usize) -> Self {
        Self::divided(tensor, file, range, rows, PIECE_BYTES_MAX)
    }

    /// Like [`TensorContent::new`], with pieces of another size.
    fn divided(
        tensor: &str,
        file: &Arc<WeightFile>,
        range: Range<u64>,
        rows: usize,
        piece_bytes_max: usize,
    ) -> Self {
        let bytes = (range.end - range.start) as usize;
        let row = if rows > 0 && bytes.is_multiple_of(rows) { (bytes / rows).max(1) } else { 1 };
        let piece_bytes = (piece_bytes_max / row).max(1) * row;
        let pieces = (0..bytes.div_ceil(piece_bytes)).map(|_| OnceLock::new()).collect();
        Self {
            tensor: tensor.to_owned(),
            file: Arc::clone(file),
            range,
            piece_bytes,
            pieces,
            cached: OnceLock::new(),
        }
    }

    /// Size in bytes.
    pub(super) fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    /// Bytes of the file that are the tensor's.
    pub(super) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Name of the tensor.
    pub(super) fn tensor(&self) -> &str {
        &self.tensor
    }

    /// File of the tensor.
    pub(super) fn file(&self) -> &Arc<WeightFile> {
        &self.file
    }

    /// Sets the digest from the fingerprint cache. To be called before the first read.
    pub(super) fn set_cached(&self, digest: Digest) {
        // Set at most once: the cache is looked up at one place.
        let _ = self.cached.set(digest);
    }

    /// Returns whether the digest is from the fingerprint cache.
    pub(super) fn is_cached(&self) -> bool {
        self.cached.get().is_some()
    }

    /// Reads a range of bytes.
    ///
    /// # Errors
    /// [`Error::Changed`] or [`Error::Read`].
    ///
    /// # Panics
    /// If the range is not within the tensor.
    pub(super) fn read(&self, range: Range<usize>) -> Result<Bytes, Error> {
        assert!(range.start <= range.end && range.end <= self.len(), "bytes are not in the tensor");
        if let Some(bytes) = self.embedded() {
            return Ok(Bytes::Embedded(&bytes[range]));
        }
        let mut bytes = vec![0; range.len()];
        let (mut parts, mut rest, mut at) = (Vec::new(), &mut bytes[..], range.start);
        while !rest.is_empty() {
            let end = self.piece(at / self.piece_bytes).end.min(range.end);
            let (part, after) = rest.split_at_mut(end - at);
            parts.push((at, part));
            (rest, at) = (after, end);
        }
        in_parallel(parts, |(at, part)| self.read_part(at, part))?;
        Ok(Bytes::Owned(bytes))
    }

    /// Returns the digest of the content; reads what was not read before.
    ///
    /// # Errors
    /// [`Error::Changed`] or [`Error::Read`].
    pub(super) fn digest(&self) -> Result<Digest, Error> {
        if let Some(digest) = self.cached.get() {
            return Ok(*digest);
        }
        let unread = (0..self.pieces.len()).filter(|index| self.pieces[*index].get().is_none());
        in_parallel(unread.collect(), |index: usize| {
            let piece = self.piece(index);
            match self.embedded() {
                Some(bytes) => self.record(index, &bytes[piece]),
                None => self.read_part(piece.start, &mut vec![0; piece.len()]),
            }
        })?;
        let mut hash = Sha256::new();
        self.pieces.iter().filter_map(OnceLock::get).for_each(|digest| hash.update(digest));
        Ok(hash.finalize().into())
    }

    /// Content of a tensor embedded in the binary.
    fn embedded(&self) -> Option<&'static [u8]> {
        self.file.in_memory().map(|bytes| &bytes[self.range.start as usize..self.range.end as usize])
    }

    /// Range of a piece in the tensor.
    fn piece(&self, index: usize) -> Range<usize> {
        index * self.piece_bytes..((index + 1) * self.piece_bytes).min(self.len())
    }

    /// Reads bytes of one piece.
    fn read_part(&self, at: usize, out: &mut [u8]) -> Result<(), Error> {
        let index = at / self.piece_bytes;
        let piece = self.piece(index);
        if self.is_cached() {
            return self.file.read_at(self.range.start + at as u64, out);
        }
        if out.len() == piece.len() {
            self.file.read_at(self.range.start + at as u64, out)?;
            return self.record(index, out);
        }
        let mut whole = vec![0; piece.len()];
        self.file.read_at(self.range.start + piece.start as u64, &mut whole)?;
        self.record(index, &whole)?;
        out.copy_from_slice(&whole[at - piece.start..][..out.len()]);
        Ok(())
    }

    /// Records the digest of a piece, or compares it with that of an earlier read.
    fn record(&self, index: usize, bytes: &[u8]) -> Result<(), Error> {
        let digest: Digest = Sha256::digest(bytes).into();
        if *self.pieces[index].get_or_init(|| digest) == digest {
            return Ok(());
        }
        let Range { start, end } = self.piece(index);
        Err(self
            .file
            .changed(format!("bytes {start} to {end} of tensor {} differ between two reads", self.tensor)))
    }
}

/// Returns the memory of dropped [`Bytes`] to the system; the allocator would keep tens of MiB for later.
pub(super) fn return_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim has no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        // Writing to a string can't fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Runs jobs on as many threads as there are CPUs; returns one of the errors, if any.
pub(super) fn in_parallel<T: Send>(
    jobs: Vec<T>,
    run: impl Fn(T) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    static CPUS: OnceLock<usize> = OnceLock::new();
    let cpus = *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, Into::into));
    let threads = cpus.min(THREADS_MAX).min(jobs.len());
    let jobs = Mutex::new(jobs.into_iter());
    let work = || {
        loop {
            let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
            match job {
                Some(job) => run(job)?,
                None => return Ok(()),
            }
        }
    };
    std::thread::scope(|scope| {
        // Without another thread, this one does everything.
        let spawn = |_| std::thread::Builder::new().name("read".to_owned()).spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).filter_map(spawn).collect();
        let own = work();
        helpers.into_iter().fold(own, |outcome, helper| match helper.join() {
            Ok(joined) => outcome.and(joined),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use inflight_fixtures::TempDir;
    use proptest::prelude::*;

    use super::*;

    /// Bytes in the file before and after the tensor.
    const MARGIN: usize = 7;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 131 % 251) as u8).collect()
    }

    /// Writes a tensor to a file; returns the file, open for writing, and the tensor in pieces of up to 64 bytes.
    fn written(folder: &TempDir, content: &[u8], rows: usize) -> (File, TensorContent) {
        let path = folder.path().join("weights");
        let margin = [0; MARGIN];
        std::fs::write(&path, [&margin[..], content, &margin[..]].concat()).unwrap();
        let file = Arc::new(WeightFile::new("weights".to_owned(), File::open(&path).unwrap()).unwrap());
        let range = MARGIN as u64..(MARGIN + content.len()) as u64;
        let content = TensorContent::divided("tensor", &file, range, rows, 64);
        (File::options().write(true).open(path).unwrap(), content)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn a_digest_depends_on_every_byte_and_not_on_what_was_read_before(
            rows in 0usize..12, row in 1usize..90, place in any::<prop::sample::Index>(), flipped in 1u8..,
            reads in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..4),
        ) {
            let folder = TempDir::new("inflight-content").unwrap();
            let mut stored = bytes(rows.max(1) * row);
            let (_, tensor) = written(&folder, &stored, rows);
            let digest = tensor.digest().unwrap();
            let (_, again) = written(&folder, &stored, rows);
            for (a, b) in reads {
                let (a, b) = (a.index(stored.len() + 1), b.index(stored.len() + 1));
                let range = a.min(b)..a.max(b);
                prop_assert_eq!(&*again.read(range.clone()).unwrap(), &stored[range]);
            }
            prop_assert_eq!(again.digest().unwrap(), digest);
            let place = place.index(stored.len());
            stored[place] ^= flipped;
            let (_, other) = written(&folder, &stored, rows);
            prop_assert_ne!(other.digest().unwrap(), digest, "byte {}", place);
        }
    }

    #[test]
    fn bytes_that_change_between_two_reads_are_rejected() {
        let folder = TempDir::new("inflight-content").unwrap();
        let (file, tensor) = written(&folder, &bytes(640), 10);
        tensor.read(0..640).unwrap();
        // The last byte of the second piece; the times of the file play no part.
        file.write_all_at(&[0xff], (MARGIN + 127) as u64).unwrap();
        tensor.read(0..64).unwrap();
        let message = tensor.read(100..110).unwrap_err().to_string();
        for clue in
            ["weights changed while the model was loaded", "bytes 64 to 128 of tensor tensor", "renaming"]
        {
            assert!(message.contains(clue), "{clue}: {message}");
        }
    }

    #[test]
    fn a_file_that_is_truncated_ends_reads_with_an_error() {
        let folder = TempDir::new("inflight-content").unwrap();
        let (file, tensor) = written(&folder, &bytes(640), 10);
        file.set_len(300).unwrap();
        tensor.read(0..256).unwrap();
        for result in [tensor.read(0..640).map(drop), tensor.digest().map(drop), tensor.file().verify()] {
            let message = result.unwrap_err().to_string();
            assert!(message.contains("weights changed") && message.contains("654"), "{message}");
        }
    }

    #[test]
    fn every_change_of_a_file_is_noticed_at_the_end() {
        let folder = TempDir::new("inflight-content").unwrap();
        let (file, tensor) = written(&folder, &bytes(64), 1);
        tensor.file().verify().unwrap();
        let hour = std::time::Duration::from_secs(3600);
        file.set_modified(std::time::SystemTime::now() - hour).unwrap();
        assert!(tensor.file().verify().unwrap_err().to_string().contains("written to"));
        let (_file, tensor) = written(&folder, &bytes(64), 1);
        // The change time has the resolution of a clock tick.
        let deadline = std::time::Instant::now() + hour / 360;
        let message = loop {
            let path = folder.path().join("weights");
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
            match tensor.file().verify() {
                Err(error) => break error.to_string(),
                Ok(()) => assert!(std::time::Instant::now() < deadline, "a change was not noticed"),
            }
        };
        assert!(message.contains("permissions"), "{message}");
    }
}
