//! Cost model: durations of steps and copies, fitted online by least squares.

use std::time::Duration;

use inflight_contract::CostCoefficients;

use crate::least_squares::LeastSquares;

/// Work of a step: the features that its duration depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    /// Tokens in the batch.
    pub tokens: u32,
    /// Keys read by attention, summed over all tokens; each token reads all positions up to its own.
    pub keys: u64,
    /// Subset of `keys` read by chunks of more than one token. Queries of a chunk share the reads, so such a
    /// key is cheaper: a third on a CPU; on a GPU it costs arithmetic instead of bandwidth.
    pub prefill_keys: u64,
    /// Sequences in the batch.
    pub sequences: u32,
}

impl StepWork {
    /// Adds a chunk of `len` tokens of one sequence, starting at position `start`.
    pub fn add(&mut self, start: u32, len: u32) {
        let keys = keys(start, len);
        self.tokens += len;
        self.keys += keys;
        self.prefill_keys += if len > 1 { keys } else { 0 };
        self.sequences += 1;
    }

    /// Adds `more` tokens to a chunk of `len` tokens that starts at position `start` and was added before.
    pub fn extend(&mut self, start: u32, len: u32, more: u32) {
        let before = keys(start, len);
        let after = keys(start, len + more);
        self.tokens += more;
        self.keys += after - before;
        self.prefill_keys += after - if len > 1 { before } else { 0 };
    }

    /// Returns the regression features: constant, tokens, decode keys, prefill keys, sequences.
    fn features(&self) -> [f64; 5] {
        let decode_keys = self.keys.saturating_sub(self.prefill_keys);
        let sequences = f64::from(self.sequences);
        [1.0, f64::from(self.tokens), decode_keys as f64, self.prefill_keys as f64, sequences]
    }
}

/// Returns the keys read by a chunk of `len` tokens from position `start`.
fn keys(start: u32, len: u32) -> u64 {
    let (start, len) = (u64::from(start), u64::from(len));
    len * start + len * (len + 1) / 2
}

/// Prior of a cost model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostPrior {
    /// Expected coefficients.
    pub cost: CostCoefficients,
    /// Relative standard deviation of the coefficients: small after a calibration, large for a guess.
    pub trust: f64,
}

impl Default for CostPrior {
    /// Returns the prior of a small model on a CPU, with so little trust that a few observations override it.
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
    /// Returns this prior with the given seconds per copy and per copied block.
    #[must_use]
    pub fn with_copies(self, copy_s: f64, copy_block_s: f64) -> Self {
        Self { cost: CostCoefficients { copy_s, copy_block_s, ..self.cost }, ..self }
    }
}

/// Quantile of step times that a step target bounds.
const TAIL_QUANTILE: f64 = 0.9;
/// Step size of the stochastic approximation of the tail factor.
const TAIL_GAIN: f64 = 0.02;

/// Linear model of step and copy durations, fitted online to measurements.
///
/// Used for prefill chunk sizes, the choice between recompute and swap, the predicted TTFT (admission and
/// placement), and as the simulator's device.
#[derive(Debug, Clone)]
pub struct CostModel {
    steps: LeastSquares<5>,
    copies: LeastSquares<2>,
    /// Ratio of measured to predicted time of mixed steps at the [`TAIL_QUANTILE`].
    tail_factor: f64,
    observed_steps: u64,
}

impl CostModel {
    /// Creates a model from a prior.
    pub fn new(prior: CostPrior) -> Self {
        let CostPrior { cost, trust } = prior;
        // In the order of `StepWork::features`.
        let step = [cost.step_s, cost.token_s, cost.decode_key_s, cost.prefill_key_s, cost.sequence_s];
        Self {
            steps: LeastSquares::new(step, trust, 0.998),
            copies: LeastSquares::new([cost.copy_s, cost.copy_block_s], trust, 0.99),
            tail_factor: 1.0,
            observed_steps: 0,
        }
    }

    /// Fits the model to a measured step.
    pub fn observe_step(&mut self, work: &StepWork, took: Duration) {
        let seconds = took.as_secs_f64();
        if work.prefill_keys > 0 && u64::from(work.sequences) > 1 {
            // Robbins-Monro quantile estimation: at the true quantile, steps up and down cancel.
            let over = seconds > self.tail_factor * self.step(work).as_secs_f64();
            self.tail_factor +=
                if over { TAIL_GAIN * TAIL_QUANTILE } else { TAIL_GAIN * (TAIL_QUANTILE - 1.0) };
            self.tail_factor = self.tail_factor.clamp(1.0, 2.0);
        }
        // The noise is proportional to the duration.
        let noise = (0.05 * seconds).powi(2).max(1e-14);
        self.steps.observe(&work.features(), seconds, noise);
        self.observed_steps += 1;
    }

    /// Fits the model to a measured one-way copy of `blocks` blocks.
    pub fn observe_copy(&mut self, blocks: u32, took: Duration) {
        let seconds = took.as_secs_f64();
        let noise = (0.05 * seconds).powi(2).max(1e-14);
        self.copies.observe(&[1.0, f64::from(blocks)], seconds, noise);
    }

    /// Returns the current coefficients.
    pub fn coefficients(&self) -> CostCoefficients {
        let [step_s, token_s, decode_key_s, prefill_key_s, sequence_s] = self.steps.coefficients();
        let [copy_s, copy_block_s] = self.copies.coefficients();
        CostCoefficients { step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s }
    }

    /// Returns the number of observed steps.
    pub fn observed_steps(&self) -> u64 {
        self.observed_steps
    }

    /// Returns the predicted mean duration of a step.
    pub fn step(&self, work: &StepWork) -> Duration {
        seconds(self.steps.predict(&work.features()))
    }

    /// Returns the predicted duration of a step at the 0.9 quantile of steps with prefills.
    pub fn step_tail(&self, work: &StepWork) -> Duration {
        self.step(work).mul_f64(self.tail_factor)
    }

    /// Returns the predicted duration of a one-way copy of `blocks` blocks.
    pub fn copy(&self, blocks: u32) -> Duration {
        seconds(self.copies.predict(&[1.0, f64::from(blocks)]))
    }

    /// Returns the predicted marginal time of prefilling `tokens` tokens from position `start` in steps that
    /// run anyway.
    pub fn prefill(&self, start: u32, tokens: u32) -> Duration {
        let CostCoefficients { token_s, prefill_key_s, .. } = self.coefficients();
        seconds(token_s * f64::from(tokens) + prefill_key_s * keys(start, tokens) as f64)
    }

    /// Returns a target for [`CostModel::chunk_within`]: `1 + slack` times the tail duration of a step with
    /// `work`.
    pub fn target_with_slack(&self, work: &StepWork, slack: f64) -> Duration {
        // `chunk_within` compares tail durations, so the target includes the tail factor.
        self.step(work).mul_f64(self.tail_factor * (1.0 + slack))
    }

    /// Returns the largest prefill chunk, at most `max` tokens from position `start`, with which a step with
    /// `work` stays within `target` at the 0.9 quantile; 0 if none does.
    pub fn chunk_within(&self, work: &StepWork, start: u32, max: u32, target: Duration) -> u32 {
        let fits = |len: u32| {
            let mut with = *work;
            with.add(start, len);
            self.step(&with).mul_f64(self.tail_factor) <= target
        };
        // Durations grow with the length, so bisect.
        let (mut low, mut high) = (0, max);
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
    fn a_chunk_reads_the_keys_up_to_each_of_its_tokens() {
        let mut work = StepWork::default();
        work.add(3, 2);
        assert_eq!(work, StepWork { tokens: 2, keys: 4 + 5, prefill_keys: 4 + 5, sequences: 1 });
    }

    #[test]
    fn hours_of_similar_steps_do_not_degrade_the_model() {
        let truth = |w: &StepWork| {
            seconds(5e-3 + 8e-5 * f64::from(w.tokens) + 2e-8 * w.keys as f64 + 4e-5 * f64::from(w.sequences))
        };
        let mut model = CostModel::new(CostPrior::default());
        let mixed = |n: u32| work(1 + n * 37 % 300, u64::from(n) * 997 % 60_000, 1 + n % 40);
        (0..200).for_each(|n| model.observe_step(&mixed(n), truth(&mixed(n))));
        for n in 0..60_000u32 {
            // Pure decode: the token count equals the sequence count, so these features are collinear.
            let batch = 1 + n / 1000 % 64;
            let decode = work(batch, u64::from(batch) * 700, batch);
            model.observe_step(&decode, truth(&decode));
        }
        for shape in [work(32, 20_000, 32), work(300, 90_000, 9), work(1, 10, 1)] {
            let (predicted, takes) = (model.step(&shape).as_secs_f64(), truth(&shape).as_secs_f64());
            assert!((predicted / takes - 1.0).abs() < 0.1, "{shape:?}: {predicted} s for {takes} s");
        }
        // The model still adapts.
        for n in 0..2000 {
            model.observe_step(&mixed(n), truth(&mixed(n)) * 3);
        }
        let shape = work(100, 10_000, 20);
        let ratio = model.step(&shape).as_secs_f64() / truth(&shape).as_secs_f64();
        assert!((ratio - 3.0).abs() < 0.3, "{ratio} instead of 3");
    }

    #[test]
    fn an_extended_chunk_has_the_work_of_the_whole_chunk() {
        for (start, len, more) in [(0, 1, 1), (7, 1, 5), (7, 3, 2)] {
            let (mut extended, mut whole) = (work(5, 10, 1), work(5, 10, 1));
            extended.add(start, len);
            extended.extend(start, len, more);
            whole.add(start, len + more);
            assert_eq!(extended, whole);
        }
    }

    proptest! {
        #[test]
        fn the_model_fits_any_linear_device_from_noisy_steps(
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
