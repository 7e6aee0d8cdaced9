//! Errors of tokenizers.

use super::VocabularyError;

/// Invalid tokenizer, or text that it cannot encode.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// Invalid tokenizer.json.
    #[error("tokenizer.json does not load: {0}")]
    Load(String),
    /// Decoder that cannot be streamed.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// Decoder whose output differs from streamed decoding.
    #[error(
        "the decoder of tokenizer.json turns {sample:?} into {theirs:?}, but token by token into {ours:?}; it is not supported"
    )]
    Mismatch {
        /// Sample text.
        sample: &'static str,
        /// Output of the tokenizer's own decoder.
        theirs: String,
        /// Output of streamed decoding.
        ours: String,
    },
    /// Text that cannot be encoded.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
}
