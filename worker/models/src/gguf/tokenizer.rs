//! Conversion of a GGUF vocabulary to tokenizer.json and tokenizer_config.json.

use serde_json::{Value, json};

use super::super::Error;
use super::vocabulary::Vocabulary;
use super::{Gguf, byte_level, sentencepiece};

/// Converts the vocabulary in the file to tokenizer.json and tokenizer_config.json.
///
/// # Errors
/// The vocabulary is of an unsupported kind; then the model's tokenizer.json must be in the same directory.
pub(in super::super) fn tokenizer(gguf: &Gguf) -> Result<[(&'static str, Value); 2], Error> {
    let unusable = |what: &str| Vocabulary::unusable(gguf, what);
    let model = gguf.metadata.get("tokenizer.ggml.model").and_then(Value::as_str);
    let model = model.ok_or_else(|| unusable("it has no vocabulary"))?;
    let convert = match model {
        "gpt2" => byte_level::tokenizer,
        "llama" => sentencepiece::tokenizer,
        other => {
            let what = format!("its vocabulary is of the kind `{other}`; `gpt2` and `llama` are rebuilt");
            return Err(unusable(&what));
        }
    };
    let vocabulary = Vocabulary::of(gguf).ok_or_else(|| unusable("its vocabulary lacks tokens"))?;
    if let Some(id) = vocabulary.first_without_text() {
        return Err(unusable(&format!("its token {id} is no text")));
    }
    let tokenizer = convert(gguf, &vocabulary)?;
    let text_of = |key: &str| vocabulary.special(key).map(|(_, text)| text);
    let config = json!({
        "chat_template": gguf.metadata.get("tokenizer.chat_template"),
        "bos_token": text_of("bos_token_id"),
        "eos_token": text_of("eos_token_id"),
        "unk_token": text_of("unknown_token_id"),
        "pad_token": text_of("padding_token_id"),
    });
    Ok([("tokenizer.json", tokenizer), ("tokenizer_config.json", config)])
}
