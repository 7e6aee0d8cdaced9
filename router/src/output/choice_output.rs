//! Output of one choice: detokenization, stop strings, and the replay of what a resuming client has.

mod parsed;

use inflight_contract::{FinishReason, PositionLogprobs};
use inflight_output_parser::{OutputEvent, OutputParser};

use crate::dispatcher::request::UnreadOutput;
use crate::outcome::Outcome;
use crate::output::event::{Delta, Finished};
use crate::output::stop::StopMatcher;
use crate::request::admitted_call::AdmittedCall;
use crate::request::cursor::ChoicePosition;
use crate::text::{Detokenizer, Tokenizer, Vocabulary};

/// Output state of one choice.
pub(crate) struct ChoiceOutput {
    index: u32,
    detokenizer: Detokenizer,
    /// Parser of the output, if it is parsed.
    parser: Option<OutputParser>,
    /// Tokens that are reasoning.
    reasoning_tokens: u32,
    stops: StopMatcher,
    /// Delivered tokens, up to its end.
    tokens: u32,
    /// Latest of these tokens.
    last_token: Option<u32>,
    ended: bool,
    /// Length and digest of the output; kept for resumable streams only.
    position: ChoicePosition,
    /// Output that the client of a resumed stream has received before.
    replay: Option<ChoicePosition>,
}

/// End of a choice as its client sees it.
struct ChoiceEnding {
    reason: FinishReason,
    stop: String,
    stop_token_id: Option<u32>,
}

/// Events of new tokens of a choice.
pub(crate) struct TakenOutput {
    /// Output; first what the client of a resumed stream has received before.
    pub(crate) deltas: Vec<Delta>,
    /// End of the choice.
    pub(crate) finished: Option<Finished>,
}

impl ChoiceOutput {
    /// Creates the state of a choice without output.
    pub(crate) fn new(index: u32, call: &AdmittedCall, tokenizer: &Tokenizer) -> Self {
        let received = call.cursor.as_ref().and_then(|cursor| cursor.choices.get(index as usize)).copied();
        Self {
            index,
            detokenizer: Detokenizer::new(tokenizer.vocabulary(), &call.prompt),
            parser: call.output.as_ref().map(|output| output.parser(index)),
            reasoning_tokens: 0,
            stops: StopMatcher::new(&call.stop),
            tokens: 0,
            last_token: None,
            ended: false,
            position: ChoicePosition::default(),
            replay: received.filter(|received| *received != ChoicePosition::default()),
        }
    }

    /// Returns the number of tokens, of which the client of a resumed stream may have had more before.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Returns the number of tokens that the client has, those of earlier calls included.
    pub(crate) fn delivered(&self) -> u32 {
        self.tokens.max(self.replay.map_or(0, |received| received.tokens))
    }

    /// Returns the number of tokens that are reasoning.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Whether the choice has ended.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// Appends new tokens.
    ///
    /// # Errors
    /// [`Outcome::ResumeDiverged`] if they are not those that the client has received before.
    pub(crate) fn take(
        &mut self,
        fresh: UnreadOutput,
        call: &AdmittedCall,
        vocabulary: &Vocabulary,
    ) -> Result<TakenOutput, Outcome> {
        if self.parser.is_some() {
            return self.take_parsed(fresh, call, vocabulary);
        }
        let UnreadOutput { mut tokens, mut logprobs, end } = fresh;
        // With `Stop`, the last token is the stop token; with `Complete`, it is output. The update has no token
        // only if an earlier attempt, on a worker with another fingerprint, has delivered it.
        let stopped = end == Some(FinishReason::Stop);
        let has_stop_token = stopped && !tokens.is_empty();
        self.last_token = tokens.last().copied().or(self.last_token);
        let stop_token_id = self.last_token.filter(|_| stopped);
        let shown = tokens.len() - usize::from(has_stop_token);
        let mut text = String::new();
        let mut ending = end.map(|reason| ChoiceEnding { reason, stop: String::new(), stop_token_id });
        let mut piece = String::new();
        for (at, token) in tokens[..shown].iter().enumerate() {
            self.tokens += 1;
            if self.stops.is_empty() {
                self.detokenizer.push(vocabulary, *token, &mut text);
                continue;
            }
            piece.clear();
            self.detokenizer.push(vocabulary, *token, &mut piece);
            let armed = self.tokens > call.sampling.min_tokens;
            if let Some(found) = self.stops.push(&piece, armed, &mut text) {
                self.ended = true;
                ending = Some(ChoiceEnding {
                    reason: FinishReason::Stop,
                    stop: call.stop[found.stop].clone(),
                    stop_token_id: None,
                });
                tokens.truncate(at + 1);
                logprobs.truncate(at + 1);
                break;
            }
        }
        if !self.ended && ending.is_some() {
            self.ended = true;
            self.tokens += u32::from(has_stop_token);
            ending = self.flush(&mut text, call, ending);
        }
        let (replayed, delta) = self.split(text, tokens, logprobs, call)?;
        let finished = ending.map(|ending| self.finished(ending, Vec::new()));
        Ok(TakenOutput { deltas: [replayed, delta].into_iter().flatten().collect(), finished })
    }

    /// Returns the end of the choice.
    fn finished(&self, ending: ChoiceEnding, parts: Vec<OutputEvent>) -> Finished {
        Finished {
            choice: self.index,
            reason: ending.reason,
            parts,
            called: self.parser.as_ref().is_some_and(OutputParser::has_made_calls),
            cut_call: self.parser.as_ref().is_some_and(OutputParser::has_cut_call),
            stop_string: ending.stop,
            stop_token_id: ending.stop_token_id,
            position: self.position,
            replayed: self.replay.is_some_and(|received| received.finished),
        }
    }

    /// Splits output into what the client has received before and what is new; the parts without content are
    /// `None`.
    fn split(
        &mut self,
        mut text: String,
        mut tokens: Vec<u32>,
        mut logprobs: Vec<PositionLogprobs>,
        call: &AdmittedCall,
    ) -> Result<(Option<Delta>, Option<Delta>), Outcome> {
        let before = self.position;
        let diverged = Outcome::ResumeDiverged { choice: self.index };
        if call.cursor.is_some() {
            for token in &tokens {
                self.position.push(*token);
                let other = |received: ChoicePosition| {
                    received.tokens == self.position.tokens && !received.same_tokens(&self.position)
                };
                if self.replay.is_some_and(other) {
                    return Err(diverged);
                }
            }
            self.position.text_bytes += text.len() as u32;
        }
        let index = self.index;
        let delta = |text: String, mut token_ids: Vec<u32>, logprobs: Vec<_>, position, replayed| {
            if !call.return_token_ids {
                token_ids.clear();
            }
            let empty = text.is_empty() && token_ids.is_empty() && logprobs.is_empty();
            let parts = Vec::new();
            (!empty).then_some(Delta { choice: index, text, parts, token_ids, logprobs, position, replayed })
        };
        let Some(received) = self.replay else {
            return Ok((None, delta(text, tokens, logprobs, self.position, false)));
        };
        let after = self.position;
        let past = after.tokens > received.tokens || after.text_bytes > received.text_bytes;
        let short = after.tokens < received.tokens || after.text_bytes < received.text_bytes;
        let text_early = after.tokens < received.tokens && after.text_bytes > received.text_bytes;
        let had_bytes = (received.text_bytes.saturating_sub(before.text_bytes) as usize).min(text.len());
        if text_early
            || (self.ended && short)
            || (received.finished && past)
            || !text.is_char_boundary(had_bytes)
        {
            return Err(diverged);
        }
        let had_tokens = received.tokens.saturating_sub(before.tokens) as usize;
        let new_text = text.split_off(had_bytes);
        let new_tokens = tokens.split_off(had_tokens.min(tokens.len()));
        let new_logprobs = logprobs.split_off(had_tokens.min(logprobs.len()));
        Ok((
            delta(text, tokens, logprobs, after, true),
            delta(new_text, new_tokens, new_logprobs, after, false),
        ))
    }

    /// Releases held-back text. The replacement of an incomplete last character is ordinary text and may
    /// complete a stop string.
    fn flush(
        &mut self,
        text: &mut String,
        call: &AdmittedCall,
        ending: Option<ChoiceEnding>,
    ) -> Option<ChoiceEnding> {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        let armed = self.tokens > call.sampling.min_tokens;
        if let Some(found) = self.stops.push(&rest, armed, text) {
            return Some(ChoiceEnding {
                reason: FinishReason::Stop,
                stop: call.stop[found.stop].clone(),
                stop_token_id: None,
            });
        }
        self.stops.finish(text);
        ending
    }
}
