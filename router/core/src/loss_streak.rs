//! Worker losses of a request without progress: when to retry, quarantine or reject it.

/// Next step of a request whose worker was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossAction {
    /// Resubmit it, beside other requests.
    Retry,
    /// Quarantine it: run it alone on a worker.
    Quarantine,
    /// Reject it: its worker was lost while it ran alone.
    Reject,
}

/// Consecutive worker losses of a request without a new token between submission and loss.
///
/// After [`LossStreak::LOSSES_MAX`] such losses the request may be their cause: it is quarantined, so that a
/// further loss affects no other request. Only if that worker is lost too is it rejected. Any new token
/// resets the streak, so a stream that makes progress is never rejected, however many workers it loses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LossStreak {
    losses: u32,
    progressed: bool,
}

impl LossStreak {
    /// Consecutive losses after which a request is quarantined.
    pub const LOSSES_MAX: u32 = 2;

    /// Records new output: a token, or log probabilities of the prompt.
    pub fn record_token(&mut self) {
        *self = Self { losses: 0, progressed: true };
    }

    /// Records the loss of its worker; `alone` if it was quarantined there.
    pub fn record_loss(&mut self, alone: bool) -> LossAction {
        if std::mem::take(&mut self.progressed) {
            return LossAction::Retry;
        }
        self.losses = self.losses.saturating_add(1);
        match self.losses {
            losses if losses < Self::LOSSES_MAX => LossAction::Retry,
            _ if alone => LossAction::Reject,
            _ => LossAction::Quarantine,
        }
    }

    /// Whether it must run alone.
    pub fn is_quarantined(&self) -> bool {
        self.losses >= Self::LOSSES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_a_quarantined_request_after_two_losses_without_a_token_is_rejected(
            steps in proptest::collection::vec(any::<bool>(), 0..200)) {
            // Oracle: consecutive attempts without a token before a loss, counted back from the last.
            let (mut suspicion, mut barren, mut tokens) = (LossStreak::default(), 0u32, false);
            for token in steps {
                if token {
                    suspicion.record_token();
                    (barren, tokens) = (0, true);
                    prop_assert!(!suspicion.is_quarantined());
                    continue;
                }
                let alone = suspicion.is_quarantined();
                barren = if std::mem::take(&mut tokens) { 0 } else { barren + 1 };
                let expected = match barren {
                    0 | 1 => LossAction::Retry,
                    2 => LossAction::Quarantine,
                    _ => LossAction::Reject,
                };
                prop_assert_eq!(suspicion.record_loss(alone), expected);
            }
        }
    }

    #[test]
    fn a_request_lost_beside_others_is_retried() {
        let mut suspicion = LossStreak::default();
        assert_eq!(suspicion.record_loss(false), LossAction::Retry);
        for _ in 0..5 {
            assert_eq!(suspicion.record_loss(false), LossAction::Quarantine);
        }
        assert_eq!(suspicion.record_loss(true), LossAction::Reject);
    }
}
