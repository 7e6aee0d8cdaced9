//! Findings about KV memory: pressure, preemption, evicted prefixes.

use super::{Bottleneck, DiagnosisWindow, Finding, Steps, percent, ratio};

/// Share of the pool in use from which it counts as full.
pub(super) const FULL: f64 = 0.9;
/// Share of the time that preemptions may cost.
const PREEMPTION_COST_MAX: f64 = 0.01;
/// Share of the running sequences' time for which preempted ones may wait.
const PAUSED_MAX: f64 = 0.05;
/// Share of the admitted tokens that may be evicted from the prefix cache before they are requested again.
const EVICTED_HITS_MAX: f64 = 0.05;

impl<'a, I: Steps<'a>> DiagnosisWindow<'_, I> {
    pub(super) fn memory_pressure(&self) -> Option<Finding> {
        let running_max = self.limits.running_max;
        let pressed = self
            .share(|step| self.is_full(step) && step.load.running * 2 < running_max && step.load.waiting > 0);
        let used = self.mean(|step| step.load.blocks_used) / f64::from(self.limits.blocks);
        let running = self.mean(|step| step.load.running);
        let more = self.mean(|step| step.load.waiting).min(f64::from(running_max) - running).max(1.0);
        let figure = format!(
            "{} of the KV pool in use with {running:.1} of {running_max} sequences running",
            percent(used)
        );
        let action = format!(
            "raise --kv-cache-bytes or add workers: {more:.0} more sequences of the present size need {} more; a smaller \
             batch would only make the queue longer",
            self.size(more * self.blocks_per_sequence())
        );
        Finding::new(Bottleneck::MemoryPressure, pressed, figure, action)
    }

    pub(super) fn preemption(&self) -> Option<Finding> {
        let (before, now) = (self.before, self.now);
        let preempted: u32 = self.steps.clone().map(|step| step.preempted).sum();
        let rate = f64::from(preempted) / self.total * 100.0;
        let cost = (now.preemption_cost_us - before.preemption_cost_us) as f64 / 1e6;
        let lost = cost / self.duration().as_secs_f64().max(1e-9);
        if rate <= self.objectives.preemptions || lost <= PREEMPTION_COST_MAX {
            return None;
        }
        let (recomputes, swaps) = (
            now.recompute_preemptions - before.recompute_preemptions,
            now.swap_preemptions - before.swap_preemptions,
        );
        let mean_ms = |us: u64| us as f64 / 1e3 / (recomputes + swaps).max(1) as f64;
        let by_recompute = mean_ms(now.preemption_recompute_us - before.preemption_recompute_us);
        let by_swap = mean_ms(now.preemption_swap_us - before.preemption_swap_us);
        let swapped = ratio(now.blocks_swapped_out - before.blocks_swapped_out, swaps);
        let redone = ratio(now.recomputed_tokens - before.recomputed_tokens, self.computed_tokens());
        let figure = format!(
            "{rate:.1} preemptions per 100 iterations, {recomputes} by recompute, {swaps} by swap of {} on average; {} of \
             the computed tokens had been computed before; predicted cost of one {by_recompute:.1} ms by recompute, \
             {by_swap:.1} ms by swap, {} of the time",
            self.size(swapped),
            percent(redone),
            percent(lost)
        );
        let host = if self.limits.host_blocks == 0 && by_swap < by_recompute {
            format!(
                ", or set --host-cache-bytes: a swap would cost {by_swap:.1} ms instead of {by_recompute:.1}"
            )
        } else {
            String::new()
        };
        let action = format!("{}{host}", self.fewer_preemptions());
        Finding::new(Bottleneck::Preemption, lost, figure, action)
    }

    /// Returns the advice against preemptions.
    fn fewer_preemptions(&self) -> String {
        let fits = (FULL * f64::from(self.limits.blocks) / self.blocks_per_sequence()).floor().max(1.0);
        format!(
            "lower --max-sequences from {} to {fits:.0}, which the pool holds at the present size: gaps get shorter, first \
             tokens later; or raise --kv-cache-bytes or --decode-reserve-tokens, or add workers",
            self.limits.running_max
        )
    }

    /// Finds pauses of preempted sequences, which their clients see as gaps between tokens.
    pub(super) fn preemption_pauses(&self) -> Option<Finding> {
        let resumed = self.now.resumed_sequences - self.before.resumed_sequences;
        let paused = (self.now.preemption_pause_us - self.before.preemption_pause_us) as f64 / 1e6;
        let running = self.mean(|step| step.load.running).max(1.0);
        let share = paused / (running * self.duration().as_secs_f64()).max(1e-9);
        let mean = paused / resumed.max(1) as f64;
        if resumed == 0 || (share <= PAUSED_MAX && mean <= self.objectives.queue.as_secs_f64()) {
            return None;
        }
        let figure = format!(
            "{resumed} preempted sequences waited {mean:.2} s on average until they ran again, which their clients see as a \
             gap between tokens; {} of the time of the running sequences",
            percent(share)
        );
        Finding::new(Bottleneck::PreemptionPauses, share, figure, self.fewer_preemptions())
    }

    pub(super) fn prefix_evictions(&self) -> Option<Finding> {
        let (before, now) = (self.before, self.now);
        let evicted = now.evicted_hit_tokens - before.evicted_hit_tokens;
        let share = ratio(evicted, self.admitted());
        if share <= EVICTED_HITS_MAX {
            return None;
        }
        let hits = ratio(now.cached_tokens - before.cached_tokens, self.admitted());
        let figure = format!(
            "{} of the admitted tokens were in the prefix cache, another {} had been evicted from it",
            percent(hits),
            percent(share)
        );
        // Prefixes of a model with several groups of layers are not copied to the host.
        let host =
            if self.limits.shape.is_uniform() { ", or --host-cache-bytes for a second tier" } else { "" };
        let action = format!(
            "raise --kv-cache-bytes{host}: with twice the pool of {} they would be hits; or place requests with a common \
             prefix on one worker (--placement)",
            self.size(f64::from(self.limits.blocks))
        );
        Finding::new(Bottleneck::PrefixEvictions, share, figure, action)
    }
}
