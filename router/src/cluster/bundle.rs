//! Model bundles: tokenizer, chat template and generation defaults of a model, fetched from a worker.

use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::{SAMPLING_NUMBERS, SamplingSpec};
use inflight_grammar_service::{Confinement, Grammars};
use inflight_output_parser::{ReasoningFormat, ToolCallFormat};
use inflight_proto::bundle_digest;
use serde_json::Value;

use crate::text::{
    ChatTemplate, Conversation, Message, PromptEnd, Rendering, SpecialTokens, TemplateError, Tokenizer,
    TokenizerError,
};

/// Invalid model bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// Digest mismatch.
    #[error(
        "the bundle's digest is {found}, but {expected} was announced; the worker's files changed while it ran or the transfer is broken"
    )]
    Digest {
        /// Announced digest.
        expected: String,
        /// Computed digest.
        found: String,
    },
    /// Too large.
    #[error("the bundle is larger than {max} bytes or has more than {files_max} files")]
    TooLarge {
        /// Maximum bytes.
        max: usize,
        /// Maximum files.
        files_max: usize,
    },
    /// Missing file.
    #[error("the bundle has no {file}; the model's directory must hold one")]
    Missing {
        /// Name of the file.
        file: &'static str,
    },
    /// Invalid file.
    #[error("{file} in the bundle is not valid: {reason}")]
    Invalid {
        /// Name of the file.
        file: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Invalid tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Invalid chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// Files of a bundle as received.
#[derive(Debug, Default)]
pub(crate) struct BundleFiles {
    files: BTreeMap<String, Vec<u8>>,
    bytes: usize,
}

impl BundleFiles {
    const BYTES_MAX: usize = 256 << 20;
    const FILES_MAX: usize = 64;

    /// Appends a chunk of a file.
    pub(crate) fn append(&mut self, file: &str, data: &[u8]) -> Result<(), BundleError> {
        self.bytes = self.bytes.saturating_add(data.len());
        let files = self.files.len() + usize::from(!self.files.contains_key(file));
        if self.bytes > Self::BYTES_MAX || files > Self::FILES_MAX {
            return Err(BundleError::TooLarge { max: Self::BYTES_MAX, files_max: Self::FILES_MAX });
        }
        self.files.entry(file.to_owned()).or_default().extend_from_slice(data);
        Ok(())
    }

    /// Verifies the digest and loads the files. Grammars are compiled in the processes of `confinement`.
    pub(crate) fn load(self, digest: &str, confinement: Option<Confinement>) -> Result<Model, BundleError> {
        let found = bundle_digest(self.files.iter().map(|(name, data)| (name.as_str(), data.as_slice())));
        if !found.eq_ignore_ascii_case(digest) {
            return Err(BundleError::Digest { expected: digest.to_owned(), found });
        }
        let tokenizer =
            self.files.get("tokenizer.json").ok_or(BundleError::Missing { file: "tokenizer.json" })?;
        let tokenizer = Tokenizer::from_json(tokenizer)?;
        let mut template_error = None;
        let config = self.json("tokenizer_config.json").unwrap_or_else(|error| {
            template_error = Some(error.to_string());
            Value::Null
        });
        let special_tokens = special_tokens(&config, &self.optional("special_tokens_map.json"));
        // Files replace what the configuration has.
        let (source, with_tools) = match self.has_template_files() {
            true => {
                let default = self.template_file("additional_chat_templates/default.jinja");
                let default = default.or_else(|| self.template_file("chat_template.jinja"));
                (default, self.template_file("additional_chat_templates/tool_use.jinja"))
            }
            false => {
                (template_source(&config, "default").map(Ok), template_source(&config, "tool_use").map(Ok))
            }
        };
        let mut parse = |source: Option<Result<String, BundleError>>| {
            let tokens = special_tokens.clone();
            let parsed = source?.and_then(|source| Ok(ChatTemplate::with_special_tokens(&source, tokens)?));
            parsed.map_err(|error| template_error = Some(error.to_string())).ok()
        };
        let (mut template, mut tool_template) = (parse(source), parse(with_tools));
        // Without a usable chat template, only chats are refused.
        if let Some(reason) = &template_error {
            tracing::warn!(reason, "chats are refused, other requests are served");
            (template, tool_template) = (None, None);
        }
        let defaults = sampling_defaults(&self.optional("generation_config.json"));
        let output = ModelOutput::of_templates(template.as_ref(), tool_template.as_ref());
        let vocabulary = tokenizer.vocabulary().clone();
        let vocab_size = u32::try_from(vocabulary.len()).unwrap_or(u32::MAX);
        let eos = special_tokens.get("eos_token").and_then(|token| tokenizer.token_id(token));
        let vocabulary = Arc::new(vocabulary);
        let grammars = Grammars::new(vocab_size, eos.as_slice(), move || Ok(Arc::clone(&vocabulary)));
        let grammars = Arc::new(match confinement {
            Some(confinement) => grammars.confined(confinement),
            None => grammars,
        });
        Ok(Model { tokenizer, template, tool_template, template_error, output, defaults, grammars })
    }

    fn json(&self, file: &'static str) -> Result<Value, BundleError> {
        let Some(data) = self.files.get(file) else { return Ok(Value::Null) };
        serde_json::from_slice(data).map_err(|error| BundleError::Invalid { file, reason: error.to_string() })
    }

    fn has_template_files(&self) -> bool {
        let is_template = |name: &String| {
            name == "chat_template.jinja"
                || name.starts_with("additional_chat_templates/") && name.ends_with(".jinja")
        };
        self.files.keys().any(is_template)
    }

    fn template_file(&self, file: &'static str) -> Option<Result<String, BundleError>> {
        self.files.get(file).map(|data| utf8(file, data))
    }

    /// Returns a file of JSON without which the model can be served; null if it is missing or cannot be read.
    fn optional(&self, file: &'static str) -> Value {
        self.json(file).unwrap_or_else(|error| {
            tracing::warn!(%error, "a file of a model is left out");
            Value::Null
        })
    }
}

/// Loaded bundle of a model.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
    /// Chat template of conversations with tools, if it is another one.
    pub(crate) tool_template: Option<ChatTemplate>,
    /// Why a template is missing, if the model has one that cannot be used.
    pub(crate) template_error: Option<String>,
    pub(crate) output: ModelOutput,
    /// Defaults of sampling fields that a request leaves unset.
    pub(crate) defaults: SamplingSpec,
    grammars: Arc<Grammars>,
}

impl Model {
    /// Outcomes of the grammars that were compiled for its vocabulary.
    pub(crate) fn grammars(&self) -> &Arc<Grammars> {
        &self.grammars
    }

    /// Whether a conversation's prompt begins the model's reasoning with the text `begin` and does not end it with `end`.
    pub(crate) fn opens_reasoning(&self, conversation: &Conversation, begin: &str, end: &str) -> bool {
        let Rendering { arguments, end: prompt_end_of } = &conversation.rendering;
        match prompt_end_of {
            PromptEnd::Messages => false,
            // The text that is continued may be that of an unfinished reasoning.
            PromptEnd::LastMessage => {
                let text = conversation.messages.last().map_or("", Message::text);
                text.rfind(begin).is_some_and(|at| !text[at..].contains(end))
            }
            PromptEnd::NextMessage if arguments.is_empty() => self.output.begins_with(begin),
            PromptEnd::NextMessage => {
                let rendering = conversation.rendering.clone();
                let template = self.template.as_ref();
                template.is_some_and(|template| prompt_end(template, rendering).ends_with(begin))
            }
        }
    }

    /// Prepares its vocabulary for grammars in the background.
    pub(crate) fn prepare_grammars(&self) {
        self.grammars.prepare_checks();
    }
}

/// What the chat template tells of the model's output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ModelOutput {
    pub(crate) calls: Option<ToolCallFormat>,
    pub(crate) reasoning: Option<ReasoningFormat>,
    /// End of every prompt without its last whitespace: the template begins the model's output with it.
    prompt_end: String,
}

impl ModelOutput {
    fn of_templates(template: Option<&ChatTemplate>, tool_template: Option<&ChatTemplate>) -> Self {
        let sources = || [tool_template, template].into_iter().flatten().map(ChatTemplate::source);
        Self {
            calls: sources().find_map(ToolCallFormat::of_template),
            reasoning: sources().find_map(ReasoningFormat::of_template),
            prompt_end: template
                .map(|template| prompt_end(template, Rendering::default()))
                .unwrap_or_default(),
        }
    }

    /// Whether the template begins the model's output with a text.
    pub(crate) fn begins_with(&self, text: &str) -> bool {
        self.prompt_end.ends_with(text)
    }
}

/// Returns the last characters of a template's prompts, without whitespace behind them.
fn prompt_end(template: &ChatTemplate, rendering: Rendering) -> String {
    let messages = vec![Message::new("user", "a".to_owned())];
    let question = Conversation { messages, tools: Vec::new(), rendering };
    let prompt = template.render(&question, time::OffsetDateTime::UNIX_EPOCH).unwrap_or_default();
    let mut end: Vec<char> = prompt.trim_end().chars().rev().take(32).collect();
    end.reverse();
    end.into_iter().collect()
}

fn utf8(file: &'static str, data: &[u8]) -> Result<String, BundleError> {
    let text = std::str::from_utf8(data).map(str::to_owned);
    text.map_err(|error| BundleError::Invalid { file, reason: error.to_string() })
}

/// Returns the special tokens, each given as a string or as an object with its content. As in transformers, those of
/// special_tokens_map.json count first, but not at all if the configuration has the added tokens, which replaced that file.
fn special_tokens(config: &Value, map: &Value) -> SpecialTokens {
    let map = if config["added_tokens_decoder"].is_null() { map } else { &Value::Null };
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
    let token = |name: &'static str| Some((name, text(&map[name]).or_else(|| text(&config[name]))?));
    SpecialTokens::NAMES.into_iter().filter_map(token).collect()
}

/// Returns a chat template: the default may be given alone, others are in a list by their names.
fn template_source(config: &Value, wanted: &str) -> Option<String> {
    match &config["chat_template"] {
        Value::String(source) => (wanted == "default").then(|| source.clone()),
        Value::Array(named) => named
            .iter()
            .find(|template| template["name"] == wanted)
            .and_then(|template| template["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

/// Returns the defaults of generation_config.json. `do_sample: false` means greedy.
fn sampling_defaults(config: &Value) -> SamplingSpec {
    let mut spec = SamplingSpec::default();
    for number in SAMPLING_NUMBERS.iter().filter(|number| number.model) {
        match &config[number.name] {
            Value::Null => {}
            value => match number.of_json(value.as_f64(), value.as_i64()) {
                Some(value) => spec.set_number(number, value),
                None => tracing::warn!(
                    "generation_config.json has {} = {value}, which is not in {}; it is left out",
                    number.name,
                    number.range
                ),
            },
        }
    }
    if config["do_sample"] == Value::Bool(false) {
        spec.temperature = 0.0;
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn generation_config_gives_the_defaults() {
        let defaults = |value| sampling_defaults(&value);
        assert_eq!(defaults(Value::Null), SamplingSpec::default());
        let sampled = defaults(json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20}));
        assert_eq!((sampled.temperature, sampled.top_p, sampled.top_k), (0.6, 0.9, 20));
        assert_eq!(defaults(json!({"do_sample": false, "temperature": 0.6})).temperature, 0.0);
        assert_eq!(defaults(json!({"temperature": null})).temperature, 1.0);
        // What cannot be used is left out.
        let odd =
            json!({"top_p": 7, "top_k": "many", "temperature": 0.5, "min_p": null, "repetition_penalty": 0});
        assert_eq!(defaults(odd), SamplingSpec { temperature: 0.5, ..SamplingSpec::default() });
    }

    #[test]
    fn an_incomplete_or_unexpected_bundle_is_rejected() {
        let tokenizer = inflight_fixtures::Family::Llama3.tokenizer_json().as_bytes();
        let load = |files: &[(&str, &[u8])]| {
            let mut bundle = BundleFiles::default();
            files.iter().for_each(|(file, data)| bundle.append(file, data).unwrap());
            bundle.load(&bundle_digest(files.iter().copied()), None)
        };
        let model = load(&[("tokenizer.json", tokenizer)]).unwrap();
        assert!(model.template.is_none() && model.defaults == SamplingSpec::default());
        let missing = load(&[("tokenizer_config.json", b"{}")]).unwrap_err();
        assert!(matches!(missing, BundleError::Missing { file: "tokenizer.json" }));
        let broken = load(&[("tokenizer.json", &tokenizer[..100])]).unwrap_err();
        assert!(matches!(broken, BundleError::Tokenizer(TokenizerError::Load(_))), "{broken}");
        // An unreadable side file disables only the feature that needs it.
        let side = |file, data| load(&[("tokenizer.json", tokenizer), (file, data)]).unwrap();
        assert_eq!(side("generation_config.json", b"{").defaults, SamplingSpec::default());
        let without = |files: &[(&str, &[u8])]| {
            let model = load(&[&[("tokenizer.json", tokenizer)], files].concat()).unwrap();
            assert!(model.template.is_none() && model.tool_template.is_none());
            model.template_error.unwrap()
        };
        let config: (&str, &[u8]) = ("tokenizer_config.json", b"{");
        assert!(without(&[config]).contains("tokenizer_config.json"));
        assert!(without(&[config, ("chat_template.jinja", b"x")]).contains("tokenizer_config.json"));
        assert!(without(&[("chat_template.jinja", b"\xff")]).contains("chat_template.jinja"));
        let model = side("chat_template.jinja", b"{% if %}");
        assert!(model.template.is_none() && model.template_error.unwrap().contains("does not parse"));
        let model =
            side("chat_template.jinja", b"{% generation %}{{ messages[0].content }}{% endgeneration %}!");
        let messages = [Message::new("user", "a".to_owned())];
        let prompt = model.template.unwrap().render(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH);
        assert_eq!(prompt.unwrap(), "a!");
        let mut bundle = BundleFiles::default();
        bundle.append("tokenizer.json", tokenizer).unwrap();
        assert!(matches!(bundle.load("00", None), Err(BundleError::Digest { .. })));
        let mut bundle = BundleFiles::default();
        let more = |i: usize| bundle.append(&i.to_string(), b"x").is_err();
        assert_eq!((0..100).position(more), Some(BundleFiles::FILES_MAX));
    }

    #[test]
    fn a_template_is_a_string_or_the_default_of_a_list() {
        let named = json!({"chat_template": [{"name": "tool_use", "template": "t"},
                                             {"name": "default", "template": "d"}],
                           "bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": null});
        assert_eq!(template_source(&named, "default").as_deref(), Some("d"));
        assert_eq!(template_source(&named, "tool_use").as_deref(), Some("t"));
        assert_eq!(template_source(&json!({"chat_template": "x"}), "default").as_deref(), Some("x"));
        assert_eq!(template_source(&Value::Null, "default"), None);
    }

    #[test]
    fn special_tokens_are_those_of_the_configuration_or_of_their_own_file() {
        let config =
            json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": null, "pad_token": 7});
        let map = json!({"eos_token": {"content": "<eos>"}, "pad_token": "<pad>", "additional_special_tokens": ["x"]});
        let tokens = |config: &Value, map: &Value| {
            special_tokens(config, map)
                .iter()
                .map(|(name, token)| format!("{name}={token}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(tokens(&config, &Value::Null), ["bos_token=<s>", "eos_token=</s>"]);
        assert_eq!(tokens(&config, &map), ["bos_token=<s>", "eos_token=<eos>", "pad_token=<pad>"]);
        assert_eq!(tokens(&Value::Null, &map), ["eos_token=<eos>", "pad_token=<pad>"]);
        let mut with_added = config;
        with_added["added_tokens_decoder"] = json!({"0": {"content": "<s>"}});
        assert_eq!(tokens(&with_added, &map), ["bos_token=<s>", "eos_token=</s>"]);
    }

    #[test]
    fn files_of_templates_replace_those_of_the_configuration() {
        let tokenizer = inflight_fixtures::Family::Llama3.tokenizer_json().as_bytes();
        let config = br#"{"chat_template": [{"name": "default", "template": "c"}, {"name": "tool_use", "template": "ct"}],
            "eos_token": "<e>"}"#;
        let sources = |files: &[(&str, &[u8])]| {
            let mut bundle = BundleFiles::default();
            let all =
                [&[("tokenizer.json", tokenizer), ("tokenizer_config.json", &config[..])], files].concat();
            all.iter().for_each(|(file, data)| bundle.append(file, data).unwrap());
            let model = bundle.load(&bundle_digest(all.iter().copied()), None).unwrap();
            let source =
                |template: Option<ChatTemplate>| template.map(|template| template.source().to_owned());
            assert_eq!(model.template_error, None);
            (source(model.template), source(model.tool_template))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(sources(&[]), (some("c"), some("ct")));
        assert_eq!(sources(&[("chat_template.jinja", b"f")]), (some("f"), None));
        let tools: (&str, &[u8]) = ("additional_chat_templates/tool_use.jinja", b"ft");
        assert_eq!(sources(&[("chat_template.jinja", b"f"), tools]), (some("f"), some("ft")));
        assert_eq!(sources(&[tools]), (None, some("ft")));
        let default: (&str, &[u8]) = ("additional_chat_templates/default.jinja", b"fd");
        assert_eq!(sources(&[default, ("additional_chat_templates/rag.jinja", b"fr")]), (some("fd"), None));
        let map: (&str, &[u8]) = ("special_tokens_map.json", br#"{"bos_token": "<b>"}"#);
        let mut bundle = BundleFiles::default();
        let all: [(&str, &[u8]); 3] =
            [("tokenizer.json", tokenizer), ("chat_template.jinja", b"{{ bos_token }}|{{ eos_token }}"), map];
        all.iter().for_each(|(file, data)| bundle.append(file, data).unwrap());
        let model = bundle.load(&bundle_digest(all.iter().copied()), None).unwrap();
        let rendered =
            model.template.unwrap().render(&Conversation::default(), time::OffsetDateTime::UNIX_EPOCH);
        assert_eq!(rendered.unwrap(), "<b>|");
    }
}
