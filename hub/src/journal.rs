//! Parts of a file that have arrived, kept beside it.
//!
//! The file grows by one line for each part. A line that was cut off, or that is about a part which the disk has not, costs a digest that
//! differs at the end, and the whole file is fetched again.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use crate::HubError;

/// Parts of one file.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    bytes: u64,
    part_bytes: u64,
    done: Vec<bool>,
}

impl Journal {
    /// Opens the journal of a file; begins a new one if it is about another number of bytes.
    pub(crate) fn open(path: &Path, bytes: u64, part_bytes: u64) -> Result<Self, HubError> {
        let head = format!("{bytes} bytes in parts of {part_bytes}");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines();
        let is_same = lines.next() == Some(&head) && text.ends_with('\n');
        let mut done = vec![false; bytes.div_ceil(part_bytes) as usize];
        let mut options = OpenOptions::new();
        options.create(true).write(true);
        let opened =
            if is_same { options.append(true).open(path) } else { options.truncate(true).open(path) };
        let mut file = opened.map_err(HubError::file("write", path))?;
        if is_same {
            for part in lines.filter_map(|line| line.parse::<usize>().ok()) {
                if let Some(done) = done.get_mut(part) {
                    *done = true;
                }
            }
        } else {
            writeln!(file, "{head}").map_err(HubError::file("write", path))?;
        }
        Ok(Self { file, bytes, part_bytes, done })
    }

    /// Returns the parts that are missing.
    pub(crate) fn missing(&self) -> Vec<usize> {
        (0..self.done.len()).filter(|part| !self.done[*part]).collect()
    }

    /// Number of parts.
    pub(crate) fn parts(&self) -> usize {
        self.done.len()
    }

    /// Whether a part has arrived.
    pub(crate) fn has(&self, part: usize) -> bool {
        self.done[part]
    }

    /// Returns the first byte of a part, and the one behind its last.
    pub(crate) fn range(&self, part: usize) -> (u64, u64) {
        let from = part as u64 * self.part_bytes;
        (from, (from + self.part_bytes).min(self.bytes))
    }

    /// Bytes that have arrived.
    pub(crate) fn present(&self) -> u64 {
        let length = |part: usize| self.range(part).1 - self.range(part).0;
        (0..self.parts()).filter(|part| self.done[*part]).map(length).sum()
    }

    /// Notes that a part has arrived.
    pub(crate) fn add(&mut self, part: usize) -> std::io::Result<()> {
        self.done[part] = true;
        writeln!(self.file, "{part}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrived_is_known_after_an_interruption() {
        let folder = inflight_fixtures::TempDir::new("journal").unwrap();
        let path = folder.path().join("x");
        let mut journal = Journal::open(&path, 10, 4).unwrap();
        assert_eq!((journal.missing(), journal.range(2), journal.present()), (vec![0, 1, 2], (8, 10), 0));
        journal.add(2).unwrap();
        journal.add(0).unwrap();
        let journal = Journal::open(&path, 10, 4).unwrap();
        assert_eq!((journal.missing(), journal.present()), (vec![1], 6));
        assert_eq!(Journal::open(&path, 11, 4).unwrap().missing(), [0, 1, 2]);
        std::fs::write(&path, "11 bytes in parts of 4\n0\n77\n1").unwrap();
        assert_eq!(Journal::open(&path, 11, 4).unwrap().missing(), [0, 1, 2], "a line was cut off");
        assert_eq!(Journal::open(&path, 0, 4).unwrap().parts(), 0);
    }
}
