//! Conversion between text and token ids, from a model's bundle.

mod added_tokens;
mod conversation;
mod detokenizer;
mod marks;
mod pieces;
mod prompt_text;
mod rendering;
mod template;
mod template_functions;
mod template_limits;
mod template_methods;
mod token_bound;
mod tokenizer;
mod tokenizer_error;

pub use added_tokens::AddedTokens;
pub use conversation::{Conversation, Message, MessageCall};
pub use detokenizer::Detokenizer;
pub use inflight_grammar::{Vocabulary, VocabularyError};
pub use prompt_text::PromptText;
pub use rendering::{ArgumentError, PromptEnd, Rendering, TemplateArguments};
pub use template::{ChatTemplate, TemplateError};
pub use token_bound::TokenBound;
pub use tokenizer::Tokenizer;
pub use tokenizer_error::TokenizerError;
