use std::time::Duration;

use inflight_contract::CostCoefficients;

use crate::least_squares::LeastSquares;

/// What a step computes, as far as its duration depends on it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    /// Tokens in the batch.
    pub tokens: u32,
    /// Keys read by attention: over all tokens, the positions up to and including each.
    pub keys: u64,
    /// Those of them read by chunks of more than one token. Their queries share what is read, so such a key costs less
    /// than one read by a single query: a third on a CPU, and on a GPU it costs arithmetic instead of bandwidth.
    pub prefill_keys: u64,
    /// Sequences in the batch.
    pub sequences: u32,
}

impl StepWork {
    /// Adds `len` tokens of one sequence, the first at position `start`.
    pub fn add(&mut self, start: u32, len: u32) {
        let keys = keys(start, len);
        self.tokens += len;
        self.keys += keys;
        self.prefill_keys += if len > 1 { keys } else { 0 };
        self.sequences += 1;
    }

    fn features(&self) -> [f64; 5] {
        let decode_keys = self.keys.saturating_sub(self.prefill_keys);
        let sequences = f64::from(self.sequences);
        [1.0, f64::from(self.tokens), decode_keys as f64, self.prefill_keys as f64, sequences]
    }
}

fn keys(start: u32, len: u32) -> u64 {
    let (start, len) = (u64::from(start), u64::from(len));
    len * start + len * (len + 1) / 2
}

/// Where a cost model starts from, before it has observed anything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostPrior {
    /// The expected coefficients.
    pub cost: CostCoefficients,
    /// Relative standard deviation of the coefficients: small after a calibration, large for a guess.
    pub trust: f64,
}

impl Default for CostPrior {
    /// A small model on a CPU: off by any factor elsewhere, and unlearnt within a few steps.
    fn default() -> Self {
        Self {
            cost: CostCoefficients {
                step_s: 1e-3,
                token_s: 1e-4,
                prefill_key_s: 5e-9,
                decode_key_s: 1e-8,
                sequence_s: 1e-5,
                copy_s: 2e-5,
                copy_block_s: 2e-5,
            },
            trust: 10.0,
        }
    }
}

impl CostPrior {
    /// The same with other costs of block copies, in seconds.
    #[must_use]
    pub fn with_copies(self, copy_s: f64, copy_block_s: f64) -> Self {
        Self { cost: CostCoefficients { copy_s, copy_block_s, ..self.cost }, ..self }
    }
}

/// A step target is a promise about the tail, and predictions are of the mean.
const TAIL: f64 = 0.9;
const TAIL_GAIN: f64 = 0.02;

/// How long steps and copies take: a linear model, fitted online to what was measured.
///
/// One component with five users: the chunk budget, the choice between recompute and swap, the predicted time to
/// first token (admission and placement), and the simulator, whose device it is.
#[derive(Debug, Clone)]
pub struct CostModel {
    steps: LeastSquares<5>,
    copies: LeastSquares<2>,
    /// By what steps with prefill beside decodes exceed their prediction at the [`TAIL`].
    excess: f64,
    observed_steps: u64,
}

impl CostModel {
    /// A model that knows what the prior says.
    pub fn new(prior: CostPrior) -> Self {
        let CostPrior { cost, trust } = prior;
        // In the order of `StepWork::features`.
        let step = [cost.step_s, cost.token_s, cost.decode_key_s, cost.prefill_key_s, cost.sequence_s];
        Self {
            steps: LeastSquares::new(step, trust, 0.998),
            copies: LeastSquares::new([cost.copy_s, cost.copy_block_s], trust, 0.99),
            excess: 1.0,
            observed_steps: 0,
        }
    }

    /// Learns from a measured step.
    pub fn observe_step(&mut self, work: &StepWork, took: Duration) {
        let seconds = took.as_secs_f64();
        if work.prefill_keys > 0 && u64::from(work.sequences) > 1 {
            // Robbins and Monro's estimate of a quantile: where it is right, the steps up and down cancel.
            let over = seconds > self.excess * self.step(work).as_secs_f64();
            self.excess += if over { TAIL_GAIN * TAIL } else { TAIL_GAIN * (TAIL - 1.0) };
            self.excess = self.excess.clamp(1.0, 2.0);
        }
        // Steps are about as noisy, in proportion, whatever their length.
        let noise = (0.05 * seconds).powi(2).max(1e-14);
        self.steps.observe(&work.features(), seconds, noise);
        self.observed_steps += 1;
    }

    /// Learns from a measured copy of this many blocks, in either direction.
    pub fn observe_copy(&mut self, blocks: u32, took: Duration) {
        let seconds = took.as_secs_f64();
        let noise = (0.05 * seconds).powi(2).max(1e-14);
        self.copies.observe(&[1.0, f64::from(blocks)], seconds, noise);
    }

    /// The coefficients learnt so far.
    pub fn coefficients(&self) -> CostCoefficients {
        let [step_s, token_s, decode_key_s, prefill_key_s, sequence_s] = self.steps.coefficients();
        let [copy_s, copy_block_s] = self.copies.coefficients();
        CostCoefficients { step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s }
    }

    /// Steps it has learnt from.
    pub fn observed_steps(&self) -> u64 {
        self.observed_steps
    }

    /// Predicted duration of a step.
    pub fn step(&self, work: &StepWork) -> Duration {
        seconds(self.steps.predict(&work.features()))
    }

    /// Predicted duration of a copy of this many blocks, one way.
    pub fn copy(&self, blocks: u32) -> Duration {
        seconds(self.copies.predict(&[1.0, f64::from(blocks)]))
    }

    /// Predicted time that computing `tokens` from position `start` on adds to steps that run anyway.
    pub fn prefill(&self, start: u32, tokens: u32) -> Duration {
        let CostCoefficients { token_s, prefill_key_s, .. } = self.coefficients();
        seconds(token_s * f64::from(tokens) + prefill_key_s * keys(start, tokens) as f64)
    }

    /// A target for [`CostModel::chunk_within`]: what a step with `work` takes, and `share` of it more.
    pub fn longer(&self, work: &StepWork, share: f64) -> Duration {
        // What is compared has its tail on both sides.
        self.step(work).mul_f64(self.excess * (1.0 + share))
    }

    /// The most tokens, up to `most`, of a prefill at position `start` that may join a step with `work` so that
    /// the step keeps within `target`, nine times in ten.
    pub fn chunk_within(&self, work: &StepWork, start: u32, most: u32, target: Duration) -> u32 {
        let fits = |len: u32| {
            let mut with = *work;
            with.add(start, len);
            self.step(&with).mul_f64(self.excess) <= target
        };
        // Durations grow with the length, so the lengths that fit are a prefix: bisect.
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, 1e6)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn work(tokens: u32, keys: u64, sequences: u32) -> StepWork {
        StepWork { tokens, keys, prefill_keys: keys / 2, sequences }
    }

    #[test]
    fn the_keys_of_a_chunk_are_those_each_token_sees() {
        let mut work = StepWork::default();
        work.add(3, 2);
        assert_eq!(work, StepWork { tokens: 2, keys: 4 + 5, prefill_keys: 4 + 5, sequences: 1 });
    }

    #[test]
    fn hours_of_equal_steps_do_not_spoil_what_it_knows() {
        let truth = |w: &StepWork| {
            seconds(5e-3 + 8e-5 * f64::from(w.tokens) + 2e-8 * w.keys as f64 + 4e-5 * f64::from(w.sequences))
        };
        let mut model = CostModel::new(CostPrior::default());
        let mixed = |n: u32| work(1 + n * 37 % 300, u64::from(n) * 997 % 60_000, 1 + n % 40);
        (0..200).for_each(|n| model.observe_step(&mixed(n), truth(&mixed(n))));
        for n in 0..60_000u32 {
            // Pure decode: as many tokens as sequences, so that the two can't be told apart.
            let batch = 1 + n / 1000 % 64;
            let decode = work(batch, u64::from(batch) * 700, batch);
            model.observe_step(&decode, truth(&decode));
        }
        for shape in [work(32, 20_000, 32), work(300, 90_000, 9), work(1, 10, 1)] {
            let (predicted, takes) = (model.step(&shape).as_secs_f64(), truth(&shape).as_secs_f64());
            assert!((predicted / takes - 1.0).abs() < 0.1, "{shape:?}: {predicted} s for {takes} s");
        }
        // And it still learns.
        for n in 0..2000 {
            model.observe_step(&mixed(n), truth(&mixed(n)) * 3);
        }
        let shape = work(100, 10_000, 20);
        let ratio = model.step(&shape).as_secs_f64() / truth(&shape).as_secs_f64();
        assert!((ratio - 3.0).abs() < 0.3, "{ratio} instead of 3");
    }

    proptest! {
        #[test]
        fn it_learns_any_device_from_noisy_steps(
            step in 1e-4f64..3e-2, token in 1e-6f64..1e-3, key in 1e-10f64..1e-7, sequence in 1e-7f64..1e-4,
            shapes in prop::collection::vec((1u32..512, 1u32..3000, 1u32..64, -1.0f64..1.0), 120)
        ) {
            let truth = |w: &StepWork| {
                step + token * f64::from(w.tokens) + key * w.keys as f64 + sequence * f64::from(w.sequences)
            };
            let mut model = CostModel::new(CostPrior::default());
            let shapes: Vec<_> = shapes.iter()
                .map(|(t, context, s, noise)| (work(*t, u64::from(*t) * u64::from(*context), *s), *noise)).collect();
            for (shape, noise) in &shapes {
                model.observe_step(shape, seconds(truth(shape) * (1.0 + 0.05 * noise)));
            }
            let off: f64 = shapes.iter()
                .map(|(shape, _)| (model.step(shape).as_secs_f64() / truth(shape) - 1.0).abs()).sum::<f64>();
            prop_assert!(off / 120.0 < 0.05, "mean relative error {}", off / 120.0);
        }

        #[test]
        fn the_largest_chunk_within_a_target_fits_and_the_next_does_not(
            start in 0u32..10_000, most in 1u32..5000, target_us in 1u64..1_000_000, tokens in 0u32..100
        ) {
            let model = CostModel::new(CostPrior::default());
            let base = work(tokens, u64::from(tokens) * 100, tokens);
            let target = Duration::from_micros(target_us);
            let len = model.chunk_within(&base, start, most, target);
            let with = |len| { let mut w = base; w.add(start, len); model.step(&w) };
            prop_assert!(len <= most && (len == 0 || with(len) <= target));
            prop_assert!(len == most || with(len + 1) > target);
        }
    }
}
