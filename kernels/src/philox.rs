//! Philox4x32-10, a counter-based random number generator (Salmon et al., SC 2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Returns Philox4x32-10 of `counter` and `key`: 128 random bits as a pure function of both.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
    }
    counter
}

/// Name of one random number. Equal names give equal numbers on every machine, whatever ran before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RandomKey {
    /// Seed of the request.
    pub seed: u64,
    /// Index of the choice within the request.
    pub choice: u32,
    /// Absolute position of the token being sampled.
    pub position: u32,
    /// Index of the number among those needed at this position.
    pub draw: u32,
}

impl RandomKey {
    /// Returns a uniform number in [0, 1), a multiple of 2^-53.
    pub fn uniform(self) -> f64 {
        let counter = [self.position, self.choice, self.draw, 0];
        let [a, b, _, _] = philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = (u64::from(b) << 32 | u64::from(a)) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Known-answer vectors published with the generator (Random123, kat_vectors, philox4x32 10).
    #[test]
    fn known_answers_of_random123_are_reproduced() {
        let f = u32::MAX;
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([f; 4], [f; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn every_field_of_a_draw_changes_it_and_the_mean_is_one_half() {
        let base = RandomKey { seed: 7, choice: 0, position: 0, draw: 0 };
        let others = [
            RandomKey { seed: 8, ..base },
            RandomKey { seed: 7 | 1 << 40, ..base },
            RandomKey { choice: 1, ..base },
            RandomKey { position: 1, ..base },
            RandomKey { draw: 1, ..base },
        ];
        assert!(others.iter().all(|other| other.uniform() != base.uniform()));
        let n = 100_000;
        let mean =
            (0..n).map(|position| RandomKey { position, ..base }.uniform()).sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 0.005, "mean {mean}");
    }
}
