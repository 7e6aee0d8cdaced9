//! Tokenization, by the requests and responses of vLLM, which remote tokenizers read.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use crate::dispatcher::ServedModel;
use crate::outcome::Outcome;
use crate::protocols::http::errors::refuse;
use crate::protocols::http::fields::{FieldTable, honoured, refused};
use crate::protocols::http::read_body;
use crate::protocols::http::{AxumResponse, Call, HttpApi, json};
use crate::protocols::openai::chat;
use crate::protocols::openai::completions::PARSE_SPECIAL;
use crate::protocols::openai::rendering;
use crate::protocols::openai::tools::{self, ToolForm};
use crate::request::draft::Input;
use crate::text::{ChatTemplate, Conversation};

/// Fields of `/tokenize`.
pub(crate) static FIELDS: FieldTable = FieldTable {
    api: "tokenize",
    fields: &[
        &[
            honoured("model", "Name of a served model; absent: the only one."),
            honoured("prompt", "Text; this or `messages`."),
            honoured("messages", "Conversation, as in chat completions."),
            honoured(
                "add_special_tokens",
                "Of a prompt: the model's special tokens around it; true by default.",
            ),
            honoured("parse_special", PARSE_SPECIAL),
            honoured("return_token_strs", "Adds the text of each token."),
            honoured("tools", "Of a conversation, as in chat completions."),
            refused("chat_template", "the model's own template renders conversations"),
            honoured("reasoning_effort", rendering::REASONING_EFFORT),
        ],
        rendering::RENDERING,
    ],
    elsewhere: &[],
};

/// Fields of `/detokenize`.
pub(crate) static DETOKENIZE_FIELDS: FieldTable = FieldTable {
    api: "detokenize",
    fields: &[&[
        honoured("model", "Name of a served model; absent: the only one."),
        honoured("tokens", "Array of token ids."),
    ]],
    elsewhere: &[],
};

#[derive(Serialize)]
struct Tokens {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Prompt {
    prompt: String,
}

/// Special tokens and chat template of a model.
#[derive(Serialize)]
struct Info<'a> {
    tokenizer_class: &'static str,
    bos_token: Option<&'a str>,
    eos_token: Option<&'a str>,
    pad_token: Option<&'a str>,
    chat_template: Option<&'a str>,
    model_max_length: u32,
}

/// Request to tokenize.
#[derive(Debug)]
pub(crate) struct Request {
    model: String,
    input: Input,
    parse_special: Option<bool>,
    /// Whether the texts of the tokens are wanted.
    with_texts: bool,
}

/// Reads a request to tokenize.
pub(crate) fn read(body: &[u8]) -> Result<Request, Outcome> {
    let fields = FIELDS.read(body)?;
    let model = fields.model()?;
    let tools = tools::read(&fields, ToolForm::Nested, &FIELDS)?;
    let tools = tools.map(|tools| tools.definitions()).unwrap_or_default();
    let input = match (fields.text("prompt")?, fields.raw("messages")) {
        (Some(_), Some(_)) => {
            return Err(Outcome::field("messages", "both prompt and messages were given; give one"));
        }
        (None, None) => return Err(Outcome::field("prompt", "prompt is missing; give prompt or messages")),
        (Some(text), None) => {
            // Without effect, but not without a check.
            rendering::read(&fields, &[])?;
            match fields.get("add_special_tokens", "true or false")? {
                Some(false) => Input::RawText(text),
                Some(true) | None => Input::Text(text),
            }
        }
        (None, Some(_)) => {
            let messages = chat::messages(&fields)?;
            let rendering = rendering::read(&fields, &messages)?;
            Input::Chat(Conversation { messages, tools, rendering })
        }
    };
    let with_texts = fields.flag("return_token_strs")?;
    let parse_special = fields.get("parse_special", "true or false")?;
    Ok(Request { model, input, parse_special, with_texts })
}

/// Tokenizes a prompt or a conversation.
pub(crate) async fn tokenize(api: Arc<HttpApi>, call: Call, body: Bytes) -> Result<Response<Body>, Outcome> {
    let Request { model, input, parse_special, with_texts } =
        read_body(call.context.caller.holder(), &body, read).await?;
    let (served, tokens) = api.ingress.tokens(&model, input, parse_special, call.context).await?;
    let texts = || tokens.iter().map(|id| served.model.tokenizer.piece(*id)).collect();
    json(&Tokens {
        count: tokens.len(),
        max_model_len: served.limits.sequence_tokens(),
        token_strs: with_texts.then(texts),
        tokens,
    })
}

/// Reads the model and the tokens whose text is wanted.
pub(crate) fn read_tokens(body: &[u8]) -> Result<(String, Vec<u32>), Outcome> {
    let fields = DETOKENIZE_FIELDS.read(body)?;
    let tokens = fields.token_ids("tokens")?.ok_or_else(|| Outcome::field("tokens", "tokens is missing"))?;
    Ok((fields.model()?, tokens))
}

/// Returns the text of tokens, special ones included.
pub(crate) async fn detokenize(
    api: Arc<HttpApi>,
    call: Call,
    body: Bytes,
) -> Result<Response<Body>, Outcome> {
    let (model, tokens) = read_tokens(&body)?;
    let served = api.ingress.resolve(&model)?;
    let vocab_size = served.limits.vocab_size;
    if let Some(id) = tokens.iter().find(|id| **id >= vocab_size) {
        let reason = format!("token id {id} is outside the vocabulary of {vocab_size}");
        return Err(Outcome::field("tokens", reason));
    }
    let prompt = api.ingress.decode(&served, tokens, call.context).await?;
    json(&Prompt { prompt })
}

/// Returns what a remote tokenizer needs to know of a model, the only one or that of the query `model`.
pub(crate) async fn info(State(api): State<Arc<HttpApi>>, RawQuery(query): RawQuery) -> AxumResponse {
    let served = model_of(&query.unwrap_or_default()).and_then(|model| api.ingress.resolve(&model));
    let answer = served.and_then(|served| describe(&served));
    answer.unwrap_or_else(|outcome| refuse("/tokenizer_info", outcome)).map(axum::body::Body::new)
}

/// Returns the parameter `model` of a query; empty if it has none.
fn model_of(query: &str) -> Result<String, Outcome> {
    let model = query.split('&').find_map(|pair| pair.strip_prefix("model=")).unwrap_or_default();
    let model = model.replace('+', " ");
    let decoded = percent_decode_str(&model).decode_utf8();
    let decoded =
        decoded.map_err(|_| Outcome::field("model", "model in the query is not percent-encoded UTF-8"));
    Ok(decoded?.into_owned())
}

fn describe(served: &ServedModel) -> Result<Response<Body>, Outcome> {
    let template = served.model.template.as_ref();
    let bos_token = template.map(ChatTemplate::bos_token).filter(|token| !token.is_empty());
    let eos_token = template.map(ChatTemplate::eos_token).filter(|token| !token.is_empty());
    json(&Info {
        tokenizer_class: "PreTrainedTokenizerFast",
        bos_token,
        eos_token,
        pad_token: eos_token,
        chat_template: template.map(ChatTemplate::source),
        model_max_length: served.limits.sequence_tokens(),
    })
}
