//! Coefficients of a device's linear cost model, which workers fit and report and routers index requests by.

/// Cost of forward passes and of KV block copies on one device. Every coefficient is in seconds.
///
/// A step takes `step_s + token_s * tokens + prefill_key_s * prefill_keys + decode_key_s * decode_keys +
/// sequence_s * sequences`, where the keys of a token are the positions it attends to, its own included;
/// those of chunks of more than one token count as prefill keys. Copying `n` blocks between device and host
/// takes `copy_s + copy_block_s * n`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CostCoefficients {
    /// Seconds of a step without any token.
    pub step_s: f64,
    /// Seconds for each token in the batch.
    pub token_s: f64,
    /// Seconds for each key that a token of a prompt chunk attends to.
    pub prefill_key_s: f64,
    /// Seconds for each key that a decoding sequence attends to.
    pub decode_key_s: f64,
    /// Seconds for each sequence in the batch.
    pub sequence_s: f64,
    /// Seconds of a copy of no blocks between device and host.
    pub copy_s: f64,
    /// Seconds for each block copied.
    pub copy_block_s: f64,
}

impl Default for CostCoefficients {
    /// Returns assumed coefficients for a worker that has not reported yet. Placement depends on their ratios
    /// only.
    fn default() -> Self {
        Self {
            step_s: 1e-2,
            token_s: 1e-4,
            prefill_key_s: 1e-8,
            decode_key_s: 2e-8,
            sequence_s: 1e-4,
            copy_s: 1e-4,
            copy_block_s: 1e-4,
        }
    }
}

impl CostCoefficients {
    /// Replaces coefficients that cannot be a duration: NaN and infinity by 0, others clamped to 0..=10^6 s.
    #[must_use]
    pub fn sanitized(self) -> Self {
        self.map(|value| if value.is_finite() { value.clamp(0.0, 1e6) } else { 0.0 })
    }

    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let Self { step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s } = self;
        Self {
            step_s: f(step_s),
            token_s: f(token_s),
            prefill_key_s: f(prefill_key_s),
            decode_key_s: f(decode_key_s),
            sequence_s: f(sequence_s),
            copy_s: f(copy_s),
            copy_block_s: f(copy_block_s),
        }
    }

    /// Returns the seconds that prefilling `tokens` tokens from position `start` adds to steps that run
    /// anyway.
    pub fn prefill(&self, start: u32, tokens: u32) -> f64 {
        let (start, tokens) = (f64::from(start), f64::from(tokens));
        self.token_s * tokens + self.prefill_key_s * tokens * (start + (tokens + 1.0) / 2.0)
    }

    /// Returns the seconds that another decoding sequence with `context_tokens` of context adds to a step.
    pub fn decode(&self, context_tokens: u32) -> f64 {
        self.token_s + self.sequence_s + self.decode_key_s * f64::from(context_tokens)
    }

    /// Returns the seconds of copying `blocks` KV blocks one way; 0 for no blocks.
    pub fn copy(&self, blocks: u32) -> f64 {
        if blocks == 0 { 0.0 } else { self.copy_s + self.copy_block_s * f64::from(blocks) }
    }

    /// Returns an upper bound in seconds of a step of at most `tokens` tokens and `sequences` sequences, each
    /// of at most `context_tokens` tokens.
    pub fn largest_step(&self, tokens: u32, sequences: u32, context_tokens: u32) -> f64 {
        let key_s = self.prefill_key_s.max(self.decode_key_s);
        let token_time = f64::from(tokens) * (self.token_s + key_s * f64::from(context_tokens));
        self.step_s + token_time + self.sequence_s * f64::from(sequences)
    }

    /// Returns whether any coefficient differs from that of `other` by more than `share` of the larger one.
    pub fn differs(&self, other: &Self, share: f64) -> bool {
        let pairs = [
            (self.step_s, other.step_s),
            (self.token_s, other.token_s),
            (self.prefill_key_s, other.prefill_key_s),
            (self.decode_key_s, other.decode_key_s),
            (self.sequence_s, other.sequence_s),
            (self.copy_s, other.copy_s),
            (self.copy_block_s, other.copy_block_s),
        ];
        pairs.into_iter().any(|(a, b)| (a - b).abs() > share * a.max(b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distinct() -> CostCoefficients {
        CostCoefficients {
            step_s: 1.0,
            token_s: 2.0,
            prefill_key_s: 3.0,
            decode_key_s: 5.0,
            sequence_s: 7.0,
            copy_s: 11.0,
            copy_block_s: 13.0,
        }
    }

    #[test]
    fn each_coefficient_multiplies_the_quantity_it_is_named_after() {
        let cost = distinct();
        assert_eq!(cost.prefill(10, 3), 2.0 * 3.0 + 3.0 * (11.0 + 12.0 + 13.0));
        assert_eq!(cost.decode(4), 2.0 + 7.0 + 5.0 * 4.0);
        assert_eq!((cost.copy(0), cost.copy(3)), (0.0, 11.0 + 3.0 * 13.0));
        assert_eq!(cost.largest_step(100, 8, 50), 1.0 + 100.0 * (2.0 + 5.0 * 50.0) + 7.0 * 8.0);
    }

    #[test]
    fn coefficients_that_are_no_durations_are_replaced_by_zero() {
        let wrong = CostCoefficients { step_s: f64::NAN, token_s: -1.0, copy_s: f64::INFINITY, ..distinct() };
        let expected = CostCoefficients { step_s: 0.0, token_s: 0.0, copy_s: 0.0, ..distinct() };
        assert_eq!(wrong.sanitized(), expected);
        assert_eq!(CostCoefficients { sequence_s: 1e300, ..distinct() }.sanitized().sequence_s, 1e6);
    }

    #[test]
    fn a_change_of_any_coefficient_is_detected() {
        let cost = distinct();
        assert!(!cost.differs(&cost, 0.0));
        for at in 0..7 {
            let mut other = cost;
            let fields = [
                &mut other.step_s,
                &mut other.token_s,
                &mut other.prefill_key_s,
                &mut other.decode_key_s,
                &mut other.sequence_s,
                &mut other.copy_s,
                &mut other.copy_block_s,
            ];
            for (index, field) in fields.into_iter().enumerate() {
                *field *= if index == at { 1.1 } else { 1.0 };
            }
            assert!(cost.differs(&other, 0.05) && !cost.differs(&other, 0.2), "coefficient {at}");
        }
    }
}
