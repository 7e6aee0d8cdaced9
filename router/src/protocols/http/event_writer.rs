//! Buffer of server-sent events: their names, data, and ids, which are cursors that a client resumes from.

use serde::Serialize;
use tonic::codegen::Bytes;

use crate::output::event::GenerationEvent;
use crate::request::cursor::{CursorTracker, Stage};

/// Buffer of server-sent events. In a resumed stream, events that the client has received before are dropped.
#[derive(Default)]
pub(crate) struct EventWriter {
    bytes: Vec<u8>,
    /// Whether the client has received that event before.
    dropped: bool,
    ids: Option<EventIds>,
    /// Number of events written, those of earlier responses of the stream included.
    written: u32,
    /// Number of events that the client has received, if they are a function of the tokens: these are dropped.
    received: Option<u32>,
}

/// Ids of the events of a resumable stream.
struct EventIds {
    cursor: CursorTracker,
    /// Part of the stream that the client has received.
    received: Stage,
    /// Part of the stream that is being written.
    stage: Stage,
    /// Whether the client has received the output that is being written.
    replayed: bool,
}

impl EventIds {
    /// Counts the next event. Returns whether the client has received it before.
    fn advance(&mut self) -> bool {
        let received = match (&mut self.stage, self.received) {
            (Stage::Start(sent), Stage::Start(had)) | (Stage::End(sent), Stage::End(had)) => {
                *sent = sent.saturating_add(1);
                *sent <= had
            }
            (Stage::Start(_), Stage::Output | Stage::End(_)) => true,
            (Stage::End(sent), _) => {
                *sent = sent.saturating_add(1);
                false
            }
            (Stage::Output, _) => self.replayed,
        };
        if !received {
            self.cursor.set_stage(self.stage);
        }
        received
    }
}

impl EventWriter {
    /// Creates a writer whose events have ids, if there is a cursor. `counted`: equal streams have equal events.
    pub(crate) fn new(cursor: Option<CursorTracker>, counted: bool) -> Self {
        let had = cursor.as_ref().map_or(0, CursorTracker::events);
        let (written, received) = if counted { (0, Some(had)) } else { (had, None) };
        let ids = cursor.map(|cursor| EventIds {
            received: cursor.stage(),
            stage: Stage::Start(0),
            replayed: false,
            cursor,
        });
        Self { ids, written, received, ..Self::default() }
    }

    /// Prepares for the events of an output.
    pub(crate) fn observe(&mut self, event: &GenerationEvent) {
        let Some(ids) = &mut self.ids else { return };
        ids.cursor.observe(event);
        if matches!(event, GenerationEvent::Delta(_) | GenerationEvent::Finished(_)) {
            ids.stage = Stage::Output;
            ids.replayed = !event.is_new_output();
        }
    }

    /// Prepares for the events after the last output.
    pub(crate) fn observe_end(&mut self) {
        if let Some(ids) = &mut self.ids {
            ids.stage = Stage::End(0);
        }
    }

    /// Returns the number of events written, those of earlier responses of the stream included.
    pub(crate) fn written(&self) -> u32 {
        self.written
    }

    /// Returns the length of the buffer in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes the content of the buffer.
    pub(crate) fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.bytes).into()
    }

    /// Appends an event without a name.
    pub(crate) fn data(&mut self, data: &impl Serialize) {
        self.begin(None);
        self.json(data);
    }

    /// Appends an event.
    pub(crate) fn event(&mut self, name: &str, data: &impl Serialize) {
        self.begin(Some(name));
        self.json(data);
    }

    /// Appends an event without id, which is never dropped: `data`, which has no line break, and an optional
    /// name.
    pub(crate) fn text(&mut self, name: Option<&str>, data: &[u8]) {
        self.name(name);
        self.bytes.extend_from_slice(b"data: ");
        self.bytes.extend_from_slice(data);
        self.bytes.extend_from_slice(b"\n\n");
    }

    /// Appends an event of a failure: without id, as nothing can be resumed behind it, and never dropped.
    pub(crate) fn failure(&mut self, name: &str, data: &impl Serialize) {
        self.written = self.written.saturating_add(1);
        self.dropped = false;
        self.name(Some(name));
        self.bytes.extend_from_slice(b"data: ");
        self.json(data);
    }

    /// Appends a comment.
    pub(crate) fn comment(&mut self, comment: &[u8]) {
        self.bytes.extend_from_slice(comment);
    }

    fn begin(&mut self, name: Option<&str>) {
        self.dropped = self.ids.as_mut().is_some_and(EventIds::advance);
        if let Some(received) = self.received {
            self.written = self.written.saturating_add(1);
            self.dropped = self.written <= received;
        }
        if self.dropped {
            return;
        }
        if self.received.is_none() {
            self.written = self.written.saturating_add(1);
        }
        if let Some(ids) = &mut self.ids {
            ids.cursor.set_events(self.written);
            self.bytes.extend_from_slice(b"id: ");
            ids.cursor.sign_text(&mut self.bytes);
            self.bytes.push(b'\n');
        }
        self.name(name);
        self.bytes.extend_from_slice(b"data: ");
    }

    fn name(&mut self, name: Option<&str>) {
        if let Some(name) = name {
            self.bytes.extend_from_slice(b"event: ");
            self.bytes.extend_from_slice(name.as_bytes());
            self.bytes.push(b'\n');
        }
    }

    fn json(&mut self, data: &impl Serialize) {
        if self.dropped {
            return;
        }
        // JSON has no line breaks outside of strings, where they are escaped. A `Vec` takes every write, and
        // all keys are strings, so this cannot fail.
        let _ = serde_json::to_writer(&mut self.bytes, data);
        self.bytes.extend_from_slice(b"\n\n");
    }
}
