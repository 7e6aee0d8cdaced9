//! `/v1/completions`: requests, and responses in one piece.

use std::sync::Arc;

use inflight_net::Holder;
use serde::Serialize;
use serde_json::value::RawValue;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use crate::outcome::Outcome;
use crate::output::collected::Collected;
use crate::output::response_stream::ResponseStream;
use crate::protocols::http::fields::{
    FieldTable, Fields, honoured, ignored, parse, parse_token_ids, refused,
};
use crate::protocols::http::sampling::{self, StreamOptions};
use crate::protocols::http::sse;
use crate::protocols::http::structured;
use crate::protocols::http::usage::{TimingsBody, UsageBody};
use crate::protocols::http::{Call, HttpApi, Started, json};
use crate::protocols::http::{SMALL_BODY_BYTES, SMALL_POSITIONS, aside, read_body};
use crate::protocols::openai::chat::finish_reason;
use crate::protocols::openai::completion_stream::CompletionStream;
use crate::protocols::openai::logprobs::{
    PromptBody, TextLogprobs, TextOffset, check_outputs, check_prompts,
};
use crate::request::draft::{Draft, Input};
use crate::request::ingress::rejected;

/// Fields of `/v1/completions`.
pub(crate) static FIELDS: FieldTable = FieldTable {
    api: "completions",
    fields: &[
        &[
            honoured(
                "prompt",
                "A string, an array of strings, an array of token ids, or an array of such arrays; at most 128 prompts.",
            ),
            honoured(
                "max_tokens",
                "At least 1; 0 if only log probabilities of the prompt are wanted; absent: 16.",
            ),
            honoured("echo", "The prompt before its output; with `logprobs`, with its log probabilities."),
            honoured(
                "logprobs",
                "In [0, 20]: number of alternatives beside each token of the output, and with `echo` of the prompt.",
            ),
            honoured(
                "add_special_tokens",
                "Extension: the model's special tokens around a text; true by default.",
            ),
            honoured("parse_special", PARSE_SPECIAL),
            refused("suffix", "insertion before a suffix is not supported"),
            honoured("response_format", structured::RESPONSE_FORMAT),
            ignored("service_tier", "The tenant's priority counts."),
            ignored("store", "Nothing is stored."),
        ],
        &sampling::SAMPLING,
        &sampling::EXTENSIONS,
        structured::GUIDED,
    ],
    elsewhere: structured::ELSEWHERE,
};

/// Meaning of `parse_special`.
pub(crate) const PARSE_SPECIAL: &str = "Extension: special tokens are recognised in a text; true by default. False: what looks like one is text.";

/// Maximum prompts of a call.
const PROMPTS_MAX: usize = 128;
/// Maximum bytes of the prompts that a response echoes, each counted in all of its choices.
const ECHO_BYTES_MAX: usize = 16 << 20;
/// Default of `max_tokens`, OpenAI's.
const MAX_TOKENS: u32 = 16;

/// Reads the four forms of `prompt`.
fn prompts(fields: &Fields<'_>) -> Result<Vec<Input>, Outcome> {
    let expected = "a string, an array of strings, an array of token ids or an array of such arrays";
    let value = fields
        .raw("prompt")
        .ok_or_else(|| Outcome::field("prompt", format!("prompt is missing; give {expected}")))?;
    let special: Option<bool> = fields.get("add_special_tokens", "true or false")?;
    let text = |text: String| if special == Some(false) { Input::RawText(text) } else { Input::Text(text) };
    if value.get().starts_with('"') {
        let prompt: String = parse("prompt", value, expected)?;
        check_filled("prompt", prompt.is_empty())?;
        return Ok(vec![text(prompt)]);
    }
    // The first element decides. An array of token ids is the common large one, so it is read at once.
    let inner = value.get().get(1..).unwrap_or_default().trim_start();
    let many = match inner.as_bytes().first() {
        Some(b'0'..=b'9' | b'-') => {
            return Ok(vec![Input::TokenIds(parse_token_ids("prompt", value, expected)?)]);
        }
        Some(b'[') => {
            let prompts: Vec<&RawValue> = parse("prompt", value, expected)?;
            check_count(prompts.len())?;
            let ids = |(at, ids): (usize, &RawValue)| {
                let name = format!("prompt[{at}]");
                let ids = parse_token_ids(&name, ids, "an array of token ids")?;
                check_filled(&name, ids.is_empty())?;
                Ok(Input::TokenIds(ids))
            };
            prompts.into_iter().enumerate().map(ids).collect::<Result<Vec<_>, _>>()?
        }
        _ => {
            let prompts: Vec<String> = parse("prompt", value, expected)?;
            if let Some(at) = prompts.iter().position(String::is_empty) {
                check_filled(&format!("prompt[{at}]"), true)?;
            }
            prompts.into_iter().map(text).collect()
        }
    };
    check_count(many.len())?;
    Ok(many)
}

fn check_filled(name: &str, empty: bool) -> Result<(), Outcome> {
    let reason = || format!("{name} is empty; give at least one character or token id");
    if empty { Err(Outcome::field("prompt", reason())) } else { Ok(()) }
}

fn check_count(prompts: usize) -> Result<(), Outcome> {
    match prompts {
        0 => Err(Outcome::field("prompt", "prompt is an empty array; give at least one prompt")),
        1..=PROMPTS_MAX => Ok(()),
        more => Err(Outcome::field(
            "prompt",
            format!("prompt has {more} prompts; at most {PROMPTS_MAX} are allowed"),
        )),
    }
}

/// Output options of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    stream: bool,
    pub(crate) stream_options: StreamOptions,
    /// Alternatives beside each token, if log probabilities are wanted.
    pub(crate) logprobs: Option<u32>,
    pub(crate) echo: bool,
    /// Alternatives beside each prompt token, if they are wanted in a field of their own.
    prompt_logprobs: Option<u32>,
}

pub(crate) fn read(body: &[u8]) -> Result<(Vec<Draft>, Output), Outcome> {
    let fields = FIELDS.read(body)?;
    let logprobs = sampling::alternatives(&fields, "logprobs")?;
    let echo = fields.flag("echo")?;
    let stream_options = StreamOptions::read(&fields)?;
    let mut template = Draft::new(fields.model()?, Input::TokenIds(Vec::new()));
    sampling::read(&fields, &mut template)?;
    let prompt_logprobs = template.sampling.prompt_logprobs;
    // Absent is less than 0.
    template.sampling.prompt_logprobs = prompt_logprobs.max(logprobs.filter(|_| echo));
    let output = Output { stream: fields.flag("stream")?, stream_options, logprobs, echo, prompt_logprobs };
    template.stop.max_tokens = Some(fields.count("max_tokens")?.unwrap_or(MAX_TOKENS));
    template.sampling.logprobs = logprobs;
    template.parse_special = fields.get("parse_special", "true or false")?;
    template.return_token_ids = stream_options.continuous();
    let request = |input| Draft { input, ..template.clone() };
    Ok((prompts(&fields)?.into_iter().map(request).collect(), output))
}

#[derive(Serialize)]
struct Completion<'a> {
    id: String,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<Choice>,
    usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptBody>,
}

/// Answers a text completion.
pub(crate) async fn create(api: Arc<HttpApi>, call: Call, body: Bytes) -> Result<Response<Body>, Outcome> {
    let holder = call.context.caller.holder();
    let (requests, output) = read_body(holder.clone(), &body, read).await.map_err(rejected)?;
    drop(body);
    let echoed = if output.echo { requests.iter().map(text_of).collect() } else { Vec::new() };
    let started = Box::pin(api.start(requests, output.stream, call)).await.map_err(rejected)?;
    // Only now the prompts have tokens. A refusal cancels their requests, which are counted as such.
    check_repeated(&started, output, &echoed)?;
    let echoed = started.prompt_texts(echoed);
    if output.stream {
        let encoder = CompletionStream::new(&started, output, &echoed, api.http.timings);
        return sse::respond(started, encoder, api.http.keepalive).await;
    }
    check_outputs(started.output_tokens_max(), "logprobs", output.logprobs)?;
    complete(&api, holder, started, output, &echoed).await
}

/// Returns the text of a prompt that is given as text and used whole.
fn text_of(request: &Draft) -> Option<String> {
    match &request.input {
        Input::Text(text) | Input::RawText(text) if request.truncate_prompt_tokens.is_none() => {
            Some(text.clone())
        }
        _ => None,
    }
}

/// Checks the size of what the choices repeat of their prompts, which are `echoed` or token ids.
fn check_repeated(started: &Started, output: Output, echoed: &[Option<String>]) -> Result<(), Outcome> {
    let choices = started.choices() as usize;
    let tokens: usize = started.streams.iter().map(|stream| stream.call().prompt.len()).sum();
    let echoed_logprobs = output.logprobs.filter(|_| output.echo);
    let wanted = [("logprobs", echoed_logprobs), ("prompt_logprobs", output.prompt_logprobs)];
    check_prompts(tokens, choices, &wanted)?;
    let bytes = |(given, stream): (&Option<String>, &ResponseStream)| match given {
        Some(text) => text.len(),
        None => {
            let model = stream.bundle();
            let vocabulary = model.tokenizer.vocabulary();
            stream.call().prompt.iter().map(|id| vocabulary.bytes(*id).len()).sum()
        }
    };
    check_echo(choices * echoed.iter().zip(&started.streams).map(bytes).sum::<usize>())
}

fn check_echo(bytes: usize) -> Result<(), Outcome> {
    if bytes <= ECHO_BYTES_MAX {
        return Ok(());
    }
    let reason = format!(
        "echo would return {bytes} bytes of prompts, those of n choices n times; at most {ECHO_BYTES_MAX} are returned: lower n, or send fewer or shorter prompts"
    );
    Err(Outcome::field("echo", reason))
}

async fn complete(
    api: &HttpApi,
    holder: Option<Holder>,
    started: Started,
    output: Output,
    echoed: &[String],
) -> Result<Response<Body>, Outcome> {
    let (id, model, created) = (started.id("cmpl-"), started.model.clone(), started.created);
    let bundle = started.bundle();
    let given = started.scored_prompts(output.echo && output.logprobs.is_some());
    let prompts = started.generations().collect().await?;
    let mut usage = UsageBody::default();
    prompts.iter().for_each(|prompt| usage.add(&prompt.usage));
    let fingerprint = prompts.first().map_or_else(String::new, |prompt| prompt.fingerprint().to_owned());
    let timings = prompts.first().filter(|_| api.http.timings).map(|prompt| prompt.timings.into());
    let large = prompts.iter().map(Collected::positions).sum::<usize>() > SMALL_POSITIONS
        || echoed.iter().map(String::len).sum::<usize>() > SMALL_BODY_BYTES;
    let build = || {
        let mut choices = Vec::new();
        for (at, prompt) in prompts.into_iter().enumerate() {
            for choice in prompt.choices {
                let vocabulary = bundle.as_ref().map(|model| model.tokenizer.vocabulary());
                let logprobs = vocabulary.zip(output.logprobs).map(|(vocabulary, alternatives)| {
                    let mut body = match given.get(at) {
                        Some(given) => {
                            TextLogprobs::echo(given, &prompt.prompt_logprobs, alternatives, vocabulary)
                        }
                        None => TextLogprobs::default(),
                    };
                    let mut offset =
                        echoed.get(at).map_or_else(TextOffset::default, |text| TextOffset::after(text));
                    body.extend(&choice.logprobs, vocabulary, &mut offset);
                    body
                });
                let prompt_logprobs =
                    vocabulary.zip(output.prompt_logprobs).map(|(vocabulary, alternatives)| {
                        PromptBody::new(&prompt.prompt_logprobs, alternatives, vocabulary)
                    });
                let finish_reason = finish_reason(choice.reason(), false);
                let text = match echoed.get(at) {
                    Some(prompt) => format!("{prompt}{}", choice.text),
                    None => choice.text,
                };
                choices.push(Choice { index: choices.len(), text, logprobs, finish_reason, prompt_logprobs });
            }
        }
        json(&Completion {
            id,
            object: "text_completion",
            created,
            model: &model,
            system_fingerprint: &fingerprint,
            choices,
            usage,
            timings,
        })
    };
    aside(holder, large, build).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(prompt: &str) -> Result<Vec<Input>, String> {
        let body = format!("{{\"prompt\": {prompt}}}");
        let read = read(body.as_bytes()).map_err(|outcome| outcome.message())?;
        Ok(read.0.into_iter().map(|request| request.input).collect())
    }

    #[test]
    fn a_prompt_has_four_forms() {
        let text = |text: &str| Input::Text(text.to_owned());
        assert_eq!(inputs("\"a\""), Ok(vec![text("a")]));
        assert_eq!(inputs("[\"a\", \"b\"]"), Ok(vec![text("a"), text("b")]));
        assert_eq!(inputs("[ 1, 2]"), Ok(vec![Input::TokenIds(vec![1, 2])]));
        assert_eq!(inputs("[[1], [2, 3]]"), Ok(vec![Input::TokenIds(vec![1]), Input::TokenIds(vec![2, 3])]));
        for (prompt, words) in [
            ("null", "prompt is missing"),
            ("[]", "prompt is an empty array"),
            ("{}", "prompt must be a string, an array"),
            ("7", "prompt must be a string, an array"),
            ("[1, \"a\"]", "prompt must be"),
            ("[\"a\", 1]", "prompt must be"),
            ("[[1], [-1]]", "prompt[1] must be an array of token ids"),
            ("[-1]", "prompt must be"),
        ] {
            let refused = inputs(prompt).unwrap_err();
            assert!(refused.contains(words), "{prompt}: {refused}");
        }
        let many = format!("[{}]", vec!["\"a\""; PROMPTS_MAX + 1].join(","));
        assert!(inputs(&many).unwrap_err().contains("has 129 prompts"));
        let refused =
            |more: &str| read(format!("{{\"prompt\": \"a\"{more}}}").as_bytes()).unwrap_err().message();
        assert!(refused(", \"suffix\": \"b\"").starts_with("suffix is refused"));
        assert!(refused(", \"prompt_logprobs\": 1, \"stream\": true").contains("with stream is refused"));
    }

    #[test]
    fn echoed_prompts_beyond_the_limit_are_refused() {
        assert_eq!(check_echo(ECHO_BYTES_MAX), Ok(()));
        let refused = check_echo(ECHO_BYTES_MAX + 1).unwrap_err().message();
        assert!(refused.contains("16777217 bytes") && refused.contains("at most 16777216"), "{refused}");
    }

    #[test]
    fn what_every_prompt_has_a_copy_of_is_bounded_before_it_is_copied() {
        let (ids, words) =
            (|count| format!("{:?}", vec![7; count]), |count| format!("{:?}", vec!["x"; count]));
        let biases = |count| {
            let biases: Vec<String> = (0..count).map(|id| format!("\"{id}\": 1")).collect();
            format!("{{{}}}", biases.join(","))
        };
        let text = |bytes| format!("{:?}", "x".repeat(bytes));
        for (field, most, beyond) in [
            ("stop_token_ids", ids(128), ids(129)),
            ("allowed_token_ids", ids(65_536), ids(65_537)),
            ("logit_bias", biases(1024), biases(1025)),
            ("bad_words", words(256), words(257)),
            ("bad_words", format!("[{}]", text(128)), format!("[{}]", text(129))),
            ("stop", words(16), words(17)),
            ("stop", text(256), text(257)),
            ("require_fingerprint", text(128), text(129)),
            ("model", text(512), text(513)),
        ] {
            let read = |value: &str| {
                read(format!("{{\"prompt\": [\"a\", \"b\"], \"{field}\": {value}}}").as_bytes())
            };
            assert_eq!(read(&most).unwrap().0.len(), 2, "{field}");
            match read(&beyond) {
                Err(Outcome::InvalidField { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {:?}", other.map(|(requests, _)| requests.len())),
            }
        }
    }
}
