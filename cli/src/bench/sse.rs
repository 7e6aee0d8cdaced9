//! Incremental parser of server-sent events (SSE), limited to single-line `data` fields.

use hyper::body::Bytes;

/// Maximum length of a buffered line.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Error of a line of more than 1 MiB, which no completion has.
#[derive(Debug, PartialEq, Eq)]
pub struct LineTooLong;

/// Parser of a byte stream that arrives in arbitrary pieces.
#[derive(Debug, Default)]
pub struct SseParser {
    /// Beginning of an incomplete line.
    rest: Vec<u8>,
}

impl SseParser {
    /// Parses the next bytes and calls `data` with the value of each `data` line that they complete. Skips
    /// comments, other fields and empty lines.
    ///
    /// # Errors
    /// [`LineTooLong`] if an incomplete line exceeds 1 MiB.
    pub fn push(&mut self, piece: &Bytes, mut data: impl FnMut(&[u8])) -> Result<(), LineTooLong> {
        let mut piece = &piece[..];
        while let Some(end) = piece.iter().position(|byte| *byte == b'\n') {
            let (line, left) = (&piece[..end], &piece[end + 1..]);
            if self.rest.is_empty() {
                data_field(line).into_iter().for_each(&mut data);
            } else {
                self.rest.extend_from_slice(line);
                data_field(&self.rest).into_iter().for_each(&mut data);
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

fn data_field(line: &[u8]) -> Option<&[u8]> {
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
        fn events_do_not_depend_on_how_the_bytes_are_split(
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
            let mut parsed = Vec::new();
            let mut parser = SseParser::default();
            let mut left = &stream[..];
            for cut in cuts.iter().cycle() {
                let (piece, rest) = left.split_at((*cut).min(left.len()));
                let pushed = parser.push(&Bytes::copy_from_slice(piece), |data| parsed.push(String::from_utf8_lossy(data).into_owned()));
                prop_assert_eq!(pushed, Ok(()));
                left = rest;
                if left.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(parsed, events);
        }
    }

    #[test]
    fn a_line_without_end_is_rejected() {
        let mut parser = SseParser::default();
        let piece = Bytes::from(vec![b'x'; 700 << 10]);
        assert_eq!(parser.push(&piece, |_| ()), Ok(()));
        assert_eq!(parser.push(&piece, |_| ()), Err(LineTooLong));
    }
}
