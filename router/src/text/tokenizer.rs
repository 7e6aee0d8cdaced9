//! Tokenizer of a model (Hugging Face tokenizer.json).

use std::ops::Range;

use tokenizers::{Model as _, Normalizer as _, OffsetType, PreTokenizedString, PreTokenizer as _, Token};

use super::{AddedTokens, PromptText, TokenBound, TokenizerError, Vocabulary, pieces};

/// Special tokens before and after a text.
type Around = (Vec<u32>, Vec<u32>);

/// Tokenizer of a model.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocabulary: Vocabulary,
    bound: TokenBound,
    added: AddedTokens,
    /// Whether long texts are cut into pieces.
    cuttable: bool,
    /// Special tokens before and after a text; `None` if they cannot be told.
    around: Option<Around>,
}

impl Tokenizer {
    /// Loads a tokenizer.json. Truncation and padding in the file are disabled: a prompt that is too long is
    /// rejected, never truncated.
    ///
    /// # Errors
    /// [`TokenizerError`] if the file is invalid or its decoder cannot be streamed.
    pub fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        let load = |error: tokenizers::Error| TokenizerError::Load(error.to_string());
        // The library panics on some invalid files.
        let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json));
        let mut inner =
            parsed.map_err(|panic| TokenizerError::Load(panic_message(&*panic)))?.map_err(load)?;
        inner.with_truncation(None).map_err(load)?;
        inner.with_padding(None);
        let vocabulary = Vocabulary::new(&inner)?;
        let parsed = serde_json::from_slice(json).map_err(|error| TokenizerError::Load(error.to_string()))?;
        let bound = TokenBound::new(&parsed, &vocabulary);
        let added = AddedTokens::new(&inner)?;
        let cuttable = pieces::is_cuttable(&parsed) && !added.may_have_spaces();
        let mut tokenizer = Self { inner, vocabulary, bound, added, cuttable, around: None };
        tokenizer.check_decoder()?;
        tokenizer.around = tokenizer.special_tokens_around()?;
        Ok(tokenizer)
    }

    /// Returns the special tokens that are added before and after a text.
    fn special_tokens_around(&self) -> Result<Option<Around>, TokenizerError> {
        let (text, with) = (self.encode_with("a", false)?, self.encode_with("a", true)?);
        let at = with.windows(text.len().max(1)).position(|window| window == text);
        Ok(at.map(|at| (with[..at].to_vec(), with[at + text.len()..].to_vec())))
    }

    /// Returns the added tokens.
    pub fn added(&self) -> &AddedTokens {
        &self.added
    }

    /// Cuts a prompt into pieces whose tokens, one piece after the other, are those of the whole: of at most 64 KiB
    /// if the tokenizer and the text allow it, else one. The special tokens around a text are part of the first
    /// and the last piece.
    pub fn pieces(&self, prompt: &PromptText) -> Vec<Range<usize>> {
        let text = prompt.as_str();
        let bytes_max = if self.cuttable && self.around.is_some() { pieces::PIECE_BYTES } else { text.len() };
        pieces::cut(text, bytes_max)
    }

    /// Tokenizes a piece of a prompt; with `around`, the model's special tokens are added around the prompt.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode_piece(
        &self,
        prompt: &PromptText,
        piece: Range<usize>,
        around: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let all = prompt.as_str().len();
        let whole = piece == (0..all);
        let special = around && whole;
        let ids = if prompt.needs_care(piece.clone(), &self.added) {
            self.encode_literal(prompt, piece.clone(), special)
        } else {
            self.encode_with(&prompt.as_str()[piece.clone()], special)
        }?;
        let Some((before, after)) = self.around.as_ref().filter(|_| around && !whole) else { return Ok(ids) };
        let before = if piece.start == 0 { &before[..] } else { &[] };
        let after = if piece.end == all { &after[..] } else { &[] };
        Ok([before, &ids, after].concat())
    }

    /// Tokenizes a piece of a prompt as the tokenizers library does, but for special tokens in literal text, which
    /// are plain text.
    pub(super) fn encode_literal(
        &self,
        prompt: &PromptText,
        piece: Range<usize>,
        special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let base = piece.start;
        let is_literal = |bytes: Range<usize>| prompt.is_literal(base + bytes.start..base + bytes.end);
        let encode = || {
            let mut text = PreTokenizedString::from(&prompt.as_str()[piece]);
            text.split(|_, part| self.added.split_raw(&part, is_literal))?;
            text.split(|_, mut part| {
                if let Some(normalizer) = self.inner.get_normalizer() {
                    normalizer.normalize(&mut part)?;
                }
                self.added.split_normalized(&part, is_literal)
            })?;
            if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut text)?;
            }
            text.tokenize(|part| self.tokenize_plain(part.get()))?;
            let encoding = text.into_encoding(None, 0, OffsetType::None)?;
            self.inner.post_process(encoding, None, special)
        };
        let encoding: tokenizers::Result<_> = encode();
        Ok(encoding.map_err(|error| TokenizerError::Encode(error.to_string()))?.get_ids().to_vec())
    }

    /// Tokenizes text that has no special token. A model whose pieces include the special tokens (Unigram does, with
    /// scores above all others) finds them in such text, too: their text is tokenized in two parts then.
    fn tokenize_plain(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let mut plain = Vec::new();
        for token in self.inner.get_model().tokenize(text)? {
            // Not the token of unknown text, whose value is that text.
            let named =
                || self.inner.get_model().id_to_token(token.id).is_some_and(|name| name == token.value);
            let special = self.vocabulary.is_special(token.id) && named();
            let (start, end) = token.offsets;
            let cut = text
                .get(start..end)
                .and_then(|part| part.chars().next())
                .map_or(end, |c| start + c.len_utf8());
            if !special || cut >= end {
                plain.push(token);
                continue;
            }
            for range in [start..cut, cut..end] {
                let from = range.start;
                plain.extend(self.tokenize_plain(&text[range])?.into_iter().map(|mut token| {
                    token.offsets = (token.offsets.0 + from, token.offsets.1 + from);
                    token
                }));
            }
        }
        Ok(plain)
    }

    /// Tokenizes a prompt; with `around`, the model's special tokens are added around it.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode_prompt(&self, prompt: &PromptText, around: bool) -> Result<Vec<u32>, TokenizerError> {
        let pieces = self.pieces(prompt).into_iter().map(|piece| self.encode_piece(prompt, piece, around));
        Ok(pieces.collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Tokenizes plain text, adding the model's special tokens around it.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, true)
    }

    /// Tokenizes a rendered chat, whose special tokens are part of the template.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, special);
        Ok(encoding.map_err(|error| TokenizerError::Encode(error.to_string()))?.get_ids().to_vec())
    }

    /// Returns a lower bound on the number of tokens, without tokenizing.
    pub fn min_tokens(&self, text: &str) -> usize {
        self.bound.min_tokens(text)
    }

    /// Returns the id of the token that a text is as a whole.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Returns the table of token bytes.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Returns the text of one token, special ones included; a partial character becomes U+FFFD.
    pub fn piece(&self, id: u32) -> String {
        String::from_utf8_lossy(self.vocabulary.bytes(id)).into_owned()
    }

    /// Decodes a whole sequence with the tokenizer's own decoder.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner.decode(ids, true).map_err(|error| TokenizerError::Encode(error.to_string()))
    }

    /// Decodes a whole sequence with the tokenizer's own decoder, special tokens included.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the decoder fails.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner.decode(ids, false).map_err(|error| TokenizerError::Encode(error.to_string()))
    }

    /// Compares streamed decoding with the tokenizer's own decoder, so that an unsupported decoder fails at
    /// load.
    fn check_decoder(&self) -> Result<(), TokenizerError> {
        for sample in ["Hello, world", " two  spaces\n\tand 3.14 ", "na\u{ef}ve \u{4f60}\u{597d} \u{1f642}!"]
        {
            let ids = self.encode_rendered(sample)?;
            let theirs = self.decode(&ids)?;
            let mut ours = String::new();
            let mut detokenizer = super::Detokenizer::new(&self.vocabulary, &[]);
            for id in ids {
                detokenizer.push(&self.vocabulary, id, &mut ours);
            }
            detokenizer.finish(&mut ours);
            if ours != theirs {
                return Err(TokenizerError::Mismatch { sample, theirs, ours });
            }
        }
        Ok(())
    }
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the library failed").to_owned()
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::{Chat, Family};
    use proptest::prelude::*;

    use super::super::{ChatTemplate, Detokenizer, Message};
    use super::*;

    fn tokenizer(family: Family) -> Tokenizer {
        Tokenizer::from_json(family.tokenizer_json().as_bytes()).unwrap()
    }

    fn streamed(tokenizer: &Tokenizer, prompt: &[u32], output: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer.vocabulary(), prompt);
        let mut deltas = Vec::new();
        for id in output {
            let mut delta = String::new();
            detokenizer.push(tokenizer.vocabulary(), *id, &mut delta);
            deltas.push(delta);
        }
        let mut rest = String::new();
        detokenizer.finish(&mut rest);
        deltas.push(rest);
        deltas
    }

    /// Collapses runs of U+FFFD, which decoders count differently.
    fn squeezed(text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            if c != '\u{fffd}' || !out.ends_with('\u{fffd}') {
                out.push(c);
            }
        }
        out
    }

    /// Prompt and output of any tokens of the vocabulary and a few ids beyond it.
    fn sequences() -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
        (proptest::collection::vec(0u32..300, 0..6), proptest::collection::vec(0u32..300, 0..40))
    }

    /// Prompt and output of whole pieces and of characters in byte tokens, whose ids follow the three special
    /// ones. (The tokenizer's decoder replaces a whole run of byte tokens if it is not valid text, which
    /// streaming cannot.)
    fn pieces() -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
        let spelt = any::<char>()
            .prop_map(|c| c.to_string().bytes().map(|byte| u32::from(byte) + 3).collect::<Vec<u32>>());
        let piece =
            prop_oneof![(0u32..3).prop_map(|id| vec![id]), (259u32..310).prop_map(|id| vec![id]), spelt];
        let pieces = |most| proptest::collection::vec(piece.clone(), 0..most).prop_map(|ids| ids.concat());
        (pieces(5), pieces(30))
    }

    proptest! {
        #[test]
        fn byte_level_streaming_equals_decoding_at_once((prompt, output) in sequences()) {
            for family in [Family::Llama3, Family::ChatMl] {
                let tokenizer = tokenizer(family);
                let decoded = tokenizer.decode(&output).unwrap();
                prop_assert_eq!(streamed(&tokenizer, &prompt, &output).concat(), decoded);
            }
        }

        #[test]
        fn sentencepiece_streams_what_decoding_adds_to_the_prompt((prompt, output) in pieces()) {
            let tokenizer = tokenizer(Family::SentencePiece);
            let whole = tokenizer.decode(&[prompt.clone(), output.clone()].concat()).unwrap();
            let before = tokenizer.decode(&prompt).unwrap();
            let text = streamed(&tokenizer, &prompt, &output).concat();
            prop_assert_eq!(Some(text.as_str()), whole.strip_prefix(&before));
        }

        #[test]
        fn text_survives_encoding_and_streaming_without_broken_characters(text in "\\PC{0,40}") {
            for family in Family::all() {
                let tokenizer = tokenizer(*family);
                let ids = tokenizer.encode_rendered(&text).unwrap();
                let deltas = streamed(&tokenizer, &[], &ids);
                prop_assert_eq!(squeezed(&deltas.concat()), squeezed(&tokenizer.decode(&ids).unwrap()));
                if !text.contains('\u{fffd}') {
                    prop_assert!(deltas.iter().all(|delta| !delta.contains('\u{fffd}')), "held back until whole");
                }
            }
        }
    }

    #[test]
    fn invalid_bytes_become_replacements_at_linear_cost() {
        let tokenizer = tokenizer(Family::SentencePiece);
        let id = |piece: &str| {
            (0..tokenizer.vocabulary().len() as u32)
                .find(|id| tokenizer.inner.id_to_token(*id).as_deref() == Some(piece))
        };
        let (lead, next) = (id("<0xE4>").unwrap(), id("<0xBD>").unwrap());
        let last = id("<0xA0>").unwrap();
        let deltas = streamed(&tokenizer, &[], &[lead, next, last, next, lead, next]);
        assert_eq!(deltas, ["", "", "\u{4f60}", "\u{fffd}", "", "", "\u{fffd}"]);
    }

    #[test]
    fn conversations_and_texts_tokenize_like_transformers() {
        for family in Family::all() {
            let (tokenizer, chat) = (tokenizer(*family), Chat::load(*family).unwrap());
            let config: serde_json::Value = serde_json::from_str(family.tokenizer_config_json()).unwrap();
            let part = |key: &str| config[key].as_str().unwrap_or_default();
            let template =
                ChatTemplate::new(part("chat_template"), part("bos_token"), part("eos_token")).unwrap();
            let message =
                |message: &inflight_fixtures::Message| Message::new(&message.role, message.content.clone());
            let messages: Vec<_> = chat.messages.iter().map(message).collect();
            let rendered = template.render(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH).unwrap();
            assert_eq!(rendered, chat.rendered);
            assert_eq!(tokenizer.encode_rendered(&rendered).unwrap(), chat.tokens);
            for text in chat.texts {
                assert_eq!(tokenizer.encode(&text.text).unwrap(), text.tokens, "{:?}", text.text);
                assert_eq!(streamed(&tokenizer, &[], &text.tokens).concat(), text.decoded);
            }
        }
    }

    /// Unigram finds every piece of its vocabulary in a text, those of special tokens with the highest scores.
    #[test]
    fn special_tokens_in_plain_text_are_plain_text_for_unigram_models_too() {
        let mut json: serde_json::Value =
            serde_json::from_str(Family::SentencePiece.tokenizer_json()).unwrap();
        let mut pieces: Vec<(u64, String)> = json["model"]["vocab"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(k, id)| (id.as_u64().unwrap(), k.clone()))
            .collect();
        pieces.sort_unstable();
        let vocab: Vec<_> = pieces
            .iter()
            .map(|(id, piece)| serde_json::json!([piece, if *id < 3 { 0.0 } else { -10.0 - *id as f64 }]))
            .collect();
        json["model"] =
            serde_json::json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": vocab});
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        let special = |ids: &[u32]| ids.iter().filter(|id| tokenizer.vocabulary.is_special(**id)).count();
        for text in ["a</s>b", "</s></s>", "<s>", "<unk>", "x<s></s>"] {
            let plain = tokenizer.encode_prompt(&PromptText::plain(text.to_owned()), false).unwrap();
            assert_eq!(special(&plain), 0, "{text}: {plain:?}");
            assert_eq!(tokenizer.decode_all(&plain).unwrap(), text);
            let recognised = PromptText::with_special_tokens(text.to_owned());
            assert!(special(&tokenizer.encode_prompt(&recognised, false).unwrap()) > 0, "{text}");
        }
    }

    #[test]
    fn an_unknown_decoder_is_rejected_by_name() {
        let mut value: serde_json::Value = serde_json::from_str(Family::Llama3.tokenizer_json()).unwrap();
        value["decoder"] = serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        let refused = Tokenizer::from_json(value.to_string().as_bytes()).unwrap_err();
        assert!(refused.to_string().contains("WordPiece"), "{refused}");
        assert!(matches!(Tokenizer::from_json(b"{"), Err(TokenizerError::Load(_))));
    }

    #[test]
    fn a_token_id_beyond_every_vocabulary_is_rejected() {
        let mut value: serde_json::Value = serde_json::from_str(Family::Llama3.tokenizer_json()).unwrap();
        value["model"]["vocab"]["zz"] = u32::MAX.into();
        let refused = Tokenizer::from_json(value.to_string().as_bytes()).unwrap_err();
        assert!(refused.to_string().contains("token id 4294967295"), "{refused}");
    }
}
