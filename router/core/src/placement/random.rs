//! Uniformly random placement: the baseline of simulations.

use super::{Candidate, PlacementRequest, Policy};

/// Uniformly random worker with room: the baseline for the other policies. It has no name in production.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Creates the policy; equal seeds give equal choices.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below `bound`, which is not 0 (SplitMix64; the bias of the remainder is below 2^-32
    /// for small bounds).
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % bound.max(1) as u64) as usize
    }
}

impl Policy for Random {
    fn pick(&mut self, _: &PlacementRequest, workers: &[Candidate]) -> usize {
        self.below(workers.len())
    }
}
