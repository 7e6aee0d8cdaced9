//! Deterministic token generator of the simulated device.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_runtime::{
    PositionLogprobs, PromptLogprobs, Sampled, ScoreRow, SlotSetup, TokenLogprob, TokenMasks,
};

/// Generator of a sequence's tokens.
///
/// A token is a pure function of seed, choice and *all* tokens before it. That makes it a test oracle: a
/// stream resumed with a token lost, duplicated or swapped continues differently.
pub(super) struct TokenChain {
    hash: u64,
    /// Newest token, the expected input of the next step.
    last: u32,
    vocab_size: u32,
    /// EOS tokens, which are never generated, so that outputs reach their maximum length.
    eos_token_ids: Vec<u32>,
    sampling: Arc<SamplingParams>,
}

impl TokenChain {
    pub fn new(setup: &SlotSetup<'_>, vocab_size: u32) -> Self {
        let mut hash = mix(setup.sampling.seed, u64::from(setup.choice));
        let mut last = 0;
        for token in setup.prompt.iter().chain(setup.generated) {
            hash = mix(hash, u64::from(*token));
            last = *token;
        }
        let eos_token_ids = setup.eos_token_ids.to_vec();
        Self { hash, last, vocab_size, eos_token_ids, sampling: setup.sampling.clone() }
    }

    pub fn last(&self) -> u32 {
        self.last
    }

    /// Generates and appends the next token, of those that a mask allows.
    pub fn sample(&mut self, mask: Option<&[u32]>) -> Sampled {
        let token = mask.map_or_else(|| self.token(0), |mask| self.masked_token(mask));
        let logprobs = self.sampling.logprobs.map(|most| self.logprobs(token, most));
        self.hash = mix(self.hash, u64::from(token));
        self.last = token;
        Sampled { token, logprobs }
    }

    /// Returns the `nth` candidate for the next token, from the middle half of the vocabulary, as special
    /// tokens are at its ends.
    fn token(&self, nth: u64) -> u32 {
        let (from, count) = (self.vocab_size / 4, (self.vocab_size / 2).max(1));
        let first = (mix(self.hash, nth.wrapping_add(1 << 32)) % u64::from(count)) as u32;
        let candidates = (0..count).map(|step| from + (first + step) % count);
        candidates.into_iter().find(|token| !self.eos_token_ids.contains(token)).unwrap_or(from)
    }

    /// Returns the next token of those that a mask allows; an EOS token only if there is no other.
    fn masked_token(&self, mask: &[u32]) -> u32 {
        let first = (mix(self.hash, 1 << 32) % u64::from(self.vocab_size)) as u32;
        let candidates = (0..self.vocab_size).map(|step| (first + step) % self.vocab_size);
        let mut allowed = candidates.filter(|token| TokenMasks::allows(mask, *token));
        let end = allowed.clone().next();
        allowed.find(|token| !self.eos_token_ids.contains(token)).or(end).unwrap_or(0)
    }

    /// Returns made-up log probabilities with the top `most` candidates.
    fn logprobs(&self, token: u32, most: u32) -> Box<PositionLogprobs> {
        let logprob = |rank: u32| -0.5 - rank as f32;
        let mut top = Vec::with_capacity(most as usize);
        let candidates = (0..u64::from(most) * 8).map(|nth| self.token(nth));
        for candidate in candidates {
            if top.len() < most as usize && top.iter().all(|one: &TokenLogprob| one.token != candidate) {
                top.push(TokenLogprob { token: candidate, logprob: logprob(top.len() as u32) });
            }
        }
        Box::new(PositionLogprobs { chosen: TokenLogprob { token, logprob: logprob(0) }, top })
    }
}

/// Returns a made-up score of a prompt token by its position and id: its rank is from 1 to 32, and the tokens
/// before it are those that follow its id.
pub(super) fn score(row: &ScoreRow, position: u32, vocab_size: u32) -> PromptLogprobs {
    let logprob = |rank: u32| -0.25 * rank as f32;
    let ranks = vocab_size.min(32);
    let rank = 1 + (mix(u64::from(position), u64::from(row.token)) % u64::from(ranks)) as u32;
    let at = |place: u32| {
        let token = (u64::from(row.token) + u64::from(vocab_size + place - rank)) % u64::from(vocab_size);
        TokenLogprob { token: token as u32, logprob: logprob(place) }
    };
    PromptLogprobs { token: at(rank), rank, top: (1..=row.top.min(vocab_size)).map(at).collect() }
}

/// Mixes `value` into `hash` with the finalizer of SplitMix64.
fn mix(hash: u64, value: u64) -> u64 {
    let mut bits = (hash ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
