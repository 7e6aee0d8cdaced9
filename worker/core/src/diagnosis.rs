//! Bottleneck diagnosis of a worker from its recent iterations.

use std::fmt;
use std::time::Duration;

use crate::history::IterationSummary;
use crate::{BlockedBy, Load, SchedulerLimits};

/// Bottleneck of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bottleneck {
    /// The KV pool is full while the batch is far below its maximum.
    MemoryPressure,
    /// Sequences wait for slots or token budget though blocks are free.
    AdmissionBlocked,
    /// Preemptions recompute or swap too much.
    Preemption,
    /// Queueing times exceed the objective.
    QueueTime,
    /// Prefill chunks make mixed steps longer than the step target.
    PrefillStarvesDecode,
    /// Prefix-cache hit rate is low though the cache is full.
    LowPrefixHits,
    /// The device is idle though there is work.
    DeviceIdle,
    /// Prefill chunks are too small.
    ChunkBudget,
    /// Decodes alone take longer than the objective for gaps.
    GapObjective,
    /// Prompts arrive faster than the objective for first tokens allows.
    FirstTokenObjective,
    /// Most drafted tokens are rejected, and they are a large part of the work.
    DraftsRejected,
    /// The recording of the scheduler's inputs has ended with an error.
    RecordingFailed,
}

impl Bottleneck {
    /// Returns the label used in reports; stable.
    pub fn label(self) -> &'static str {
        match self {
            Self::MemoryPressure => "memory_pressure",
            Self::AdmissionBlocked => "admission_blocked",
            Self::Preemption => "preemption",
            Self::QueueTime => "queue_time",
            Self::PrefillStarvesDecode => "prefill_starves_decode",
            Self::LowPrefixHits => "low_prefix_hits",
            Self::DeviceIdle => "device_idle",
            Self::ChunkBudget => "chunk_budget",
            Self::GapObjective => "slo_gap",
            Self::FirstTokenObjective => "slo_ttft",
            Self::DraftsRejected => "drafts_rejected",
            Self::RecordingFailed => "recording_failed",
        }
    }

    /// Returns the advised action.
    pub fn action(self) -> &'static str {
        match self {
            Self::MemoryPressure => {
                "raise --kv-cache-bytes or add workers; a smaller batch would only make the queue longer"
            }
            Self::AdmissionBlocked => {
                "raise the limit that blocks: --max-sequences for slots, --max-batch-tokens for the token budget"
            }
            Self::Preemption => "raise --kv-cache-bytes or add workers",
            Self::QueueTime => {
                "add workers, or raise --kv-cache-bytes if KV blocks are exhausted; a smaller batch makes the queue longer"
            }
            Self::PrefillStarvesDecode => "lower --step-target for smaller prefill chunks beside decodes",
            Self::LowPrefixHits => {
                "raise --kv-cache-bytes, or place requests with a common prefix on one worker"
            }
            Self::DeviceIdle => {
                "check what delays the engine thread: other processes on its cores, or slow routers"
            }
            Self::ChunkBudget => "raise --step-target or --max-batch-tokens for larger prefill chunks",
            Self::GapObjective => "raise --slo-gap, lower --max-sequences, or add workers",
            Self::FirstTokenObjective => "add workers, or raise --slo-gap or --slo-ttft",
            Self::DraftsRejected => "lower --drafts-max, or disable drafts with --drafts off",
            Self::RecordingFailed => {
                "free space for the file of --record and restart the worker; what was recorded can be replayed"
            }
        }
    }
}

/// Bottleneck with its evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Kind of bottleneck.
    pub limit: Bottleneck,
    /// Severity in (0, 1]: approximately the affected share of the window.
    pub weight: f64,
    /// Measurements that support the finding, as text.
    pub figure: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.limit.label(), self.figure, self.limit.action())
    }
}

/// Thresholds of the diagnosis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objectives {
    /// Longest acceptable queueing time in the worker.
    pub queue: Duration,
    /// Acceptable preemptions per hundred iterations.
    pub preemptions: f64,
    /// Prefix-cache hit rate (share of admitted tokens) below which it counts as low.
    pub prefix_hits: f64,
    /// Acceptable share of time in which the device is idle though there is work.
    pub idle: f64,
}

impl Default for Objectives {
    fn default() -> Self {
        Self { queue: Duration::from_secs(1), preemptions: 1.0, prefix_hits: 0.05, idle: 0.1 }
    }
}

/// Facts about a worker that its iterations do not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Conditions {
    /// Whether the recording has ended with an error.
    pub recording_failed: bool,
}

/// Returns the bottlenecks of a worker from its recent iterations and other conditions, most severe first.
pub fn diagnose<'a>(
    steps: impl DoubleEndedIterator<Item = &'a IterationSummary> + Clone,
    limits: &SchedulerLimits,
    objectives: &Objectives,
    conditions: Conditions,
) -> Vec<Finding> {
    let figure = || "the recording ended early: its file could not be written".to_owned();
    let failed =
        conditions.recording_failed.then(|| Finding::new(Bottleneck::RecordingFailed, 1.0, figure()));
    let mut findings: Vec<Finding> = failed.flatten().into_iter().collect();
    findings.extend(bottlenecks(steps, limits, objectives));
    findings.sort_by(|a, b| b.weight.total_cmp(&a.weight).then(a.limit.cmp(&b.limit)));
    findings
}

/// Returns the bottlenecks that recent iterations show; none without iterations.
fn bottlenecks<'a>(
    steps: impl DoubleEndedIterator<Item = &'a IterationSummary> + Clone,
    limits: &SchedulerLimits,
    objectives: &Objectives,
) -> Vec<Finding> {
    let (Some(first), Some(last)) = (steps.clone().next(), steps.clone().next_back()) else {
        return Vec::new();
    };
    let total = steps.clone().count() as f64;
    let (before, now) = (&first.load, &last.load);
    let window = DiagnosisWindow { steps, total, before, now, limits, objectives };
    let findings = [
        window.memory_pressure(),
        window.admission_blocked(BlockedBy::Slots),
        window.admission_blocked(BlockedBy::Budget),
        window.preemption(),
        window.queue_time(),
        window.prefill_starves_decode(),
        window.chunk_budget(),
        window.objective(Bottleneck::GapObjective, |load| load.gap_objective_unmet),
        window.objective(Bottleneck::FirstTokenObjective, |load| load.first_token_objective_unmet),
        window.low_prefix_hits(),
        window.drafts_rejected(),
        window.device_idle(),
    ];
    findings.into_iter().flatten().collect()
}

impl Finding {
    /// Creates a finding whose weight is capped at 1; `None` if the weight is not above 0.
    fn new(limit: Bottleneck, weight: f64, figure: String) -> Option<Self> {
        (weight > 0.0).then_some(Self { limit, weight: weight.min(1.0), figure })
    }
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
}

impl<'a, I: Iterator<Item = &'a IterationSummary> + Clone> DiagnosisWindow<'_, I> {
    /// Returns the share of iterations that satisfy `predicate`.
    fn share(&self, predicate: impl Fn(&IterationSummary) -> bool) -> f64 {
        self.steps.clone().filter(|step| predicate(step)).count() as f64 / self.total
    }

    /// Returns the mean of `value` over the iterations.
    fn mean(&self, value: impl Fn(&IterationSummary) -> u32) -> f64 {
        self.steps.clone().map(|step| f64::from(value(step))).sum::<f64>() / self.total
    }

    /// Returns the tokens admitted in the window.
    fn admitted(&self) -> u64 {
        self.now.admitted_tokens - self.before.admitted_tokens
    }

    fn memory_pressure(&self) -> Option<Finding> {
        let (pool, running_max) = (f64::from(self.limits.blocks), self.limits.running_max);
        let pressed = self.share(|step| {
            f64::from(step.load.blocks_used) > 0.9 * pool
                && step.load.running * 2 < running_max
                && step.load.waiting > 0
        });
        let used = self.mean(|step| step.load.blocks_used) / pool;
        let running = self.mean(|step| step.load.running);
        let figure = format!(
            "{:.0} % of the KV pool in use with {running:.1} of {running_max} sequences running",
            used * 100.0
        );
        Finding::new(Bottleneck::MemoryPressure, pressed, figure)
    }

    fn admission_blocked(&self, by: BlockedBy) -> Option<Finding> {
        let pool = f64::from(self.limits.blocks);
        let held = self.share(|step| {
            step.blocked.is_some_and(|blocked| blocked.by.label() == by.label())
                && f64::from(step.load.blocks_used) < 0.9 * pool
        });
        if held <= 0.1 {
            return None;
        }
        let figure =
            format!("{:.0} % of iterations: first waiting sequence blocked by {}", held * 100.0, by.label());
        Finding::new(Bottleneck::AdmissionBlocked, held, figure)
    }

    fn preemption(&self) -> Option<Finding> {
        let (before, now) = (self.before, self.now);
        let preempted: u32 = self.steps.clone().map(|step| step.preempted).sum();
        let rate = f64::from(preempted) / self.total * 100.0;
        if rate <= self.objectives.preemptions {
            return None;
        }
        let mean_swap = match now.swap_preemptions - before.swap_preemptions {
            0 => 0.0,
            swaps => (now.blocks_swapped_out - before.blocks_swapped_out) as f64 / swaps as f64,
        };
        let redone = ratio(now.recomputed_tokens - before.recomputed_tokens, self.admitted());
        let figure = format!(
            "{rate:.1} preemptions per 100 iterations, {mean_swap:.1} blocks per swap, {:.1} % of computed tokens recomputed",
            redone * 100.0
        );
        Finding::new(Bottleneck::Preemption, rate / 100.0, figure)
    }

    fn queue_time(&self) -> Option<Finding> {
        let late = self.share(|step| step.longest_wait > self.objectives.queue);
        let longest = self.steps.clone().map(|step| step.longest_wait).max().unwrap_or_default();
        let figure = format!("longest queueing time {:.1} s", longest.as_secs_f64());
        Finding::new(Bottleneck::QueueTime, late, figure)
    }

    fn prefill_starves_decode(&self) -> Option<Finding> {
        let late = |step: &&IterationSummary| {
            let bound = step.bound.filter(|_| step.prefills > 0);
            bound.is_some_and(|bound| step.took.is_some_and(|took| took > bound * 5 / 4))
        };
        let over = self.share(|step| late(&step));
        if over <= 0.05 {
            return None;
        }
        let bounds = self.steps.clone().filter(late).filter_map(|step| step.bound);
        let (count, sum) = bounds.fold((0, Duration::ZERO), |(count, sum), bound| (count + 1, sum + bound));
        let figure = format!(
            "{:.0} % of iterations had prefills and took more than 1.25x the step target, {:.0} ms on average",
            over * 100.0,
            1e3 * (sum / count.max(1)).as_secs_f64()
        );
        Finding::new(Bottleneck::PrefillStarvesDecode, over, figure)
    }

    fn chunk_budget(&self) -> Option<Finding> {
        // Without a step target, chunks are limited by the token budget alone.
        let crawling = self.share(|step| {
            step.prefills > 0
                && step.bound.is_some()
                && step.load.waiting > 0
                && step.prefill_tokens < 2 * self.limits.block_tokens
        });
        if crawling <= 0.1 {
            return None;
        }
        let figure =
            format!("{:.0} % of mixed iterations prefilled less than two KV blocks", crawling * 100.0);
        Finding::new(Bottleneck::ChunkBudget, crawling, figure)
    }

    /// Returns the finding of an objective that more than one iteration in twenty could not meet.
    fn objective(&self, limit: Bottleneck, unmet: fn(&Load) -> u64) -> Option<Finding> {
        let share = (unmet(self.now) - unmet(self.before)) as f64 / self.total;
        if share <= 0.05 {
            return None;
        }
        Finding::new(
            limit,
            share,
            format!("{:.0} % of iterations could not meet the objective", share * 100.0),
        )
    }

    fn low_prefix_hits(&self) -> Option<Finding> {
        let (before, now) = (self.before, self.now);
        let hits = ratio(now.cached_tokens - before.cached_tokens, self.admitted());
        let low = self.limits.prefix_cache
            && self.admitted() > 0
            && hits < self.objectives.prefix_hits
            && now.blocks_used * 10 > now.blocks * 9;
        if !low {
            return None;
        }
        let figure = format!("{:.1} % prefix-cache hit rate with a full cache", hits * 100.0);
        Finding::new(Bottleneck::LowPrefixHits, 0.1, figure)
    }

    fn drafts_rejected(&self) -> Option<Finding> {
        let (before, now) = (self.before, self.now);
        let drafted = now.drafted_tokens - before.drafted_tokens;
        let rejected = drafted - (now.accepted_drafts - before.accepted_drafts);
        let rows = |step: &IterationSummary| u64::from(step.decodes + step.drafts + step.prefill_tokens);
        let share = ratio(rejected, self.steps.clone().map(rows).sum());
        if share <= 0.05 || rejected * 10 <= drafted * 7 {
            return None;
        }
        let figure = format!(
            "{:.0} % of drafted tokens rejected, {:.0} % of all computed tokens",
            ratio(rejected, drafted) * 100.0,
            share * 100.0
        );
        Finding::new(Bottleneck::DraftsRejected, share, figure)
    }

    fn device_idle(&self) -> Option<Finding> {
        let idle = idle_share(self.steps.clone());
        if idle <= self.objectives.idle {
            return None;
        }
        let figure = format!("device idle {:.0} % of the time while work was waiting", idle * 100.0);
        Finding::new(Bottleneck::DeviceIdle, idle, figure)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
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
    use super::*;
    use crate::{StepTarget, Time};

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

    fn found(change: impl Fn(&mut IterationSummary)) -> Vec<Bottleneck> {
        let steps: Vec<_> = (0..100)
            .map(|number| {
                let mut step = step(number);
                change(&mut step);
                step
            })
            .collect();
        let findings = diagnose(steps.iter(), &LIMITS(), &Objectives::default(), Conditions::default());
        findings.iter().map(|finding| finding.limit).collect()
    }

    #[test]
    fn a_healthy_worker_has_no_findings() {
        assert_eq!(found(|_| {}), []);
        let idle = |conditions| diagnose([].iter(), &LIMITS(), &Objectives::default(), conditions);
        assert_eq!(idle(Conditions::default()), []);
    }

    #[test]
    fn a_failed_recording_is_found_with_and_without_iterations() {
        let failed = Conditions { recording_failed: true };
        for steps in [Vec::new(), vec![step(0), step(1)]] {
            let findings = diagnose(steps.iter(), &LIMITS(), &Objectives::default(), failed);
            let found: Vec<_> = findings.iter().map(|finding| finding.limit).collect();
            assert_eq!(found, [Bottleneck::RecordingFailed]);
            assert!(findings[0].to_string().starts_with("recording_failed: "), "{}", findings[0]);
        }
    }

    #[test]
    fn each_bottleneck_is_found_where_it_is_the_only_one() {
        let full = |step: &mut IterationSummary| {
            (step.load.blocks_used, step.load.running, step.decodes, step.load.waiting) = (95, 10, 10, 5)
        };
        assert_eq!(found(full), [Bottleneck::MemoryPressure]);
        let id = crate::SequenceId { index: 0, generation: 0 };
        let slots =
            |step: &mut IterationSummary| step.blocked = Some(crate::Blocked { id, by: BlockedBy::Slots });
        assert_eq!(found(slots), [Bottleneck::AdmissionBlocked]);
        let preempting =
            |step: &mut IterationSummary| step.preempted = u32::from(step.number.is_multiple_of(10));
        assert_eq!(found(preempting), [Bottleneck::Preemption]);
        let queueing = |step: &mut IterationSummary| step.longest_wait = Duration::from_secs(3);
        assert_eq!(found(queueing), [Bottleneck::QueueTime]);
        let long = |step: &mut IterationSummary| {
            (step.prefills, step.prefill_tokens) = (1, 500);
            step.planned = Time::from_nanos(step.number * 30_000_000);
            step.took = Some(Duration::from_millis(30));
        };
        assert_eq!(found(long), [Bottleneck::PrefillStarvesDecode]);
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
        let cold = |step: &mut IterationSummary| {
            (step.load.admitted_tokens, step.load.blocks_used) = (step.number * 100, 95);
        };
        assert_eq!(found(cold), [Bottleneck::LowPrefixHits]);
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
