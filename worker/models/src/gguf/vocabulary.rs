//! Vocabulary of a GGUF file: tokens with their classes, and special tokens by key.

use serde_json::{Value, json};

use super::super::Error;
use super::Gguf;

/// Class of a token in `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenClass {
    Normal,
    Unknown,
    Control,
    UserDefined,
}

/// Tokens of a GGUF file.
pub(super) struct Vocabulary<'a> {
    gguf: &'a Gguf,
    tokens: &'a [Value],
    classes: Option<&'a [Value]>,
}

impl<'a> Vocabulary<'a> {
    /// Returns the vocabulary of a file; `None` if it has no tokens.
    pub(super) fn of(gguf: &'a Gguf) -> Option<Self> {
        let tokens = gguf.list("tokenizer.ggml.tokens")?;
        Some(Self { gguf, tokens, classes: gguf.list("tokenizer.ggml.token_type") })
    }

    /// Iterates over ids, texts and classes. A token that is no text is empty.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &'a str, TokenClass)> {
        let classes = self.classes.unwrap_or_default();
        self.tokens.iter().enumerate().map(|(id, text)| {
            let class = match classes.get(id).and_then(Value::as_u64) {
                Some(2) => TokenClass::Unknown,
                Some(3) => TokenClass::Control,
                Some(4) => TokenClass::UserDefined,
                _ => TokenClass::Normal,
            };
            (id, text.as_str().unwrap_or_default(), class)
        })
    }

    /// Whether the file says which tokens are control tokens.
    pub(super) fn has_classes(&self) -> bool {
        self.classes.is_some()
    }

    /// Returns the id of the first token that is no text.
    pub(super) fn first_without_text(&self) -> Option<usize> {
        self.tokens.iter().position(|token| !token.is_string())
    }

    /// Returns a special token by its key, such as `bos_token_id`, or the default of its kind of vocabulary, as llama.cpp has
    /// them.
    pub(super) fn special(&self, key: &str) -> Option<(u64, &'a str)> {
        let stored = self.gguf.metadata.get(&format!("tokenizer.ggml.{key}")).and_then(Value::as_u64);
        let default = || match (self.is_sentencepiece(), key) {
            (true, "unknown_token_id") => Some(0),
            (true, "bos_token_id") => Some(1),
            (true, "eos_token_id") => Some(2),
            _ => None,
        };
        let id = stored.or_else(default)?;
        Some((id, self.tokens.get(usize::try_from(id).ok()?)?.as_str()?))
    }

    /// Whether the vocabulary is SentencePiece's.
    pub(super) fn is_sentencepiece(&self) -> bool {
        self.gguf.metadata.get("tokenizer.ggml.model").and_then(Value::as_str) == Some("llama")
    }

    /// Returns the tokens that tokenizer.json lists as added: control tokens, user-defined ones and those for unknown text.
    pub(super) fn added_tokens(&self) -> Vec<Value> {
        let added = self.iter().filter(|(_, _, class)| *class != TokenClass::Normal);
        let added = added.map(|(id, text, class)| {
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": class != TokenClass::UserDefined,
            })
        });
        added.collect()
    }

    /// Returns the post-processor that puts the BOS token first, if the file or else its kind of vocabulary asks for it.
    pub(super) fn post_processor(&self, default: bool) -> Option<Value> {
        let asked = self.gguf.metadata.get("tokenizer.ggml.add_bos_token").and_then(Value::as_bool);
        let (id, text) = self.special("bos_token_id").filter(|_| asked.unwrap_or(default))?;
        let special = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
        let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
        Some(json!({
            "type": "TemplateProcessing",
            "single": [special, sequence("A")],
            "pair": [special, sequence("A"), sequence("B")],
            "special_tokens": { text: { "id": text, "ids": [id], "tokens": [text] } },
        }))
    }

    /// Returns the error of a vocabulary that cannot be rebuilt.
    pub(super) fn unusable(gguf: &Gguf, what: &str) -> Error {
        let reason = format!("{what}; put the model's tokenizer.json into the same directory");
        Error::Broken { file: gguf.label.clone(), reason }
    }
}
