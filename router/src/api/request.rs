//! Validation of requests: from a [`GenerationRequest`] to an [`AdmittedCall`].

use std::time::Instant;

use inflight_contract::{Priority, RequestError, RequestShape, SamplingError, SamplingSpec, Weight};

use crate::api::admission;
use crate::api::generation::{GenerationRequest, Input, SamplingOverrides, StopConditions};
use crate::dispatcher::ServedModel;
use crate::dispatcher::request::AdmittedCall;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::tenants::Caller;
use crate::text::{Message, TokenizerError};
use crate::trace::TraceContext;

/// Limits on fields of the API that workers do not see.
const NAME_BYTES_MAX: usize = 128;
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 256;
const BAD_WORDS_MAX: usize = 256;
const BAD_WORD_BYTES_MAX: usize = 128;

/// Whether tokenizing the input needs a blocking thread.
pub(crate) fn is_large(input: &Input) -> bool {
    match input {
        Input::Text(text) | Input::RawText(text) => text.len() > LARGE_TEXT_BYTES,
        Input::Chat(messages) => {
            let bytes =
                messages.iter().map(|message| message.role.len() + message.content.len()).sum::<usize>();
            bytes > LARGE_TEXT_BYTES || messages.len() > LARGE_CHAT_MESSAGES
        }
        Input::TokenIds(_) => false,
    }
}

/// Text size above which tokenizing would delay other streams of the thread, in bytes.
const LARGE_TEXT_BYTES: usize = 16 << 10;
/// Number of messages above which rendering would delay them.
const LARGE_CHAT_MESSAGES: usize = 64;

/// Validates and tokenizes a request. `seed` and `request_id` are defaults.
pub(crate) fn prepare(
    request: GenerationRequest,
    served: &ServedModel,
    options: &Options,
    arrived: Instant,
    deadline: Option<Instant>,
    seed: u64,
    request_id: String,
    caller: &Caller,
) -> Result<AdmittedCall, Outcome> {
    check_fields(&request)?;
    let weight = request.weight.map_or(Ok(Weight::default()), Weight::try_from);
    let weight = weight.map_err(|error| Outcome::field("weight", error))?;
    let priority = Priority::try_from(request.priority).map_err(|error| Outcome::field("priority", error))?;
    let terms = admission::terms(caller, request.tenant, weight, priority)?;
    let stop = request.stop;
    check_stops(&stop)?;
    let defaults = SamplingSpec { seed, ..served.model.defaults.clone() };
    let mut sampling = request.sampling;
    add_bad_words(&mut sampling, served)?;
    let sampling = sampling.apply(&stop, &defaults).validate().map_err(invalid_sampling)?;
    let discard_output = stop.max_tokens == Some(0);
    if discard_output && sampling.prompt_logprobs.is_none() {
        let reason = "max_tokens is 0; ask for at least one token, or for log probabilities of the prompt";
        return Err(Outcome::field("max_tokens", reason));
    }
    let chat = matches!(request.input, Input::Chat(_));
    let truncation = request
        .truncate_prompt_tokens
        .map(|tokens| Truncation::new(tokens, stop.max_tokens, served))
        .transpose()?;
    let mut prompt = encode_within(served, request.input, truncation)?;
    served.limits.check_tokens(&prompt, &sampling).map_err(invalid_request)?;
    if let Some(Truncation { tokens }) = truncation {
        prompt.drain(..prompt.len().saturating_sub(tokens));
    }
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = served.limits.sequence_tokens().saturating_sub(prompt_tokens);
    // A prompt that leaves no room is rejected below.
    let max_tokens = stop.max_tokens.unwrap_or(options.default_max_tokens.min(room)).max(1);
    served.limits.check_shape(RequestShape { prompt_tokens, max_tokens }).map_err(invalid_request)?;
    if stop.min_tokens > max_tokens {
        let reason = format!("min_tokens is {}, more than max_tokens = {max_tokens}", stop.min_tokens);
        return Err(Outcome::field("min_tokens", reason));
    }
    Ok(AdmittedCall {
        request_id: if request.request_id.is_empty() { request_id } else { request.request_id },
        model: served.name.clone(),
        lane: served.lane,
        prompt,
        sampling,
        max_tokens,
        stop: stop.stop,
        tenant: terms.tenant,
        key_id: caller.key_id().to_owned(),
        weight: terms.weight,
        priority: terms.priority,
        bounds: terms.bounds,
        arrived,
        deadline,
        return_token_ids: request.return_token_ids,
        discard_output,
        require_fingerprint: Some(request.require_fingerprint).filter(|required| !required.is_empty()),
        chat,
        trace: TraceContext::default(),
    })
}

fn check_fields(request: &GenerationRequest) -> Result<(), Outcome> {
    let names = [
        ("tenant", &request.tenant),
        ("request_id", &request.request_id),
        ("require_fingerprint", &request.require_fingerprint),
    ];
    for (name, value) in names {
        if value.len() > NAME_BYTES_MAX {
            let reason = format!("{name} has {} bytes; at most {NAME_BYTES_MAX} are allowed", value.len());
            return Err(Outcome::field(name, reason));
        }
    }
    Ok(())
}

fn check_stops(stop: &StopConditions) -> Result<(), Outcome> {
    if stop.stop.len() > STOPS_MAX {
        let reason = format!("stop has {} strings; at most {STOPS_MAX} are allowed", stop.stop.len());
        return Err(Outcome::field("stop", reason));
    }
    for (index, text) in stop.stop.iter().enumerate() {
        if text.is_empty() || text.len() > STOP_BYTES_MAX {
            let bytes = text.len();
            let reason = format!("stop[{index}] has {bytes} bytes; each must have 1 to {STOP_BYTES_MAX}");
            return Err(Outcome::field("stop", reason));
        }
    }
    Ok(())
}

/// Tokenizes the bad words of a request: each with and without a leading space, as it may begin the output or
/// follow other text.
fn add_bad_words(sampling: &mut SamplingOverrides, served: &ServedModel) -> Result<(), Outcome> {
    let words = std::mem::take(&mut sampling.bad_words);
    let invalid = |reason: String| Err(Outcome::field("bad_words", reason));
    if words.len() > BAD_WORDS_MAX {
        return invalid(format!("bad_words has {} words; at most {BAD_WORDS_MAX} are allowed", words.len()));
    }
    for (index, word) in words.iter().enumerate() {
        let bare = word.trim_start();
        if bare.is_empty() || word.len() > BAD_WORD_BYTES_MAX {
            let bytes = word.len();
            return invalid(format!(
                "bad_words[{index}] has {bytes} bytes; each must have 1 to {BAD_WORD_BYTES_MAX}, not only spaces"
            ));
        }
        for text in [bare.to_owned(), format!(" {bare}")] {
            let tokens = served.model.tokenizer.encode_rendered(&text).map_err(encoding)?;
            let (len, most) = (tokens.len(), SamplingSpec::BAD_WORD_TOKENS_MAX);
            if !(1..=most).contains(&len) {
                return invalid(format!("bad_words[{index}] has {len} tokens; each must have 1 to {most}"));
            }
            sampling.bad_word_token_ids.push(tokens);
        }
    }
    Ok(())
}

/// Truncation of a prompt.
#[derive(Debug, Clone, Copy)]
struct Truncation {
    /// Maximum tokens kept, the last ones.
    tokens: usize,
}

impl Truncation {
    /// Multiple of the context up to which a text is tokenized to keep its end.
    const CONTEXTS_MAX: usize = 8;

    /// Returns the truncation that `truncate_prompt_tokens` asks for.
    fn new(requested: i32, max_tokens: Option<u32>, served: &ServedModel) -> Result<Self, Outcome> {
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
}

/// Returns the tokens of a prompt.
pub(crate) fn encode(served: &ServedModel, input: Input) -> Result<Vec<u32>, Outcome> {
    encode_within(served, input, None)
}

/// Returns the tokens of a prompt, of which `truncation` will keep the last ones.
fn encode_within(
    served: &ServedModel,
    input: Input,
    truncation: Option<Truncation>,
) -> Result<Vec<u32>, Outcome> {
    match input {
        Input::TokenIds(ids) => Ok(ids),
        Input::Text(text) => {
            check_text(served, &text, truncation)?;
            served.model.tokenizer.encode(&text).map_err(encoding)
        }
        Input::RawText(text) => {
            check_text(served, &text, truncation)?;
            served.model.tokenizer.encode_rendered(&text).map_err(encoding)
        }
        Input::Chat(messages) => encode_chat(served, &messages, truncation),
    }
}

/// Checks plain text before it is tokenized.
fn check_text(served: &ServedModel, text: &str, truncation: Option<Truncation>) -> Result<(), Outcome> {
    if text.is_empty() {
        return Err(Outcome::invalid("the prompt is empty; text must have at least one character"));
    }
    check_size(served, text, truncation)
}

/// Rejects text that cannot fit the context before tokenizing it, which would take seconds.
fn check_size(served: &ServedModel, text: &str, truncation: Option<Truncation>) -> Result<(), Outcome> {
    let (tokens, most) = (served.model.tokenizer.min_tokens(text), served.limits.sequence_tokens());
    let contexts = if truncation.is_some() { Truncation::CONTEXTS_MAX } else { 1 };
    if tokens <= contexts * most as usize {
        return Ok(());
    }
    let bytes = text.len();
    if truncation.is_some() {
        return Err(Outcome::ContextExceeded(format!(
            "the prompt's {bytes} bytes of text are at least {tokens} tokens; at most {contexts} times the \
             model's {most} are truncated: send the end of the text only"
        )));
    }
    Err(Outcome::ContextExceeded(format!(
        "the prompt's {bytes} bytes of text are at least {tokens} tokens; the model takes {most} for prompt and output together"
    )))
}

/// Renders and tokenizes a conversation.
fn encode_chat(
    served: &ServedModel,
    messages: &[Message],
    truncation: Option<Truncation>,
) -> Result<Vec<u32>, Outcome> {
    let Some(template) = &served.model.template else {
        return Err(Outcome::NoChatTemplate { model: served.name.clone() });
    };
    if messages.is_empty() {
        return Err(Outcome::invalid("the prompt is empty; chat must have at least one message"));
    }
    let text = template.render(messages).map_err(Outcome::invalid)?;
    check_size(served, &text, truncation)?;
    served.model.tokenizer.encode_rendered(&text).map_err(encoding)
}

fn invalid_sampling(error: SamplingError) -> Outcome {
    Outcome::field(error.field(), &error)
}

fn invalid_request(error: RequestError) -> Outcome {
    match error {
        RequestError::ContextExceeded { .. } => Outcome::ContextExceeded(error.to_string()),
        error => Outcome::invalid(error),
    }
}

fn encoding(error: TokenizerError) -> Outcome {
    Outcome::invalid(error)
}
