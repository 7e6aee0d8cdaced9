//! Incremental check of one JSON value, character by character.

/// Result of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scan {
    /// It belongs to the value, which is not complete.
    Continue,
    /// It completes the value.
    Complete,
    /// The value, a number, was complete before it.
    Ended,
    /// The text is no JSON.
    Invalid,
}

/// What may come next between the tokens of a JSON text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
}

/// Token that is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    None,
    /// String; the number of hexadecimal digits that an escape still needs, or the character after a backslash.
    Text {
        key: bool,
        escape: Escape,
    },
    Number(Number),
    /// Rest of `true`, `false` or `null`.
    Literal(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    None,
    Begun,
    Hex(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Number {
    fn next(self, c: char) -> Option<Self> {
        use Number::*;
        Some(match (self, c) {
            (Minus, '0') => Zero,
            (Minus, '1'..='9') | (Integer, '0'..='9') => Integer,
            (Zero | Integer, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Integer | Fraction, 'e' | 'E') => Exponent,
            (Exponent, '+' | '-') => ExponentSign,
            (Exponent | ExponentSign | ExponentDigits, '0'..='9') => ExponentDigits,
            _ => return None,
        })
    }

    fn is_whole(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits)
    }
}

/// Checks one JSON value.
#[derive(Debug, Clone)]
pub(crate) struct JsonScanner {
    /// Open containers; true for objects.
    open: Vec<bool>,
    expected: Expected,
    token: Token,
}

impl JsonScanner {
    /// Maximum nesting of containers.
    pub(crate) const DEPTH_MAX: usize = 64;

    pub(crate) fn new() -> Self {
        Self { open: Vec::new(), expected: Expected::Value, token: Token::None }
    }

    /// Whether a string is open, in which any text may come.
    pub(crate) fn in_text(&self) -> bool {
        matches!(self.token, Token::Text { .. })
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char) -> Scan {
        match self.token {
            Token::None => self.between(c),
            Token::Text { key, escape } => self.text(c, key, escape),
            Token::Literal(rest) => match rest.strip_prefix(c) {
                Some("") => self.value_end(),
                Some(rest) => {
                    self.token = Token::Literal(rest);
                    Scan::Continue
                }
                None => Scan::Invalid,
            },
            Token::Number(number) => match number.next(c) {
                Some(number) => {
                    self.token = Token::Number(number);
                    Scan::Continue
                }
                None if !number.is_whole() => Scan::Invalid,
                None => match self.value_end() {
                    Scan::Complete => Scan::Ended,
                    _ => self.between(c),
                },
            },
        }
    }

    fn text(&mut self, c: char, key: bool, escape: Escape) -> Scan {
        let escape = match (escape, c) {
            (Escape::None, '"') => {
                if !key {
                    return self.value_end();
                }
                (self.token, self.expected) = (Token::None, Expected::Colon);
                return Scan::Continue;
            }
            (Escape::None, '\\') => Escape::Begun,
            (Escape::None, '\0'..='\u{1f}') => return Scan::Invalid,
            (Escape::None, _) => Escape::None,
            (Escape::Begun, 'u') => Escape::Hex(4),
            (Escape::Begun, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::None,
            (Escape::Begun, _) => return Scan::Invalid,
            (Escape::Hex(_), c) if !c.is_ascii_hexdigit() => return Scan::Invalid,
            (Escape::Hex(1), _) => Escape::None,
            (Escape::Hex(left), _) => Escape::Hex(left - 1),
        };
        self.token = Token::Text { key, escape };
        Scan::Continue
    }

    fn between(&mut self, c: char) -> Scan {
        use Expected::*;
        if matches!(c, ' ' | '\n' | '\r' | '\t') {
            return Scan::Continue;
        }
        match (self.expected, c) {
            (ValueOrEnd, ']') | (KeyOrEnd, '}') => return self.close(c),
            (CommaOrEnd, ']' | '}') => return self.close(c),
            (CommaOrEnd, ',') => {
                self.expected = if self.open.last() == Some(&true) { Key } else { Value };
                return Scan::Continue;
            }
            (Colon, ':') => {
                self.expected = Value;
                return Scan::Continue;
            }
            (Key | KeyOrEnd, '"') => self.token = Token::Text { key: true, escape: Escape::None },
            (Value | ValueOrEnd, '"') => self.token = Token::Text { key: false, escape: Escape::None },
            (Value | ValueOrEnd, '{' | '[') => {
                if self.open.len() == Self::DEPTH_MAX {
                    return Scan::Invalid;
                }
                self.open.push(c == '{');
                self.expected = if c == '{' { KeyOrEnd } else { ValueOrEnd };
            }
            (Value | ValueOrEnd, '-') => self.token = Token::Number(Number::Minus),
            (Value | ValueOrEnd, '0') => self.token = Token::Number(Number::Zero),
            (Value | ValueOrEnd, '1'..='9') => self.token = Token::Number(Number::Integer),
            (Value | ValueOrEnd, 't') => self.token = Token::Literal("rue"),
            (Value | ValueOrEnd, 'f') => self.token = Token::Literal("alse"),
            (Value | ValueOrEnd, 'n') => self.token = Token::Literal("ull"),
            _ => return Scan::Invalid,
        }
        Scan::Continue
    }

    fn close(&mut self, c: char) -> Scan {
        match self.open.pop() {
            Some(object) if object == (c == '}') => self.value_end(),
            _ => Scan::Invalid,
        }
    }

    fn value_end(&mut self) -> Scan {
        (self.token, self.expected) = (Token::None, Expected::CommaOrEnd);
        if self.open.is_empty() { Scan::Complete } else { Scan::Continue }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the length in bytes of the value at the start of a text; `None` if there is none.
    fn scanned(text: &str) -> Option<usize> {
        let mut scanner = JsonScanner::new();
        for (at, c) in text.char_indices() {
            match scanner.push(c) {
                Scan::Continue => {}
                Scan::Complete => return Some(at + c.len_utf8()),
                Scan::Ended => return Some(at),
                Scan::Invalid => return None,
            }
        }
        None
    }

    fn expected(text: &str) -> Option<usize> {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<serde::de::IgnoredAny>();
        matches!(values.next(), Some(Ok(_))).then(|| values.byte_offset())
    }

    proptest! {
        #[test]
        fn the_same_texts_are_json_as_for_serde(
            text in r#"[ \n]{0,2}[{}\[\]",:0-9eE+.\-a-f\\ntrue fals]{0,14}"#, whole in any::<bool>(),
        ) {
            let text = if whole { format!("{{\"a\": [{text}, {{\"b\": \"\\u00e9\"}}]}}") } else { format!("[{text}]") };
            prop_assert_eq!(scanned(&text), expected(&text), "{:?}", text);
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(scanned(&nested(JsonScanner::DEPTH_MAX)), Some(2 * JsonScanner::DEPTH_MAX));
        assert_eq!(scanned(&nested(JsonScanner::DEPTH_MAX + 1)), None);
    }
}
