use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Mmap, UncheckedAdvice};

use super::{Error, ModelSource, embedded};

/// Where a model's files are.
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

    /// What the model is called.
    pub(super) fn model_name(&self) -> String {
        match self {
            Self::Embedded(_) => embedded::NAME.to_owned(),
            // `.` and `..` have no name of their own.
            Self::Directory(path) => {
                let absolute = path.canonicalize().unwrap_or_else(|_| path.clone());
                absolute.file_name().map_or("model".into(), |name| name.to_string_lossy()).into_owned()
            }
        }
    }

    /// How messages call a file.
    pub(super) fn label(&self, name: &str) -> String {
        match self {
            Self::Directory(path) => path.join(name).display().to_string(),
            Self::Embedded(_) => format!("{name} of the embedded model"),
        }
    }

    /// A file's content, if it is there.
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

/// A file of a name that was given, and the directory that it lies in.
pub(super) fn open_file(path: &Path) -> Result<(Files, Bytes), Error> {
    let refuse =
        |error: io::Error| Error::NoFile { path: path.display().to_string(), reason: error.to_string() };
    let bytes = map(path).map_err(refuse)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Ok((Files::Directory(folder.unwrap_or(Path::new(".")).to_owned()), bytes))
}

/// A file's content, mapped or part of the binary. Cheap to clone.
#[derive(Clone)]
pub(super) enum Bytes {
    Mapped(Arc<Mmap>),
    Static(&'static [u8]),
}

impl Bytes {
    /// Gives the whole pages within a range back to the operating system, which has them in its cache of files.
    pub(super) fn release(&self, range: Range<usize>) {
        let Self::Mapped(map) = self else { return };
        let page = page_size();
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start < end {
            // SAFETY: the mapping is shared and read-only, so what is dropped is read from the file again.
            let advised =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
            if let Err(error) = advised {
                tracing::debug!(%error, "cannot release mapped pages of the checkpoint");
            }
        }
    }
}

fn page_size() -> usize {
    // SAFETY: it only asks for a constant of the system.
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
        // There is nothing to map, which some systems refuse.
        return Ok(Bytes::Static(&[]));
    }
    // SAFETY: a model's files are not changed while a worker has them open; that is part of how workers are
    // operated, as for every engine that maps weights. All reads go through this immutable view.
    let map = unsafe { Mmap::map(&file)? };
    Ok(Bytes::Mapped(Arc::new(map)))
}
