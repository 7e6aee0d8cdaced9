//! Cursor of a stream: what a client has received, signed, so that any router with the same key can resume it.
//!
//! A cursor holds everything that decides the stream's tokens beside the request itself (seed, fingerprint),
//! a digest of the request, and for each choice its length in tokens and text with a digest of the tokens.
//! It is signed with HMAC-SHA256: clients cannot make a router bill other tokens as delivered before.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac as _};
use inflight_router_core::RequestSpec;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::clock;
use crate::output::event::GenerationEvent;

/// First byte of a cursor: the version of its format.
const VERSION: u8 = 1;
/// Length of the signature in bytes.
const TAG_BYTES: usize = 16;

/// Output of a choice that a client has received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChoicePosition {
    /// Tokens, the stop token included.
    pub(crate) tokens: u32,
    /// Bytes of text.
    pub(crate) text_bytes: u32,
    /// Digest of the tokens: each step hashes the digest so far and one token.
    digest: [u8; 8],
    /// Whether the end of the choice was received.
    pub(crate) finished: bool,
}

impl ChoicePosition {
    /// Appends a token.
    pub(crate) fn push(&mut self, token: u32) {
        let hash = Sha256::new().chain_update(self.digest).chain_update(token.to_le_bytes()).finalize();
        self.digest.copy_from_slice(&hash[..8]);
        self.tokens += 1;
    }

    /// Returns the position before the end of the choice was received.
    pub(crate) fn unfinished(&self) -> Self {
        Self { finished: false, ..*self }
    }

    /// Whether both have the same tokens.
    pub(crate) fn same_tokens(&self, other: &Self) -> bool {
        (self.tokens, self.digest) == (other.tokens, other.digest)
    }
}

/// Part of a stream of server-sent events, with the number of its events that were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stage {
    /// Events before the first output.
    Start(u8),
    /// Output of the choices.
    Output,
    /// Events after the last output.
    End(u8),
}

/// Position of a client in a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cursor {
    /// Random id of the stream, kept when it is resumed.
    pub(crate) stream: u128,
    /// Seed of the request.
    pub(crate) seed: u64,
    /// First bytes of the numerics fingerprint of the worker; empty before the dispatch.
    pub(crate) fingerprint: String,
    /// Digest of the request.
    pub(crate) request: RequestDigest,
    /// Start of the stream, in seconds since the Unix epoch.
    pub(crate) started_at: u32,
    /// Time of signing, in seconds since the Unix epoch.
    issued_at: u32,
    pub(crate) stage: Stage,
    /// Number of server-sent events so far.
    events: u32,
    pub(crate) choices: Vec<ChoicePosition>,
}

/// Digest of everything in a request that decides its tokens, and of its tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RequestDigest(pub(crate) [u8; 16]);

impl Cursor {
    /// Returns the cursor of a stream's start.
    pub(crate) fn start(
        stream: u128,
        seed: u64,
        request: RequestDigest,
        choices: u32,
        started_at: u32,
    ) -> Self {
        Self {
            stream,
            seed,
            fingerprint: String::new(),
            request,
            started_at,
            issued_at: started_at,
            stage: Stage::Start(0),
            events: 0,
            choices: vec![ChoicePosition::default(); choices as usize],
        }
    }

    /// Returns the stream id as text.
    pub(crate) fn stream_id(&self) -> String {
        stream_id(self.stream)
    }

    /// Returns the number of received tokens over all choices.
    pub(crate) fn tokens(&self) -> u64 {
        self.choices.iter().map(|choice| u64::from(choice.tokens)).sum()
    }

    /// Sets the fingerprint of the worker.
    fn set_fingerprint(&mut self, fingerprint: &str) {
        let end = fingerprint.len().min(RequestSpec::FINGERPRINT_PREFIX);
        // Fingerprints are hexadecimal; another one is kept whole, as a prefix would be no text.
        fingerprint.get(..end).unwrap_or(fingerprint).clone_into(&mut self.fingerprint);
    }
}

/// Returns a stream id as text, which is the request id of requests without one.
pub(crate) fn stream_id(stream: u128) -> String {
    format!("{stream:032x}")
}

/// Returns the time in seconds since the Unix epoch.
pub(crate) fn unix_seconds() -> u32 {
    u32::try_from(clock::since_unix_epoch().as_secs()).unwrap_or(u32::MAX)
}

/// Cursor that is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CursorError {
    /// Not a cursor of this version with a valid signature.
    #[error(
        "the cursor was changed, or issued by a router with another resume key; give all routers the same --resume-key-file"
    )]
    Signature,
    /// Issued too long ago.
    #[error("the cursor was issued {age} s ago; streams can be resumed for {most} s")]
    Stale { age: u32, most: u32 },
}

/// Keys that sign and verify cursors.
#[derive(Clone)]
pub(crate) struct CursorKeys {
    /// The first key signs; all of them verify, so that a key can be replaced.
    keys: Arc<[Hmac<Sha256>]>,
    /// Age in seconds up to which cursors are accepted.
    age_max: u32,
}

impl CursorKeys {
    /// Creates keys from secrets, the first of which signs; from a random one if there are none.
    pub(crate) fn new(secrets: &[Vec<u8>], age_max: std::time::Duration) -> Self {
        let random = || vec![rand::random::<[u8; 32]>().to_vec()];
        let secrets = if secrets.is_empty() { random() } else { secrets.to_vec() };
        let key = |secret: &Vec<u8>| {
            // The digest separates this use of the secret from others, and has a length that HMAC takes.
            let key = Sha256::new().chain_update(b"inflight cursor\0").chain_update(secret).finalize();
            let mut block = [0; 64];
            block[..key.len()].copy_from_slice(&key);
            <Hmac<Sha256> as hmac::Mac>::new(&block.into())
        };
        let age_max = u32::try_from(age_max.as_secs()).unwrap_or(u32::MAX);
        Self { keys: secrets.iter().map(key).collect(), age_max }
    }

    /// Returns the signed bytes of a cursor.
    pub(crate) fn sign(&self, cursor: &mut Cursor) -> Vec<u8> {
        cursor.issued_at = unix_seconds();
        // Serialization into a `Vec` fails only for types without a known length.
        let mut bytes = postcard::to_extend(cursor, vec![VERSION]).unwrap_or_default();
        if let Some(key) = self.keys.first() {
            let tag = key.clone().chain_update(&bytes).finalize().into_bytes();
            bytes.extend_from_slice(&tag[..TAG_BYTES]);
        }
        bytes
    }

    /// Returns the cursor in signed bytes.
    ///
    /// # Errors
    /// [`CursorError`] if it has no valid signature or is too old.
    pub(crate) fn verify(&self, bytes: &[u8]) -> Result<Cursor, CursorError> {
        let (content, tag) = bytes.split_last_chunk::<TAG_BYTES>().ok_or(CursorError::Signature)?;
        let signed = |key: &Hmac<Sha256>| {
            key.clone().chain_update(content).verify_truncated_left(tag.as_slice()).is_ok()
        };
        let (version, content) = match content.split_first() {
            Some(split) if self.keys.iter().any(signed) => split,
            _ => return Err(CursorError::Signature),
        };
        let cursor: Cursor = postcard::from_bytes(content).map_err(|_| CursorError::Signature)?;
        if *version != VERSION {
            return Err(CursorError::Signature);
        }
        let age = unix_seconds().saturating_sub(cursor.issued_at);
        if age > self.age_max {
            return Err(CursorError::Stale { age, most: self.age_max });
        }
        Ok(cursor)
    }

    /// Returns the bytes of a cursor in the text of an event id.
    ///
    /// # Errors
    /// [`CursorError::Signature`] if it is not base64.
    pub(crate) fn decode(id: &str) -> Result<Vec<u8>, CursorError> {
        URL_SAFE_NO_PAD.decode(id).map_err(|_| CursorError::Signature)
    }
}

/// Cursor of a stream that follows its events.
pub(crate) struct CursorTracker {
    keys: CursorKeys,
    cursor: Cursor,
}

impl CursorTracker {
    /// Creates a tracker that starts at a cursor.
    pub(crate) fn new(keys: CursorKeys, cursor: Cursor) -> Self {
        Self { keys, cursor }
    }

    /// Returns the start of the stream, in seconds since the Unix epoch.
    pub(crate) fn started_at(&self) -> u32 {
        self.cursor.started_at
    }

    /// Returns the part of the stream that the cursor is in.
    pub(crate) fn stage(&self) -> Stage {
        self.cursor.stage
    }

    /// Sets the part of the stream.
    pub(crate) fn set_stage(&mut self, stage: Stage) {
        self.cursor.stage = stage;
    }

    /// Returns the number of server-sent events so far.
    pub(crate) fn events(&self) -> u32 {
        self.cursor.events
    }

    /// Sets the number of server-sent events so far.
    pub(crate) fn set_events(&mut self, events: u32) {
        self.cursor.events = events;
    }

    /// Moves the cursor behind an event.
    pub(crate) fn observe(&mut self, event: &GenerationEvent) {
        match event {
            GenerationEvent::Started(started) => self.cursor.set_fingerprint(&started.fingerprint),
            GenerationEvent::FingerprintChanged { fingerprint, .. } => {
                self.cursor.set_fingerprint(fingerprint);
            }
            GenerationEvent::Delta(delta) if !delta.replayed => {
                if let Some(choice) = self.cursor.choices.get_mut(delta.choice as usize) {
                    *choice = delta.position;
                }
            }
            GenerationEvent::Finished(finished) => {
                if let Some(choice) = self.cursor.choices.get_mut(finished.choice as usize) {
                    *choice = ChoicePosition { finished: true, ..finished.position };
                }
            }
            GenerationEvent::PromptLogprobs { .. }
            | GenerationEvent::Delta(_)
            | GenerationEvent::Completed(_) => {}
        }
    }

    /// Returns the signed cursor.
    pub(crate) fn sign(&mut self) -> Vec<u8> {
        self.keys.sign(&mut self.cursor)
    }

    /// Appends the signed cursor as text for an event id.
    pub(crate) fn sign_text(&mut self, out: &mut Vec<u8>) {
        let bytes = self.sign();
        let start = out.len();
        let length = base64::encoded_len(bytes.len(), false).unwrap_or(0);
        out.resize(start + length, 0);
        // The length is that of the encoding, so this cannot fail.
        let _ = URL_SAFE_NO_PAD.encode_slice(bytes, &mut out[start..]);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn cursor() -> impl Strategy<Value = Cursor> {
        let choice = (any::<u32>(), any::<u32>(), any::<[u8; 8]>(), any::<bool>());
        let choices = proptest::collection::vec(choice, 0..16);
        (any::<u128>(), any::<u64>(), "[0-9a-f]{0,16}", any::<[u8; 16]>(), 0u8..4, choices).prop_map(
            |(stream, seed, fingerprint, request, stage, choices)| Cursor {
                fingerprint,
                stage: [Stage::Start(1), Stage::Output, Stage::End(0), Stage::End(9)][stage as usize],
                choices: choices
                    .into_iter()
                    .map(|(tokens, text_bytes, digest, finished)| ChoicePosition {
                        tokens,
                        text_bytes,
                        digest,
                        finished,
                    })
                    .collect(),
                ..Cursor::start(stream, seed, RequestDigest(request), 0, unix_seconds())
            },
        )
    }

    proptest! {
        #[test]
        fn a_cursor_is_read_back_and_no_changed_byte_is_accepted(
            mut cursor in cursor(), at in any::<prop::sample::Index>(), bit in 0u8..8, garbage in any::<Vec<u8>>(),
        ) {
            let keys = CursorKeys::new(&[b"a".to_vec()], HOUR);
            let bytes = keys.sign(&mut cursor);
            prop_assert_eq!(keys.verify(&bytes), Ok(cursor.clone()));
            let mut text = Vec::new();
            CursorTracker::new(keys.clone(), cursor.clone()).sign_text(&mut text);
            let text = String::from_utf8(text).unwrap();
            prop_assert!(keys.verify(&CursorKeys::decode(&text).unwrap()).is_ok());
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] ^= 1 << bit;
            prop_assert_eq!(keys.verify(&changed), Err(CursorError::Signature));
            prop_assert_eq!(keys.verify(&bytes[..at.index(bytes.len())]), Err(CursorError::Signature));
            prop_assert_eq!(keys.verify(&garbage), Err(CursorError::Signature));
            let rotated = CursorKeys::new(&[b"b".to_vec(), b"a".to_vec()], HOUR);
            prop_assert_eq!(rotated.verify(&bytes), Ok(cursor));
            let other = CursorKeys::new(&[], HOUR);
            prop_assert_eq!(other.verify(&bytes), Err(CursorError::Signature));
        }
    }

    #[test]
    fn an_old_cursor_is_stale() {
        let keys = CursorKeys::new(&[], Duration::from_secs(10));
        let mut cursor = Cursor::start(1, 2, RequestDigest::default(), 1, unix_seconds());
        cursor.issued_at = unix_seconds() - 11;
        let mut bytes = postcard::to_extend(&cursor, vec![VERSION]).unwrap();
        let tag = keys.keys[0].clone().chain_update(&bytes).finalize().into_bytes();
        bytes.extend_from_slice(&tag[..TAG_BYTES]);
        let error = keys.verify(&bytes).unwrap_err();
        assert!(matches!(error, CursorError::Stale { most: 10, .. }), "{error}");
    }
}
