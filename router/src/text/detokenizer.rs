//! Streaming detokenizer.

use inflight_grammar::Leading;

use super::Vocabulary;

/// Streaming detokenizer of the tokens that follow a prompt.
///
/// The text is what decoding prompt and output together adds to the decoded prompt. A character whose bytes
/// are split over tokens is held back until it is complete; bytes that can never form a character become
/// U+FFFD, one per maximal invalid part, as in lossy decoding of the whole. The cost of a token is
/// proportional to its own bytes, however long the text is.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// Incomplete character: at most three bytes.
    held: Vec<u8>,
    leading: Leading,
}

impl Detokenizer {
    /// Creates a detokenizer for the output after a prompt.
    pub fn new(vocabulary: &Vocabulary, prompt: &[u32]) -> Self {
        // After a visible prompt token, the output is not at the beginning of the text.
        let begun = prompt.iter().any(|id| !vocabulary.is_special(*id) && !vocabulary.bytes(*id).is_empty());
        let leading = if begun { Leading::Keep } else { vocabulary.leading() };
        Self { held: Vec::new(), leading }
    }

    /// Appends the text completed by the next token.
    pub fn push(&mut self, vocabulary: &Vocabulary, id: u32, text: &mut String) {
        if vocabulary.is_special(id) {
            return;
        }
        let bytes = self.without_leading(vocabulary.bytes(id));
        if self.held.is_empty()
            && let Ok(whole) = std::str::from_utf8(bytes)
        {
            text.push_str(whole);
            return;
        }
        self.held.extend_from_slice(bytes);
        self.release(text);
    }

    /// Appends the held-back bytes at the end of the output: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.held.is_empty() {
            self.held.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn without_leading<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        match self.leading {
            Leading::Keep => bytes,
            _ if bytes.is_empty() => bytes,
            Leading::FirstToken => {
                self.leading = Leading::Keep;
                let spaces = bytes.iter().take_while(|byte| **byte == b' ').count();
                &bytes[spaces..]
            }
            Leading::Spaces(most) => {
                let spaces = bytes.iter().take(most).take_while(|byte| **byte == b' ').count();
                let rest = &bytes[spaces..];
                self.leading = if rest.is_empty() { Leading::Spaces(most - spaces) } else { Leading::Keep };
                rest
            }
        }
    }

    fn release(&mut self, text: &mut String) {
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, invalid) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad) = error.error_len() else {
                        rest = invalid;
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &invalid[bad..];
                }
            }
        }
        let kept = rest.len();
        self.held.drain(..self.held.len() - kept);
        debug_assert!(kept <= 3, "an incomplete character has at most three bytes");
    }
}
