//! Which of several ways to make a product is the fastest. Pure: what is timed next follows from the times told so far;
//! whoever asks has the device and the clock ([`Trials`]).

use std::time::Duration;

/// Times each way is taken at most; the least counts.
const ROUNDS: u32 = 4;
/// A way leaves the race when the fastest is so much faster.
const HOPELESS: f64 = 1.25;
/// The first way stays unless another one is faster by more than what times scatter by.
const MARGIN: f64 = 1.02;

/// Ways to make a product that compete for it. The first is the one taken without a race.
#[derive(Debug, Clone)]
pub(super) struct Race {
    /// Of each way: the least time told, and whether it is still in the race.
    ways: Vec<(f64, bool)>,
    /// The next to be timed, if it is still in the race.
    at: usize,
    /// Rounds that are over.
    rounds: u32,
}

/// Who wins.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Verdict {
    /// The fastest way.
    pub(super) way: usize,
    /// Seconds it takes.
    pub(super) seconds: f64,
    /// Seconds that the first way takes; `None`: it can't make the product.
    pub(super) first: Option<f64>,
}

impl Race {
    pub(super) fn new(ways: usize) -> Self {
        Self { ways: vec![(f64::INFINITY, true); ways], at: 0, rounds: 0 }
    }

    /// What to time next; `None`: it is over. All are timed once before one is timed again, so that a clock that drifts
    /// does so for all.
    pub(super) fn next(&self) -> Option<usize> {
        let left = self.ways.iter().filter(|(_, racing)| *racing).count();
        // One that is alone after a round has won; before the first is over its time is wanted, too.
        let over = self.rounds == ROUNDS || left == 0 || (self.rounds > 0 && left == 1);
        if over { None } else { (self.at..self.ways.len()).find(|way| self.ways[*way].1) }
    }

    /// Tells how many seconds the way took that [`Race::next`] named; `None`: it can't.
    pub(super) fn tell(&mut self, way: usize, seconds: Option<f64>) {
        match seconds {
            // A clock that shows nothing knows nothing.
            Some(seconds) if seconds.is_finite() && seconds > 0.0 => {
                self.ways[way].0 = self.ways[way].0.min(seconds);
            }
            _ => self.ways[way] = (f64::INFINITY, false),
        }
        self.at = way + 1;
        if self.ways[self.at..].iter().any(|(_, racing)| *racing) {
            return;
        }
        (self.at, self.rounds) = (0, self.rounds + 1);
        let best = self.best().1;
        self.ways.iter_mut().for_each(|(seconds, racing)| *racing &= *seconds <= best * HOPELESS);
    }

    fn best(&self) -> (usize, f64) {
        let times = self.ways.iter().map(|(seconds, _)| *seconds).enumerate();
        times.fold((0, f64::INFINITY), |best, way| if way.1 < best.1 { way } else { best })
    }

    /// The winner; `None` before every way was timed once, and where none can make the product.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        let (way, seconds) = self.best();
        if self.rounds == 0 || !seconds.is_finite() {
            return None;
        }
        let first = self.ways[0].0;
        Some(match first <= seconds * MARGIN {
            true => Verdict { way: 0, seconds: first, first: Some(first) },
            false => Verdict { way, seconds, first: first.is_finite().then_some(first) },
        })
    }
}

/// What races need of the world.
pub(super) trait Trials {
    type Error;

    /// How many ways there are to make a product, which is the one that is timed from now on.
    fn ways(&mut self, product: usize) -> Result<usize, Self::Error>;

    /// Seconds that one of them takes; `None`: it can't.
    fn time(&mut self, way: usize) -> Result<Option<f64>, Self::Error>;

    /// The product is made by the winner from now on.
    fn settle(&mut self, verdict: Verdict) -> Result<(), Self::Error>;

    /// Since the first call of all.
    fn elapsed(&self) -> Duration;
}

/// Finds the fastest way for as many products as `budget` lets, in their order; those it has no time for stay as they are.
/// Beyond the budget it takes one trial at most.
///
/// # Errors
/// Those of the trials.
pub(super) fn tune<T: Trials>(trials: &mut T, products: usize, budget: Duration) -> Result<(), T::Error> {
    for product in 0..products {
        if trials.elapsed() >= budget {
            break;
        }
        let mut race = Race::new(trials.ways(product)?);
        while let Some(way) = race.next() {
            if trials.elapsed() >= budget {
                break;
            }
            let seconds = trials.time(way)?;
            race.tell(way, seconds);
        }
        if let Some(verdict) = race.verdict() {
            trials.settle(verdict)?;
        }
    }
    Ok(())
}

/// Numbers of rows to find the fastest way for, the most important first: those that decoding is captured for, then
/// batches with prompts, whose usual size is the largest.
pub(super) fn agenda(buckets: impl Iterator<Item = u32>, rows: u32) -> Vec<u32> {
    let mut agenda: Vec<u32> = buckets.filter(|bucket| *bucket <= rows).collect();
    agenda.sort_unstable();
    for prompts in [rows, 2048, 1024, 512, 4096, 256] {
        if prompts <= rows && !agenda.contains(&prompts) {
            agenda.push(prompts);
        }
    }
    agenda
}

/// Products of one shape to launch between two looks at the clock, so that it shows about a third of a millisecond on a
/// large GPU, and so that their weights, which the cache must not hold, are many; a head has only one, which a large cache may hold all the
/// same if it is small. `layers`: how many have weights of their own.
pub(super) fn launches(m: u32, n: u32, k: u32, layers: usize) -> usize {
    // Reading a number of the matrix takes as long as so many operations.
    const READ: f64 = 500.0;
    let each = f64::from(n) * f64::from(k) * (2.0 * f64::from(m) + READ);
    ((2e11 / each) as usize).clamp(2, layers.clamp(2, 64))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Ways with a true time each, or none, and a clock that only trials move.
    struct Fake {
        truth: Vec<Vec<Option<f64>>>,
        /// Times are longer by up to this part, never shorter.
        noise: f64,
        word: u64,
        clock: f64,
        product: usize,
        trials: Vec<Vec<u32>>,
        settled: Vec<Option<Verdict>>,
        last: f64,
    }

    impl Fake {
        fn new(truth: Vec<Vec<Option<f64>>>, noise: f64, seed: u64) -> Self {
            let trials = truth.iter().map(|ways| vec![0; ways.len()]).collect();
            let settled = vec![None; truth.len()];
            Self { truth, noise, word: seed, clock: 0.0, product: 0, trials, settled, last: 0.0 }
        }
    }

    impl Trials for Fake {
        type Error = String;

        fn ways(&mut self, product: usize) -> Result<usize, String> {
            self.product = product;
            Ok(self.truth[product].len())
        }

        fn time(&mut self, way: usize) -> Result<Option<f64>, String> {
            self.trials[self.product][way] += 1;
            self.word = self.word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let noise = (self.word >> 40) as f64 / (1u64 << 24) as f64 * self.noise;
            let seconds = self.truth[self.product][way].map(|seconds| seconds * (1.0 + noise));
            self.last = seconds.unwrap_or(1e-6);
            self.clock += self.last;
            Ok(seconds)
        }

        fn settle(&mut self, verdict: Verdict) -> Result<(), String> {
            self.settled[self.product] = Some(verdict);
            Ok(())
        }

        fn elapsed(&self) -> Duration {
            Duration::from_secs_f64(self.clock)
        }
    }

    fn ways() -> impl Strategy<Value = Vec<Option<f64>>> {
        prop::collection::vec(prop::option::weighted(0.8, 1e-5f64..1e-3), 0..9)
    }

    fn fastest(truth: &[Option<f64>]) -> Option<f64> {
        truth.iter().flatten().copied().reduce(f64::min)
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_no_slower_than_the_first_nor_than_the_fastest_by_more_than_the_noise(
            truth in prop::collection::vec(ways(), 1..6), noise in 0.0f64..0.2, seed in any::<u64>(),
        ) {
            let mut fake = Fake::new(truth.clone(), noise, seed);
            tune(&mut fake, truth.len(), Duration::from_secs(60)).unwrap();
            for (product, ways) in truth.iter().enumerate() {
                let verdict = fake.settled[product];
                let Some(best) = fastest(ways) else {
                    prop_assert_eq!(verdict, None);
                    continue;
                };
                let Verdict { way, seconds, first } = verdict.unwrap();
                let true_time = ways[way].unwrap();
                prop_assert!(true_time <= best * (1.0 + noise) * MARGIN * 1.0001, "{true_time} is chosen, {best} is there");
                prop_assert!(seconds >= true_time && seconds <= true_time * (1.0 + noise) * 1.0001);
                prop_assert_eq!(first.is_some(), ways[0].is_some());
                prop_assert!(way == 0 || first.is_none_or(|first| first > seconds * MARGIN));
                for (way, trials) in fake.trials[product].iter().enumerate() {
                    prop_assert!((1..=ROUNDS).contains(trials), "way {} was timed {} times", way, trials);
                    let hopeless = ways[way].is_none_or(|seconds| seconds > best * (1.0 + noise) * HOPELESS);
                    prop_assert!(!hopeless || *trials == 1, "way {} was timed again", way);
                }
            }
        }

        #[test]
        fn a_budget_is_exceeded_by_one_trial_at_most_and_what_it_leaves_no_time_for_stays(
            truth in prop::collection::vec(ways(), 1..12), budget in 0.0f64..0.02, seed in any::<u64>(),
        ) {
            let limit = Duration::from_secs_f64(budget);
            let mut fake = Fake::new(truth.clone(), 0.1, seed);
            tune(&mut fake, truth.len(), limit).unwrap();
            prop_assert!(fake.clock <= limit.as_secs_f64() + fake.last + 1e-9);
            for (trials, settled) in fake.trials.iter().zip(&fake.settled) {
                // Nothing is decided before everything was seen.
                prop_assert!(settled.is_none() || trials.iter().all(|trials| *trials > 0));
            }
            // In their order: behind one that was not finished none was begun.
            let timed = |trials: &&Vec<u32>| trials.iter().all(|trials| *trials > 0);
            let later = fake.trials.iter().skip_while(timed).skip(1);
            prop_assert!(later.flatten().all(|trials| *trials == 0));
        }

        #[test]
        fn an_agenda_has_every_bucket_and_the_largest_batch_once(slots in 1u32..4096, rows in 256u32..65_536) {
            let buckets = || super::super::sizing::buckets(slots);
            let agenda = agenda(buckets(), rows);
            prop_assert!(buckets().all(|bucket| agenda.contains(&bucket)) && agenda.contains(&rows));
            let once: std::collections::BTreeSet<u32> = agenda.iter().copied().collect();
            prop_assert!(once.len() == agenda.len() && once.iter().all(|m| (1..=rows).contains(m)));
            prop_assert!(agenda.len() <= 20);
        }
    }

    #[test]
    fn a_clock_that_shows_nothing_wins_no_race() {
        let mut race = Race::new(3);
        for (way, seconds) in [(0, Some(0.0)), (1, Some(f64::NAN)), (2, Some(1e-3))] {
            assert_eq!(race.next(), Some(way));
            race.tell(way, seconds);
        }
        assert_eq!(race.verdict(), Some(Verdict { way: 2, seconds: 1e-3, first: None }));
    }

    #[test]
    fn small_products_are_launched_for_every_layer_and_large_ones_twice() {
        assert_eq!(launches(1, 4096, 1024, 28), 28);
        assert_eq!(launches(1, 28_672, 4096, 32), 3);
        assert_eq!(launches(8192, 28_672, 4096, 32), 2);
        assert_eq!(launches(1, 151_936, 1024, 1), 2);
    }
}
