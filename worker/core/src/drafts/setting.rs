//! Sources of drafted tokens (speculative decoding).

use std::str::FromStr;

/// Sources of drafted tokens, which are verified so that the output does not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Drafts {
    /// No drafts.
    #[default]
    Off,
    /// Tokens that followed the last ones where they occurred before, in prompt or output.
    PromptLookup,
    /// Tokens that the model's MTP layer predicts.
    Mtp,
    /// Both, for each sequence the one that is expected to save more time; prompt lookup alone for models without an MTP layer.
    Auto,
}

/// Error for an unknown source of drafts.
#[derive(Debug, thiserror::Error)]
#[error("unknown source of drafts `{0}`; there are `off`, `prompt-lookup`, `mtp` and `auto`")]
pub struct UnknownDrafts(String);

impl Drafts {
    /// All values.
    pub const ALL: [Self; 4] = [Self::Off, Self::PromptLookup, Self::Mtp, Self::Auto];

    /// Whether tokens are looked up in prompt and output.
    pub fn uses_prompt_lookup(self) -> bool {
        matches!(self, Self::PromptLookup | Self::Auto)
    }

    /// Whether the model's MTP layer predicts tokens, if it has one.
    pub fn uses_mtp(self) -> bool {
        matches!(self, Self::Mtp | Self::Auto)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::PromptLookup => "prompt-lookup",
            Self::Mtp => "mtp",
            Self::Auto => "auto",
        }
    }
}

impl FromStr for Drafts {
    type Err = UnknownDrafts;

    fn from_str(name: &str) -> Result<Self, UnknownDrafts> {
        Self::ALL
            .into_iter()
            .find(|drafts| drafts.name() == name)
            .ok_or_else(|| UnknownDrafts(name.to_owned()))
    }
}

impl std::fmt::Display for Drafts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_drafts_are_read_by_their_names() {
        for drafts in Drafts::ALL {
            assert_eq!(drafts.to_string().parse::<Drafts>().ok(), Some(drafts));
        }
        assert!("eagle".parse::<Drafts>().is_err_and(|error| error.to_string().contains("prompt-lookup")));
    }
}
