//! Tokens of a GGUF file that end an answer. Most files name one of them only; llama.cpp finds the others by their texts.

use super::Gguf;
use super::vocabulary::{TokenClass, Vocabulary};

/// Keys of end tokens: of the sequence, of the turn, and of a message that calls a tool.
const KEYS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

/// Texts of tokens that end a turn or a sequence in published vocabularies.
const TEXTS: [&str; 14] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "</s>",
];

/// Returns the ids of end tokens, ascending.
pub(super) fn end_tokens(gguf: &Gguf) -> Vec<u64> {
    let Some(vocabulary) = Vocabulary::of(gguf) else {
        let id = |key: &&str| gguf.metadata.get(&format!("tokenizer.ggml.{key}"))?.as_u64();
        return KEYS.iter().filter_map(id).collect();
    };
    // Without classes, no token is known to be a part of ordinary text.
    let is_control =
        |class| matches!(class, TokenClass::Control | TokenClass::UserDefined) || !vocabulary.has_classes();
    let named = vocabulary.iter().filter(|(_, text, class)| TEXTS.contains(text) && is_control(*class));
    let named: Vec<(u64, &str)> = named.map(|(id, text, _)| (id as u64, text)).collect();
    // In the format of gpt-oss, `<|end|>` ends a message and not the answer.
    let has = |text: &str| named.iter().any(|(_, other)| *other == text);
    let messages = has("<|return|>") && has("<|call|>");
    let named = named.iter().filter(|(_, text)| !(messages && *text == "<|end|>")).map(|(id, _)| *id);
    let keyed = KEYS.iter().filter_map(|key| vocabulary.special(key)).map(|(id, _)| id);
    let mut ids: Vec<u64> = named.chain(keyed).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
