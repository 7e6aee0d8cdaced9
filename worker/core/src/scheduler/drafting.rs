//! Choice of the numbers of drafts, from estimates of how many stand and of what a step with them costs.

use super::sequences::Sequences;
use crate::cost::{CostModel, StepWork};
use crate::drafts::{Acceptance, DraftBudget, DraftKind, DraftPrice, DraftsWanted};
use crate::sequence::{Sequence, SequenceState};
use crate::{Chunk, SchedulerLimits, StepTarget};

/// Interval in tokens at which a sequence that prefers predicted drafts tries guessed ones.
const GUESSES_EVERY: u32 = 16;
/// Prefill time as a multiple of the decode time that must fit into a step target beside drafts.
const PREFILL_TIME_FACTOR: f64 = 0.25;

/// Decode of the step that is planned, with its drafts.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftCandidate {
    /// Index of its chunk in the plan.
    pub at: usize,
    pub index: u32,
    /// Number of drafts planned.
    pub drafts: u32,
    /// Maximum number of drafts.
    most: u32,
    /// Probability that all drafts planned stand.
    all_stand: f64,
}

/// Sampling chunk for which tokens may be predicted.
#[derive(Debug, Clone, Copy)]
pub(super) struct PredictionCandidate {
    /// Index of the chunk in the plan.
    pub at: usize,
    /// Maximum number of tokens.
    pub most: u32,
    /// Estimate of how many drafts stand.
    pub acceptance: Acceptance,
}

/// Step for which drafts are chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct DraftStep<'a> {
    pub limits: &'a SchedulerLimits,
    pub cost: &'a CostModel,
    pub sequences: &'a Sequences,
    /// Chunks of the decodes.
    pub chunks: &'a [Chunk],
    /// Work of the decodes.
    pub work: StepWork,
}

impl DraftStep<'_> {
    /// Returns the seconds that one more token of a decode takes in this step.
    fn row(&self) -> f64 {
        let mut with = self.work;
        let keys = with.keys / u64::from(with.sequences.max(1));
        with.tokens += 1;
        (with.keys, with.prefill_keys) = (with.keys + keys, with.prefill_keys + keys);
        (self.cost.step(&with).as_secs_f64() - self.cost.step(&self.work).as_secs_f64()).max(0.0)
    }

    /// Returns true if a step of these decodes leaves room for prefills within a fixed step target or the
    /// objective for gaps.
    fn within_target(&self, decodes: &StepWork) -> bool {
        let target = match self.limits.step_target {
            StepTarget::Unbounded => None,
            StepTarget::Fixed(target) => Some(target),
            StepTarget::Adaptive(objectives) => objectives.gap,
        };
        target.is_none_or(|target| self.cost.target_with_slack(decodes, PREFILL_TIME_FACTOR) <= target)
    }
}

/// Estimates of the drafts, and the sequences for which the driver has drafted.
#[derive(Debug, Default)]
pub(super) struct Drafting {
    pub(super) budget: DraftBudget,
    /// Estimates of how many forced and predicted drafts stand, over all sequences.
    forced: Acceptance,
    pub(super) predicted: Acceptance,
    /// Number of prediction passes of the last plan.
    pub(super) passes: u32,
    /// Sequences with tokens drafted since the last plan.
    offered: Vec<u32>,
    /// Buffer of the candidates of a plan.
    candidates: Vec<DraftCandidate>,
    /// Buffers of the candidates for predictions, and of those of a pass.
    pub(super) predictions: (Vec<PredictionCandidate>, Vec<PredictionCandidate>),
}

impl Drafting {
    /// Notes drafted tokens of a sequence for the next plan.
    pub fn offer(&mut self, sequence: &mut Sequence, count: u32, kind: DraftKind) {
        (sequence.drafted, sequence.draft_kind) = (count, kind);
        self.offered.push(sequence.id.index);
    }

    /// Returns true if no tokens were drafted since the last plan.
    pub fn is_empty(&self) -> bool {
        self.offered.is_empty()
    }

    /// Forgets the tokens drafted since the last plan.
    pub fn clear(&mut self, sequences: &mut Sequences) {
        for index in self.offered.drain(..) {
            // A sequence may have ended since.
            if let Some(sequence) = sequences.find_mut(index) {
                sequence.drafted = 0;
            }
        }
    }

    /// Returns the numbers of drafted tokens of a sequence that a plan would use if nothing but their price limited them.
    pub fn wanted(&self, sequence: &Sequence, limits: &SchedulerLimits) -> DraftsWanted {
        if !matches!(sequence.state, SequenceState::Decoding { .. }) || sequence.is_marked() {
            return DraftsWanted::default();
        }
        let most = limits.drafts_max.min(sequence.remaining_tokens);
        let predicted = most.min(limits.predicted_max);
        let guessed_first = self.guesses_first(sequence, limits);
        if !limits.govern_drafts || most == 0 {
            return DraftsWanted { guessed: most, predicted, forced: most, guessed_first };
        }
        let Some(price) = self.budget.price() else { return DraftsWanted::default() };
        let wanted = |kind, most| self.acceptance(sequence, kind).drafts_wanted(price, &self.budget, most);
        DraftsWanted {
            guessed: wanted(DraftKind::Guessed, most),
            predicted: wanted(DraftKind::Predicted, predicted),
            forced: wanted(DraftKind::Forced, most),
            guessed_first,
        }
    }

    /// Returns true if a sequence takes guessed drafts before predicted ones: they save more time, or they are tried to find out.
    fn guesses_first(&self, sequence: &Sequence, limits: &SchedulerLimits) -> bool {
        let turn = |every| sequence.known_tokens.is_multiple_of(every);
        if !limits.govern_drafts {
            return turn(2);
        }
        let (guessed, predicted) = (&sequence.acceptance, &sequence.predicted);
        !guessed.is_proven() || self.budget.prefers_guesses(guessed, predicted) || turn(GUESSES_EVERY)
    }

    /// Records the measured duration of `passes` prediction passes, in seconds.
    pub fn observe_passes(&mut self, took: f64, passes: u32) {
        if passes > 0 {
            self.budget.observe_pass(took / f64::from(passes));
        }
    }

    /// Returns the expected duration of the prediction passes of the last plan, in seconds.
    pub fn passes_seconds(&self) -> f64 {
        f64::from(self.passes) * self.budget.pass_seconds()
    }

    /// Returns the initial estimate of how many predicted drafts of a new sequence are accepted.
    pub fn inherited(&self) -> Acceptance {
        self.predicted.inherited()
    }

    /// Returns the estimate of how many drafts of a sequence and kind stand.
    fn acceptance<'s>(&'s self, sequence: &'s Sequence, kind: DraftKind) -> &'s Acceptance {
        match kind {
            DraftKind::Guessed => &sequence.acceptance,
            DraftKind::Predicted => &sequence.predicted,
            DraftKind::Forced => &self.forced,
        }
    }

    /// Updates the cost of a drafted token from the decodes of a step. `lost`: seconds that the device was idle before the step because the
    /// driver waited for drafts to be verified.
    pub fn update_price(&mut self, step: &DraftStep<'_>, lost: Option<f64>) {
        let seconds = step.cost.step(&step.work).as_secs_f64();
        self.budget.observe_step(seconds, step.row(), step.work.sequences, lost);
    }

    /// Chooses at most `budget` drafts of the sequences of a step. Pauses drafts if the chosen ones are not worth the overlap of host and
    /// device.
    pub fn choose(&mut self, step: &DraftStep<'_>, budget: u32) -> Vec<DraftCandidate> {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for (at, chunk) in step.chunks.iter().enumerate() {
            let (index, sequence) = (chunk.id.index, &step.sequences[chunk.id.index]);
            let most = sequence.drafted.min(sequence.remaining_tokens);
            if most > 0 {
                candidates.push(DraftCandidate { at, index, most, drafts: 0, all_stand: 1.0 });
            }
        }
        self.choose_among(&mut candidates, step, budget);
        self.check_overlap(&candidates, step);
        candidates
    }

    /// Keeps the buffer of [`Drafting::choose`] for the next plan.
    pub fn recycle(&mut self, candidates: Vec<DraftCandidate>) {
        self.candidates = candidates;
    }

    /// Chooses the number of drafts of each candidate: the first one of each, then the second ones, and so on,
    /// while they are worth their price.
    fn choose_among(&self, candidates: &mut [DraftCandidate], step: &DraftStep<'_>, mut budget: u32) {
        let (mut work, mut probes) = (step.work, 0);
        let mut price = DraftPrice {
            seconds_per_token: step.cost.step(&work).as_secs_f64() / f64::from(work.sequences.max(1)),
            row: step.row(),
        };
        let (mut tokens, mut grows) = (f64::from(work.sequences), true);
        while grows && budget > 0 {
            grows = false;
            for candidate in candidates.iter_mut() {
                if candidate.drafts == candidate.most || budget == 0 {
                    continue;
                }
                let sequence = &step.sequences[candidate.index];
                let acceptance = self.acceptance(sequence, sequence.draft_kind);
                let mut with = work;
                with.extend(step.chunks[candidate.at].start, 1 + candidate.drafts, 1);
                let wanted = !step.limits.govern_drafts
                    || acceptance.pays(candidate.drafts, price, &self.budget)
                    || candidate.drafts == 0 && acceptance.may_probe(price, &self.budget, probes) && {
                        probes += 1;
                        true
                    };
                if !wanted || !step.within_target(&with) {
                    candidate.most = candidate.drafts;
                    continue;
                }
                (budget, grows) = (budget - 1, true);
                candidate.drafts += 1;
                candidate.all_stand *= acceptance.probability();
                (work, tokens) = (with, tokens + candidate.all_stand);
                // Each draft that pays shortens the time per token, so the next one must save more.
                let seconds = step.cost.step(&work).as_secs_f64() / tokens;
                price.seconds_per_token = price.seconds_per_token.min(seconds);
            }
        }
    }

    /// Pauses drafts if the chosen ones, less probes, are not worth the overlap of host and device that is lost
    /// when the driver waits for their verification.
    fn check_overlap(&mut self, candidates: &[DraftCandidate], step: &DraftStep<'_>) {
        if step.limits.depth == 1 || !step.limits.govern_drafts {
            return;
        }
        let (mut work, mut tokens) = (step.work, f64::from(step.work.sequences));
        for candidate in candidates.iter().filter(|candidate| candidate.drafts > 0) {
            let sequence = &step.sequences[candidate.index];
            let acceptance = self.acceptance(sequence, sequence.draft_kind);
            if !acceptance.is_proven() {
                continue;
            }
            let p = acceptance.probability();
            work.extend(step.chunks[candidate.at].start, 1, candidate.drafts);
            tokens += (1..=candidate.drafts).map(|nth| p.powi(nth as i32)).sum::<f64>();
        }
        if work.tokens > step.work.tokens {
            let (before, after) = (step.cost.step(&step.work), step.cost.step(&work));
            let sequences = f64::from(step.work.sequences);
            self.budget.check_overlap(before.as_secs_f64(), sequences, after.as_secs_f64(), tokens);
        }
    }

    /// Counts an iteration that sampled tokens without drafts of a kind that has an estimate over all sequences.
    pub fn pass(&mut self, kind: DraftKind) {
        match kind {
            DraftKind::Guessed => {}
            DraftKind::Predicted => self.predicted.pass(),
            DraftKind::Forced => self.forced.pass(),
        }
    }

    /// Counts the drafts of a sequence that stand and those that do not.
    pub fn verify(&mut self, sequence: &mut Sequence, drafts: u32, stand: u32) {
        self.budget.verify(stand, drafts - stand);
        match sequence.draft_kind {
            DraftKind::Guessed => sequence.acceptance.verify(drafts, stand),
            DraftKind::Predicted => {
                sequence.predicted.verify(drafts, stand);
                self.predicted.verify(drafts, stand);
            }
            DraftKind::Forced => self.forced.verify(drafts, stand),
        }
    }
}
