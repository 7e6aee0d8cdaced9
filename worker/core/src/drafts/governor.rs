//! Governor of drafts: how many drafted tokens are worth their time, by the acceptance so far and the cost model.
//!
//! A drafted token saves a sequence one step with the probability that it stands, and takes the time of one more
//! row in this step. Let a step with its decodes take `T / B` seconds per token. The `i`-th draft of a sequence,
//! whose drafts stand with probability `p` each, pays if `p^i T / B` exceeds the time of a row: at one stream,
//! where a step is bound by reading the weights, even improbable drafts do; in a large batch hardly any.
//!
//! A sequence without successes is not drafted for but by a probe, a single token. Probes and all other drafts
//! that fail are paid from a budget of rows that grows with the decodes, so a workload without repetition wastes
//! less than one row in a hundred however the batch changes. A sequence whose probe fails waits for twice as many
//! steps as before.

/// Prior of the probability that a draft stands: successes of a number of trials.
const PRIOR_SUCCESSES: f64 = 0.25;
const PRIOR_TRIALS: f64 = 1.0;
/// Maximum trials that the estimate remembers, so that it forgets a repetition that has ended.
const TRIALS_MAX: f64 = 8.0;
/// Ratio of saved to spent time from which drafting begins, and above which it continues. The gap keeps a sequence
/// at the threshold from alternating.
const BEGIN_RATIO: f64 = 1.5;
const CONTINUE_RATIO: f64 = 1.3;
/// Probability that a probe assumes.
const PROBE_PROBABILITY: f64 = 0.9;
/// Probability from which a sequence is drafted for even if the budget is used up.
const SURE_PROBABILITY: f64 = 0.7;
/// Steps between two probes of a sequence, doubled by each that fails.
const PROBE_WAIT_MIN: u32 = 8;
const PROBE_WAIT_MAX: u32 = 64;
/// Share of the decoded rows that failed drafts may add.
const WASTE_SHARE: f64 = 0.004;
/// Bounds of the budget in rows, and what it begins with.
const BUDGET_MAX: f64 = 64.0;
const BUDGET_MIN: f64 = -8.0;
const BUDGET_START: f64 = 4.0;
/// Maximum rows that an accepted draft counts as saved.
const WORTH_MAX: f64 = 8.0;
/// Plans without drafts after drafts that saved less than the overlap that was lost for them.
const PAUSE_PLANS: u32 = 64;
/// Weight of a new measurement of the lost overlap, and of the duration of a prediction pass.
const OVERLAP_WEIGHT: f64 = 0.1;
/// Maximum ratio of a measured prediction pass to the estimate; longer ones are cut to it.
const PREDICTION_GROWTH_MAX: f64 = 4.0;
/// Number of prediction passes from whose shortest one the estimate begins.
const PREDICTIONS_WARM: u32 = 8;
/// Weight of a measured prediction pass that is shorter than the estimate.
const PREDICTION_FALL_WEIGHT: f64 = 0.5;
/// Factor of the discount on prediction passes for each plan without them, which halves it in 350 plans, and its minimum.
const PREDICTION_FADE: f64 = 0.998;
const PREDICTION_DISCOUNT_MIN: f64 = 0.125;
/// Maximum number of trials behind the acceptance estimate that a new sequence inherits from earlier ones.
const INHERITED_TRIALS: f64 = 4.0;

/// Estimate of the probability that a sequence's drafts stand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Acceptance {
    /// Drafts that stood, and drafts that were compared, with old ones fading.
    successes: f64,
    trials: f64,
    /// Steps until the next probe, and the number of steps after it if it fails.
    wait: u32,
    next_wait: u32,
    /// Whether the last step had drafts.
    drafting: bool,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { successes: 0.0, trials: 0.0, wait: 0, next_wait: PROBE_WAIT_MIN, drafting: false }
    }
}

impl Acceptance {
    /// Returns the probability that a draft stands if all before it do.
    pub fn probability(&self) -> f64 {
        (self.successes + PRIOR_SUCCESSES) / (self.trials + PRIOR_TRIALS)
    }

    /// Returns the initial estimate of a new sequence, from this one of all sequences before it, with fewer trials.
    pub fn inherited(&self) -> Self {
        let part = (INHERITED_TRIALS / self.trials.max(1.0)).min(1.0);
        Self { successes: self.successes * part, trials: self.trials * part, ..Self::default() }
    }

    /// Returns true if the last step had drafts.
    pub fn is_drafting(&self) -> bool {
        self.drafting
    }

    /// Returns true if the wait for the next probe is over.
    pub fn is_due(&self) -> bool {
        self.wait == 0
    }

    /// Records predicted drafts that no plan has used; they count as one rejected draft.
    pub fn reject_unused(&mut self) {
        self.verify(1, 0);
        self.drafting = false;
    }

    /// Returns true if some of its drafts stood lately.
    pub fn is_proven(&self) -> bool {
        self.successes >= 0.5
    }

    /// Returns true if one more draft behind `drafts` others saves more time than it takes.
    pub fn pays(&self, drafts: u32, price: DraftPrice, budget: &DraftBudget) -> bool {
        let probability = self.probability();
        let ratio = if self.drafting { CONTINUE_RATIO } else { BEGIN_RATIO };
        let proven = self.is_proven() && (budget.rows > 0.0 || probability >= SURE_PROBABILITY);
        proven && probability.powi(drafts as i32 + 1) * price.seconds_per_token > ratio * price.row
    }

    /// Returns true if a single draft may show whether drafts stand, beside `probes` others.
    pub fn may_probe(&self, price: DraftPrice, budget: &DraftBudget, probes: u32) -> bool {
        self.wait == 0
            && budget.rows >= 1.0 + f64::from(probes)
            && PROBE_PROBABILITY * price.seconds_per_token > BEGIN_RATIO * price.row
    }

    /// Returns the number of drafts that pay, at most `most`; 1 for a probe.
    pub fn drafts_wanted(&self, price: DraftPrice, budget: &DraftBudget, most: u32) -> u32 {
        let pays = (0..most).take_while(|drafts| self.pays(*drafts, price, budget)).count() as u32;
        if pays == 0 && most > 0 { u32::from(self.may_probe(price, budget, 0)) } else { pays }
    }

    /// Records the verification of a step's drafts.
    pub fn verify(&mut self, drafts: u32, accepted: u32) {
        let failed = accepted < drafts;
        self.successes += f64::from(accepted);
        self.trials += f64::from(accepted) + if failed { 1.0 } else { 0.0 };
        if self.trials > TRIALS_MAX {
            self.successes *= TRIALS_MAX / self.trials;
            self.trials = TRIALS_MAX;
        }
        self.drafting = true;
        if accepted > 0 {
            (self.wait, self.next_wait) = (0, PROBE_WAIT_MIN);
        } else {
            self.back_off();
        }
    }

    /// Waits before the next probe, for twice as many steps as the time before.
    pub fn back_off(&mut self) {
        self.wait = self.next_wait;
        self.next_wait = (2 * self.next_wait).min(PROBE_WAIT_MAX);
    }

    /// Records a decode without drafts.
    pub fn pass(&mut self) {
        self.wait = self.wait.saturating_sub(1);
        self.drafting = false;
    }
}

/// Time that a draft takes and may save.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftPrice {
    /// Seconds per token of a step.
    pub seconds_per_token: f64,
    /// Seconds of one more row.
    pub row: f64,
}

/// Rows that failed drafts may take, over all sequences, and the price of a draft at the last plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftBudget {
    rows: f64,
    price: Option<DraftPrice>,
    /// Seconds of a prediction pass: the MTP layer and the LM head for one token of each sequence that is predicted for. `discount` is the
    /// part of it that counts in decisions, `step` the seconds of the decodes planned last.
    pass_seconds: f64,
    discount: f64,
    step: f64,
    /// Number of prediction passes measured, up to [`PREDICTIONS_WARM`].
    measured: u32,
    /// Seconds of host work that do not overlap with a step when the driver waits for verification.
    lost_overlap: f64,
    /// Plans until drafts are tried again.
    pause: u32,
}

impl Default for DraftBudget {
    fn default() -> Self {
        Self {
            rows: BUDGET_START,
            price: None,
            pass_seconds: 0.0,
            discount: 0.0,
            step: 0.0,
            measured: 0,
            lost_overlap: 0.0,
            pause: 0,
        }
    }
}

impl DraftBudget {
    /// Price at the last plan; `None` before the first one and during a pause.
    pub fn price(&self) -> Option<DraftPrice> {
        self.price.filter(|_| self.pause == 0)
    }

    /// Takes the price of a draft from a plan with `decodes` decodes, whose step takes `step` seconds and a
    /// further row `row`. `lost_overlap` is the host time that did not overlap with the step before, if it had
    /// drafts.
    pub fn observe_step(&mut self, step: f64, row: f64, decodes: u32, lost_overlap: Option<f64>) {
        self.step = step;
        let decodes = f64::from(decodes.max(1));
        self.price = Some(DraftPrice { seconds_per_token: step / decodes, row });
        self.rows = (self.rows + WASTE_SHARE * decodes).min(BUDGET_MAX);
        self.pause = self.pause.saturating_sub(1);
        if let Some(lost) = lost_overlap {
            self.lost_overlap += OVERLAP_WEIGHT * (lost - self.lost_overlap);
        }
    }

    /// Seconds of a prediction pass; 0 before one was measured.
    pub fn pass_seconds(&self) -> f64 {
        self.pass_seconds
    }

    /// Returns true if guessed drafts save more time than predicted ones. These must be accepted more often by the part of a step that a
    /// prediction pass takes.
    pub fn prefers_guesses(&self, guessed: &Acceptance, predicted: &Acceptance) -> bool {
        let part = if self.step > 0.0 { self.pass_seconds / self.step } else { 0.0 };
        guessed.probability() + part.min(1.0) > predicted.probability()
    }

    /// Records the measured duration of a prediction pass, in seconds.
    pub fn observe_pass(&mut self, seconds: f64) {
        if self.measured < PREDICTIONS_WARM {
            // The first passes are slow: their code and buffers are not in memory yet. They count as free until enough are measured.
            let least = if self.measured == 0 { seconds } else { seconds.min(self.pass_seconds) };
            (self.pass_seconds, self.measured) = (least, self.measured + 1);
            self.discount = if self.measured == PREDICTIONS_WARM { 1.0 } else { 0.0 };
            return;
        }
        self.discount = 1.0;
        // An interrupted pass is no estimate; a shorter one shows that the estimate was too high.
        let bounded = seconds.min(PREDICTION_GROWTH_MAX * self.pass_seconds);
        let weight = if bounded < self.pass_seconds { PREDICTION_FALL_WEIGHT } else { OVERLAP_WEIGHT };
        self.pass_seconds += weight * (bounded - self.pass_seconds);
    }

    /// Records a plan whose prediction passes were not worth their time. Passes count as cheaper from plan to plan until one is measured again:
    /// an estimate that is too high would otherwise never be corrected.
    pub fn skip_pass(&mut self) {
        if self.measured == PREDICTIONS_WARM {
            self.discount = (self.discount * PREDICTION_FADE).max(PREDICTION_DISCOUNT_MIN);
        }
    }

    /// Returns true if a prediction pass for `rows` sequences saves more time than it and the rows of its drafts take. `tokens` is the expected
    /// number of accepted drafts; `continues` is set if the last plan had prediction passes.
    pub fn pass_pays(&self, tokens: f64, rows: u32, price: DraftPrice, continues: bool) -> bool {
        let ratio = if continues { CONTINUE_RATIO } else { BEGIN_RATIO };
        tokens * price.seconds_per_token
            > ratio * (f64::from(rows) * price.row + self.discount * self.pass_seconds)
    }

    /// Pauses drafts if those of a step do not save the overlap that is lost for them. The step takes `before`
    /// seconds for `decodes` tokens without drafts; with them `after` seconds for `tokens` expected tokens.
    pub fn check_overlap(&mut self, before: f64, decodes: f64, after: f64, tokens: f64) {
        if (after + self.lost_overlap) * decodes > before * tokens {
            self.pause = PAUSE_PLANS;
        }
    }

    /// Records verified drafts.
    pub fn verify(&mut self, accepted: u32, rejected: u32) {
        // It saved a token's share of a step, and took a row.
        let price = self.price.filter(|price| price.row > 0.0);
        let worth = price.map_or(0.0, |price| price.seconds_per_token / price.row - 1.0);
        let worth = worth.clamp(0.0, WORTH_MAX);
        let earned = f64::from(accepted) * worth - f64::from(rejected);
        self.rows = (self.rows + earned).clamp(BUDGET_MIN, BUDGET_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One stream: a step takes ten times as long as a row.
    const CHEAP: DraftPrice = DraftPrice { seconds_per_token: 10e-3, row: 1e-3 };
    /// A large batch: a row costs as much as a token.
    const DEAR: DraftPrice = DraftPrice { seconds_per_token: 1e-3, row: 1e-3 };

    fn budget(price: DraftPrice) -> DraftBudget {
        let mut budget = DraftBudget::default();
        budget.observe_step(price.seconds_per_token, price.row, 1, None);
        budget
    }

    #[test]
    fn drafts_grow_with_success_and_vanish_with_failure() {
        let (mut acceptance, mut budget) = (Acceptance::default(), budget(CHEAP));
        assert_eq!(acceptance.drafts_wanted(CHEAP, &budget, 8), 1, "a probe comes first");
        let mut last = 0;
        for _ in 0..6 {
            let drafts = acceptance.drafts_wanted(CHEAP, &budget, 8);
            assert!(drafts >= last, "{drafts} after {last}");
            acceptance.verify(drafts, drafts);
            budget.verify(drafts, 0);
            last = drafts;
        }
        assert_eq!(last, 8);
        assert_eq!(acceptance.drafts_wanted(DEAR, &budget, 8), 0, "no draft pays in a large batch");
        let mut wasted = 0;
        while acceptance.drafts_wanted(CHEAP, &budget, 8) > 0 {
            let drafts = acceptance.drafts_wanted(CHEAP, &budget, 8);
            acceptance.verify(drafts, 0);
            budget.verify(0, drafts);
            wasted += drafts;
            assert!(wasted < 50, "{acceptance:?}");
        }
    }

    #[test]
    fn failing_probes_waste_less_than_the_budget_whatever_the_batch() {
        let mut sequences = [Acceptance::default(); 16];
        let mut budget = DraftBudget::default();
        let (mut rows, mut wasted) = (0, 0);
        for step in 0..20_000u32 {
            // The batch swings between the prices every few steps.
            let price = if step / 7 % 2 == 0 { CHEAP } else { DEAR };
            budget.observe_step(16.0 * price.seconds_per_token, price.row, 16, None);
            let mut probes = 0;
            for sequence in &mut sequences {
                rows += 1;
                if sequence.may_probe(price, &budget, probes) {
                    (rows, wasted, probes) = (rows + 1, wasted + 1, probes + 1);
                    sequence.verify(1, 0);
                    budget.verify(0, 1);
                } else {
                    sequence.pass();
                }
            }
        }
        assert!(wasted > 20, "no probes: {wasted}");
        assert!(f64::from(wasted) < 0.005 * f64::from(rows), "{wasted} of {rows}");
    }

    #[test]
    fn an_estimate_of_prediction_passes_that_is_too_high_is_corrected() {
        let mut budget = budget(CHEAP);
        budget.observe_pass(1e-3);
        assert!(budget.pass_pays(0.8, 1, CHEAP, false));
        (0..100).for_each(|_| budget.observe_pass(20e-3));
        assert!(!budget.pass_pays(0.8, 1, CHEAP, true));
        let plans = (0..5000).take_while(|_| {
            budget.skip_pass();
            !budget.pass_pays(0.8, 1, CHEAP, false)
        });
        assert!((100..4999).contains(&plans.count()));
        let once = |first: f64, then: f64| {
            let mut budget = DraftBudget::default();
            (0..PREDICTIONS_WARM).for_each(|_| budget.observe_pass(first));
            budget.observe_pass(then);
            budget.pass_seconds()
        };
        assert!(once(1e-3, 10.0) < 1.5e-3, "one interrupted step");
    }

    #[test]
    fn drafts_that_are_never_used_are_made_seldom() {
        let mut acceptance = Acceptance::default();
        (0..8).for_each(|_| acceptance.verify(1, 1));
        let inherited = acceptance.inherited();
        assert!(inherited.is_proven() && inherited.trials <= INHERITED_TRIALS);
        assert!(inherited.probability() < acceptance.probability());
        let mut made = 0;
        for _ in 0..1000 {
            if acceptance.is_proven() || acceptance.is_due() {
                (made, _) = (made + 1, acceptance.reject_unused());
            } else {
                acceptance.pass();
            }
        }
        assert!(made < 60, "{made} of 1000");
    }

    #[test]
    fn drafts_pause_where_waiting_for_them_costs_more_than_they_save() {
        let mut budget = budget(CHEAP);
        budget.observe_step(10e-3, 1e-3, 1, Some(0.0));
        budget.check_overlap(10e-3, 1.0, 11e-3, 1.5);
        assert!(budget.price().is_some());
        (0..100).for_each(|_| budget.observe_step(10e-3, 1e-3, 1, Some(8e-3)));
        budget.check_overlap(10e-3, 1.0, 11e-3, 1.5);
        assert!(budget.price().is_none());
        (0..PAUSE_PLANS).for_each(|_| budget.observe_step(10e-3, 1e-3, 1, None));
        assert!(budget.price().is_some());
    }
}
