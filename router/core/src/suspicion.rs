//! Worker losses of a request without progress: when to retry, quarantine or reject it.

/// Next step of a request whose worker was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterLoss {
    /// Resubmit it, beside other requests.
    Retry,
    /// Quarantine it: run it alone on a worker.
    Isolate,
    /// Reject it: its worker was lost while it ran alone.
    Refuse,
}

/// Consecutive worker losses of a request without a new token between submission and loss.
///
/// After [`LossStreak::LOSSES_MAX`] such losses the request may be their cause: it is quarantined, so that a
/// further loss affects no other request. Only if that worker is lost too is it rejected. Any new token
/// resets the streak, so a stream that makes progress is never rejected, however many workers it loses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Suspicion {
    losses: u32,
    progressed: bool,
}

impl Suspicion {
    /// Consecutive losses after which a request is quarantined.
    pub const LOSSES_MAX: u32 = 2;

    /// Records a new token.
    pub fn token(&mut self) {
        *self = Self { losses: 0, progressed: true };
    }

    /// Records the loss of its worker; `alone` if it was quarantined there.
    pub fn lost(&mut self, alone: bool) -> AfterLoss {
        if std::mem::take(&mut self.progressed) {
            return AfterLoss::Retry;
        }
        self.losses = self.losses.saturating_add(1);
        match self.losses {
            losses if losses < Self::LOSSES_MAX => AfterLoss::Retry,
            _ if alone => AfterLoss::Refuse,
            _ => AfterLoss::Isolate,
        }
    }

    /// Whether it must run alone.
    pub fn isolated(&self) -> bool {
        self.losses >= Self::LOSSES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_a_request_that_ran_alone_after_two_barren_losses_in_a_row_is_refused(
            steps in proptest::collection::vec(any::<bool>(), 0..200)) {
            // Oracle: consecutive attempts without a token before a loss, counted back from the last.
            let (mut suspicion, mut barren, mut tokens) = (Suspicion::default(), 0u32, false);
            for token in steps {
                if token {
                    suspicion.token();
                    (barren, tokens) = (0, true);
                    prop_assert!(!suspicion.isolated());
                    continue;
                }
                let alone = suspicion.isolated();
                barren = if std::mem::take(&mut tokens) { 0 } else { barren + 1 };
                let expected = match barren {
                    0 | 1 => AfterLoss::Retry,
                    2 => AfterLoss::Isolate,
                    _ => AfterLoss::Refuse,
                };
                prop_assert_eq!(suspicion.lost(alone), expected);
            }
        }
    }

    #[test]
    fn a_suspect_that_had_company_gets_another_chance() {
        let mut suspicion = Suspicion::default();
        assert_eq!(suspicion.lost(false), AfterLoss::Retry);
        for _ in 0..5 {
            assert_eq!(suspicion.lost(false), AfterLoss::Isolate);
        }
        assert_eq!(suspicion.lost(true), AfterLoss::Refuse);
    }
}
