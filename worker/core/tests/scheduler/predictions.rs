//! Drafts that the MTP layer predicts: predicted where they save time, and verified; seldom where they do not.

use std::time::Duration;

use inflight_contract::{TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CostModel, CostPrior, DraftKind, IterationOutcome, LatencyObjectives, NewSequence, Scheduler,
    SchedulerLimits, ScoredRange, SequenceId, StepTarget, Time, TokenVerdict,
};

const DRAFTS_MAX: u32 = 6;

/// What the drafts of a bench are like, and what they cost.
#[derive(Clone, Copy)]
struct Setting {
    streams: u32,
    /// Parts of the predicted and of the guessed drafts that stand.
    predicted: f64,
    guessed: f64,
    /// Duration of a step without its rows, of a row, and of a token predicted for all.
    step: Duration,
    row: Duration,
    pass: Duration,
    /// The driver offers what was predicted.
    offers: bool,
}

const ONE_STREAM: Setting = Setting {
    streams: 1,
    predicted: 0.8,
    guessed: 0.0,
    step: Duration::from_millis(10),
    row: Duration::from_micros(300),
    pass: Duration::from_millis(1),
    offers: true,
};

/// Totals over the plans of a run.
#[derive(Debug, Default)]
struct Totals {
    plans: u32,
    tokens: u32,
    predicted: u32,
    /// Plans with predictions.
    predicting: u32,
    /// Predicted and guessed drafts that were verified.
    verified: [u32; 2],
    time: Duration,
}

struct Bench {
    scheduler: Scheduler,
    setting: Setting,
    now: Time,
    /// Sequences, with the tokens predicted for each.
    sequences: Vec<(SequenceId, u32)>,
    /// Sequences that have sampled.
    sampled: Vec<SequenceId>,
    random: u64,
}

fn sequence() -> NewSequence<'static> {
    NewSequence {
        known_tokens: 8,
        max_tokens: 1 << 18,
        priority: 0,
        deadline: None,
        tenant: "a",
        weight: Weight::default(),
        hashes: &[],
        group: None,
        virtual_start_time: None,
        charged_tokens: 0,
        scored: ScoredRange::default(),
    }
}

impl Bench {
    fn new(setting: Setting) -> Self {
        Self::with_target(setting, StepTarget::Unbounded, setting.streams)
    }

    fn with_target(setting: Setting, step_target: StepTarget, running_max: u32) -> Self {
        let limits = SchedulerLimits {
            step_target,
            drafts_max: DRAFTS_MAX,
            predicted_max: DRAFTS_MAX,
            iteration_samples: running_max + 64,
            ..SchedulerLimits::new(16, 1 << 16, running_max, 4096)
        };
        let tenants = VirtualTokenCounters::new(TokenCost::default(), Scheduler::TENANTS_MAX);
        let policy = inflight_worker_core::policy::Policy::from(PolicyKind::Fcfs).build();
        let mut scheduler =
            Scheduler::new(limits, policy, CostModel::new(CostPrior::default()), tenants).unwrap();
        let sequences =
            (0..setting.streams).map(|_| (scheduler.submit(sequence(), Time::ZERO).unwrap(), 0)).collect();
        Self { scheduler, setting, now: Time::ZERO, sequences, sampled: Vec::new(), random: 1 }
    }

    /// Whether a sequence has sampled a token.
    fn sampled(&self, id: SequenceId) -> bool {
        self.sampled.contains(&id)
    }

    /// Ends a stream and begins another one.
    fn replace(&mut self, nth: usize) {
        self.scheduler.cancel(self.sequences[nth].0);
        self.sequences[nth] = (self.scheduler.submit(sequence(), self.now).unwrap(), 0);
    }

    /// Returns true with this probability.
    fn draw(&mut self, probability: f64) -> bool {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as f64 / f64::from(1u32 << 31)) < probability
    }

    /// Runs so many plans and returns their totals.
    fn run(&mut self, plans: u32) -> Totals {
        let mut totals = Totals { plans, ..Totals::default() };
        for _ in 0..plans {
            let mut kinds = Vec::new();
            for (id, predicted) in &mut self.sequences {
                let (wanted, predicted) = (self.scheduler.drafts_wanted(*id), std::mem::take(predicted));
                let guesses = self.setting.guessed > 0.0 && wanted.guessed > 0;
                let (kind, count) = if guesses && (predicted == 0 || wanted.guessed_first) {
                    (DraftKind::Guessed, wanted.guessed)
                } else {
                    (DraftKind::Predicted, predicted.min(wanted.predicted))
                };
                if self.setting.offers {
                    self.scheduler.draft(*id, count, kind);
                }
                kinds.push((*id, kind));
            }
            let plan = self.scheduler.plan(self.now).clone();
            let (mut verdicts, mut accepted) = (Vec::new(), Vec::new());
            for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
                let kind = kinds.iter().find(|(id, _)| *id == chunk.id).map(|(_, kind)| *kind);
                let [part, nth] = match kind {
                    Some(DraftKind::Guessed) => [self.setting.guessed, 1.0],
                    _ => [self.setting.predicted, 0.0],
                };
                totals.verified[nth as usize] += chunk.drafts;
                let mut stand = 0;
                while stand < chunk.drafts && self.draw(part) {
                    stand += 1;
                }
                accepted.extend((chunk.drafts > 0).then_some(stand + 1));
                verdicts.extend(vec![TokenVerdict::CONTINUE; stand as usize + 1]);
                let sequence = self.sequences.iter_mut().find(|(id, _)| *id == chunk.id).unwrap();
                sequence.1 = chunk.predictions;
                if !self.sampled.contains(&chunk.id) {
                    self.sampled.push(chunk.id);
                }
                totals.predicted += chunk.predictions;
            }
            totals.tokens += verdicts.len() as u32;
            let passes = plan.chunks.iter().map(|chunk| chunk.predictions).max().unwrap_or(0);
            totals.predicting += u32::from(passes > 0);
            let took = self.setting.step + self.setting.row * plan.tokens();
            let predicting = self.setting.pass * passes;
            if passes > 0 {
                self.scheduler.observe_predictions(predicting);
            }
            let outcome = IterationOutcome { verdicts: &verdicts, accepted: &accepted, took };
            self.scheduler.commit(plan.number, outcome).unwrap();
            self.now = self.now.after(took + predicting);
            totals.time += took + predicting;
        }
        totals
    }

    /// Runs until estimates have settled, then returns the totals of some plans.
    fn settled(setting: Setting) -> Totals {
        let mut bench = Self::new(setting);
        bench.run(400);
        bench.run(400)
    }
}

/// Tokens per second of a run over those without drafts.
fn speedup(setting: Setting, totals: &Totals) -> f64 {
    let step = setting.step + setting.row * setting.streams;
    let without = f64::from(setting.streams) / step.as_secs_f64();
    f64::from(totals.tokens) / totals.time.as_secs_f64() / without
}

#[test]
fn tokens_are_predicted_where_their_drafts_save_time() {
    let one = Bench::settled(ONE_STREAM);
    let speedup_of_one = speedup(ONE_STREAM, &one);
    println!("one stream: {one:?}, {speedup_of_one:.2}");
    assert!(speedup_of_one > 1.8, "{one:?}");
    assert!(one.verified[0] * 10 > one.predicted * 9, "predictions that are not used: {one:?}");
    let four = Setting { streams: 4, ..ONE_STREAM };
    let of_four = Bench::settled(four);
    println!("four streams: {of_four:?}, {:.2}", speedup(four, &of_four));
    assert!(speedup(four, &of_four) > 1.5, "{of_four:?}");
    // Rows that cost as much as tokens save nothing.
    let dear = Setting { streams: 32, row: Duration::from_millis(3), ..ONE_STREAM };
    let of_dear = Bench::settled(dear);
    assert!(speedup(dear, &of_dear) > 0.98, "{of_dear:?}");
}

#[test]
fn drafts_that_fail_or_are_not_used_are_predicted_seldom() {
    for setting in [
        Setting { predicted: 0.0, ..ONE_STREAM },
        Setting { predicted: 0.0, streams: 16, ..ONE_STREAM },
        Setting { offers: false, ..ONE_STREAM },
        Setting { pass: Duration::from_millis(40), ..ONE_STREAM },
    ] {
        let totals = Bench::settled(setting);
        println!("{totals:?}");
        assert!(totals.predicting * 12 < totals.plans, "{totals:?}");
    }
}

#[test]
fn of_short_streams_whose_rows_are_dear_hardly_any_is_predicted_for() {
    // A row costs nearly what a step's share of a token does, so that no draft is verified.
    let mut bench = Bench::new(Setting { streams: 32, row: Duration::from_millis(3), ..ONE_STREAM });
    let mut totals = Totals::default();
    for round in 0..320u32 {
        // One stream in 32 ends and another begins.
        bench.replace(round as usize % 32);
        let some = bench.run(3);
        totals.plans += some.plans;
        totals.predicting += some.predicting;
    }
    assert!(totals.predicting * 8 < totals.plans, "{totals:?}");
}

#[test]
fn prompts_progress_however_long_predictions_take() {
    for step_target in [
        StepTarget::Fixed(Duration::from_millis(15)),
        StepTarget::Adaptive(LatencyObjectives { first_token: None, gap: Some(Duration::from_millis(15)) }),
    ] {
        let setting = Setting { pass: Duration::from_millis(4), predicted: 0.95, ..ONE_STREAM };
        let mut bench = Bench::with_target(setting, step_target, 2);
        bench.run(400);
        let prompt = NewSequence { known_tokens: 1000, ..sequence() };
        let id = bench.scheduler.submit(prompt, bench.now).unwrap();
        bench.sequences.push((id, 0));
        let totals = bench.run(300);
        assert!(totals.verified[0] > 100, "{step_target:?}: nothing was predicted: {totals:?}");
        assert!(bench.sampled(id), "{step_target:?}: a prompt of 1,000 tokens takes more than 300 steps");
    }
}

#[test]
fn predictions_begin_again_after_one_that_took_very_long() {
    let mut bench = Bench::new(ONE_STREAM);
    bench.run(200);
    bench.setting.pass = Duration::from_secs(2);
    bench.run(40);
    bench.setting.pass = ONE_STREAM.pass;
    bench.run(8000);
    let totals = bench.run(200);
    assert!(speedup(ONE_STREAM, &totals) > 1.7, "{totals:?}");
}

#[test]
fn of_two_sources_the_better_one_is_used() {
    for (predicted, guessed) in [(0.85, 0.3), (0.3, 0.9)] {
        let setting = Setting { predicted, guessed, ..ONE_STREAM };
        let totals = Bench::settled(setting);
        let [of_predicted, of_guessed] = totals.verified;
        println!("{predicted} and {guessed}: {totals:?}");
        let (better, other) =
            if predicted > guessed { (of_predicted, of_guessed) } else { (of_guessed, of_predicted) };
        assert!(better > 4 * other, "{totals:?}");
    }
}
