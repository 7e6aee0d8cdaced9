//! Refusal of a sampling parameter.

use crate::ConstraintError;

/// Sampling parameter that is out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A value is outside its range or NaN.
    #[error("{name} is {value}; it must be in {range}")]
    OutOfRange {
        /// Name of the field in the API.
        name: &'static str,
        /// Given value.
        value: f64,
        /// Allowed range.
        range: &'static str,
    },
    /// A list is too long.
    #[error("{name} has {len} entries; at most {most} are allowed")]
    TooMany {
        /// Name of the field in the API.
        name: &'static str,
        /// Number of entries given.
        len: usize,
        /// Maximum number of entries.
        most: usize,
    },
    /// A bad word has no or too many tokens.
    #[error("{name}[{index}] has {len} tokens; each must have 1 to {most}", name = Self::BAD_WORDS)]
    BadWord {
        /// Index of the word.
        index: usize,
        /// Number of its tokens.
        len: usize,
        /// Maximum number of tokens.
        most: usize,
    },
    /// The bad words have too many tokens together.
    #[error("bad_words have {tokens} tokens together; at most {most} are allowed")]
    BadWordTokens {
        /// Number of their tokens.
        tokens: usize,
        /// Maximum number of tokens.
        most: usize,
    },
    /// The grammar of the constraint breaks a bound.
    #[error("{name}: {0}", name = Self::CONSTRAINT)]
    Constraint(#[from] ConstraintError),
}

impl SamplingError {
    pub(super) const BAD_WORDS: &str = "bad_word_token_ids";
    /// Name of the constraint in errors.
    pub const CONSTRAINT: &str = "constraint";

    /// Returns the name of the field in the API.
    pub fn field(&self) -> &'static str {
        match self {
            Self::OutOfRange { name, .. } | Self::TooMany { name, .. } => name,
            Self::BadWord { .. } => Self::BAD_WORDS,
            Self::BadWordTokens { .. } => "bad_words",
            Self::Constraint(_) => Self::CONSTRAINT,
        }
    }
}
