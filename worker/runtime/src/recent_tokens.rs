//! Last generated tokens of a sequence, which masks of bad words depend on.

use inflight_contract::SamplingSpec;

/// Number of tokens kept: at least the tokens of the longest bad word, less its last one.
pub const RECENT_TOKENS: usize = 32;
const _: () = assert!(RECENT_TOKENS >= SamplingSpec::BAD_WORD_TOKENS_MAX - 1);

/// Ring of the last [`RECENT_TOKENS`] generated tokens: the `n`-th generated token, counted from 0, is at `n`
/// modulo the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecentTokens {
    ring: [u32; RECENT_TOKENS],
    generated: usize,
}

impl RecentTokens {
    /// Creates the ring of a sequence with these generated tokens.
    pub fn new(generated: &[u32]) -> Self {
        let mut recent =
            Self { ring: [0; RECENT_TOKENS], generated: generated.len().saturating_sub(RECENT_TOKENS) };
        generated[recent.generated..].iter().for_each(|token| recent.push(*token));
        recent
    }

    /// Appends a generated token.
    pub fn push(&mut self, token: u32) {
        self.ring[self.generated % RECENT_TOKENS] = token;
        self.generated += 1;
    }

    /// Whether the generated tokens end with `tokens`, of which there are at most [`RECENT_TOKENS`].
    pub fn end_with(&self, tokens: &[u32]) -> bool {
        let Some(first) = self.generated.checked_sub(tokens.len()) else { return false };
        (first..).zip(tokens).all(|(at, token)| self.ring[at % RECENT_TOKENS] == *token)
    }

    /// Returns the tokens by their place in the ring; places of tokens not yet generated hold 0.
    pub fn ring(&self) -> &[u32; RECENT_TOKENS] {
        &self.ring
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_ring_ends_with_what_the_sequence_ends_with(
            generated in prop::collection::vec(0u32..3, 0..100), split in 0usize..100,
            word in prop::collection::vec(0u32..3, 0..6), suffix in 0usize..=RECENT_TOKENS,
        ) {
            let split = split.min(generated.len());
            let mut recent = RecentTokens::new(&generated[..split]);
            generated[split..].iter().for_each(|token| recent.push(*token));
            prop_assert_eq!(recent, RecentTokens::new(&generated));
            prop_assert_eq!(recent.end_with(&word), generated.ends_with(&word));
            prop_assert!(recent.end_with(&generated[generated.len().saturating_sub(suffix)..]));
        }
    }
}
