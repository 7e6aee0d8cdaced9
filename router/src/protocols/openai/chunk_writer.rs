//! Writer of the chunks of a streamed chat or text completion: what they have in common around their choices.

use serde::Serialize;

use crate::output::event::{Completed, Delta, Started};
use crate::protocols::http;
use crate::protocols::http::event_writer::EventWriter;
use crate::protocols::http::sampling::StreamOptions;
use crate::protocols::http::usage::{TimingsBody, UsageBody};

/// Writer of chunks, whose choices' endings are of type `E`.
pub(super) struct ChunkWriter<E> {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    fingerprint: String,
    /// Whether the client has not got the fingerprint.
    fingerprint_is_new: bool,
    options: StreamOptions,
    with_timings: bool,
    /// Choices that have not ended.
    open: usize,
    /// Prompts whose usage is not known.
    uncounted: usize,
    /// Last end of a choice, whose chunk waits for the timings.
    last: Option<E>,
    prompt_tokens: u32,
    completion_tokens: u32,
    usage: UsageBody,
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'a str>,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

/// Place of a chunk in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Output follows.
    Within,
    /// A choice ends with it.
    End,
    /// All choices have ended with it, and it carries the timings.
    Last,
}

impl<E> ChunkWriter<E> {
    /// Creates the writer of a call whose ids begin with `prefix`.
    pub(super) fn new(
        started: &http::Started,
        (prefix, object): (&str, &'static str),
        options: StreamOptions,
        with_timings: bool,
    ) -> Self {
        Self {
            id: started.id(prefix),
            object,
            created: started.created,
            model: started.model.clone(),
            fingerprint: String::new(),
            fingerprint_is_new: true,
            options,
            with_timings,
            open: started.streams.len() * started.choices() as usize,
            uncounted: started.streams.len(),
            last: None,
            prompt_tokens: 0,
            completion_tokens: 0,
            usage: UsageBody::default(),
            timings: None,
        }
    }

    /// Takes the start of a prompt's generation.
    pub(super) fn start(&mut self, started: Started) {
        self.prompt_tokens += started.prompt_tokens;
        self.change_fingerprint(started.fingerprint);
    }

    /// Takes the fingerprint of the workers from here on.
    pub(super) fn change_fingerprint(&mut self, fingerprint: String) {
        self.fingerprint_is_new |= self.fingerprint != fingerprint;
        self.fingerprint = fingerprint;
    }

    /// Counts the tokens of a delta.
    pub(super) fn count(&mut self, delta: &Delta) {
        self.completion_tokens += delta.token_ids.len() as u32;
    }

    /// Takes the end of a choice. Returns it if its chunk is due ([`Place::End`]): the last one waits for the timings that its chunk carries.
    pub(super) fn finish(&mut self, ending: E) -> Option<E> {
        self.open = self.open.saturating_sub(1);
        if self.with_timings && self.open == 0 && !self.options.include_usage() {
            self.last = Some(ending);
            return None;
        }
        Some(ending)
    }

    /// Takes the counts of a prompt. Returns the end of a choice whose chunk is due ([`Place::Last`]).
    pub(super) fn complete(&mut self, prompt: usize, completed: Completed) -> Option<E> {
        self.usage.add(&completed.usage);
        if prompt == 0 && self.with_timings {
            self.timings = Some(completed.timings.into());
        }
        self.uncounted = self.uncounted.saturating_sub(1);
        self.last.take_if(|_| self.uncounted == 0)
    }

    /// Writes a chunk of one choice.
    pub(super) fn choice(&mut self, choice: impl Serialize, place: Place, out: &mut EventWriter) {
        let so_far = || UsageBody::so_far(self.prompt_tokens, self.completion_tokens);
        let usage = self.options.of_chunk(so_far);
        let timings = self.timings.filter(|_| place == Place::Last);
        self.chunk(&[choice], place, usage, timings, out);
    }

    /// Writes the end of the stream.
    pub(super) fn end(&mut self, out: &mut EventWriter) {
        if self.options.include_usage() {
            let (usage, timings) = (self.usage, self.timings);
            let none: &[()] = &[];
            self.chunk(none, Place::Last, Some(Some(usage)), timings, out);
        }
        out.text(None, b"[DONE]");
    }

    fn chunk(
        &mut self,
        choices: &[impl Serialize],
        place: Place,
        usage: Option<Option<UsageBody>>,
        timings: Option<TimingsBody>,
        out: &mut EventWriter,
    ) {
        // Client libraries that accumulate a stream read the fingerprint from its first or its last chunk.
        let is_new = std::mem::take(&mut self.fingerprint_is_new);
        let system_fingerprint = (is_new || place != Place::Within).then_some(&*self.fingerprint);
        let (id, model) = (&*self.id, &*self.model);
        let (object, created) = (self.object, self.created);
        out.data(&Chunk { id, object, created, model, system_fingerprint, choices, usage, timings });
    }
}
