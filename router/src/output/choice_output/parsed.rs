//! Parsed output of one choice: reasoning, content and tool calls.
//!
//! Each token is a delta of its own, so that the events of a stream are a function of its tokens: a resumed stream has the
//! same events, whatever arrives together.

use inflight_contract::{FinishReason, PositionLogprobs};
use inflight_output_parser::{OutputEnd, OutputEvent};

use crate::dispatcher::request::UnreadOutput;
use crate::outcome::Outcome;
use crate::output::choice_output::{ChoiceEnding, ChoiceOutput, TakenOutput};
use crate::output::event::{Delta, content};
use crate::request::admitted_call::AdmittedCall;
use crate::text::Vocabulary;

impl ChoiceOutput {
    /// Appends new tokens of an output that is parsed.
    ///
    /// # Errors
    /// [`Outcome::ResumeDiverged`] if they are not those that the client has received before.
    pub(crate) fn take_parsed(
        &mut self,
        fresh: UnreadOutput,
        call: &AdmittedCall,
        vocabulary: &Vocabulary,
    ) -> Result<TakenOutput, Outcome> {
        let UnreadOutput { tokens, logprobs, end } = fresh;
        let stopped = end == Some(FinishReason::Stop);
        self.last_token = tokens.last().copied().or(self.last_token);
        let stop_token_id = self.last_token.filter(|_| stopped);
        let shown = tokens.len() - usize::from(stopped && !tokens.is_empty());
        let mut logprobs = logprobs.into_iter();
        let (mut deltas, mut last_parts, mut ending) = (Vec::new(), Vec::new(), None);
        for token in &tokens[..shown] {
            self.tokens += 1;
            let mut text = String::new();
            let (parts, stop) = self.parse_token(*token, call, vocabulary, &mut text);
            deltas.extend(self.delta(&text, parts, Some((*token, logprobs.next())), call)?);
            if let Some(stop) = stop {
                let reason = FinishReason::Stop;
                ending = Some(ChoiceEnding { reason, stop: call.stop[stop].clone(), stop_token_id: None });
                break;
            }
        }
        if let (None, Some(reason)) = (&ending, end) {
            let mut text = String::new();
            if let Some(token) = tokens.get(shown) {
                self.tokens += 1;
                deltas.extend(self.delta("", Vec::new(), Some((*token, logprobs.next())), call)?);
            }
            let unless = Some(ChoiceEnding { reason, stop: String::new(), stop_token_id });
            ending = self.flush(&mut text, call, unless);
            last_parts.extend(self.parser.iter_mut().flat_map(|parser| parser.push_text(&text)));
            self.position.text_bytes += text.len() as u32;
        }
        let Some(ending) = ending else { return Ok(TakenOutput { deltas, finished: None }) };
        self.ended = true;
        let received = self.replay.unwrap_or_default();
        let short = self.position.tokens < received.tokens;
        if short || (received.finished && self.position != received.unfinished()) {
            return Err(Outcome::ResumeDiverged { choice: self.index });
        }
        let end = if ending.reason == FinishReason::Length { OutputEnd::Cut } else { OutputEnd::Model };
        last_parts.extend(self.parser.iter_mut().flat_map(|parser| parser.finish(end)));
        let finished = Some(self.finished(ending, last_parts));
        Ok(TakenOutput { deltas, finished })
    }

    /// Parses a token. Returns its parts, and the index of the stop string that it completes.
    fn parse_token(
        &mut self,
        token: u32,
        call: &AdmittedCall,
        vocabulary: &Vocabulary,
        text: &mut String,
    ) -> (Vec<OutputEvent>, Option<usize>) {
        let Some(parser) = &mut self.parser else { return (Vec::new(), None) };
        let mut parts = Vec::new();
        let mut piece = String::new();
        let marker = call.output.as_ref().and_then(|output| output.marker(token));
        let was_reasoning = parser.in_reasoning();
        let found;
        match marker {
            Some(marker) => {
                // No character continues over a marker.
                self.detokenizer.finish(&mut piece);
                let armed = self.tokens > call.sampling.min_tokens;
                found = self.stops.push_marker(&piece, marker.text, armed, text);
                parts.extend(parser.push_text(text));
                if found.is_none() {
                    parts.extend(parser.push_marker(marker));
                }
            }
            None => {
                self.detokenizer.push(vocabulary, token, &mut piece);
                let armed = self.tokens > call.sampling.min_tokens;
                found = self.stops.push(&piece, armed, text);
                parts.extend(parser.push_text(text));
            }
        }
        // The markers themselves are reasoning.
        self.reasoning_tokens += u32::from(was_reasoning || parser.in_reasoning());
        (parts, found.map(|found| found.stop))
    }

    /// Returns the delta of a token; `None` if it has no content.
    fn delta(
        &mut self,
        text: &str,
        parts: Vec<OutputEvent>,
        token: Option<(u32, Option<PositionLogprobs>)>,
        call: &AdmittedCall,
    ) -> Result<Option<Delta>, Outcome> {
        let received = self.replay.unwrap_or_default();
        let (token_ids, logprobs) = token.map_or((None, None), |(token, logprobs)| (Some(token), logprobs));
        if call.cursor.is_some() {
            token_ids.iter().for_each(|token| self.position.push(*token));
            self.position.text_bytes += text.len() as u32;
            let at_end = self.position.tokens == received.tokens && received.tokens > 0;
            let other_text = !received.finished && self.position.text_bytes != received.text_bytes;
            if at_end && (!received.same_tokens(&self.position) || other_text) {
                return Err(Outcome::ResumeDiverged { choice: self.index });
            }
        }
        let replayed = self.replay.is_some() && self.position.tokens <= received.tokens;
        let token_ids = token_ids.into_iter().filter(|_| call.return_token_ids).collect::<Vec<_>>();
        let logprobs: Vec<_> = logprobs.into_iter().collect();
        let empty = parts.is_empty() && token_ids.is_empty() && logprobs.is_empty();
        let position = self.position;
        let text = content(&parts);
        let choice = self.index;
        Ok((!empty).then_some(Delta { choice, text, parts, token_ids, logprobs, position, replayed }))
    }
}
