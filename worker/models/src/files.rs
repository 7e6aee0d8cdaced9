//! Read access to model files: memory-mapped from a directory, or embedded in the binary.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Mmap, UncheckedAdvice};

use super::embedded;
use super::error::Error;
use super::source::ModelSource;

/// Location of a model's files.
pub(super) enum Files {
    Directory(PathBuf),
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Files {
    pub(super) fn of(source: &ModelSource) -> Result<Self, Error> {
        match source {
            ModelSource::Embedded => Ok(Self::Embedded(embedded::FILES)),
            ModelSource::Directory(path) => {
                let refuse = |reason: String| Error::NoDirectory { path: path.display().to_string(), reason };
                let metadata = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
                if metadata.is_dir() {
                    Ok(Self::Directory(path.clone()))
                } else {
                    Err(refuse("it is a file".to_owned()))
                }
            }
        }
    }

    /// Default name of the model.
    pub(super) fn model_name(&self) -> String {
        match self {
            Self::Embedded(_) => embedded::NAME.to_owned(),
            // Canonicalized, because `.` and `..` have no file name.
            Self::Directory(path) => {
                let absolute = path.canonicalize().unwrap_or_else(|_| path.clone());
                absolute.file_name().map_or("model".into(), |name| name.to_string_lossy()).into_owned()
            }
        }
    }

    /// Label of a file for messages.
    pub(super) fn label(&self, name: &str) -> String {
        match self {
            Self::Directory(path) => path.join(name).display().to_string(),
            Self::Embedded(_) => format!("{name} of the embedded model"),
        }
    }

    /// Opens a file; `None` if it does not exist.
    pub(super) fn open(&self, name: &str) -> Result<Option<Bytes>, Error> {
        let path = match self {
            Self::Directory(path) => path.join(name),
            Self::Embedded(files) => {
                return Ok(files
                    .iter()
                    .find(|(file, _)| *file == name)
                    .map(|(_, bytes)| Bytes::Static(bytes)));
            }
        };
        match map(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Read { file: self.label(name), source }),
        }
    }
}

/// Opens the file at `path`; returns its directory and content.
pub(super) fn open_file(path: &Path) -> Result<(Files, Bytes), Error> {
    let refuse =
        |error: io::Error| Error::NoFile { path: path.display().to_string(), reason: error.to_string() };
    let bytes = map(path).map_err(refuse)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Ok((Files::Directory(folder.unwrap_or(Path::new(".")).to_owned()), bytes))
}

/// Content of a file, memory-mapped or embedded. Cheap to clone.
#[derive(Clone)]
pub(super) enum Bytes {
    Mapped(Arc<Mmap>),
    Static(&'static [u8]),
}

impl Bytes {
    /// Releases the resident pages within `range`; they stay in the page cache and can be read again.
    pub(super) fn release(&self, range: Range<usize>) {
        let Self::Mapped(map) = self else { return };
        let page = page_size();
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start < end {
            // SAFETY: the mapping is file-backed and read-only, so MADV_DONTNEED only drops clean pages,
            // which later reads fault in from the file again; the range lies within the mapping.
            let advised =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
            if let Err(error) = advised {
                tracing::debug!(%error, "cannot release mapped pages of the checkpoint");
            }
        }
    }
}

fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

fn map(path: &Path) -> io::Result<Bytes> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file"));
    }
    if metadata.len() == 0 {
        // mmap rejects empty files.
        return Ok(Bytes::Static(&[]));
    }
    // SAFETY: the mapping is private to this process and read-only. That the file is not modified while it is
    // mapped is an operating requirement, as for every engine that maps weights.
    let map = unsafe { Mmap::map(&file)? };
    Ok(Bytes::Mapped(Arc::new(map)))
}
