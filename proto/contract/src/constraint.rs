//! Constraint of a request: the grammar that its output must match.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::JsonWhitespace;

/// Grammar that a request's output must match, and where it begins.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Constraint {
    /// Grammar of the constrained part of the output.
    pub grammar: Grammar,
    /// Token after whose first occurrence in the output the constraint begins (the end of reasoning); `None`:
    /// with the first token.
    pub begins_after: Option<u32>,
}

/// Grammar in one of the languages that clients use.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject(JsonWhitespace),
    /// JSON that is valid under a JSON schema.
    JsonSchema(String, JsonWhitespace),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of the given texts.
    Choice(Vec<String>),
    /// Grammar in llguidance's dialect of Lark.
    Lark(String),
}

/// Grammar that breaks a bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// Neither text nor choices are given.
    #[error("the grammar is empty; give a JSON schema, a regular expression, choices or a Lark grammar")]
    Empty,
    /// A choice has no text.
    #[error("choice {index} is empty; each must have at least one byte")]
    EmptyChoice {
        /// Index of the choice.
        index: usize,
    },
    /// Too many choices.
    #[error("the grammar has {choices} choices; at most {most} are allowed")]
    Choices {
        /// Number of choices.
        choices: usize,
        /// Maximum number of choices.
        most: usize,
    },
    /// The text is too long.
    #[error("the grammar has {bytes} bytes; at most {most} are allowed")]
    Bytes {
        /// Bytes of the text, or of all choices together.
        bytes: usize,
        /// Maximum number of bytes.
        most: usize,
    },
}

impl Constraint {
    /// Sets the whitespace of a grammar of JSON. A constraint that others share, too, is copied if it has another.
    pub fn set_json_whitespace(this: &mut Arc<Self>, whitespace: JsonWhitespace) {
        if this.grammar.json_whitespace().is_none_or(|of| of == whitespace) {
            return;
        }
        match &mut Arc::make_mut(this).grammar {
            Grammar::JsonObject(of) | Grammar::JsonSchema(_, of) => *of = whitespace,
            Grammar::Regex(_) | Grammar::Choice(_) | Grammar::Lark(_) => {}
        }
    }
}

impl Grammar {
    /// Maximum bytes of a grammar's text, or of all choices together.
    pub const BYTES_MAX: usize = 256 << 10;
    /// Maximum number of choices.
    pub const CHOICES_MAX: usize = 4096;

    /// Returns the name of the grammar's language, as in the API.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject(_) => "json_object",
            Self::JsonSchema(..) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "lark",
        }
    }

    /// Returns the grammar's texts: the choices, or its only text; none for any JSON object.
    pub fn texts(&self) -> &[String] {
        match self {
            Self::JsonObject(_) => &[],
            Self::JsonSchema(text, _) | Self::Regex(text) | Self::Lark(text) => std::slice::from_ref(text),
            Self::Choice(choices) => choices,
        }
    }

    /// Returns the grammar of a JSON schema with the default whitespace.
    pub fn json_schema(text: impl Into<String>) -> Self {
        Self::JsonSchema(text.into(), JsonWhitespace::default())
    }

    /// Returns the whitespace of a grammar of JSON; `None` for any other grammar, which says it itself.
    pub fn json_whitespace(&self) -> Option<JsonWhitespace> {
        match self {
            Self::JsonObject(whitespace) | Self::JsonSchema(_, whitespace) => Some(*whitespace),
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => None,
        }
    }

    /// Returns the SHA-256 digest of language, whitespace and texts.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.kind());
        // Earlier versions had `Any` alone.
        if let Some(JsonWhitespace::OneLine) = self.json_whitespace() {
            hash.update("one-line");
        }
        for text in self.texts() {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        hash.finalize().into()
    }

    /// Checks the size of the grammar. Its syntax is checked where it is compiled.
    ///
    /// # Errors
    /// [`ConstraintError`] of the first bound that it breaks.
    pub fn check(&self) -> Result<(), ConstraintError> {
        let texts = self.texts();
        if let Self::Choice(choices) = self {
            if choices.len() > Self::CHOICES_MAX {
                return Err(ConstraintError::Choices { choices: choices.len(), most: Self::CHOICES_MAX });
            }
            if let Some(index) = choices.iter().position(String::is_empty) {
                return Err(ConstraintError::EmptyChoice { index });
            }
        }
        let (bytes, most) = (texts.iter().map(String::len).sum(), Self::BYTES_MAX);
        if bytes > most {
            return Err(ConstraintError::Bytes { bytes, most });
        }
        if bytes == 0 && !matches!(self, Self::JsonObject(_)) {
            return Err(ConstraintError::Empty);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grammar_beyond_a_bound_is_refused_by_name() {
        let most = Grammar::BYTES_MAX;
        let choice = |texts: &[&str]| Grammar::Choice(texts.iter().map(|text| (*text).to_owned()).collect());
        assert_eq!(Grammar::JsonObject(JsonWhitespace::Any).check(), Ok(()));
        assert_eq!(Grammar::Regex("x".repeat(most)).check(), Ok(()));
        let long = Grammar::Regex("x".repeat(most + 1)).check();
        assert_eq!(long, Err(ConstraintError::Bytes { bytes: most + 1, most }));
        for empty in [Grammar::Lark(String::new()), Grammar::json_schema(""), choice(&[])] {
            assert_eq!(empty.check(), Err(ConstraintError::Empty), "{empty:?}");
        }
        assert_eq!(choice(&["a", ""]).check(), Err(ConstraintError::EmptyChoice { index: 1 }));
        let many = vec!["a"; Grammar::CHOICES_MAX + 1];
        assert!(matches!(choice(&many).check(), Err(ConstraintError::Choices { .. })));
    }

    #[test]
    fn grammars_of_one_text_in_other_languages_or_parts_have_other_digests() {
        let choice = |texts: &[&str]| Grammar::Choice(texts.iter().map(|text| (*text).to_owned()).collect());
        let grammars = [
            Grammar::JsonObject(JsonWhitespace::OneLine),
            Grammar::JsonObject(JsonWhitespace::Any),
            Grammar::Regex("ab".to_owned()),
            Grammar::Lark("ab".to_owned()),
            Grammar::JsonSchema("ab".to_owned(), JsonWhitespace::OneLine),
            Grammar::JsonSchema("ab".to_owned(), JsonWhitespace::Any),
            choice(&["ab"]),
            choice(&["a", "b"]),
            choice(&["b", "a"]),
        ];
        let digests: std::collections::BTreeSet<_> = grammars.iter().map(Grammar::digest).collect();
        assert_eq!(digests.len(), grammars.len());
    }

    #[test]
    fn whitespace_is_set_in_grammars_of_json_alone_and_copies_none_that_has_it() {
        let any = JsonWhitespace::Any;
        for (grammar, expected) in [
            (Grammar::json_schema("{}"), Grammar::JsonSchema("{}".to_owned(), any)),
            (Grammar::JsonObject(JsonWhitespace::OneLine), Grammar::JsonObject(any)),
            (Grammar::JsonObject(any), Grammar::JsonObject(any)),
            (Grammar::Regex("a".to_owned()), Grammar::Regex("a".to_owned())),
        ] {
            let shared = Arc::new(Constraint { grammar, begins_after: Some(1) });
            let mut set = Arc::clone(&shared);
            Constraint::set_json_whitespace(&mut set, any);
            assert_eq!(*set, Constraint { grammar: expected, begins_after: Some(1) });
            assert_eq!(Arc::ptr_eq(&set, &shared), set == shared);
        }
    }
}
