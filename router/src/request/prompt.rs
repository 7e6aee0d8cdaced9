//! Tokenizing of prompts: from an [`Input`] to token ids, in steps that can be interrupted.

use std::collections::VecDeque;
use std::ops::Range;

use time::OffsetDateTime;

use inflight_router_core::TokenizePiece;

use crate::dispatcher::ServedModel;
use crate::options::Options;
use crate::outcome::{ContextExcess, Outcome};
use crate::request::draft::Input;
use crate::request::tokenizing::{TokenizeTerms, Tokenizing};
use crate::tenants::TokenCharge;
use crate::text::{Conversation, PromptText, TokenizerError};

/// Text size above which tokenizing would delay other streams of the thread, in bytes.
const LARGE_TEXT_BYTES: usize = 16 << 10;
/// Number of messages above which rendering would delay them.
const LARGE_CHAT_MESSAGES: usize = 64;
/// Assumed size of what a template adds to a message, in bytes.
const MESSAGE_BYTES: usize = 16;
/// Text size up to which a prompt is rendered and tokenized in one step, in bytes.
const ONE_STEP_BYTES: usize = 64 << 10;

/// Truncation of a prompt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Truncation {
    /// Maximum tokens kept, the last ones.
    tokens: usize,
}

impl Truncation {
    /// Multiple of the context up to which a text is tokenized to keep its end.
    const CONTEXTS_MAX: usize = 8;

    /// Returns the truncation that `truncate_prompt_tokens` asks for.
    pub(crate) fn new(
        requested: i32,
        max_tokens: Option<u32>,
        served: &ServedModel,
    ) -> Result<Self, Outcome> {
        let most = served.limits.sequence_tokens();
        match u32::try_from(requested) {
            Err(_) if requested == -1 => {
                let tokens = most.saturating_sub(max_tokens.unwrap_or(1)) as usize;
                // Without any room, `max_tokens` is rejected with the whole prompt.
                Ok(Self { tokens: if tokens == 0 { usize::MAX } else { tokens } })
            }
            Ok(tokens) if (1..=most).contains(&tokens) => Ok(Self { tokens: tokens as usize }),
            _ => {
                let reason =
                    format!("truncate_prompt_tokens is {requested}; it must be in [1, {most}], or -1");
                Err(Outcome::field("truncate_prompt_tokens", reason))
            }
        }
    }

    /// Keeps the last tokens of a prompt.
    pub(crate) fn apply(self, prompt: &mut Vec<u32>) {
        prompt.drain(..prompt.len().saturating_sub(self.tokens));
    }
}

/// Where special tokens are recognised.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpecialTokens {
    /// In plain text.
    text: bool,
    /// In the messages of conversations.
    chat: bool,
}

impl SpecialTokens {
    /// Returns what a request asks for, with the router's options.
    pub(crate) fn new(parse_special: Option<bool>, options: &Options) -> Self {
        Self { text: parse_special.unwrap_or(true), chat: options.special_tokens_in_chat }
    }
}

/// Bound on the tokens of a text.
#[derive(Debug, Clone, Copy)]
enum Bound {
    /// The model's context, or a multiple of it for a prompt that is truncated.
    Context { contexts: usize },
    /// The context by the text's size, and the answer of Tokenize by its tokens.
    Answer { tokens: usize },
}

/// Tokenizing of a prompt. Each step renders the prompt, tokenizes a piece of it, or both for short ones.
pub(crate) struct PromptJob {
    served: ServedModel,
    special: SpecialTokens,
    bound: Bound,
    /// The prompt until it is rendered.
    input: Option<Input>,
    /// Size of the prompt's text before it is rendered; counted once, as that visits every number of a definition.
    bytes: usize,
    text: PromptText,
    /// Whether the model's special tokens are added around the text.
    around: bool,
    /// Pieces that are not tokenized yet.
    pieces: VecDeque<Range<usize>>,
    tokens: Vec<u32>,
    /// Time that the chat template sees.
    time: OffsetDateTime,
    /// Charge that each step's tokens use up, also if the caller is gone before the last one.
    charge: Option<TokenCharge>,
}

impl PromptJob {
    /// Prompt of a request, of which `truncation` will keep the last tokens.
    pub(crate) fn of_request(
        served: ServedModel,
        input: Input,
        special: SpecialTokens,
        truncation: Option<Truncation>,
    ) -> Self {
        let contexts = if truncation.is_some() { Truncation::CONTEXTS_MAX } else { 1 };
        Self::new(served, input, special, Bound::Context { contexts })
    }

    /// Text whose tokens are the answer, at most `tokens`.
    pub(crate) fn of_answer(
        served: ServedModel,
        input: Input,
        special: SpecialTokens,
        tokens: usize,
    ) -> Self {
        Self::new(served, input, special, Bound::Answer { tokens })
    }

    fn new(served: ServedModel, input: Input, special: SpecialTokens, bound: Bound) -> Self {
        let text = PromptText::with_special_tokens(String::new());
        let around = matches!(input, Input::Text(_));
        let (pieces, tokens) = (VecDeque::new(), Vec::new());
        let (bytes, input, charge) = (text_bytes(&input), Some(input), None);
        let time = OffsetDateTime::UNIX_EPOCH;
        Self { served, special, bound, input, bytes, text, around, pieces, tokens, time, charge }
    }

    /// Sets the time that the chat template sees.
    pub(crate) fn at(mut self, time: OffsetDateTime) -> Self {
        self.time = time;
        self
    }

    /// Sets the charge that the job's tokens use up.
    pub(crate) fn charged_to(mut self, charge: Option<TokenCharge>) -> Self {
        self.charge = charge;
        self
    }

    /// Whether the job needs a blocking thread.
    pub(crate) fn is_large(&self) -> bool {
        let messages = match &self.input {
            Some(Input::Chat(chat)) => chat.messages.len(),
            _ => 0,
        };
        self.bytes > LARGE_TEXT_BYTES || messages > LARGE_CHAT_MESSAGES
    }

    /// Returns the size of the prompt's text in bytes, before it is rendered.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first step.
    pub(crate) fn first(&self) -> TokenizePiece {
        let bytes = self.bytes;
        // Rendering and checking a text cost little beside tokenizing it.
        if bytes <= ONE_STEP_BYTES {
            TokenizePiece { bytes: bytes as u64, last: true }
        } else {
            TokenizePiece { bytes: bytes as u64 / 16, last: false }
        }
    }

    /// Runs a step and returns the next one; `None` if the prompt is tokenized.
    pub(crate) fn step(&mut self) -> Result<Option<TokenizePiece>, Outcome> {
        if let Some(input) = self.input.take() {
            self.render(input)?;
            if self.pieces.len() != 1 || self.text.as_str().len() > ONE_STEP_BYTES {
                return Ok(self.next());
            }
        }
        if let Some(piece) = self.pieces.pop_front() {
            let tokenizer = &self.served.model.tokenizer;
            let tokens = tokenizer.encode_piece(&self.text, piece, self.around).map_err(encoding)?;
            if let Some(charge) = &mut self.charge {
                charge.used(tokens.len() as u64);
            }
            self.tokens.extend(tokens);
            self.check_tokens()?;
        }
        Ok(self.next())
    }

    /// Runs all steps.
    pub(crate) fn run(&mut self) -> Result<(), Outcome> {
        while self.step()?.is_some() {}
        Ok(())
    }

    /// Tokenizes the prompt, in turns with other tenants if it is large.
    pub(crate) async fn tokenize(
        mut self,
        tokenizing: &Tokenizing,
        terms: &TokenizeTerms,
    ) -> Result<Self, Outcome> {
        if self.is_large() {
            return tokenizing.run(terms, self.first(), self, Self::step).await;
        }
        self.run()?;
        Ok(self)
    }

    /// Returns the tokens.
    pub(crate) fn into_tokens(self) -> Vec<u32> {
        self.tokens
    }

    fn next(&self) -> Option<TokenizePiece> {
        let bytes = self.pieces.front()?.len() as u64;
        Some(TokenizePiece { bytes, last: self.pieces.len() == 1 })
    }

    /// Renders the prompt, checks its size and cuts it into pieces.
    fn render(&mut self, input: Input) -> Result<(), Outcome> {
        self.text = match input {
            Input::TokenIds(ids) => {
                self.tokens = ids;
                return Ok(());
            }
            Input::Chat(chat) => self.render_chat(&chat)?,
            Input::Text(text) | Input::RawText(text) if text.is_empty() => {
                return Err(Outcome::invalid("the prompt is empty; text must have at least one character"));
            }
            Input::Text(text) | Input::RawText(text) if self.special.text => {
                PromptText::with_special_tokens(text)
            }
            Input::Text(text) | Input::RawText(text) => PromptText::plain(text),
        };
        self.check_size()?;
        self.pieces = self.served.model.tokenizer.pieces(&self.text).into();
        Ok(())
    }

    fn render_chat(&self, chat: &Conversation) -> Result<PromptText, Outcome> {
        let Conversation { messages, tools, .. } = chat;
        let model = &self.served.model;
        let with_tools = model.tool_template.as_ref().filter(|_| !tools.is_empty());
        let Some(template) = with_tools.or(model.template.as_ref()) else {
            return Err(Outcome::NoChatTemplate {
                model: self.served.name.clone(),
                reason: model.template_error.clone(),
            });
        };
        if messages.is_empty() {
            return Err(Outcome::invalid("the prompt is empty; chat must have at least one message"));
        }
        if self.special.chat {
            let text = template.render(chat, self.time).map_err(Outcome::invalid)?;
            return Ok(PromptText::with_special_tokens(text));
        }
        template.render_prompt(chat, self.time, model.tokenizer.added()).map_err(Outcome::invalid)
    }

    /// Rejects text that cannot fit the context before tokenizing it, which would take seconds.
    fn check_size(&self) -> Result<(), Outcome> {
        let text = self.text.as_str();
        let (bytes, tokens) = (text.len(), self.served.model.tokenizer.min_tokens(text));
        let most = self.served.limits.sequence_tokens();
        let contexts = match self.bound {
            Bound::Context { contexts } => contexts,
            Bound::Answer { .. } => 1,
        };
        if tokens <= contexts * most as usize {
            return match self.bound {
                Bound::Answer { tokens: answer } if tokens > answer => Err(answer_exceeded(answer)),
                _ => Ok(()),
            };
        }
        let size = format!("the prompt's {bytes} bytes of text are at least {tokens} tokens");
        Err(context_exceeded(&size, tokens, contexts, most))
    }

    /// Rejects a text that turns out to be too long, without tokenizing the rest of it.
    fn check_tokens(&self) -> Result<(), Outcome> {
        let (tokens, most) = (self.tokens.len(), self.served.limits.sequence_tokens());
        match self.bound {
            Bound::Answer { tokens: answer } if tokens > answer => Err(answer_exceeded(answer)),
            // The whole prompt is known: its exact size is in the message of a later check.
            Bound::Context { .. } if self.pieces.is_empty() => Ok(()),
            Bound::Context { contexts } if tokens > contexts * most as usize => {
                let size = format!("the prompt's text has more than {tokens} tokens");
                Err(context_exceeded(&size, tokens, contexts, most))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the size of a prompt's text in bytes, with [`MESSAGE_BYTES`] for what a template adds to each message.
fn text_bytes(input: &Input) -> usize {
    match input {
        Input::Text(text) | Input::RawText(text) => text.len(),
        Input::Chat(chat) => chat.bytes() + chat.messages.len() * MESSAGE_BYTES,
        Input::TokenIds(_) => 0,
    }
}

/// Returns the outcome of a prompt of at least so many `tokens`, which `size` says in words.
fn context_exceeded(size: &str, tokens: usize, contexts: usize, most: u32) -> Outcome {
    let reason = match contexts {
        0 | 1 => format!("{size}; the model takes {most} for prompt and output together: shorten the prompt"),
        _ => format!(
            "{size}; at most {contexts} times the model's {most} are truncated: send the end of the text only"
        ),
    };
    let prompt_tokens = tokens as u64;
    Outcome::ContextExceeded(Box::new(ContextExcess {
        context_tokens: most,
        prompt_tokens,
        max_tokens: 0,
        reason,
    }))
}

fn answer_exceeded(answer: usize) -> Outcome {
    Outcome::invalid(format!(
        "the text has more than {answer} tokens, the limit of --tokenize-tokens-max; tokenize it in parts"
    ))
}

pub(crate) fn encoding(error: TokenizerError) -> Outcome {
    Outcome::invalid(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Message;

    #[test]
    fn a_definition_of_numbers_is_a_large_text() {
        let numbers = serde_json::json!({"x": vec![1; LARGE_TEXT_BYTES / 2]}).to_string();
        let tools = vec![serde_json::from_str(&numbers).unwrap()];
        let messages = vec![Message::new("user", "a".to_owned())];
        let bytes = text_bytes(&Input::Chat(Conversation { messages, tools, ..Conversation::default() }));
        assert!(bytes >= numbers.len() && numbers.len() > LARGE_TEXT_BYTES, "{bytes}");
    }
}
