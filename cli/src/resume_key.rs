//! Resume keys: the secrets by which routers sign the cursors of streams.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::exit::CommandError;

/// Minimum length of a key in bytes.
const KEY_BYTES_MIN: usize = 32;

/// Reads the keys of a file, one on each line: the first signs, all verify.
///
/// # Errors
/// The file cannot be read, has no key or a short one.
pub fn read(path: &Path) -> Result<Vec<Vec<u8>>, CommandError> {
    let context = || format!("--resume-key-file {}", path.display());
    let text = fs::read_to_string(path).map_err(|error| CommandError::chain(&context(), &error))?;
    let keys = parse(&text);
    keys.map_err(|reason| CommandError::new(crate::exit::Exit::Failure, format!("{}: {reason}", context())))
}

fn parse(text: &str) -> Result<Vec<Vec<u8>>, String> {
    let keys: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if keys.is_empty() {
        return Err(format!("no key in it; write a line of {KEY_BYTES_MIN} random characters or more"));
    }
    if let Some(at) = keys.iter().position(|key| key.len() < KEY_BYTES_MIN) {
        let bytes = keys[at].len();
        return Err(format!("key {} has {bytes} bytes; it needs {KEY_BYTES_MIN} or more", at + 1));
    }
    Ok(keys.into_iter().map(|key| key.as_bytes().to_vec()).collect())
}

/// File with a random key, readable by this user only, which is removed on drop.
#[derive(Debug)]
pub struct TemporaryKey(PathBuf);

impl TemporaryKey {
    /// Creates the file.
    ///
    /// # Errors
    /// I/O error.
    pub fn create() -> io::Result<Self> {
        let name = format!("inflight-resume-key-{:032x}", rand::random::<u128>());
        let path = std::env::temp_dir().join(name);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let created = Self(path);
        writeln!(file, "{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>())?;
        Ok(created)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryKey {
    fn drop(&mut self) {
        // A file that is left in the folder of temporary files does no harm.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_key_and_short_ones_are_refused() {
        let (one, two) = ("a".repeat(32), "b".repeat(40));
        assert_eq!(parse(&format!("{one}\n\n {two} \n")), Ok(vec![one.clone().into(), two.into()]));
        assert!(parse("\n").unwrap_err().contains("no key"));
        assert!(parse(&format!("{one}\nshort")).unwrap_err().contains("key 2 has 5 bytes"));
        let path = {
            let key = TemporaryKey::create().unwrap();
            assert_eq!(read(key.path()).unwrap().len(), 1);
            key.path().to_owned()
        };
        assert!(!path.exists());
    }
}
