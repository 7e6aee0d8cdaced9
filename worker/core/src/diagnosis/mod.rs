//! Bottleneck diagnosis of a worker from its recent iterations.

mod admission;
mod bottleneck;
mod latency;
mod memory;

use std::time::Duration;

pub use bottleneck::{Bottleneck, Finding};

use crate::history::IterationSummary;
use crate::{Load, SchedulerLimits};

/// Thresholds of the diagnosis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objectives {
    /// Longest acceptable queueing time in the worker.
    pub queue: Duration,
    /// Acceptable preemptions per hundred iterations.
    pub preemptions: f64,
    /// Acceptable share of time in which the device is idle though there is work.
    pub idle: f64,
}

impl Default for Objectives {
    fn default() -> Self {
        Self { queue: Duration::from_secs(1), preemptions: 1.0, idle: 0.1 }
    }
}

/// Facts about a worker that its iterations do not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Conditions {
    /// Whether the recording has ended with an error.
    pub recording_failed: bool,
    /// Bytes of a KV block; 0 if unknown.
    pub block_bytes: u64,
}

/// Iterations in order.
trait Steps<'a>: DoubleEndedIterator<Item = &'a IterationSummary> + Clone {}

impl<'a, I: DoubleEndedIterator<Item = &'a IterationSummary> + Clone> Steps<'a> for I {}

/// Returns the bottlenecks of a worker from its recent iterations and other conditions, most severe first.
pub fn diagnose<'a>(
    steps: impl DoubleEndedIterator<Item = &'a IterationSummary> + Clone,
    limits: &SchedulerLimits,
    objectives: &Objectives,
    conditions: Conditions,
) -> Vec<Finding> {
    let recording = || {
        Finding::new(
            Bottleneck::RecordingFailed,
            1.0,
            "the recording ended early: its file could not be written".to_owned(),
            "free space for the file of --record and restart the worker; what was recorded can be replayed"
                .to_owned(),
        )
    };
    let failed = conditions.recording_failed.then(recording).flatten();
    let mut findings: Vec<Finding> = failed.into_iter().collect();
    if let (Some(first), Some(last)) = (steps.clone().next(), steps.clone().next_back()) {
        let total = steps.clone().count() as f64;
        let (before, now) = (&first.load, &last.load);
        let window = DiagnosisWindow { steps, total, before, now, limits, objectives, conditions };
        findings.extend(window.bottlenecks());
    }
    findings.sort_by(|a, b| b.weight.total_cmp(&a.weight).then(a.limit.cmp(&b.limit)));
    findings
}

/// Recent iterations under diagnosis, at least one.
struct DiagnosisWindow<'w, I> {
    steps: I,
    /// Number of iterations.
    total: f64,
    /// Load after the first iteration, and after the last one.
    before: &'w Load,
    now: &'w Load,
    limits: &'w SchedulerLimits,
    objectives: &'w Objectives,
    conditions: Conditions,
}

impl<'a, I: Steps<'a>> DiagnosisWindow<'_, I> {
    fn bottlenecks(&self) -> Vec<Finding> {
        let findings = [
            self.memory_pressure(),
            self.preemption(),
            self.preemption_pauses(),
            self.queue_time(),
            self.prefill_starves_decode(),
            self.slow_iterations(),
            self.chunk_budget(),
            self.gap_objective(),
            self.first_token_objective(),
            self.prefix_evictions(),
            self.drafts_rejected(),
            self.device_idle(),
        ];
        findings.into_iter().flatten().chain(self.admission_blocked()).collect()
    }

    /// Returns the share of iterations that satisfy `predicate`.
    fn share(&self, predicate: impl Fn(&IterationSummary) -> bool) -> f64 {
        self.steps.clone().filter(|step| predicate(step)).count() as f64 / self.total
    }

    /// Returns the mean of `value` over the iterations.
    fn mean(&self, value: impl Fn(&IterationSummary) -> u32) -> f64 {
        self.steps.clone().map(|step| f64::from(value(step))).sum::<f64>() / self.total
    }

    /// Returns the mean number of KV blocks of a running sequence; at least 1.
    fn blocks_per_sequence(&self) -> f64 {
        let running = self.mean(|step| step.load.running).max(1.0);
        (self.mean(|step| step.load.blocks_used) / running).max(1.0)
    }

    /// Returns true if the KV pool is full.
    fn is_full(&self, step: &IterationSummary) -> bool {
        f64::from(step.load.blocks_used) > memory::FULL * f64::from(self.limits.blocks)
    }

    /// Returns the tokens admitted in the window.
    fn admitted(&self) -> u64 {
        self.now.admitted_tokens - self.before.admitted_tokens
    }

    /// Returns the tokens computed in the window.
    fn computed_tokens(&self) -> u64 {
        let rows = |step: &IterationSummary| u64::from(step.decodes + step.drafts + step.prefill_tokens);
        self.steps.clone().map(rows).sum()
    }

    /// Returns the time in which iterations ran.
    fn duration(&self) -> Duration {
        self.steps.clone().filter_map(|step| step.took).sum()
    }

    /// Returns a number of blocks as bytes, or as blocks where their size is unknown.
    fn size(&self, blocks: f64) -> String {
        const MIB: f64 = 1_048_576.0;
        match self.conditions.block_bytes {
            0 => format!("{blocks:.1} blocks"),
            bytes => match blocks * bytes as f64 / MIB {
                mebibytes if mebibytes >= 1024.0 => format!("{:.1} GiB", mebibytes / 1024.0),
                mebibytes => format!("{mebibytes:.1} MiB"),
            },
        }
    }

    fn drafts_rejected(&self) -> Option<Finding> {
        let (before, now) = (self.before, self.now);
        let drafted = now.drafted_tokens - before.drafted_tokens;
        let rejected = drafted - (now.accepted_drafts - before.accepted_drafts);
        let share = ratio(rejected, self.computed_tokens());
        if share <= 0.05 || rejected * 10 <= drafted * 7 {
            return None;
        }
        let figure = format!(
            "{} of the drafted tokens were rejected, {} of all computed tokens",
            percent(ratio(rejected, drafted)),
            percent(share)
        );
        let action = "lower --drafts-max, or disable drafts with --drafts off".to_owned();
        Finding::new(Bottleneck::DraftsRejected, share, figure, action)
    }

    fn device_idle(&self) -> Option<Finding> {
        let idle = idle_share(self.steps.clone());
        if idle <= self.objectives.idle {
            return None;
        }
        let figure = format!("device idle {} of the time while work was waiting", percent(idle));
        let action =
            "check what delays the engine thread: other processes on its cores, or slow routers".to_owned();
        Finding::new(Bottleneck::DeviceIdle, idle, figure, action)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Returns the idle share of the time between consecutive steps. A gap at whose start no work was left does
/// not count.
fn idle_share<'a>(steps: impl Iterator<Item = &'a IterationSummary> + Clone) -> f64 {
    let (mut idle, mut all) = (Duration::ZERO, Duration::ZERO);
    for (step, next) in steps.clone().zip(steps.skip(1)) {
        let had_work = step.load.waiting > 0
            || step.load.running > step.decodes
            || next.number == step.number + 1 && next.decodes > 0;
        let (Some(took), true) = (step.took, had_work && next.load.running > 0) else { continue };
        let between = next.planned.since(step.planned);
        all += between;
        idle += between.saturating_sub(took);
    }
    if all.is_zero() { 0.0 } else { idle.as_secs_f64() / all.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use inflight_contract::{LayerGroup, MemoryShape};

    use super::*;
    use crate::{BlockedBy, StepTarget, Time};

    const LIMITS: fn() -> SchedulerLimits = || SchedulerLimits {
        step_target: StepTarget::Fixed(Duration::from_millis(20)),
        ..SchedulerLimits::new(16, 100, 64, 512)
    };

    fn step(number: u64) -> IterationSummary {
        IterationSummary {
            number,
            planned: Time::from_nanos(number * 10_000_000),
            took: Some(Duration::from_millis(10)),
            predicted: Duration::from_millis(10),
            bound: Some(Duration::from_millis(20)),
            decodes: 40,
            predictions: 0,
            drafts: 0,
            prefills: 0,
            prefill_tokens: 0,
            longest_wait: Duration::ZERO,
            preempted: 0,
            stalled: 0,
            blocked: None,
            load: Load { running: 40, blocks: 100, blocks_used: 50, ..Load::default() },
        }
    }

    fn findings(limits: &SchedulerLimits, change: impl Fn(&mut IterationSummary)) -> Vec<Finding> {
        let steps: Vec<_> = (0..100)
            .map(|number| {
                let mut step = step(number);
                change(&mut step);
                step
            })
            .collect();
        let conditions = Conditions { block_bytes: 1 << 20, ..Conditions::default() };
        diagnose(steps.iter(), limits, &Objectives::default(), conditions)
    }

    fn found(change: impl Fn(&mut IterationSummary)) -> Vec<Bottleneck> {
        findings(&LIMITS(), change).iter().map(|finding| finding.limit).collect()
    }

    #[test]
    fn a_healthy_worker_has_no_findings() {
        assert_eq!(found(|_| {}), []);
        let idle = |conditions| diagnose([].iter(), &LIMITS(), &Objectives::default(), conditions);
        assert_eq!(idle(Conditions::default()), []);
    }

    #[test]
    fn a_failed_recording_is_found_with_and_without_iterations() {
        let failed = Conditions { recording_failed: true, ..Conditions::default() };
        for steps in [Vec::new(), vec![step(0), step(1)]] {
            let findings = diagnose(steps.iter(), &LIMITS(), &Objectives::default(), failed);
            let found: Vec<_> = findings.iter().map(|finding| finding.limit).collect();
            assert_eq!(found, [Bottleneck::RecordingFailed]);
            assert!(findings[0].to_string().starts_with("recording_failed: "), "{}", findings[0]);
        }
    }

    /// Lets a step wait for longer than the objective, for this reason.
    fn blocked(step: &mut IterationSummary, by: BlockedBy) {
        let id = crate::SequenceId { index: 0, generation: 0 };
        step.blocked = Some(crate::Blocked { id, by });
        step.longest_wait = Duration::from_secs(3);
    }

    #[test]
    fn each_bottleneck_is_found_where_it_is_the_only_one() {
        let full = |step: &mut IterationSummary| {
            (step.load.blocks_used, step.load.running, step.decodes, step.load.waiting) = (95, 10, 10, 5)
        };
        assert_eq!(found(full), [Bottleneck::MemoryPressure]);
        let preempting = |step: &mut IterationSummary| {
            step.preempted = u32::from(step.number.is_multiple_of(10));
            step.load.preemption_cost_us = step.number * 1000;
        };
        assert_eq!(found(preempting), [Bottleneck::Preemption]);
        let pausing = |step: &mut IterationSummary| {
            step.load.resumed_sequences = step.number / 10;
            step.load.preemption_pause_us = step.number / 10 * 400_000;
        };
        assert_eq!(found(pausing), [Bottleneck::PreemptionPauses]);
        let short = |step: &mut IterationSummary| {
            step.load.resumed_sequences = step.number / 10;
            step.load.preemption_pause_us = step.number / 10 * 20_000;
        };
        assert_eq!(found(short), []);
        let queueing = |step: &mut IterationSummary| step.longest_wait = Duration::from_secs(3);
        assert_eq!(found(queueing), [Bottleneck::QueueTime]);
        let blocks = |step: &mut IterationSummary| blocked(step, BlockedBy::Blocks { needed: 9, free: 1 });
        assert_eq!(found(blocks), [Bottleneck::QueueTime]);
        let long = |step: &mut IterationSummary| {
            (step.prefills, step.prefill_tokens) = (1, 500);
            step.planned = Time::from_nanos(step.number * 30_000_000);
            (step.took, step.predicted) = (Some(Duration::from_millis(30)), Duration::from_millis(28));
        };
        assert_eq!(found(long), [Bottleneck::PrefillStarvesDecode]);
        let slow = |step: &mut IterationSummary| {
            step.planned = Time::from_nanos(step.number * 60_000_000);
            step.took = Some(Duration::from_millis(60));
        };
        assert_eq!(found(slow), [Bottleneck::SlowIterations]);
        let crawling = |step: &mut IterationSummary| {
            (step.prefills, step.prefill_tokens, step.load.waiting) = (1, 16, 3)
        };
        assert_eq!(found(crawling), [Bottleneck::ChunkBudget]);
        let late = |step: &mut IterationSummary| step.load.gap_objective_unmet = step.number;
        assert_eq!(found(late), [Bottleneck::GapObjective]);
        let late = |step: &mut IterationSummary| step.load.first_token_objective_unmet = step.number;
        assert_eq!(found(late), [Bottleneck::FirstTokenObjective]);
        let gaps = |step: &mut IterationSummary| step.planned = Time::from_nanos(step.number * 15_000_000);
        assert_eq!(found(gaps), [Bottleneck::DeviceIdle]);
        let rejected = |step: &mut IterationSummary| {
            step.drafts = 40;
            (step.load.drafted_tokens, step.load.accepted_drafts) = (step.number * 40, step.number * 8);
        };
        assert_eq!(found(rejected), [Bottleneck::DraftsRejected]);
        let paying = |step: &mut IterationSummary| {
            step.drafts = 40;
            (step.load.drafted_tokens, step.load.accepted_drafts) = (step.number * 40, step.number * 20);
        };
        assert_eq!(found(paying), []);
        let evicted = |step: &mut IterationSummary| {
            step.load.admitted_tokens = step.number * 100;
            step.load.evicted_hit_tokens = step.number * 30;
        };
        assert_eq!(found(evicted), [Bottleneck::PrefixEvictions]);
        // The host holds evicted prefixes of models with one group of layers only.
        let groups = [LayerGroup { blocks: 1, window: None }, LayerGroup { blocks: 5, window: Some(64) }];
        let windows = SchedulerLimits { shape: MemoryShape::new(16, &groups).unwrap(), ..LIMITS() };
        for (limits, advised) in [(LIMITS(), true), (windows, false)] {
            let text = findings(&limits, evicted)[0].to_string();
            assert_eq!(text.contains("--host-cache-bytes"), advised, "{text}");
        }
    }

    #[test]
    fn each_reason_for_waiting_beside_free_memory_is_found_with_an_option_that_helps() {
        let reasons = [
            (BlockedBy::Slots, "--max-sequences from 64"),
            (BlockedBy::Budget, "--slo-gap"),
            (BlockedBy::Policy, "--policy fair"),
            (BlockedBy::Preemption, "--kv-cache-bytes"),
            (BlockedBy::PrefixUnderWay, "common prefix"),
            (BlockedBy::Fence, "copied to the host"),
        ];
        for (by, option) in reasons {
            let found = findings(&LIMITS(), |step| blocked(step, by));
            let [finding] = found.as_slice() else { panic!("{by:?}: {found:?}") };
            assert_eq!(finding.limit, Bottleneck::AdmissionBlocked, "{by:?}");
            assert!(finding.action.contains(option), "{by:?}: {finding}");
        }
    }

    #[test]
    fn a_stall_of_seconds_is_found_among_ten_thousand_short_iterations() {
        let limits = SchedulerLimits { step_target: StepTarget::Unbounded, ..LIMITS() };
        let mut steps: Vec<_> = (0..10_000).map(step).collect();
        for step in &mut steps {
            step.bound = None;
        }
        let stall = &mut steps[5000];
        (stall.prefills, stall.prefill_tokens, stall.decodes) = (1, 16_000, 8);
        (stall.took, stall.predicted) = (Some(Duration::from_millis(3900)), Duration::from_millis(3500));
        let found = diagnose(steps.iter(), &limits, &Objectives::default(), Conditions::default());
        let [finding] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(finding.limit, Bottleneck::PrefillStarvesDecode);
        let text = finding.to_string();
        assert!(text.contains("3900 ms, stalled 8 sequences beside 16000 prompt tokens"), "{text}");
        assert!(text.contains("--step-target auto"), "{text}");
    }

    #[test]
    fn the_advice_against_preemption_names_the_batch_that_fits_and_the_cheaper_mode() {
        let found = findings(&LIMITS(), |step| {
            step.preempted = u32::from(step.number.is_multiple_of(10));
            (step.load.blocks_used, step.load.running) = (98, 49);
            step.load.recompute_preemptions = step.number / 10;
            step.load.recomputed_tokens = step.number * 8;
            step.load.preemption_cost_us = step.number * 500;
            step.load.preemption_recompute_us = step.number * 500;
            step.load.preemption_swap_us = step.number * 200;
        });
        let [finding] = found.as_slice() else { panic!("{found:?}") };
        let text = finding.to_string();
        // 40 decodes are computed in an iteration, 8 of their tokens again.
        for part in ["20 % of the computed tokens", "5.5 ms by recompute, 2.2 ms by swap", "5 % of the time"]
        {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
        // A sequence has two blocks; nine tenths of a hundred hold 45 of them.
        for part in ["--max-sequences from 64 to 45", "--host-cache-bytes"] {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
    }

    #[test]
    fn the_most_severe_finding_comes_first() {
        let both = |step: &mut IterationSummary| {
            step.longest_wait = Duration::from_secs(if step.number < 30 { 3 } else { 0 });
            (step.load.blocks_used, step.load.running, step.decodes, step.load.waiting) = (95, 10, 10, 5);
        };
        assert_eq!(found(both), [Bottleneck::MemoryPressure, Bottleneck::QueueTime]);
    }
}
