//! Table of the bytes of each token.

use serde_json::Value;

/// Decoder of a tokenizer.json that cannot be streamed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// Unknown decoder or combination of decoders.
    #[error(
        "tokenizer.json has the decoder {decoder}, which is not supported; supported are ByteLevel, Metaspace \
         and a Sequence of Replace, ByteFallback, Fuse and Strip, in this order"
    )]
    Decoder {
        /// Decoder in the file.
        decoder: String,
    },
    /// Token id beyond every real vocabulary.
    #[error("tokenizer.json has the token id {id}; ids below {most} are supported", most = Vocabulary::TOKENS_MAX)]
    TokenId {
        /// Highest token id.
        id: u32,
    },
    /// Token texts that are too long.
    #[error("the decoder of tokenizer.json makes its tokens longer than {most} bytes together", most = Vocabulary::BYTES_MAX)]
    TooLong,
}

/// Conversion of vocabulary pieces to bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rules {
    /// Characters stand for bytes, as in GPT-2's byte-level BPE.
    byte_level: bool,
    /// Replacements in each piece, in order.
    replace: Vec<(String, String)>,
    /// Whether `<0xNN>` stands for a byte.
    byte_fallback: bool,
    leading: Leading,
}

/// What decoding strips at the beginning of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leading {
    /// Nothing.
    Keep,
    /// Up to this many spaces.
    Spaces(usize),
    /// All spaces of the first token.
    FirstToken,
}

/// Bytes of every token, so that decoding a token is a table lookup. All supported decoders are
/// concatenations of per-token bytes, except at the beginning of a text.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// Token i is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<u32>,
    special: Vec<bool>,
    leading: Leading,
}

impl Vocabulary {
    /// Bound on token ids, above those of every published tokenizer, so that a broken file cannot request absurd amounts
    /// of memory.
    const TOKENS_MAX: u32 = 1 << 22;
    /// Bound on the bytes of all tokens, which replacements of the decoder can multiply.
    const BYTES_MAX: usize = 1 << 28;

    /// Builds the table of a tokenizer.
    ///
    /// # Errors
    /// [`VocabularyError`] if the decoder is not supported.
    pub fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, VocabularyError> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()).unwrap_or(Value::Null);
        let rules = Rules::parse(&decoder)
            .ok_or_else(|| VocabularyError::Decoder { decoder: decoder.to_string() })?;
        let added = tokenizer.get_added_tokens_decoder();
        let ids = match tokenizer.get_vocab(true).into_values().max() {
            Some(id) if id >= Self::TOKENS_MAX => return Err(VocabularyError::TokenId { id }),
            highest => highest.map_or(0, |id| id + 1),
        };
        let alphabet = byte_alphabet();
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(ids as usize);
        for id in 0..ids {
            if let Some(piece) = tokenizer.id_to_token(id) {
                rules.append(&piece, &alphabet, &mut bytes)?;
            }
            ends.push(bytes.len() as u32);
        }
        // The tokenizer skips special tokens by content, whichever id they have.
        let special = (0..ids)
            .map(|id| {
                added.get(&id).is_some_and(|token| token.special)
                    || tokenizer
                        .id_to_token(id)
                        .is_some_and(|piece| tokenizer.get_added_vocabulary().is_special_token(&piece))
            })
            .collect();
        Ok(Self { bytes, ends, special, leading: rules.leading })
    }

    /// Builds the table of given tokens: the bytes of each, and whether it is a control token.
    pub fn from_tokens<'a>(tokens: impl IntoIterator<Item = (&'a [u8], bool)>) -> Self {
        let mut table =
            Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new(), leading: Leading::Keep };
        for (bytes, special) in tokens {
            table.bytes.extend_from_slice(bytes);
            table.ends.push(table.bytes.len() as u32);
            table.special.push(special);
        }
        table
    }

    /// Reads the table from a tokenizer.json.
    ///
    /// # Errors
    /// The reason: the file is broken, or its decoder is not supported.
    pub fn from_json(tokenizer: &[u8]) -> Result<Self, String> {
        // The library panics on some broken files.
        let read = || tokenizers::Tokenizer::from_bytes(tokenizer).map_err(|error| error.to_string());
        let tokenizer = std::panic::catch_unwind(read);
        let tokenizer = tokenizer.unwrap_or_else(|_| Err("tokenizer.json is broken".to_owned()))?;
        Self::new(&tokenizer).map_err(|error| error.to_string())
    }

    /// Returns the bytes of a token; empty for an unknown id, as in a padded vocabulary.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let at = id as usize;
        let Some(end) = self.ends.get(at) else { return &[] };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start as usize..*end as usize]
    }

    /// Whether a token is a control token, which decoded text omits.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// What decoding strips at the beginning of a text.
    pub fn leading(&self) -> Leading {
        self.leading
    }
}

impl Rules {
    fn parse(decoder: &Value) -> Option<Self> {
        let mut rules =
            Self { byte_level: false, replace: Vec::new(), byte_fallback: false, leading: Leading::Keep };
        match kind(decoder)? {
            "ByteLevel" => rules.byte_level = true,
            "Metaspace" => {
                let mark = decoder.get("replacement")?.as_str()?;
                rules.replace.push((mark.to_owned(), " ".to_owned()));
                if decoder.get("prepend_scheme")?.as_str()? != "never" {
                    rules.leading = Leading::FirstToken;
                }
            }
            "Sequence" => return Self::parse_sequence(decoder.get("decoders")?.as_array()?),
            _ => return None,
        }
        Some(rules)
    }

    /// Order matters: each step works on the output of the previous one.
    fn parse_sequence(steps: &[Value]) -> Option<Self> {
        if let [only] = steps {
            return Self::parse(only);
        }
        let mut rules =
            Self { byte_level: false, replace: Vec::new(), byte_fallback: false, leading: Leading::Keep };
        let mut fused = false;
        for step in steps {
            match kind(step)? {
                "Replace" if !rules.byte_fallback && !fused => {
                    let pattern = step.get("pattern")?.get("String")?.as_str()?;
                    rules.replace.push((pattern.to_owned(), step.get("content")?.as_str()?.to_owned()));
                }
                "ByteFallback" if !rules.byte_fallback && !fused => rules.byte_fallback = true,
                "Fuse" => fused = true,
                "Strip" if fused && rules.leading == Leading::Keep => {
                    let stop = step.get("stop")?.as_u64()?;
                    if step.get("content")?.as_str()? != " " || stop != 0 {
                        return None;
                    }
                    rules.leading = Leading::Spaces(step.get("start")?.as_u64()? as usize);
                }
                _ => return None,
            }
        }
        Some(rules)
    }

    /// Appends the bytes of a token.
    fn append(
        &self,
        piece: &str,
        alphabet: &[Option<u8>],
        bytes: &mut Vec<u8>,
    ) -> Result<(), VocabularyError> {
        if self.byte_level {
            let byte = |c: char| alphabet.get(c as usize).copied().flatten();
            // A piece with a character outside the alphabet is an added token and stands for itself.
            match piece.chars().map(byte).collect::<Option<Vec<u8>>>() {
                Some(mapped) => bytes.extend(mapped),
                None => bytes.extend_from_slice(piece.as_bytes()),
            }
            return Ok(());
        }
        let mut text = piece.to_owned();
        for (from, to) in &self.replace {
            let most = Vocabulary::BYTES_MAX.saturating_sub(bytes.len() + text.len());
            if text.matches(from).count().saturating_mul(to.len()) > most {
                return Err(VocabularyError::TooLong);
            }
            text = text.replace(from, to);
        }
        match fallback_byte(&text) {
            Some(byte) if self.byte_fallback => bytes.push(byte),
            _ => bytes.extend_from_slice(text.as_bytes()),
        }
        Ok(())
    }
}

fn kind(decoder: &Value) -> Option<&str> {
    decoder.get("type")?.as_str()
}

fn fallback_byte(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Returns GPT-2's table from characters to bytes: printable bytes stand for themselves, the others are
/// numbered from U+0100 on.
fn byte_alphabet() -> Vec<Option<u8>> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut alphabet = vec![None; 0x200];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        if printable(byte) {
            alphabet[byte as usize] = Some(byte);
        } else {
            alphabet[next] = Some(byte);
            next += 1;
        }
    }
    alphabet
}
