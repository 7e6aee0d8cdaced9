use std::sync::Arc;

use inflight_contract::SamplingParams;

use super::super::{PositionLogprobs, Sampled, SlotSetup, TokenLogprob};

/// What a simulated device knows of a sequence: enough to make its next token.
///
/// A token is a pure function of the tokens before it, the seed and the choice. That it depends on *all* tokens before
/// it makes it an oracle: a stream that was resumed with a token lost, doubled or swapped goes on differently.
pub(super) struct Chain {
    hash: u64,
    /// The newest token, whose row comes next.
    last: u32,
    vocab_size: u32,
    /// Tokens that would end the sequence on their own account: never made, so that outputs run to their length.
    ending: Vec<u32>,
    sampling: Arc<SamplingParams>,
}

impl Chain {
    pub fn new(setup: &SlotSetup<'_>, vocab_size: u32) -> Self {
        let mut hash = mix(setup.sampling.seed, u64::from(setup.choice));
        let mut last = 0;
        for token in setup.prompt.iter().chain(setup.generated) {
            hash = mix(hash, u64::from(*token));
            last = *token;
        }
        let ending = setup.eos_token_ids.to_vec();
        Self { hash, last, vocab_size, ending, sampling: setup.sampling.clone() }
    }

    pub fn last(&self) -> u32 {
        self.last
    }

    /// Makes the next token and appends it.
    pub fn sample(&mut self) -> Sampled {
        let token = self.token(0);
        let logprobs = self.sampling.logprobs.map(|most| self.logprobs(token, most));
        self.hash = mix(self.hash, u64::from(token));
        self.last = token;
        Sampled { token, logprobs }
    }

    /// The `nth` candidate for the next token. Special tokens lie at the ends of vocabularies, so they are left out.
    fn token(&self, nth: u64) -> u32 {
        let (from, count) = (self.vocab_size / 4, (self.vocab_size / 2).max(1));
        let first = (mix(self.hash, nth.wrapping_add(1 << 32)) % u64::from(count)) as u32;
        let candidates = (0..count).map(|step| from + (first + step) % count);
        candidates.into_iter().find(|token| !self.ending.contains(token)).unwrap_or(from)
    }

    fn logprobs(&self, token: u32, most: u32) -> Box<PositionLogprobs> {
        let logprob = |place: u32| -0.5 - place as f32;
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

/// One round of a mixer with full avalanche (the finaliser of SplitMix64) over both.
fn mix(hash: u64, value: u64) -> u64 {
    let mut bits = (hash ^ value.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
