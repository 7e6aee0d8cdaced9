//! Sampling fields that chat and text completions share, with extensions for what OpenAI's API lacks.

use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::{
    NumberKind, SAMPLING_NUMBERS, SamplingError, SamplingOverrides, SamplingSpec, StopConditions,
};

use crate::layers::request_id;
use crate::outcome::Outcome;
use crate::protocols::http::fields::{Field, Fields, honoured, ignored, refused};
use crate::protocols::http::structured;
use crate::protocols::http::usage::UsageBody;
use crate::request::draft::Draft;
use crate::request::limits::check_shared;

/// Fields of OpenAI's chat and text completions: the numeric parameters that OpenAI's API has, and others.
pub(crate) static SAMPLING: [Field; count(false) + STANDARD.len()] = with_numbers(false, STANDARD);

/// Extensions that other servers and their clients know, too: the numeric parameters that OpenAI's API lacks, and others.
pub(crate) static EXTENSIONS: [Field; count(true) + OTHERS.len()] = with_numbers(true, OTHERS);

/// Returns the count of numeric parameters that OpenAI's API has, or lacks.
const fn count(extension: bool) -> usize {
    let (mut row, mut count) = (0, 0);
    while row < SAMPLING_NUMBERS.len() {
        count += (SAMPLING_NUMBERS[row].extension == extension) as usize;
        row += 1;
    }
    count
}

/// Returns the field of a numeric parameter; an unknown name does not compile where a field table names it.
pub(crate) const fn number(name: &str) -> Field {
    let mut row = 0;
    while row < SAMPLING_NUMBERS.len() {
        let number = &SAMPLING_NUMBERS[row];
        if equal(number.name.as_bytes(), name.as_bytes()) {
            return honoured(number.name, number.http);
        }
        row += 1;
    }
    panic!("no numeric parameter has this name")
}

/// Whether two texts are equal, in constants.
const fn equal(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let mut at = 0;
    while at < left.len() {
        if left[at] != right[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// Returns the fields of the numeric parameters that OpenAI's API has, or lacks, before `others`.
const fn with_numbers<const N: usize>(extension: bool, others: &[Field]) -> [Field; N] {
    let mut fields = [honoured("", ""); N];
    let (mut row, mut filled) = (0, 0);
    while row < SAMPLING_NUMBERS.len() {
        let number = &SAMPLING_NUMBERS[row];
        if number.extension == extension {
            fields[filled] = honoured(number.name, number.http);
            filled += 1;
        }
        row += 1;
    }
    let mut other = 0;
    while other < others.len() {
        fields[filled + other] = others[other];
        other += 1;
    }
    fields
}

const STANDARD: &[Field] = &[
    honoured("model", "Name of a served model; absent: the only one."),
    honoured("logit_bias", "Object of token id to bias in [-100, 100]; at most 1024 entries."),
    honoured(
        "seed",
        "64-bit integer. Equal requests with equal seeds give equal tokens on one `system_fingerprint`.",
    ),
    honoured("n", "In [1, 16]."),
    honoured("stop", "String or at most 16 strings of 1 to 256 bytes."),
    honoured("stream", "Server-sent events."),
    honoured(
        "stream_options",
        "`include_usage` and `continuous_usage_stats`; without `stream` it has no effect.",
    ),
    ignored("user", "The API key names the tenant."),
    ignored("metadata", "Nothing is stored."),
];

const OTHERS: &[Field] = &[
    honoured("min_tokens", "Extension: minimum number of tokens before the end."),
    honoured("stop_token_ids", "Extension: at most 128 token ids that end the output."),
    honoured("ignore_eos", "Extension: the model's EOS tokens do not end the output."),
    honoured("require_fingerprint", "Extension: runs only on workers with this `system_fingerprint`."),
    honoured(
        "request_id",
        "Extension: id of the request, 1 to 120 visible characters; the header `x-request-id` counts first.",
    ),
    ignored("priority", "The tenant's priority counts; other servers order it the other way round."),
    ignored("cache_salt", "The prefix cache is keyed by tenant."),
    ignored("include_stop_str_in_output", "Stop strings are never part of the output."),
    ignored("skip_special_tokens", "Special tokens are never part of the output."),
    ignored("spaces_between_special_tokens", "Special tokens are never part of the output."),
    ignored("return_token_ids", "Use `/tokenize` or gRPC for token ids."),
    honoured("best_of", "Only 1; use `n` for more choices."),
    refused("use_beam_search", "beam search is not supported; use sampling"),
    honoured(
        "prompt_logprobs",
        "Extension: in [0, 20]; log probability, rank and this many alternatives of each prompt token. Not with `stream`.",
    ),
    honoured("allowed_token_ids", "Extension: 1 to 65536 token ids; no others are generated."),
    honoured("bad_words", "Extension: at most 256 words of 1 to 128 bytes that the output does not contain."),
    honoured(
        "truncate_prompt_tokens",
        "Extension: number of last tokens kept of the prompt, or -1 for what the context leaves beside `max_tokens`.",
    ),
];

/// Reads the fields of [`SAMPLING`] and [`EXTENSIONS`] into a request.
pub(crate) fn read(fields: &Fields<'_>, request: &mut Draft) -> Result<(), Outcome> {
    if fields.count("best_of")?.is_some_and(|best_of| best_of != 1) {
        return Err(Outcome::field("best_of", "best_of must be 1; use n for more choices"));
    }
    request.sampling = SamplingOverrides {
        logit_bias: logit_bias(fields)?,
        allowed_token_ids: allowed_token_ids(fields)?,
        bad_words: fields.get("bad_words", "an array of strings")?.unwrap_or_default(),
        prompt_logprobs: prompt_logprobs(fields)?,
        seed: seed(fields)?,
        n: fields.count("n")?,
        ..SamplingOverrides::default()
    };
    read_numbers(fields, &mut request.sampling)?;
    request.stop = StopConditions {
        max_tokens: None,
        min_tokens: fields.count("min_tokens")?.unwrap_or(0),
        stop: fields.texts("stop")?,
        stop_token_ids: fields.token_ids("stop_token_ids")?.unwrap_or_default(),
        ignore_eos: fields.flag("ignore_eos")?,
    };
    structured::read(fields, request)?;
    request.truncate_prompt_tokens = fields.integer("truncate_prompt_tokens", "an integer")?;
    if let Some(id) = fields.text("request_id")? {
        request_id::check(&id)?;
        request.request_id = id;
    }
    request.require_fingerprint = fields.text("require_fingerprint")?.unwrap_or_default();
    check_shared(request)
}

/// Reads the numeric parameters that the endpoint's table of fields honours.
pub(crate) fn read_numbers(fields: &Fields<'_>, sampling: &mut SamplingOverrides) -> Result<(), Outcome> {
    for number in SAMPLING_NUMBERS {
        let value = match number.kind {
            NumberKind::Float => fields.number(number.name)?.map(f64::from),
            NumberKind::Integer => fields.integer::<i32>(number.name, "an integer")?.map(f64::from),
        };
        if let Some(value) = value {
            let is_off = number.off == Some(value);
            sampling.set_number(number, if is_off { number.absent } else { value });
        }
    }
    Ok(())
}

/// Returns the number of alternatives in a field of log probabilities.
pub(crate) fn alternatives(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, Outcome> {
    let (alternatives, most) = (fields.count(name)?, SamplingSpec::LOGPROBS_MAX);
    match alternatives {
        Some(more) if more > most => {
            Err(Outcome::field(name, format!("{name} is {more}; it must be in [0, {most}]")))
        }
        alternatives => Ok(alternatives),
    }
}

fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, Outcome> {
    let biases = fields.get::<BTreeMap<String, f32>>("logit_bias", "an object of token id to bias")?;
    let entry = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => {
            Err(Outcome::field("logit_bias", format!("logit_bias has the key {id:?}; keys are token ids")))
        }
    };
    biases.unwrap_or_default().into_iter().map(entry).collect()
}

fn prompt_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, Outcome> {
    let alternatives = alternatives(fields, "prompt_logprobs")?;
    if alternatives.is_some() && fields.flag("stream")? {
        let reason = "prompt_logprobs with stream is refused; use stream = false, or gRPC";
        return Err(Outcome::field("prompt_logprobs", reason));
    }
    Ok(alternatives)
}

/// Returns the allowed token ids; none if the field is absent.
fn allowed_token_ids(fields: &Fields<'_>) -> Result<Arc<[u32]>, Outcome> {
    match fields.token_ids("allowed_token_ids")? {
        Some(allowed) if allowed.is_empty() => {
            let reason = "allowed_token_ids is empty; allow at least one token, or leave the field out";
            Err(Outcome::field("allowed_token_ids", reason))
        }
        Some(allowed) if allowed.len() > SamplingSpec::ALLOWED_TOKEN_IDS_MAX => {
            let (name, len, most) = ("allowed_token_ids", allowed.len(), SamplingSpec::ALLOWED_TOKEN_IDS_MAX);
            Err(Outcome::field(name, SamplingError::TooMany { name, len, most }))
        }
        // In the order in which it is used, so that all requests of a call share it.
        allowed => Ok(SamplingSpec::sorted(allowed.unwrap_or_default().into())),
    }
}

/// Returns the seed. Negative ones are valid in OpenAI's API.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, Outcome> {
    let seed = fields.integer::<i128>("seed", "an integer")?;
    let bits = |seed: i128| {
        i64::try_from(seed)
            .map(i64::cast_unsigned)
            .or_else(|_| u64::try_from(seed))
            .map_err(|_| Outcome::field("seed", format!("seed is {seed}; it must be a 64-bit integer")))
    };
    seed.map(bits).transpose()
}

/// Usage of streamed responses that a client asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
pub(crate) struct StreamOptions {
    /// A last chunk has the usage.
    #[serde(default)]
    pub(crate) include_usage: Option<bool>,
    /// Every chunk has the usage so far.
    #[serde(default)]
    pub(crate) continuous_usage_stats: Option<bool>,
}

impl StreamOptions {
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self, Outcome> {
        Ok(fields.object("stream_options", "an object of flags")?.unwrap_or_default())
    }

    /// Whether a last chunk has the usage.
    pub(crate) fn include_usage(self) -> bool {
        self.include_usage == Some(true)
    }

    /// Whether every chunk has the usage so far.
    pub(crate) fn continuous(self) -> bool {
        self.continuous_usage_stats == Some(true)
    }

    /// Returns the usage of a chunk with output: null if only a last chunk has it.
    pub(crate) fn of_chunk(self, so_far: impl FnOnce() -> UsageBody) -> Option<Option<UsageBody>> {
        (self.include_usage() || self.continuous()).then(|| self.continuous().then(so_far))
    }
}
