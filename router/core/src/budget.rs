//! Daily token budget of a tenant at one router. Days are those of UTC.

use std::time::Duration;

/// Seconds of a UTC day.
const DAY_SECONDS: u64 = 86_400;

/// Daily limit divided among routers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DailyLimit {
    /// Tokens per day of the cluster.
    pub per_day: u64,
    /// Number of routers that share the limit.
    pub routers: u32,
}

impl DailyLimit {
    /// Returns the tokens per day of one router.
    pub fn share(self) -> u64 {
        (self.per_day / u64::from(self.routers.max(1))).max(1)
    }
}

/// Budget that a request would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetExceeded {
    /// Tokens used today.
    pub used: u64,
    /// Tokens reserved by open requests, which return what they don't use.
    pub reserved: u64,
    /// Time until the next UTC day, in whole seconds; `None` if the request would be admitted once open
    /// requests have ended.
    pub wait: Option<Duration>,
}

/// Tokens of a tenant used today and reserved by open requests. Times are since the Unix epoch.
///
/// A request reserves its maximum and settles what it used when it ends, on the day of its end: a
/// reservation survives midnight, and usage never exceeds the limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DailyBudget {
    /// Days since the Unix epoch.
    day: u64,
    used: u64,
    reserved: u64,
}

impl DailyBudget {
    /// Starts a new day. A clock that is set back starts none: one that wavers around midnight must not renew the budget
    /// again and again. If it is set back by more than a day, it was far ahead, and its days to come would renew nothing;
    /// then the usage counts for the day that it shows now.
    fn advance(&mut self, now: Duration) {
        let day = now.as_secs() / DAY_SECONDS;
        if day > self.day {
            (self.day, self.used) = (day, 0);
        } else if day + 1 < self.day {
            self.day = day;
        }
    }

    /// Reserves `tokens`, until [`DailyBudget::settle`].
    ///
    /// # Errors
    /// [`BudgetExceeded`]; nothing is reserved then.
    pub fn reserve(&mut self, limit: DailyLimit, tokens: u64, now: Duration) -> Result<(), BudgetExceeded> {
        self.advance(now);
        let share = limit.share();
        let asked = self.used.saturating_add(tokens);
        if asked.saturating_add(self.reserved) > share {
            let until_midnight = Duration::from_secs(DAY_SECONDS - now.as_secs() % DAY_SECONDS);
            let wait = (asked > share).then_some(until_midnight);
            return Err(BudgetExceeded { used: self.used, reserved: self.reserved, wait });
        }
        self.reserved += tokens;
        Ok(())
    }

    /// Ends a reservation of `reserved` tokens, of which `used` were used.
    pub fn settle(&mut self, reserved: u64, used: u64, now: Duration) {
        debug_assert!(self.reserved >= reserved, "more tokens settled than reserved");
        self.reserved = self.reserved.saturating_sub(reserved);
        self.count(used, now);
    }

    /// Counts tokens used at `now`, for instance those of a usage log from before a restart.
    pub fn count(&mut self, used: u64, now: Duration) {
        self.advance(now);
        self.used = self.used.saturating_add(used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: Duration = Duration::from_secs(20_000 * DAY_SECONDS + DAY_SECONDS / 2);
    const LIMIT: DailyLimit = DailyLimit { per_day: 100, routers: 1 };

    #[test]
    fn a_spent_budget_is_renewed_at_midnight_and_open_requests_count_on_the_day_of_their_end() {
        let mut budget = DailyBudget::default();
        budget.reserve(LIMIT, 60, NOON).unwrap();
        // The open request may return some of its 60 tokens: no need to wait for midnight.
        let refused = budget.reserve(LIMIT, 50, NOON);
        assert_eq!(refused, Err(BudgetExceeded { used: 0, reserved: 60, wait: None }));
        budget.settle(60, 55, NOON);
        let refused = budget.reserve(LIMIT, 50, NOON);
        let wait = Some(Duration::from_secs(DAY_SECONDS / 2));
        assert_eq!(refused, Err(BudgetExceeded { used: 55, reserved: 0, wait }));
        budget.reserve(LIMIT, 45, NOON).unwrap();

        let midnight = NOON + Duration::from_secs(DAY_SECONDS / 2);
        let before = midnight.saturating_sub(Duration::from_nanos(1));
        assert_eq!(budget.reserve(LIMIT, 50, before).unwrap_err().wait, Some(Duration::from_secs(1)));
        budget.reserve(LIMIT, 50, midnight).unwrap();
        budget.settle(45, 40, midnight);
        assert_eq!(budget.reserve(LIMIT, 20, midnight).unwrap_err().used, 40, "yesterday's request");
        // A clock that is set back renews nothing.
        assert_eq!(budget.reserve(LIMIT, 20, NOON).unwrap_err().used, 40);
    }

    #[test]
    fn a_clock_that_was_years_ahead_does_not_withhold_the_next_days_budget() {
        const DAY: Duration = Duration::from_secs(DAY_SECONDS);
        let mut budget = DailyBudget::default();
        budget.count(100, NOON);
        let ahead = NOON + 3000 * DAY;
        budget.reserve(LIMIT, 100, ahead).unwrap();
        budget.settle(100, 100, ahead);
        assert_eq!(budget.reserve(LIMIT, 1, NOON).unwrap_err().used, 100, "setting it right renews nothing");
        budget.reserve(LIMIT, 100, NOON + DAY).unwrap();
        budget.settle(100, 100, NOON + DAY);
        // Back and forth over one midnight renews it once.
        for now in [NOON, NOON + DAY, NOON, NOON + DAY] {
            assert_eq!(budget.reserve(LIMIT, 1, now).unwrap_err().used, 100);
        }
    }

    #[test]
    fn routers_share_a_budget() {
        let limit = DailyLimit { routers: 3, ..LIMIT };
        let mut budget = DailyBudget::default();
        assert!(budget.reserve(limit, 34, NOON).is_err());
        assert!(budget.reserve(limit, 33, NOON).is_ok());
    }

    proptest::proptest! {
        /// Whatever requests do, the usage of a day never exceeds the limit.
        #[test]
        fn the_usage_of_a_day_never_exceeds_the_limit(
            steps in proptest::collection::vec((0u64..60, 0u64..60, 0u64..30_000, proptest::bool::ANY), 1..100)
        ) {
            let mut budget = DailyBudget::default();
            let (mut now, mut open, mut by_day) = (NOON, Vec::new(), std::collections::BTreeMap::new());
            for (tokens, used, pause, ends) in steps {
                now += Duration::from_secs(pause);
                if ends && let Some(reserved) = open.pop() {
                    let used = used.min(reserved);
                    budget.settle(reserved, used, now);
                    *by_day.entry(now.as_secs() / DAY_SECONDS).or_insert(0) += used;
                } else if budget.reserve(LIMIT, tokens, now).is_ok() {
                    open.push(tokens);
                }
            }
            proptest::prop_assert!(by_day.values().all(|used| *used <= LIMIT.per_day), "{by_day:?}");
            proptest::prop_assert_eq!(budget.reserved, open.iter().sum::<u64>());
        }
    }
}
