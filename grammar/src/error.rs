//! Errors of compiling and matching.

/// Reason for which a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The JSON schema is not JSON.
    #[error("the JSON schema is not valid JSON: {0}")]
    NotJson(String),
    /// The JSON schema is neither an object nor a boolean.
    #[error("the JSON schema must be an object or a boolean")]
    NotASchema,
    /// The schema names a dialect that is not supported.
    #[error(
        "$schema is {0}; supported are the drafts 4, 6, 7, 2019-09 and 2020-12 of json-schema.org; name one of them or \
         leave it out"
    )]
    Dialect(String),
    /// A reference leads out of the schema.
    #[error("$ref {0} leads out of the schema; only references within it, #/..., are followed")]
    RemoteReference(String),
    /// Groups are nested too deep.
    #[error("the grammar nests {depth} groups; at most {most} are allowed")]
    Nesting {
        /// Depth of nesting.
        depth: usize,
        /// Maximum depth.
        most: usize,
    },
    /// The compiler refuses the grammar.
    #[error("{0}")]
    Refused(String),
    /// Only the empty text matches.
    #[error("the grammar matches nothing but the empty text")]
    Empty,
    /// No token of the vocabulary can begin the output.
    #[error("no token of the model's vocabulary can begin an output that matches the grammar: {0}")]
    Unsatisfiable(String),
    /// The model's vocabulary cannot be used.
    #[error("the model's vocabulary cannot be used with grammars: {0}")]
    Vocabulary(String),
}

/// Reason for which a matcher cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// A token does not match.
    #[error("the grammar does not allow token {token} after {consumed} tokens")]
    TokenRefused {
        /// Refused token.
        token: u32,
        /// Tokens of the output before it.
        consumed: usize,
    },
    /// No token of the vocabulary may follow, or the work of a step is exhausted.
    #[error("the grammar cannot go on after {consumed} tokens: {reason}")]
    Stuck {
        /// Tokens of the output so far.
        consumed: usize,
        /// Reason.
        reason: String,
    },
}
