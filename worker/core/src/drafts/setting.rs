//! Sources of drafted tokens (speculative decoding).

use std::str::FromStr;

/// Source of drafted tokens, which are verified so that the output does not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Drafts {
    /// No drafts.
    #[default]
    Off,
    /// Tokens that followed the last ones where they occurred before, in prompt or output.
    PromptLookup,
}

/// Error for an unknown source of drafts.
#[derive(Debug, thiserror::Error)]
#[error("unknown source of drafts `{0}`; there are `off` and `prompt-lookup`")]
pub struct UnknownDrafts(String);

impl FromStr for Drafts {
    type Err = UnknownDrafts;

    fn from_str(name: &str) -> Result<Self, UnknownDrafts> {
        match name {
            "off" => Ok(Self::Off),
            "prompt-lookup" => Ok(Self::PromptLookup),
            other => Err(UnknownDrafts(other.to_owned())),
        }
    }
}

impl std::fmt::Display for Drafts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::PromptLookup => "prompt-lookup",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_drafts_are_read_by_their_names() {
        for drafts in [Drafts::Off, Drafts::PromptLookup] {
            assert_eq!(drafts.to_string().parse::<Drafts>().ok(), Some(drafts));
        }
        assert!("eagle".parse::<Drafts>().is_err_and(|error| error.to_string().contains("prompt-lookup")));
    }
}
