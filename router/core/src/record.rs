//! Record and replay: a log of all events of a dispatcher, from which its commands are reproduced offline.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Command, Dispatcher, DispatcherOptions, Event, PlacementKind};

/// First bytes of a log, including the format version.
const MAGIC: &[u8; 8] = b"inflrou4";

/// Configuration of the recorded dispatcher.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    options: DispatcherOptions,
    placement: PlacementKind,
    seed: u64,
}

/// Log of a dispatcher's events, with the bytes not drained yet. An event is recorded in two steps:
/// [`Recording::event`] before it is applied, [`Recording::commands`] after it.
#[derive(Debug)]
pub struct Recording {
    bytes: Vec<u8>,
}

impl Recording {
    /// Creates a log that starts with the dispatcher's configuration: its options, and its placement policy
    /// with the seed of [`PlacementKind::build`].
    pub fn new(options: DispatcherOptions, placement: PlacementKind, seed: u64) -> Self {
        let mut log = Self { bytes: MAGIC.to_vec() };
        log.append(&Header { options, placement, seed });
        log
    }

    /// Records an event before it is applied.
    pub fn event(&mut self, event: &Event, now: Duration) {
        self.append(&(now, event));
    }

    /// Records the commands that followed from the event.
    pub fn commands(&mut self, commands: &[Command]) {
        self.bytes.extend_from_slice(&digest_of(commands).to_le_bytes());
    }

    /// Takes the bytes recorded since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Appends a value with its digest, by which a replay detects damage before it applies an event that no router has
    /// made.
    fn append(&mut self, value: &impl Serialize) {
        // Writing to memory fails only for types without a known length, which these do not have.
        if let Ok(bytes) = postcard::to_allocvec(value) {
            self.bytes.extend_from_slice(&bytes);
            self.bytes.extend_from_slice(&digest(&bytes).to_le_bytes());
        }
    }
}

/// Returns the digest of commands.
fn digest_of(commands: &[Command]) -> u64 {
    digest(&postcard::to_allocvec(commands).unwrap_or_default())
}

/// Returns the FNV-1a digest of bytes.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Reason why a log cannot be replayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// Not a log of this version, or a damaged one.
    #[error("the log is malformed at byte {at}: expected {what}")]
    Malformed {
        /// Byte offset.
        at: usize,
        /// Expected content.
        what: &'static str,
    },
    /// The dispatcher decides otherwise than at recording time, most likely because its version differs.
    #[error("the commands of event {event} (at byte {at}) are not those that were recorded")]
    Diverged {
        /// Number of events replayed before.
        event: u64,
        /// Byte offset.
        at: usize,
    },
}

/// Whether bytes begin like the log of a router.
pub fn is_recording(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Replays a log and calls `each` with every event, its time and its commands. Returns the number
/// of events. A log truncated in the middle of a record, as by a killed process, is replayed up to that record.
///
/// # Errors
/// [`ReplayError`]; the commands passed to `each` before are those that were recorded.
pub fn replay(bytes: &[u8], mut each: impl FnMut(&Event, Duration, &[Command])) -> Result<u64, ReplayError> {
    let at = |rest: &[u8]| bytes.len() - rest.len();
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        return Err(ReplayError::Malformed { at: 0, what: "the log of a router of this version" });
    };
    let header = take::<Header>(rest).ok().flatten();
    let (header, mut rest) =
        header.ok_or(ReplayError::Malformed { at: MAGIC.len(), what: "a dispatcher's options" })?;
    let mut dispatcher = Dispatcher::new(header.options, header.placement.build(header.seed));
    let mut commands = Vec::new();
    let mut events = 0;
    while !rest.is_empty() {
        let ((now, event), after) = match take::<(Duration, Event)>(rest) {
            Ok(Some(taken)) => taken,
            Ok(None) => break,
            Err(Damaged) => return Err(ReplayError::Malformed { at: at(rest), what: "an event" }),
        };
        let Some((recorded, after)) = after.split_first_chunk::<8>() else { break };
        commands.clear();
        dispatcher.apply(event.clone(), now, &mut commands);
        if digest_of(&commands) != u64::from_le_bytes(*recorded) {
            return Err(ReplayError::Diverged { event: events, at: at(rest) });
        }
        each(&event, now, &commands);
        events += 1;
        rest = after;
    }
    Ok(events)
}

/// Value that was not recorded like this.
struct Damaged;

/// Takes a value and its digest from the beginning of `bytes`; `None` if they end before.
fn take<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<Option<(T, &'a [u8])>, Damaged> {
    let (value, rest) = match postcard::take_from_bytes::<T>(bytes) {
        Ok(taken) => taken,
        Err(postcard::Error::DeserializeUnexpectedEnd) => return Ok(None),
        Err(_) => return Err(Damaged),
    };
    let Some((recorded, behind)) = rest.split_first_chunk::<8>() else { return Ok(None) };
    let taken = &bytes[..bytes.len() - rest.len()];
    if digest(taken) == u64::from_le_bytes(*recorded) { Ok(Some((value, behind))) } else { Err(Damaged) }
}
