//! Search for the fastest GEMM algorithm by racing (successive elimination). Pure: the next timing follows
//! from the times so far; a [`GemmTimer`] provides device and clock.

use std::time::Duration;

use super::step_graph::StepGraph;

/// Maximum timings per algorithm; the minimum counts.
const ROUNDS_MAX: u32 = 4;
/// An algorithm is eliminated when it is slower than the fastest by this factor.
const ELIMINATION_FACTOR: f64 = 1.25;
/// Speedup over the first algorithm that another one needs to replace it: more than the noise of timings.
const SPEEDUP_MIN: f64 = 1.02;

/// Race between the candidate algorithms of one GEMM shape. The first is the default.
#[derive(Debug, Clone)]
pub(super) struct AlgorithmRace {
    /// Minimum seconds of each algorithm, and whether it is still racing.
    algorithms: Vec<(f64, bool)>,
    /// Index of the next algorithm to time, if it is still racing.
    next: usize,
    /// Completed rounds.
    rounds: u32,
}

/// Selected algorithm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Selection {
    /// Index of the selected algorithm.
    pub(super) algorithm: usize,
    /// Its minimum seconds.
    pub(super) seconds: f64,
    /// Minimum seconds of the first algorithm; `None`: it rejects the shape.
    pub(super) first: Option<f64>,
}

impl AlgorithmRace {
    pub(super) fn new(algorithms: usize) -> Self {
        Self { algorithms: vec![(f64::INFINITY, true); algorithms], next: 0, rounds: 0 }
    }

    /// Returns the algorithm to time next; `None`: the race is over. All are timed once before one is timed
    /// again, so that clock drift affects all equally.
    pub(super) fn next(&self) -> Option<usize> {
        let left = self.algorithms.iter().filter(|(_, racing)| *racing).count();
        // A sole survivor after a round has won; before the first round ends its time is needed, too.
        let over = self.rounds == ROUNDS_MAX || left == 0 || (self.rounds > 0 && left == 1);
        if over {
            None
        } else {
            (self.next..self.algorithms.len()).find(|algorithm| self.algorithms[*algorithm].1)
        }
    }

    /// Records the seconds of the algorithm that [`AlgorithmRace::next`] returned; `None`: it rejects the
    /// shape.
    pub(super) fn record(&mut self, algorithm: usize, seconds: Option<f64>) {
        match seconds {
            // Zero or non-finite times are invalid.
            Some(seconds) if seconds.is_finite() && seconds > 0.0 => {
                self.algorithms[algorithm].0 = self.algorithms[algorithm].0.min(seconds);
            }
            _ => self.algorithms[algorithm] = (f64::INFINITY, false),
        }
        self.next = algorithm + 1;
        if self.algorithms[self.next..].iter().any(|(_, racing)| *racing) {
            return;
        }
        (self.next, self.rounds) = (0, self.rounds + 1);
        let best = self.best().1;
        self.algorithms
            .iter_mut()
            .for_each(|(seconds, racing)| *racing &= *seconds <= best * ELIMINATION_FACTOR);
    }

    fn best(&self) -> (usize, f64) {
        let times = self.algorithms.iter().map(|(seconds, _)| *seconds).enumerate();
        times.fold((0, f64::INFINITY), |best, time| if time.1 < best.1 { time } else { best })
    }

    /// Returns the winner; `None` before all were timed once, or if none supports the shape.
    pub(super) fn selection(&self) -> Option<Selection> {
        let (algorithm, seconds) = self.best();
        if self.rounds == 0 || !seconds.is_finite() {
            return None;
        }
        let first = self.algorithms[0].0;
        Some(match first <= seconds * SPEEDUP_MIN {
            true => Selection { algorithm: 0, seconds: first, first: Some(first) },
            false => Selection { algorithm, seconds, first: first.is_finite().then_some(first) },
        })
    }
}

/// Device and clock of the search.
pub(super) trait GemmTimer {
    type Error;

    /// Selects the GEMM shape to time, and returns its number of candidate algorithms.
    fn select_shape(&mut self, shape: usize) -> Result<usize, Self::Error>;

    /// Times one algorithm and returns its seconds; `None`: it rejects the shape.
    fn time(&mut self, algorithm: usize) -> Result<Option<f64>, Self::Error>;

    /// Makes the winner the algorithm of the selected shape.
    fn apply(&mut self, selection: Selection) -> Result<(), Self::Error>;

    /// Returns the time since the search began.
    fn elapsed(&self) -> Duration;
}

/// Selects the fastest algorithm for as many shapes, in order, as fit in `budget`; the others keep their
/// default. Exceeds the budget by one timing at most.
///
/// # Errors
/// Those of the timer.
pub(super) fn tune_all<T: GemmTimer>(timer: &mut T, shapes: usize, budget: Duration) -> Result<(), T::Error> {
    for shape in 0..shapes {
        if timer.elapsed() >= budget {
            break;
        }
        let mut race = AlgorithmRace::new(timer.select_shape(shape)?);
        while let Some(algorithm) = race.next() {
            if timer.elapsed() >= budget {
                break;
            }
            let seconds = timer.time(algorithm)?;
            race.record(algorithm, seconds);
        }
        if let Some(selection) = race.selection() {
            timer.apply(selection)?;
        }
    }
    Ok(())
}

/// Returns the row counts to tune, most important first: the graphs of decode batches, then batches with prompts, of which the
/// largest are the most common, then the graphs of small ones.
pub(super) fn row_counts(graphs: impl Iterator<Item = StepGraph>, rows: u32) -> Vec<u32> {
    let (decodes, layers): (Vec<StepGraph>, Vec<StepGraph>) =
        graphs.partition(|graph| graph.logits_rows().is_some());
    let mut counts: Vec<u32> = decodes.into_iter().map(StepGraph::rows).filter(|m| *m <= rows).collect();
    counts.sort_unstable();
    let prompts = [rows, 2048, 1024, 512, 4096, 256];
    for prompts in prompts.into_iter().chain(layers.into_iter().map(StepGraph::rows)) {
        if prompts <= rows && !counts.contains(&prompts) {
            counts.push(prompts);
        }
    }
    counts
}

/// Returns the number of launches per timing: enough for about a third of a millisecond on a large GPU, and
/// over many layers so that weights do not stay in the L2 cache (a small head, of which there is only one,
/// may). `layers`: layers with their own weights.
pub(super) fn launches_per_timing(m: u32, n: u32, k: u32, layers: usize) -> usize {
    // Reading one weight element takes as long as this many operations.
    const OPERATIONS_PER_READ: f64 = 500.0;
    let operations = f64::from(n) * f64::from(k) * (2.0 * f64::from(m) + OPERATIONS_PER_READ);
    ((2e11 / operations) as usize).clamp(2, layers.clamp(2, 64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Timer with a fixed true time per algorithm, or a rejection, and a clock that only timings advance.
    struct FakeTimer {
        truth: Vec<Vec<Option<f64>>>,
        /// Maximum relative noise; times are only ever longer.
        noise: f64,
        random: u64,
        clock: f64,
        shape: usize,
        /// Number of timings, by shape and algorithm.
        timings: Vec<Vec<u32>>,
        selected: Vec<Option<Selection>>,
        last: f64,
    }

    impl FakeTimer {
        fn new(truth: Vec<Vec<Option<f64>>>, noise: f64, seed: u64) -> Self {
            let timings = truth.iter().map(|algorithms| vec![0; algorithms.len()]).collect();
            let selected = vec![None; truth.len()];
            Self { truth, noise, random: seed, clock: 0.0, shape: 0, timings, selected, last: 0.0 }
        }
    }

    impl GemmTimer for FakeTimer {
        type Error = String;

        fn select_shape(&mut self, shape: usize) -> Result<usize, String> {
            self.shape = shape;
            Ok(self.truth[shape].len())
        }

        fn time(&mut self, algorithm: usize) -> Result<Option<f64>, String> {
            self.timings[self.shape][algorithm] += 1;
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let noise = (self.random >> 40) as f64 / (1u64 << 24) as f64 * self.noise;
            let seconds = self.truth[self.shape][algorithm].map(|seconds| seconds * (1.0 + noise));
            self.last = seconds.unwrap_or(1e-6);
            self.clock += self.last;
            Ok(seconds)
        }

        fn apply(&mut self, selection: Selection) -> Result<(), String> {
            self.selected[self.shape] = Some(selection);
            Ok(())
        }

        fn elapsed(&self) -> Duration {
            Duration::from_secs_f64(self.clock)
        }
    }

    fn algorithms() -> impl Strategy<Value = Vec<Option<f64>>> {
        prop::collection::vec(prop::option::weighted(0.8, 1e-5f64..1e-3), 0..9)
    }

    fn fastest(truth: &[Option<f64>]) -> Option<f64> {
        truth.iter().flatten().copied().reduce(f64::min)
    }

    proptest! {
        #[test]
        fn the_selection_is_no_slower_than_the_first_or_the_fastest_beyond_noise(
            truth in prop::collection::vec(algorithms(), 1..6), noise in 0.0f64..0.2, seed in any::<u64>(),
        ) {
            let mut fake = FakeTimer::new(truth.clone(), noise, seed);
            tune_all(&mut fake, truth.len(), Duration::from_secs(60)).unwrap();
            for (shape, times) in truth.iter().enumerate() {
                let selection = fake.selected[shape];
                let Some(best) = fastest(times) else {
                    prop_assert_eq!(selection, None);
                    continue;
                };
                let Selection { algorithm, seconds, first } = selection.unwrap();
                let true_time = times[algorithm].unwrap();
                prop_assert!(true_time <= best * (1.0 + noise) * SPEEDUP_MIN * 1.0001, "{true_time} is chosen, {best} is there");
                prop_assert!(seconds >= true_time && seconds <= true_time * (1.0 + noise) * 1.0001);
                prop_assert_eq!(first.is_some(), times[0].is_some());
                prop_assert!(algorithm == 0 || first.is_none_or(|first| first > seconds * SPEEDUP_MIN));
                for (algorithm, timings) in fake.timings[shape].iter().enumerate() {
                    prop_assert!(
                        (1..=ROUNDS_MAX).contains(timings),
                        "algorithm {} was timed {} times",
                        algorithm,
                        timings
                    );
                    let bound = best * (1.0 + noise) * ELIMINATION_FACTOR;
                    let hopeless = times[algorithm].is_none_or(|seconds| seconds > bound);
                    prop_assert!(!hopeless || *timings == 1, "algorithm {} was timed again", algorithm);
                }
            }
        }

        #[test]
        fn the_budget_is_exceeded_by_one_timing_at_most_and_shapes_run_in_order(
            truth in prop::collection::vec(algorithms(), 1..12), budget in 0.0f64..0.02, seed in any::<u64>(),
        ) {
            let limit = Duration::from_secs_f64(budget);
            let mut fake = FakeTimer::new(truth.clone(), 0.1, seed);
            tune_all(&mut fake, truth.len(), limit).unwrap();
            prop_assert!(fake.clock <= limit.as_secs_f64() + fake.last + 1e-9);
            for (timings, selected) in fake.timings.iter().zip(&fake.selected) {
                // Nothing is selected before all were timed.
                prop_assert!(selected.is_none() || timings.iter().all(|timings| *timings > 0));
            }
            // In order: after an unfinished shape none was started.
            let timed = |timings: &&Vec<u32>| timings.iter().all(|timings| *timings > 0);
            let later = fake.timings.iter().skip_while(timed).skip(1);
            prop_assert!(later.flatten().all(|timings| *timings == 0));
        }

        #[test]
        fn row_counts_have_every_graph_and_the_largest_batch_once(slots in 1u32..4096, rows in 256u32..65_536) {
            let graphs = super::super::step_graph::StepGraphs { sample_rows: slots, batch_tokens: rows };
            let counts = row_counts(graphs.all(), graphs.rows_max());
            prop_assert!(graphs.all().all(|graph| counts.contains(&graph.rows())));
            prop_assert!(counts.contains(&graphs.rows_max()));
            let once: std::collections::BTreeSet<u32> = counts.iter().copied().collect();
            prop_assert!(once.len() == counts.len() && once.iter().all(|m| (1..=graphs.rows_max()).contains(m)));
            prop_assert!(counts.len() <= 23);
        }
    }

    #[test]
    fn invalid_times_win_no_race() {
        let mut race = AlgorithmRace::new(3);
        for (algorithm, seconds) in [(0, Some(0.0)), (1, Some(f64::NAN)), (2, Some(1e-3))] {
            assert_eq!(race.next(), Some(algorithm));
            race.record(algorithm, seconds);
        }
        assert_eq!(race.selection(), Some(Selection { algorithm: 2, seconds: 1e-3, first: None }));
    }

    #[test]
    fn small_gemms_are_launched_for_every_layer_and_large_ones_twice() {
        assert_eq!(launches_per_timing(1, 4096, 1024, 28), 28);
        assert_eq!(launches_per_timing(1, 28_672, 4096, 32), 3);
        assert_eq!(launches_per_timing(8192, 28_672, 4096, 32), 2);
        assert_eq!(launches_per_timing(1, 151_936, 1024, 1), 2);
    }
}
