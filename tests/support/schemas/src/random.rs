//! Pseudo-random numbers.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts the sequence of a seed.
    pub fn new(seed: u64) -> Self {
        // Sequences of neighbouring seeds are no shifted copies of each other.
        Self(seed.wrapping_mul(0xD6E8_FEB8_6659_FD93))
    }

    /// Returns a number below `most`, which is at least 1.
    pub fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % most.max(1) as u64) as usize
    }

    /// Returns true once in `of` draws.
    pub fn once_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    /// Returns one of some values.
    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}
