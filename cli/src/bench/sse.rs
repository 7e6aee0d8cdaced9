//! Server-sent events, as far as completions use them: the `data` fields, one event each.

use hyper::body::Bytes;

/// Longest line that is kept.
const LINE_BYTES_MAX: usize = 1 << 20;

/// A line of more than a mebibyte: no completion has one.
#[derive(Debug, PartialEq, Eq)]
pub struct LineTooLong;

/// Puts lines together from pieces cut anywhere.
#[derive(Debug, Default)]
pub struct Events {
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
}

impl Events {
    /// Takes the next bytes and hands on the content of every `data` line they complete. Comments, other fields and the
    /// empty lines between events are passed over.
    ///
    /// # Errors
    /// [`LineTooLong`].
    pub fn feed(&mut self, piece: &Bytes, mut data: impl FnMut(&[u8])) -> Result<(), LineTooLong> {
        let mut piece = &piece[..];
        while let Some(end) = piece.iter().position(|byte| *byte == b'\n') {
            let (line, left) = (&piece[..end], &piece[end + 1..]);
            if self.rest.is_empty() {
                content(line).into_iter().for_each(&mut data);
            } else {
                self.rest.extend_from_slice(line);
                content(&self.rest).into_iter().for_each(&mut data);
                self.rest.clear();
            }
            piece = left;
        }
        if self.rest.len() + piece.len() > LINE_BYTES_MAX {
            return Err(LineTooLong);
        }
        self.rest.extend_from_slice(piece);
        Ok(())
    }
}

fn content(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let data = line.strip_prefix(b"data:")?;
    Some(data.strip_prefix(b" ").unwrap_or(data))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn events_are_the_same_however_the_bytes_are_cut(
            events in prop::collection::vec("[a-z{}\":]{0,20}", 0..8),
            separators in prop::collection::vec(prop_oneof![
                Just("\n\n"), Just("\r\n\r\n"), Just("\n: a comment\n\n"), Just("\nevent: x\nid: 7\n\n"),
            ], 8),
            cuts in prop::collection::vec(1..12usize, 1..100),
        ) {
            let mut stream = Vec::new();
            for (event, separator) in events.iter().zip(&separators) {
                stream.extend_from_slice(b"data: ");
                stream.extend_from_slice(event.as_bytes());
                stream.extend_from_slice(separator.as_bytes());
            }
            let mut seen = Vec::new();
            let mut parser = Events::default();
            let mut left = &stream[..];
            for cut in cuts.iter().cycle() {
                let (piece, rest) = left.split_at((*cut).min(left.len()));
                let fed = parser.feed(&Bytes::copy_from_slice(piece), |data| seen.push(String::from_utf8_lossy(data).into_owned()));
                prop_assert_eq!(fed, Ok(()));
                left = rest;
                if left.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(seen, events);
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut parser = Events::default();
        let piece = Bytes::from(vec![b'x'; 700 << 10]);
        assert_eq!(parser.feed(&piece, |_| ()), Ok(()));
        assert_eq!(parser.feed(&piece, |_| ()), Err(LineTooLong));
    }
}
