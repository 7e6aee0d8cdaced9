//! Errors of compiling and matching.

use serde::{Deserialize, Serialize};

/// Maximum bytes of a reason in an error, which quotes parts of the grammar; caches keep errors.
const REASON_BYTES_MAX: usize = 500;

/// Reason for which a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
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
    /// Definitions lead to each other over too many levels.
    #[error(
        "the grammar's references and rules lead to each other over {levels} levels of nesting; at most {most} are allowed; write \
         short definitions in place"
    )]
    Chain {
        /// Levels along the longest chain.
        levels: usize,
        /// Maximum levels.
        most: usize,
    },
    /// The compiler refuses the grammar.
    #[error("{0}")]
    Refused(String),
    /// Rules have parameters.
    #[error("rules with parameters (`name::...`) are not supported; write a rule for each value")]
    Parameters,
    /// The state at the beginning of an output is too large.
    #[error(
        "the grammar takes {kib} KiB for each sequence; at most {most} are allowed; use fewer alternatives and shorter counted \
         repetitions"
    )]
    TooLarge {
        /// Size of the state.
        kib: usize,
        /// Maximum size.
        most: usize,
    },
    /// Only the empty text matches.
    #[error("the grammar matches nothing but the empty text")]
    Empty,
    /// No token of the vocabulary can begin the output.
    #[error("no token of the model's vocabulary can begin an output that matches the grammar: {0}")]
    Unsatisfiable(String),
    /// Compiling the grammar takes more time or memory than allowed.
    #[error(
        "the grammar cannot be compiled: {0}; use fewer alternatives, shorter counted repetitions and smaller `multipleOf`"
    )]
    TooCostly(String),
    /// The machine cannot compile it for now; says nothing about the grammar.
    #[error("grammars cannot be compiled for now: {0}; try again later")]
    Unavailable(String),
    /// The machine lacks what compiling within limits takes; says nothing about the grammar.
    #[error("structured output is not available on this machine: {0}")]
    Host(String),
    /// The model's vocabulary cannot be used.
    #[error("the model's vocabulary cannot be used with grammars: {0}")]
    Vocabulary(String),
}

impl GrammarError {
    /// Whether another attempt, perhaps on another machine, may succeed, so that the outcome must not be kept.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Host(_))
    }
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
    /// The masks of the output need too much work.
    #[error(
        "the grammar needs too much work: {work} units beyond what its {consumed} tokens earn, of which {most} are allowed; use a \
         simpler grammar, with shorter counted repetitions and fewer alternatives"
    )]
    Work {
        /// Tokens of the output so far.
        consumed: usize,
        /// Work ahead of what the tokens earn.
        work: u64,
        /// Maximum work.
        most: u64,
    },
    /// The state holds more than its share of the memory.
    #[error(
        "the grammar holds {kib} KiB after {consumed} tokens, more than this sequence may hold of the {most_mib} MiB for \
         structured output; use a simpler grammar, with shorter counted repetitions and fewer alternatives"
    )]
    Memory {
        /// Tokens of the output so far.
        consumed: usize,
        /// Size of the state.
        kib: usize,
        /// Memory of all sequences.
        most_mib: usize,
    },
}

impl GrammarError {
    /// Returns the error without its place in a grammar that the client has not written.
    #[must_use]
    pub fn without_place(self) -> Self {
        let Self::Refused(reason) = self else { return self };
        let is_place = |place: &str| {
            place.starts_with("at ")
                && place[3..].chars().all(|c| c.is_ascii_digit() || matches!(c, '(' | ')'))
        };
        let reason = match reason.split_once(": ") {
            Some((place, rest)) if is_place(place) => rest,
            _ => &*reason,
        };
        // Lines of the grammar, each behind its number.
        let is_line = |line: &&str| {
            let (number, bar) = line.trim_start().split_once(" | ").unwrap_or_default();
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) && !bar.is_empty()
        };
        let lines: Vec<&str> = reason.lines().take_while(|line| !is_line(line)).collect();
        Self::Refused(lines.join("\n"))
    }

    /// Returns the refusal of a grammar whose compilation failed for this reason, without what of it is not for clients.
    pub fn refused(reason: &str) -> Self {
        Self::Refused(shorten(reason))
    }
}

/// Returns the part of a library's error that is for clients.
pub(crate) fn shorten(reason: &str) -> String {
    let reason = reason.split("<non-verbose/>").next().unwrap_or_default();
    let reason = reason.split("<backtrace>").next().unwrap_or_default().trim();
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_grammars_that_clients_did_not_write_are_left_out() {
        let without = |reason: &str| match GrammarError::Refused(reason.to_owned()).without_place() {
            GrammarError::Refused(reason) => reason,
            other => panic!("{other:?}"),
        };
        let regex =
            "at 1(8): invalid regex \"([\": unclosed\n    ([\n     ^\n   1 | start: /([/\n              ^";
        assert_eq!(without(regex), "invalid regex \"([\": unclosed\n    ([\n     ^");
        for kept in ["at most: 3 | 4", "a | b", "the schema `false` allows no value"] {
            assert_eq!(without(kept), kept);
        }
    }
}
