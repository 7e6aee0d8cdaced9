//! Read access to model files: in a directory, or embedded in the binary.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::embedded;
use super::error::Error;
use super::weight_file::WeightFile;

/// Location of a model's files.
pub(super) enum Files {
    Directory(PathBuf),
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl Files {
    /// Files of a directory in the Hugging Face layout.
    pub(super) fn of_directory(path: &Path) -> Result<Self, Error> {
        let refuse = |reason: String| Error::NoDirectory { path: path.display().to_string(), reason };
        let metadata = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
        if metadata.is_dir() {
            Ok(Self::Directory(path.to_owned()))
        } else {
            Err(refuse("it is a file".to_owned()))
        }
    }

    /// Label of a file for messages.
    pub(super) fn label(&self, name: &str) -> String {
        match self {
            Self::Directory(path) => path.join(name).display().to_string(),
            Self::Embedded(_) => format!("{name} of the embedded model"),
        }
    }

    /// Reads a file without tensors into memory; `None` if it does not exist.
    pub(super) fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, Error> {
        let path = match self {
            Self::Directory(path) => path.join(name),
            Self::Embedded(files) => return Ok(embedded_file(files, name).map(Cow::Borrowed)),
        };
        let read = || {
            let mut bytes = Vec::new();
            open_regular(&path)?.read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        Ok(existing(read()).map_err(|source| Error::Read { file: self.label(name), source })?.map(Cow::Owned))
    }

    /// Returns the names of the files in a folder that end with `ending`; none if there is no such folder.
    pub(super) fn list(&self, folder: &str, ending: &str) -> Result<Vec<String>, Error> {
        let Self::Directory(path) = self else { return Ok(Vec::new()) };
        let list = || {
            let entries = std::fs::read_dir(path.join(folder))?.map(|entry| Ok(entry?.file_name()));
            entries.collect::<io::Result<Vec<_>>>()
        };
        let names = existing(list())
            .map_err(|source| Error::Read { file: self.label(folder), source })?
            .unwrap_or_default();
        let names = names.into_iter().filter_map(|name| name.into_string().ok());
        Ok(names.filter(|name| name.ends_with(ending)).collect())
    }

    /// Opens a weight file; `None` if it does not exist.
    pub(super) fn open_weights(&self, name: &str) -> Result<Option<WeightFile>, Error> {
        let label = self.label(name);
        let path = match self {
            Self::Directory(path) => path.join(name),
            Self::Embedded(files) => {
                return Ok(embedded_file(files, name).map(|bytes| WeightFile::embedded(label, bytes)));
            }
        };
        let opened = open_regular(&path).and_then(|file| WeightFile::new(label.clone(), file));
        existing(opened).map_err(|source| Error::Read { file: label, source })
    }
}

/// Opens the weight file of the embedded model; returns its other files, too.
pub(super) fn open_embedded() -> Result<(Files, WeightFile), Error> {
    let files = Files::Embedded(embedded::FILES);
    let missing = || Error::MissingFile {
        file: files.label(embedded::WEIGHTS),
        advice: "this binary was built without it; choose a model with --model",
    };
    let weights = files.open_weights(embedded::WEIGHTS)?.ok_or_else(missing)?;
    Ok((files, weights))
}

/// Opens the weight file at `path`; returns its directory, too.
pub(super) fn open_file(path: &Path) -> Result<(Files, WeightFile), Error> {
    let label = path.display().to_string();
    let refuse = |error: io::Error| Error::NoFile { path: label.clone(), reason: error.to_string() };
    let file = open_regular(path).and_then(|file| WeightFile::new(label.clone(), file)).map_err(refuse)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Ok((Files::Directory(folder.unwrap_or(Path::new(".")).to_owned()), file))
}

fn embedded_file(files: &[(&str, &'static [u8])], name: &str) -> Option<&'static [u8]> {
    files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| *bytes)
}

fn open_regular(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file"));
    }
    Ok(file)
}

/// Turns the error for a missing file into `None`.
fn existing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
