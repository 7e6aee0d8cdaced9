//! Generations of a call that were accepted.

use std::sync::Arc;

use super::generations::Generations;
use crate::cluster::bundle::Model;
use crate::output::response_stream::ResponseStream;
use crate::request::admitted_call::AdmittedCall;
use crate::request::cursor::CursorTracker;

/// Generations of a call that were accepted.
pub(crate) struct Started {
    pub(crate) request_id: String,
    /// Name of the model.
    pub(crate) model: String,
    /// Seconds since the epoch.
    pub(crate) created: u64,
    /// One stream for each prompt.
    pub(crate) streams: Vec<ResponseStream>,
    /// Cursor of a resumable stream.
    pub(crate) cursor: Option<CursorTracker>,
}

impl Started {
    /// Returns the id of the response object.
    pub(crate) fn id(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.request_id)
    }

    /// Whether the output of the first prompt is parsed.
    pub(crate) fn is_parsed(&self) -> bool {
        self.streams.first().is_some_and(|stream| stream.call().output.is_some())
    }

    /// Returns the bundle of the model.
    pub(crate) fn bundle(&self) -> Option<Arc<Model>> {
        self.streams.first().map(ResponseStream::bundle)
    }

    /// Returns the number of choices of each prompt.
    pub(crate) fn choices(&self) -> u32 {
        self.streams.first().map_or(1, |stream| stream.call().sampling.n)
    }

    /// Returns the maximum output tokens of all choices of all prompts.
    pub(crate) fn output_tokens_max(&self) -> u64 {
        let of = |call: &AdmittedCall| u64::from(call.max_tokens) * u64::from(call.sampling.n);
        self.streams.iter().map(|stream| of(stream.call())).sum()
    }

    /// Completes the texts of the prompts: one that was given as token ids is decoded.
    pub(crate) fn prompt_texts(&self, given: Vec<Option<String>>) -> Vec<String> {
        let text = |(given, stream): (Option<String>, &ResponseStream)| {
            given.unwrap_or_else(|| {
                stream.bundle().tokenizer.decode(&stream.call().prompt).unwrap_or_default()
            })
        };
        given.into_iter().zip(&self.streams).map(text).collect()
    }

    /// Returns the token ids of the prompts if they are `scored`, echoed with log probabilities; else none.
    pub(crate) fn scored_prompts(&self, scored: bool) -> Vec<Vec<u32>> {
        self.streams.iter().filter(|_| scored).map(|stream| stream.call().prompt.clone()).collect()
    }

    pub(crate) fn generations(self) -> Generations {
        Generations::new(self.streams)
    }

    /// Returns the generations with the cursor of their stream.
    pub(crate) fn split(self) -> (Generations, Option<CursorTracker>) {
        (Generations::new(self.streams), self.cursor)
    }
}
