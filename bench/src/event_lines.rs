//! Server-sent events (SSE) whose data is one line each, as completions are.

use hyper::body::Bytes;
use tokio_util::bytes::BytesMut;
use tokio_util::codec::{Decoder as _, LinesCodec, LinesCodecError};

/// Maximum length of a line in bytes, far beyond that of a completion.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Error of a stream that is not SSE.
#[derive(Debug, thiserror::Error)]
pub enum EventLinesError {
    /// A line exceeds 1 MiB.
    #[error("the stream has a line of over a mebibyte")]
    LineTooLong,
    /// A line is not UTF-8.
    #[error("the stream is not UTF-8")]
    NotUtf8,
}

/// Data lines of a byte stream that arrives in arbitrary pieces. Buffers one incomplete line.
#[derive(Debug)]
pub struct EventLines {
    codec: LinesCodec,
    buffer: BytesMut,
}

impl Default for EventLines {
    fn default() -> Self {
        Self { codec: LinesCodec::new_with_max_length(LINE_BYTES_MAX), buffer: BytesMut::new() }
    }
}

impl EventLines {
    /// Takes the next bytes and calls `data` with the value of each `data` line that they complete. Skips
    /// comments, other fields and empty lines.
    ///
    /// # Errors
    /// [`EventLinesError`]; the stream cannot be read further.
    pub fn push(&mut self, piece: &Bytes, mut data: impl FnMut(&[u8])) -> Result<(), EventLinesError> {
        self.buffer.extend_from_slice(piece);
        loop {
            match self.codec.decode(&mut self.buffer) {
                Ok(Some(line)) => {
                    if let Some(value) = line.strip_prefix("data:") {
                        data(value.strip_prefix(' ').unwrap_or(value).as_bytes());
                    }
                }
                Ok(None) => return Ok(()),
                Err(LinesCodecError::MaxLineLengthExceeded) => return Err(EventLinesError::LineTooLong),
                Err(LinesCodecError::Io(_)) => return Err(EventLinesError::NotUtf8),
            }
        }
    }
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
            let mut lines = EventLines::default();
            let mut left = &stream[..];
            for cut in cuts.iter().cycle() {
                let (piece, rest) = left.split_at((*cut).min(left.len()));
                let taken = |data: &[u8]| parsed.push(String::from_utf8_lossy(data).into_owned());
                let pushed = lines.push(&Bytes::copy_from_slice(piece), taken);
                prop_assert!(pushed.is_ok(), "{:?}", pushed);
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
        let mut lines = EventLines::default();
        let piece = Bytes::from(vec![b'x'; 700 << 10]);
        assert!(lines.push(&piece, |_| ()).is_ok());
        assert!(matches!(lines.push(&piece, |_| ()), Err(EventLinesError::LineTooLong)));
    }
}
