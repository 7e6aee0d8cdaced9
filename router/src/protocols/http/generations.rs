//! Response streams of the prompts of one call.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt as _};

use crate::outcome::Outcome;
use crate::output::collected::Collected;
use crate::output::event::GenerationEvent;
use crate::output::response_stream::{GenerationEvents, ResponseStream};

/// Response streams of a call, one for each prompt. Yields the index of the prompt with each event; ends with
/// the last stream or at the first failure, which cancels the others.
pub(crate) struct Generations {
    streams: Vec<Option<GenerationEvents>>,
    /// Prompt whose stream is polled first.
    next: usize,
}

impl Generations {
    pub(crate) fn new(streams: Vec<ResponseStream>) -> Self {
        let streams = streams.into_iter().map(|stream| Some(stream.into_events()));
        Self { streams: streams.collect(), next: 0 }
    }

    /// Reads all streams to their ends.
    ///
    /// # Errors
    /// The first failure of a stream.
    pub(crate) async fn collect(mut self) -> Result<Vec<Collected>, Outcome> {
        let mut prompts: Vec<Collected> = self.streams.iter().map(|_| Collected::default()).collect();
        while let Some(event) = self.next().await {
            let (prompt, event) = event?;
            prompts[prompt].add(event);
        }
        Ok(prompts)
    }
}

impl Stream for Generations {
    type Item = Result<(usize, GenerationEvent), Outcome>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let mut open = false;
        for offset in 0..this.streams.len() {
            let prompt = (this.next + offset) % this.streams.len();
            let Some(stream) = &mut this.streams[prompt] else { continue };
            match Pin::new(stream).poll_next(context) {
                Poll::Pending => open = true,
                Poll::Ready(Some(Ok(event))) => {
                    // Fair among streams that are always ready, and in order within each.
                    this.next = (prompt + 1) % this.streams.len();
                    return Poll::Ready(Some(Ok((prompt, event))));
                }
                Poll::Ready(Some(Err(outcome))) => {
                    this.streams.clear();
                    return Poll::Ready(Some(Err(outcome)));
                }
                Poll::Ready(None) => this.streams[prompt] = None,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}
