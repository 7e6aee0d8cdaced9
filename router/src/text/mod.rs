//! Conversion between text and token ids, from a model's bundle.

mod added_tokens;
mod conversation;
mod detokenizer;
mod marks;
mod pieces;
mod prompt_text;
mod rendering;
mod special_tokens;
mod template;
mod template_filters;
mod template_format;
mod template_functions;
mod template_json;
mod template_limits;
mod template_methods;
mod template_options;
mod template_source;
mod template_time;
mod template_values;
mod token_bound;
mod tokenizer;
mod tokenizer_error;

pub use added_tokens::AddedTokens;
pub use conversation::{Conversation, Message, MessageCall};
pub use detokenizer::Detokenizer;
pub use inflight_grammar::{Vocabulary, VocabularyError};
pub use prompt_text::PromptText;
pub use rendering::{ArgumentError, PromptEnd, Rendering, TemplateArguments};
pub use special_tokens::SpecialTokens;
pub use template::{ChatTemplate, TemplateError};
pub use token_bound::TokenBound;
pub use tokenizer::Tokenizer;
pub use tokenizer_error::TokenizerError;
