//! Search for the highest request rate at which a server meets its objectives.

/// Ratio between a rate that is too high and one that is met at which the search ends.
const RESOLUTION: f64 = 1.1;

/// Search for the highest rate between two bounds: doubles the rate until it is too high, then bisects.
#[derive(Debug, Clone)]
pub struct RateSearch {
    from: f64,
    to: f64,
    /// Highest rate that was met.
    met: Option<f64>,
    /// Lowest rate that was too high.
    missed: Option<f64>,
}

impl RateSearch {
    /// Searches from the rate `from` up to `to`, in requests per second.
    pub fn new(from: f64, to: f64) -> Self {
        Self { from, to, met: None, missed: None }
    }

    /// Returns the next rate to measure, in requests per second; `None` when the search has ended.
    pub fn next_rate(&self) -> Option<f64> {
        match (self.met, self.missed) {
            (None, None) => Some(self.from),
            // Not even the lowest.
            (None, Some(_)) => None,
            (Some(met), None) if met >= self.to => None,
            (Some(met), None) if 2.0 * met >= self.to => Some(self.to),
            (Some(met), None) => Some(rounded(2.0 * met).min(self.to)),
            (Some(met), Some(missed)) => (missed / met > RESOLUTION).then(|| rounded((met * missed).sqrt())),
        }
    }

    /// Records whether the objectives were met at `rate`.
    pub fn record(&mut self, rate: f64, is_met: bool) {
        if is_met {
            self.met = Some(self.met.map_or(rate, |met| met.max(rate)));
        } else {
            self.missed = Some(self.missed.map_or(rate, |missed| missed.min(rate)));
        }
    }

    /// Highest rate that was met.
    pub fn met(&self) -> Option<f64> {
        self.met
    }

    /// Lowest rate that was too high.
    pub fn missed(&self) -> Option<f64> {
        self.missed
    }
}

/// Rounds to three digits, which is less than the resolution, and readable.
fn rounded(rate: f64) -> f64 {
    let unit = 10f64.powf(rate.log10().floor() - 2.0);
    (rate / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rounding_does_not_leave_the_bounds() {
        let mut search = RateSearch::new(5.13, 10.28);
        search.record(5.13, true);
        assert_eq!(search.next_rate(), Some(10.28));
        search.record(10.28, true);
        assert_eq!((search.next_rate(), search.met(), search.missed()), (None, Some(10.28), None));
    }

    proptest! {
        #[test]
        fn the_search_finds_the_limit_to_a_tenth_within_its_bounds_and_few_rounds(
            from in 0.01f64..10.0, width in 1.0f64..1000.0, limit in 0.001f64..20_000.0,
        ) {
            let to = from * width;
            let mut search = RateSearch::new(from, to);
            let mut rounds = 0;
            while let Some(rate) = search.next_rate() {
                prop_assert!((from..=to).contains(&rate), "{rate} is not from {from} to {to}");
                prop_assert!(search.met().is_none_or(|met| rate > met), "{rate} again");
                prop_assert!(search.missed().is_none_or(|missed| rate < missed), "{rate} again");
                search.record(rate, rate <= limit);
                rounds += 1;
            }
            prop_assert!(rounds <= 20, "{rounds} rounds");
            match (search.met(), search.missed()) {
                (None, missed) => prop_assert!(limit < from && missed == Some(from)),
                (Some(met), None) => prop_assert!(met == to && limit >= to),
                (Some(met), Some(missed)) => {
                    prop_assert!(met <= limit && limit < missed && missed / met <= 1.0001 * RESOLUTION);
                }
            }
        }
    }
}
