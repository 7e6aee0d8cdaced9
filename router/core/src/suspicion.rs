/// What becomes of a request whose worker was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterLoss {
    /// It goes on elsewhere, beside others.
    Retry,
    /// It goes on where nothing else runs.
    Isolate,
    /// It is refused: the worker that it had for itself was lost too.
    Refuse,
}

/// Whether a request may be what kills its workers.
///
/// A request that brought no token between its submission and the loss of its worker is suspect. After
/// [`Suspicion::LOSSES_MAX`] such losses in a row it runs alone, as far as its router knows, so that it takes nobody with it
/// and nobody's fault is laid on it; only if that worker is lost too is it refused. Any new token clears it, so a stream that gets on is
/// never refused, however many workers it loses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Suspicion {
    losses: u32,
    progressed: bool,
}

impl Suspicion {
    /// Losses without a token between them, after which a request runs alone.
    pub const LOSSES_MAX: u32 = 2;

    /// A token came.
    pub fn token(&mut self) {
        *self = Self { losses: 0, progressed: true };
    }

    /// Its worker was lost, which it had for itself if `alone`.
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
            // The oracle counts attempts that ended in a loss and brought nothing, back from now.
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
