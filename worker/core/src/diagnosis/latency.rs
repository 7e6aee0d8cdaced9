//! Findings about the duration of iterations, which every decoding sequence sees as a gap between tokens.

use std::time::Duration;

use super::{Bottleneck, DiagnosisWindow, Finding, Steps, percent};
use crate::StepTarget;
use crate::history::IterationSummary;

/// Share of the decodes' time that may be lost to long iterations.
const LOST_MAX: f64 = 0.05;
/// Duration of a single iteration that is reported whatever its share.
const STALL: Duration = Duration::from_secs(1);
/// Duration of a mixed iteration beyond that of decodes alone, from which it counts as long where no bound is set.
const LONG_FACTOR: u32 = 4;
/// Measured over predicted duration from which an iteration counts as slow.
const SLOW_FACTOR: u32 = 4;
/// Iterations shorter than this are never slow: the clock and the operating system disturb them.
const SLOW_MIN: Duration = Duration::from_millis(20);

/// Time that decodes have lost to long iterations.
#[derive(Debug, Default)]
struct Lost {
    time: Duration,
    iterations: u32,
    /// The longest one.
    longest: Duration,
    /// Decodes that it stalled, and prompt tokens beside them.
    decodes: u32,
    prefill_tokens: u32,
}

impl Lost {
    fn add(&mut self, step: &IterationSummary, took: Duration, allowed: Duration) {
        self.time += took.saturating_sub(allowed);
        self.iterations += 1;
        if took > self.longest {
            self.longest = took;
            (self.decodes, self.prefill_tokens) = (step.decodes, step.prefill_tokens);
        }
    }
}

impl<'a, I: Steps<'a>> DiagnosisWindow<'_, I> {
    pub(super) fn prefill_starves_decode(&self) -> Option<Finding> {
        let decode = self.decode_time()?;
        let mut lost = Lost::default();
        for (step, took) in self.decoding() {
            let allowed = step.bound.map_or(LONG_FACTOR * decode, |bound| bound * 5 / 4);
            // What the cost model did not predict is no fault of the chunk.
            if step.prefills > 0 && took.min(step.predicted.max(decode) * 2) > allowed {
                lost.add(step, took, allowed);
            }
        }
        let action = match self.limits.step_target {
            StepTarget::Unbounded => format!(
                "set --step-target auto, the default: iterations beside decodes would take about {:.0} ms",
                3.0 * millis(decode)
            ),
            StepTarget::Fixed(target) => {
                format!("lower --step-target, now {:.0} ms, for smaller prefill chunks", millis(target))
            }
            StepTarget::Adaptive(_) => {
                "bound the iterations by --slo-gap; first tokens come later".to_owned()
            }
        };
        self.lost_time(Bottleneck::PrefillStarvesDecode, &lost, "prefill beside decodes", action)
    }

    pub(super) fn slow_iterations(&self) -> Option<Finding> {
        let mut lost = Lost::default();
        for (step, took) in self.decoding() {
            let allowed = (SLOW_FACTOR * step.predicted).max(SLOW_MIN);
            if took > allowed {
                lost.add(step, took, allowed);
            }
        }
        let action = "find what slows the device: other processes on its cores, swapped or throttled memory, a GPU's clock \
                      limit; the cost model predicted less than a quarter of their time"
            .to_owned();
        self.lost_time(Bottleneck::SlowIterations, &lost, "iterations slower than predicted", action)
    }

    /// Returns the finding of lost time, if it is a notable share of the decodes' time or one iteration was a stall.
    fn lost_time(&self, limit: Bottleneck, lost: &Lost, what: &str, action: String) -> Option<Finding> {
        let all: Duration = self.decoding().map(|(_, took)| took).sum();
        let share = lost.time.as_secs_f64() / all.as_secs_f64().max(1e-9);
        if share <= LOST_MAX && lost.longest < STALL {
            return None;
        }
        let figure = format!(
            "{what}: {} of {} iterations were too long and took {} of the time of decodes; the longest, {:.0} ms, stalled {} \
             sequences beside {} prompt tokens",
            lost.iterations,
            self.total,
            percent(share),
            millis(lost.longest),
            lost.decodes,
            lost.prefill_tokens
        );
        Finding::new(limit, share, figure, action)
    }

    pub(super) fn chunk_budget(&self) -> Option<Finding> {
        // Without a step target, chunks are limited by the token budget alone.
        let crawling = self.share(|step| {
            step.prefills > 0
                && step.bound.is_some()
                && step.load.waiting > 0
                && step.prefill_tokens < 2 * self.limits.block_tokens()
        });
        if crawling <= 0.1 {
            return None;
        }
        let figure = format!(
            "{} of iterations prefilled less than two KV blocks while prompts waited",
            percent(crawling)
        );
        let action =
            "raise --step-target, --slo-gap or --max-batch-tokens for larger prefill chunks".to_owned();
        Finding::new(Bottleneck::ChunkBudget, crawling, figure, action)
    }

    pub(super) fn gap_objective(&self) -> Option<Finding> {
        let share = self.unmet(self.now.gap_objective_unmet - self.before.gap_objective_unmet)?;
        let decode = self.decode_time().unwrap_or_default();
        let figure = format!(
            "decodes alone were too long for --slo-gap in {} of iterations: {:.0} ms with {:.0} sequences",
            percent(share),
            millis(decode),
            self.mean(|step| step.decodes)
        );
        let action = "raise --slo-gap, lower --max-sequences, or add workers".to_owned();
        Finding::new(Bottleneck::GapObjective, share, figure, action)
    }

    pub(super) fn first_token_objective(&self) -> Option<Finding> {
        let share =
            self.unmet(self.now.first_token_objective_unmet - self.before.first_token_objective_unmet)?;
        let figure = format!("prompts could not all meet --slo-ttft in {} of iterations", percent(share));
        let action = "add workers, or raise --slo-gap or --slo-ttft".to_owned();
        Finding::new(Bottleneck::FirstTokenObjective, share, figure, action)
    }

    /// Returns the share of iterations that could not meet an objective, if more than one in twenty.
    fn unmet(&self, iterations: u64) -> Option<f64> {
        let share = iterations as f64 / self.total;
        (share > 0.05).then_some(share)
    }

    /// Returns the completed iterations with decodes, and their durations.
    fn decoding(&self) -> impl Iterator<Item = (&'a IterationSummary, Duration)> + use<'a, I> {
        self.steps.clone().filter(|step| step.decodes > 0).filter_map(|step| Some((step, step.took?)))
    }

    /// Returns the median duration of iterations with decodes alone, else the shortest of those with decodes.
    fn decode_time(&self) -> Option<Duration> {
        let mut alone: Vec<Duration> =
            self.decoding().filter(|(step, _)| step.prefills == 0).map(|(_, took)| took).collect();
        alone.sort_unstable();
        let median = alone.get(alone.len() / 2).copied();
        median.or_else(|| self.decoding().map(|(_, took)| took).min())
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
