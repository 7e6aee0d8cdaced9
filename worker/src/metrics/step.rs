//! Handles of the metrics that change with every iteration.

use std::time::Duration;

use inflight_worker_core::{Load, SchedulerLimits};
use metrics::{Counter, Gauge, Histogram};

use super::{
    ACCEPTED_DRAFTS, ADMITTED_TOKENS, ANTICIPATION_SECONDS, BATCH_TOKENS_MAX, BLOCK_BYTES, BLOCK_TOKENS,
    BLOCKS, BLOCKS_USED, BYPASS_MAX, CACHED_TOKENS, COMMANDS, CONTEXT_MAX, DECODE_RESERVE, DRAFT_INDEX_BYTES,
    DRAFTED, DRAFTS_MAX, EVICTED_HITS, HOST_BLOCKS, HOST_BLOCKS_USED, HOST_CACHED_TOKENS, ITERATIONS,
    KV_WATERMARK, OFFLOADED_BLOCKS, PREDICTED, PREDICTION, PREEMPTION_COST, PREEMPTION_THRESHOLD,
    PREEMPTIONS, PREFILL_TOKENS, QUEUE_SECONDS, RECOMPUTED, RUNNING, SAMPLED, SEQUENCES_MAX, SLO_UNMET,
    STEP_DECODES, STEP_PREFILL_TOKENS, STEP_SECONDS, STEP_TOKENS, SWAPPED, SWAPPED_BLOCKS, SWAPPED_BYTES,
    TOKENS, TOTAL_QUEUE_SECONDS, UNFILLED, WAITING, WAITING_MAX,
};
use crate::engine::{QueueingTime, StepReport};

/// Handles of the metrics that change with every iteration, looked up once.
pub(crate) struct StepMetrics {
    running: Gauge,
    waiting: Gauge,
    blocks_used: Gauge,
    unfilled: Gauge,
    pub commands: Gauge,
    iterations: Counter,
    step_seconds: Histogram,
    step_tokens: Histogram,
    step_decodes: Histogram,
    step_prefill_tokens: Histogram,
    prediction: Histogram,
    queue_seconds: Histogram,
    total_queue_seconds: Histogram,
    tokens: Counter,
    prefill_tokens: Counter,
    sampled: Counter,
    drafted: Counter,
    accepted_drafts: Counter,
    predicted: Counter,
    pub draft_index_bytes: Gauge,
    swapped: Gauge,
    host_blocks_used: Gauge,
    recompute_preemptions: Counter,
    swap_preemptions: Counter,
    recompute_cost: Counter,
    swap_cost: Counter,
    chosen_cost: Counter,
    recomputed: Counter,
    admitted_tokens: Counter,
    cached_tokens: Counter,
    host_cached_tokens: Counter,
    evicted_hits: Counter,
    offloaded: Counter,
    blocks_out: Counter,
    blocks_in: Counter,
    bytes_out: Counter,
    bytes_in: Counter,
    block_bytes: u64,
    ttft_unmet: Counter,
    gap_unmet: Counter,
    anticipation_followed: Histogram,
    anticipation_in_vain: Histogram,
}

impl StepMetrics {
    /// Creates the handles, and sets the gauges of limits.
    pub fn new(limits: &SchedulerLimits, block_bytes: u64) -> Self {
        metrics::gauge!(BLOCKS).set(limits.blocks);
        metrics::gauge!(HOST_BLOCKS).set(limits.host_blocks);
        metrics::gauge!(BLOCK_TOKENS).set(limits.block_tokens());
        metrics::gauge!(BLOCK_BYTES).set(block_bytes as f64);
        metrics::gauge!(SEQUENCES_MAX).set(limits.running_max);
        metrics::gauge!(BATCH_TOKENS_MAX).set(limits.iteration_tokens);
        metrics::gauge!(WAITING_MAX).set(limits.waiting_max);
        metrics::gauge!(CONTEXT_MAX).set(limits.sequence_tokens_max());
        metrics::gauge!(KV_WATERMARK).set(limits.watermark_blocks);
        metrics::gauge!(DECODE_RESERVE).set(limits.min_decode_tokens);
        metrics::gauge!(PREEMPTION_THRESHOLD).set(limits.preemption_threshold);
        metrics::gauge!(BYPASS_MAX).set(limits.bypass_max);
        metrics::gauge!(DRAFTS_MAX).set(limits.drafts_max);
        Self {
            running: metrics::gauge!(RUNNING),
            waiting: metrics::gauge!(WAITING),
            blocks_used: metrics::gauge!(BLOCKS_USED),
            unfilled: metrics::gauge!(UNFILLED),
            commands: metrics::gauge!(COMMANDS),
            iterations: metrics::counter!(ITERATIONS),
            step_seconds: metrics::histogram!(STEP_SECONDS),
            step_tokens: metrics::histogram!(STEP_TOKENS),
            step_decodes: metrics::histogram!(STEP_DECODES),
            step_prefill_tokens: metrics::histogram!(STEP_PREFILL_TOKENS),
            prediction: metrics::histogram!(PREDICTION),
            queue_seconds: metrics::histogram!(QUEUE_SECONDS),
            total_queue_seconds: metrics::histogram!(TOTAL_QUEUE_SECONDS),
            tokens: metrics::counter!(TOKENS),
            prefill_tokens: metrics::counter!(PREFILL_TOKENS),
            sampled: metrics::counter!(SAMPLED),
            drafted: metrics::counter!(DRAFTED),
            accepted_drafts: metrics::counter!(ACCEPTED_DRAFTS),
            predicted: metrics::counter!(PREDICTED),
            draft_index_bytes: metrics::gauge!(DRAFT_INDEX_BYTES),
            swapped: metrics::gauge!(SWAPPED),
            host_blocks_used: metrics::gauge!(HOST_BLOCKS_USED),
            recompute_preemptions: metrics::counter!(PREEMPTIONS, "kind" => "recompute"),
            swap_preemptions: metrics::counter!(PREEMPTIONS, "kind" => "swap"),
            recompute_cost: metrics::counter!(PREEMPTION_COST, "kind" => "recompute"),
            swap_cost: metrics::counter!(PREEMPTION_COST, "kind" => "swap"),
            chosen_cost: metrics::counter!(PREEMPTION_COST, "kind" => "chosen"),
            recomputed: metrics::counter!(RECOMPUTED),
            admitted_tokens: metrics::counter!(ADMITTED_TOKENS),
            cached_tokens: metrics::counter!(CACHED_TOKENS),
            host_cached_tokens: metrics::counter!(HOST_CACHED_TOKENS),
            evicted_hits: metrics::counter!(EVICTED_HITS),
            offloaded: metrics::counter!(OFFLOADED_BLOCKS),
            blocks_out: metrics::counter!(SWAPPED_BLOCKS, "direction" => "out"),
            blocks_in: metrics::counter!(SWAPPED_BLOCKS, "direction" => "in"),
            bytes_out: metrics::counter!(SWAPPED_BYTES, "direction" => "out"),
            bytes_in: metrics::counter!(SWAPPED_BYTES, "direction" => "in"),
            block_bytes,
            ttft_unmet: metrics::counter!(SLO_UNMET, "objective" => "ttft"),
            gap_unmet: metrics::counter!(SLO_UNMET, "objective" => "gap"),
            anticipation_followed: metrics::histogram!(ANTICIPATION_SECONDS, "outcome" => "followed"),
            anticipation_in_vain: metrics::histogram!(ANTICIPATION_SECONDS, "outcome" => "in_vain"),
        }
    }

    /// Records a wait for the requests that follow ended ones.
    pub fn anticipation(&self, took: Duration, followed: bool) {
        let waits = if followed { &self.anticipation_followed } else { &self.anticipation_in_vain };
        waits.record(took.as_secs_f64());
    }

    /// Records the queueing time of a sequence that was admitted for the first time.
    pub fn queueing_time(&self, waited: QueueingTime) {
        self.queue_seconds.record(waited.worker.as_secs_f64());
        if let Some(total) = waited.total {
            self.total_queue_seconds.record(total.as_secs_f64());
        }
    }

    /// Records a completed iteration.
    pub fn step(&self, step: &StepReport) {
        let prefill = step.tokens - step.decodes;
        self.iterations.increment(1);
        self.step_seconds.record(step.took.as_secs_f64());
        self.step_tokens.record(step.tokens);
        self.step_decodes.record(step.decodes);
        self.step_prefill_tokens.record(prefill);
        if !step.predicted.is_zero() {
            self.prediction.record(step.took.as_secs_f64() / step.predicted.as_secs_f64());
        }
        self.tokens.increment(step.tokens.into());
        self.prefill_tokens.increment(prefill.into());
        self.sampled.increment(step.sampled.into());
    }

    /// Sets the gauges to `now` and adds the difference between `before` and `now` to the counters.
    pub fn record(&self, before: &Load, now: &Load) {
        self.running.set(now.running);
        self.waiting.set(now.waiting);
        self.swapped.set(now.swapped);
        self.blocks_used.set(now.blocks_used);
        self.unfilled.set(now.unfilled_tokens);
        self.host_blocks_used.set(now.host_blocks_used);
        self.drafted.increment(now.drafted_tokens - before.drafted_tokens);
        self.accepted_drafts.increment(now.accepted_drafts - before.accepted_drafts);
        self.predicted.increment(now.predicted_tokens - before.predicted_tokens);
        self.recompute_preemptions.increment(now.recompute_preemptions - before.recompute_preemptions);
        self.swap_preemptions.increment(now.swap_preemptions - before.swap_preemptions);
        self.recompute_cost.increment(now.preemption_recompute_us - before.preemption_recompute_us);
        self.swap_cost.increment(now.preemption_swap_us - before.preemption_swap_us);
        self.chosen_cost.increment(now.preemption_cost_us - before.preemption_cost_us);
        self.recomputed.increment(now.recomputed_tokens - before.recomputed_tokens);
        self.admitted_tokens.increment(now.admitted_tokens - before.admitted_tokens);
        self.cached_tokens.increment(now.cached_tokens - before.cached_tokens);
        self.host_cached_tokens.increment(now.host_cached_tokens - before.host_cached_tokens);
        self.evicted_hits.increment(now.evicted_hit_tokens - before.evicted_hit_tokens);
        self.offloaded.increment(now.blocks_offloaded - before.blocks_offloaded);
        let out = now.blocks_swapped_out - before.blocks_swapped_out;
        let back = now.blocks_swapped_in - before.blocks_swapped_in;
        self.blocks_out.increment(out);
        self.blocks_in.increment(back);
        self.bytes_out.increment(out * self.block_bytes);
        self.bytes_in.increment(back * self.block_bytes);
        self.ttft_unmet.increment(now.first_token_objective_unmet - before.first_token_objective_unmet);
        self.gap_unmet.increment(now.gap_objective_unmet - before.gap_objective_unmet);
    }
}
