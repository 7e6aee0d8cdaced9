//! Messages between a helper and its owner: a header of 16 bytes (length, kind and number of the request, little-endian), and a payload.

use std::io::{self, Read, Write};

const HEADER_BYTES: usize = 16;

/// Maximum bytes of a payload: a state to prepare.
const PAYLOAD_MAX: usize = 256 << 20;

/// Meaning of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To the helper: limits and the state to prepare.
    Prepare,
    /// To the helper: a request to fork for.
    Run,
    /// To the helper: end the process of a request.
    Cancel,
    /// To the helper: whether it runs.
    Ping,
    /// From the helper: the state is prepared. Its payload says what could not be confined.
    Ready,
    /// From the helper: the reason why no helper can prepare the state.
    Unusable,
    /// From the helper: the reason why it could not prepare the state, or begin a request, for now.
    Failed,
    /// From the helper: the reason why this machine cannot confine the processes of requests.
    Unconfined,
    /// From the helper: the message of a panic of a request's work.
    Panicked,
    /// From the helper: it runs.
    Pong,
    /// From the helper: the answer of a request, behind its processor time in microseconds.
    Answer,
    /// From the helper: the process of a request ended without an answer. Its payload is an [`crate::child::End`].
    Ended,
}

const KINDS: [Kind; 12] = [
    Kind::Prepare,
    Kind::Run,
    Kind::Cancel,
    Kind::Ping,
    Kind::Ready,
    Kind::Unusable,
    Kind::Failed,
    Kind::Unconfined,
    Kind::Panicked,
    Kind::Pong,
    Kind::Answer,
    Kind::Ended,
];

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) request: u64,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    pub(crate) fn new(kind: Kind, request: u64, payload: Vec<u8>) -> Self {
        Self { kind, request, payload }
    }

    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&(self.payload.len() as u32).to_le_bytes());
        header[4..8].copy_from_slice(&(self.kind as u32).to_le_bytes());
        header[8..].copy_from_slice(&self.request.to_le_bytes());
        to.write_all(&header)?;
        to.write_all(&self.payload)?;
        to.flush()
    }

    /// Reads a message; `None` at the end of the stream.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_BYTES];
        match from.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let (length, kind, request) = parse(&header)?;
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        Ok(Some(Self { kind, request, payload }))
    }
}

fn parse(header: &[u8; HEADER_BYTES]) -> io::Result<(usize, Kind, u64)> {
    let [a, b, c, d, e, f, g, h, request @ ..] = *header;
    let (length, kind) = (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]));
    match KINDS.get(kind as usize) {
        Some(kind) if length <= PAYLOAD_MAX => Ok((length, *kind, u64::from_le_bytes(request))),
        _ => Err(io::Error::other("a message that no helper and no owner sends")),
    }
}

/// Messages from bytes that come in pieces of any length.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
}

impl Frames {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next whole message.
    pub(crate) fn next(&mut self) -> io::Result<Option<Frame>> {
        let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let (length, kind, request) = parse(header)?;
        if self.bytes.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        let payload = self.bytes[HEADER_BYTES..HEADER_BYTES + length].to_vec();
        self.bytes.drain(..HEADER_BYTES + length);
        Ok(Some(Frame { kind, request, payload }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_whole_and_in_pieces() {
        let frames = KINDS
            .iter()
            .zip(1..)
            .map(|(kind, number)| Frame::new(*kind, number << 40, vec![7; number as usize]));
        let frames: Vec<Frame> = frames.collect();
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes).unwrap());
        let mut whole = &bytes[..];
        let mut pieces = Frames::default();
        let mut found = Vec::new();
        for byte in &bytes {
            pieces.push(&[*byte]);
            found.extend(pieces.next().unwrap());
        }
        assert_eq!(found, frames);
        for frame in frames {
            assert_eq!(Frame::read(&mut whole).unwrap(), Some(frame));
        }
        assert_eq!(Frame::read(&mut whole).unwrap(), None);
        bytes[5] = 1;
        assert!(Frame::read(&mut &bytes[..]).is_err());
    }
}
