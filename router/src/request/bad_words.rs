//! Bad words of a request: their tokens, which the output does not contain.

use inflight_contract::SamplingSpec;
use inflight_router_core::TokenizePiece;

use crate::dispatcher::ServedModel;
use crate::outcome::Outcome;
use crate::request::prompt::encoding;
use crate::request::tokenizing::{TokenizeTerms, Tokenizing};

const WORDS_MAX: usize = 256;
const WORD_BYTES_MAX: usize = 128;
/// Number of words above which tokenizing them would delay other streams of the thread: each call of the
/// tokenizer has a cost of its own.
const FEW_WORDS: usize = 16;

/// Bad words to be tokenized: each with and without a leading space, as it may begin the output or follow other
/// text.
pub(crate) struct BadWords {
    served: ServedModel,
    words: Vec<String>,
    tokens: Vec<Vec<u32>>,
}

impl BadWords {
    /// Creates the work of a request.
    ///
    /// # Errors
    /// There are too many words, or one is empty or too long.
    pub(crate) fn new(served: ServedModel, words: Vec<String>) -> Result<Self, Outcome> {
        Self::check(&words)?;
        Ok(Self { served, words, tokens: Vec::new() })
    }

    /// Checks the number of words and their sizes.
    pub(crate) fn check(words: &[String]) -> Result<(), Outcome> {
        if words.len() > WORDS_MAX {
            return invalid(format!("bad_words has {} words; at most {WORDS_MAX} are allowed", words.len()));
        }
        let wrong = |word: &String| word.trim_start().is_empty() || word.len() > WORD_BYTES_MAX;
        if let Some(index) = words.iter().position(wrong) {
            let bytes = words[index].len();
            return invalid(format!(
                "bad_words[{index}] has {bytes} bytes; each must have 1 to {WORD_BYTES_MAX}, not only spaces"
            ));
        }
        Ok(())
    }

    /// Whether tokenizing them needs a blocking thread.
    pub(crate) fn are_many(&self) -> bool {
        self.words.len() > FEW_WORDS
    }

    /// Returns the only piece of the work.
    pub(crate) fn piece(&self) -> TokenizePiece {
        let bytes: usize = self.words.iter().map(String::len).sum();
        TokenizePiece { bytes: 2 * bytes as u64, last: true }
    }

    /// Tokenizes them.
    ///
    /// # Errors
    /// A word has too many tokens.
    pub(crate) fn run(&mut self) -> Result<Option<TokenizePiece>, Outcome> {
        for (index, word) in self.words.iter().enumerate() {
            let bare = word.trim_start();
            for text in [bare.to_owned(), format!(" {bare}")] {
                let tokens = self.served.model.tokenizer.encode_rendered(&text).map_err(encoding)?;
                let (len, most) = (tokens.len(), SamplingSpec::BAD_WORD_TOKENS_MAX);
                if !(1..=most).contains(&len) {
                    return invalid(format!(
                        "bad_words[{index}] has {len} tokens; each must have 1 to {most}"
                    ));
                }
                self.tokens.push(tokens);
            }
        }
        Ok(None)
    }

    /// Returns their tokens, in turns with other tenants if they are many.
    pub(crate) async fn tokenize(
        mut self,
        tokenizing: &Tokenizing,
        terms: &TokenizeTerms,
    ) -> Result<Vec<Vec<u32>>, Outcome> {
        if self.are_many() {
            let done = tokenizing.run(terms, self.piece(), self, Self::run).await?;
            return Ok(done.tokens);
        }
        self.run()?;
        Ok(self.tokens)
    }
}

fn invalid<T>(reason: String) -> Result<T, Outcome> {
    Err(Outcome::field("bad_words", reason))
}
