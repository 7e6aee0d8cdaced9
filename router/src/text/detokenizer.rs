use super::Vocabulary;
use super::vocabulary::Leading;

/// Turns the tokens that follow a prompt into text as they come.
///
/// The text is what decoding prompt and output together adds to the decoded prompt. A character whose bytes
/// are split over tokens is held back until it is whole; bytes that can never become a character turn into
/// U+FFFD, one for each maximal part of a sequence, as in lossy decoding of the whole. The cost of a token is
/// that of its own bytes, however long the text is.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// An incomplete character: at most three bytes.
    held: Vec<u8>,
    leading: Leading,
}

impl Detokenizer {
    /// Starts after a prompt.
    pub fn new(vocabulary: &Vocabulary, prompt: &[u32]) -> Self {
        // Once the prompt shows a token, the output does not stand at the beginning of the text.
        let begun = prompt.iter().any(|id| !vocabulary.is_special(*id) && !vocabulary.bytes(*id).is_empty());
        let leading = if begun { Leading::Keep } else { vocabulary.leading() };
        Self { held: Vec::new(), leading }
    }

    /// Appends to `text` what the next token completes.
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

    /// Appends what is left when nothing more comes: an incomplete character shows as U+FFFD.
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
