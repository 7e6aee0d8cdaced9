//! Findings about sequences that wait: each iteration whose longest wait exceeds the objective counts for one reason.

use super::{Bottleneck, DiagnosisWindow, Finding, Steps, percent};
use crate::BlockedBy;
use crate::history::IterationSummary;

/// Reasons for waiting though blocks are free. Those that the label names the same are one reason.
const REASONS: [&str; 6] = [
    BlockedBy::Slots.label(),
    BlockedBy::Budget.label(),
    BlockedBy::Preemption.label(),
    BlockedBy::PrefixUnderWay.label(),
    BlockedBy::Policy.label(),
    BlockedBy::Fence.label(),
];
/// Share of iterations from which a reason is reported.
const SHARE_MIN: f64 = 0.05;

impl<'a, I: Steps<'a>> DiagnosisWindow<'_, I> {
    /// Returns a finding for each reason, other than a lack of blocks, for which sequences wait too long.
    pub(super) fn admission_blocked(&self) -> Vec<Finding> {
        REASONS.iter().filter_map(|reason| self.blocked_by(reason)).collect()
    }

    fn blocked_by(&self, reason: &str) -> Option<Finding> {
        let held = self.share(|step| self.is_late(step) && reason_of(step) == Some(reason));
        if held <= SHARE_MIN {
            return None;
        }
        let figure = format!(
            "{} of iterations: sequences wait up to {:.1} s, the first one blocked by {} with {} of the KV pool free",
            percent(held),
            self.longest_wait(|step| reason_of(step) == Some(reason)),
            reason.replace('_', " "),
            percent(1.0 - self.mean(|step| step.load.blocks_used) / f64::from(self.limits.blocks))
        );
        Finding::new(Bottleneck::AdmissionBlocked, held, figure, self.action_against(reason))
    }

    fn action_against(&self, reason: &str) -> String {
        let limits = self.limits;
        if reason == BlockedBy::Slots.label() {
            let free = f64::from(limits.blocks) - self.mean(|step| step.load.blocks_used);
            let more = (free / self.blocks_per_sequence()).floor();
            return format!(
                "raise --max-sequences from {}: the free KV blocks hold {more:.0} more sequences of the present size; gaps get \
                 longer",
                limits.running_max
            );
        }
        if reason == BlockedBy::Budget.label() {
            let bounded = |step: &IterationSummary| {
                reason_of(step) == Some(reason)
                    && step.bound.is_some()
                    && step.prefill_tokens + step.decodes < limits.iteration_tokens
            };
            return if self.share(bounded) > 0.0 {
                "prompts wait for time beside decodes: allow longer gaps (--slo-gap or --step-target), or add workers"
                    .to_owned()
            } else {
                format!("raise --max-batch-tokens from {}, or add workers", limits.iteration_tokens)
            };
        }
        if reason == BlockedBy::Policy.label() {
            let idle = f64::from(limits.running_max) - self.mean(|step| step.load.running);
            return format!(
                "choose --policy fair: this policy admits no sequence until its batch has ended, with {idle:.1} slots empty on \
                 average"
            );
        }
        if reason == BlockedBy::Preemption.label() {
            return "no sequence is admitted in an iteration that preempts: raise --kv-cache-bytes, or lower --max-sequences \
                    so that fewer are preempted"
                .to_owned();
        }
        if reason == BlockedBy::PrefixUnderWay.label() {
            return "the prompts wait for a common prefix that another request computes, which is less work in sum; if the \
                    wait is too long, raise --step-target or --max-batch-tokens, so that it is computed sooner"
                .to_owned();
        }
        "admissions wait for blocks that are being copied to the host: raise --kv-cache-bytes, or lower --max-sequences so \
         that fewer sequences are swapped"
            .to_owned()
    }

    /// Returns the finding of waits that no free memory explains: the pool is full, or the device is busy.
    pub(super) fn queue_time(&self) -> Option<Finding> {
        let unexplained =
            |step: &IterationSummary| reason_of(step).is_none_or(|reason| !REASONS.contains(&reason));
        let late = self.share(|step| self.is_late(step) && unexplained(step));
        let lacks_blocks =
            |step: &IterationSummary| matches!(step.blocked, Some(blocked) if is_blocks(blocked.by));
        let memory = self.share(|step| self.is_late(step) && lacks_blocks(step));
        let figure = format!(
            "sequences wait up to {:.1} s in {} of iterations, the objective is {:.1} s",
            self.longest_wait(unexplained),
            percent(late),
            self.objectives.queue.as_secs_f64()
        );
        let action = if memory * 2.0 > late {
            format!(
                "raise --kv-cache-bytes, which holds {:.0} sequences of the present size, or add workers; a smaller batch makes \
                 the queue longer",
                f64::from(self.limits.blocks) / self.blocks_per_sequence()
            )
        } else {
            "add workers: the device computes all the time".to_owned()
        };
        Finding::new(Bottleneck::QueueTime, late, figure, action)
    }

    /// Returns true if a sequence waited longer than the objective.
    fn is_late(&self, step: &IterationSummary) -> bool {
        step.longest_wait > self.objectives.queue
    }

    /// Returns the longest wait in seconds over the iterations that satisfy `predicate`.
    fn longest_wait(&self, predicate: impl Fn(&IterationSummary) -> bool) -> f64 {
        let waits = self.steps.clone().filter(|step| predicate(step)).map(|step| step.longest_wait);
        waits.max().unwrap_or_default().as_secs_f64()
    }
}

fn reason_of(step: &IterationSummary) -> Option<&'static str> {
    step.blocked.map(|blocked| blocked.by.label())
}

fn is_blocks(by: BlockedBy) -> bool {
    matches!(by, BlockedBy::Blocks { .. })
}
