//! Inventory of the worker's Prometheus metrics, and handles to those that change with every iteration.

use std::time::Duration;

use inflight_runtime::{DEVICE_COMMANDS, PROMISED_BYTES};
use inflight_worker_core::Load;
use metrics::{Counter, Gauge, Histogram, Unit};

pub(crate) const ENDED: &str = "inflight_worker_finished_sequences_total";
const RUNNING: &str = "inflight_worker_running_sequences";
const WAITING: &str = "inflight_worker_waiting_sequences";
const BLOCKS_USED: &str = "inflight_worker_kv_blocks_used";
const BLOCKS: &str = "inflight_worker_kv_blocks";
const SESSIONS: &str = "inflight_worker_sessions";
const COMMANDS: &str = "inflight_worker_engine_queue_commands";
const ITERATIONS: &str = "inflight_worker_iterations_total";
const STEP_SECONDS: &str = "inflight_worker_iteration_seconds";
const STEP_TOKENS: &str = "inflight_worker_iteration_tokens";
const TOKENS: &str = "inflight_worker_tokens_total";
const SAMPLED: &str = "inflight_worker_generated_tokens_total";
const DRAFTED: &str = "inflight_worker_drafted_tokens_total";
const ACCEPTED_DRAFTS: &str = "inflight_worker_accepted_drafts_total";
const DRAFT_INDEX_BYTES: &str = "inflight_worker_draft_index_bytes";
const SWAPPED: &str = "inflight_worker_swapped_sequences";
const HOST_BLOCKS_USED: &str = "inflight_worker_host_kv_blocks_used";
const PREEMPTIONS: &str = "inflight_worker_preemptions_total";
const ADMITTED_TOKENS: &str = "inflight_worker_admitted_tokens_total";
const CACHED_TOKENS: &str = "inflight_worker_cached_tokens_total";
const HOST_CACHED_TOKENS: &str = "inflight_worker_host_cached_tokens_total";
const OFFLOADED_BLOCKS: &str = "inflight_worker_offloaded_blocks_total";
const SWAPPED_BLOCKS: &str = "inflight_worker_swapped_blocks_total";
const RECOMPUTED: &str = "inflight_worker_recomputed_tokens_total";
const ANTICIPATION_SECONDS: &str = "inflight_worker_anticipation_seconds";
const SLO_UNMET: &str = "inflight_worker_slo_unmet_iterations_total";
const BLOCKED: &str = "inflight_worker_admission_blocked_total";
const RECEIVE_BYTES: &str = "inflight_worker_receive_bytes";
const VIOLATIONS: &str = "inflight_worker_protocol_violations_total";
const UNAUTHENTICATED: &str = "inflight_worker_unauthenticated_calls_total";
const RECORDING_FAILED: &str = "inflight_worker_recording_failed";
const REFUSED_SESSIONS: &str = "inflight_worker_sessions_rejected_total";

/// Type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Monotonic counter.
    Counter,
    /// Value that rises and falls.
    Gauge,
    /// Histogram with fixed buckets.
    Histogram,
}

/// Name, kind, unit and help text of every metric that a worker exports.
pub const INVENTORY: &[(&str, MetricKind, Unit, &str)] = &[
    (RUNNING, MetricKind::Gauge, Unit::Count, "Sequences in the running batch"),
    (WAITING, MetricKind::Gauge, Unit::Count, "Sequences that wait for admission to the batch"),
    (BLOCKS_USED, MetricKind::Gauge, Unit::Count, "KV blocks in use"),
    (BLOCKS, MetricKind::Gauge, Unit::Count, "KV blocks in the pool"),
    (SESSIONS, MetricKind::Gauge, Unit::Count, "Open sessions with routers"),
    (COMMANDS, MetricKind::Gauge, Unit::Count, "Commands queued for the engine"),
    (
        DEVICE_COMMANDS,
        MetricKind::Gauge,
        Unit::Count,
        "Commands queued for the GPU's device thread; 0 on other devices",
    ),
    (
        PROMISED_BYTES,
        MetricKind::Gauge,
        Unit::Bytes,
        "Host memory reserved for weights and pools, which take it at first use",
    ),
    (
        RECORDING_FAILED,
        MetricKind::Gauge,
        Unit::Count,
        "1 if the recording (--record) has ended with an error, else 0",
    ),
    (ITERATIONS, MetricKind::Counter, Unit::Count, "Iterations run"),
    (
        STEP_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Duration of an iteration: forward pass and sampling",
    ),
    (STEP_TOKENS, MetricKind::Histogram, Unit::Count, "Tokens computed in an iteration"),
    (TOKENS, MetricKind::Counter, Unit::Count, "Tokens computed: prompt, recomputed and generated"),
    (SAMPLED, MetricKind::Counter, Unit::Count, "Tokens generated"),
    (DRAFTED, MetricKind::Counter, Unit::Count, "Drafted tokens computed and verified (--drafts)"),
    (ACCEPTED_DRAFTS, MetricKind::Counter, Unit::Count, "Drafted tokens that became output"),
    (
        DRAFT_INDEX_BYTES,
        MetricKind::Gauge,
        Unit::Bytes,
        "Memory of the running sequences' indices from which tokens are drafted",
    ),
    (SWAPPED, MetricKind::Gauge, Unit::Count, "Preempted sequences whose KV blocks are swapped to the host"),
    (HOST_BLOCKS_USED, MetricKind::Gauge, Unit::Count, "KV blocks in use in the host pool"),
    (PREEMPTIONS, MetricKind::Counter, Unit::Count, "Sequences preempted, by kind: swap or recompute"),
    (ADMITTED_TOKENS, MetricKind::Counter, Unit::Count, "Prompt and resumed tokens of admitted sequences"),
    (
        CACHED_TOKENS,
        MetricKind::Counter,
        Unit::Count,
        "Admitted tokens found in the prefix cache or shared with another choice of the request",
    ),
    (
        HOST_CACHED_TOKENS,
        MetricKind::Counter,
        Unit::Count,
        "Cached tokens that were copied back from the host pool",
    ),
    (
        OFFLOADED_BLOCKS,
        MetricKind::Counter,
        Unit::Count,
        "Cold blocks of the prefix cache copied to the host pool",
    ),
    (
        SWAPPED_BLOCKS,
        MetricKind::Counter,
        Unit::Count,
        "KV blocks swapped between device and host, by direction",
    ),
    (RECOMPUTED, MetricKind::Counter, Unit::Count, "Computed tokens discarded by recompute preemptions"),
    (
        ANTICIPATION_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Waits before an iteration for requests that follow ended ones, by outcome: followed or in_vain",
    ),
    (
        SLO_UNMET,
        MetricKind::Counter,
        Unit::Count,
        "Iterations that could not meet an objective, by objective: ttft (--slo-ttft) or gap (--slo-gap)",
    ),
    (
        BLOCKED,
        MetricKind::Counter,
        Unit::Count,
        "Iterations in which the first waiting sequence was not admitted, by reason",
    ),
    (ENDED, MetricKind::Counter, Unit::Count, "Sequences finished, by reason"),
    (RECEIVE_BYTES, MetricKind::Gauge, Unit::Bytes, "Bytes of router messages that are being received"),
    (
        VIOLATIONS,
        MetricKind::Counter,
        Unit::Count,
        "Sessions closed after a protocol violation by the router, by kind",
    ),
    (
        UNAUTHENTICATED,
        MetricKind::Counter,
        Unit::Count,
        "Calls rejected for want of a valid proof of the shared secret, by reason: missing, stale, wrong or full",
    ),
    (REFUSED_SESSIONS, MetricKind::Counter, Unit::Count, "Sessions rejected because the limit is reached"),
];

/// Histogram buckets of the tokens per iteration.
pub const STEP_TOKENS_BUCKETS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0];
/// Histogram buckets of the iteration time, in seconds.
pub const STEP_SECONDS_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048];

/// Histogram buckets of the waits for following requests, in seconds.
pub const ANTICIPATION_SECONDS_BUCKETS: &[f64] = &[0.0005, 0.001, 0.002, 0.004, 0.008, 0.016];

/// Histogram buckets by metric name.
pub const BUCKETS: &[(&str, &[f64])] = &[
    (STEP_TOKENS, STEP_TOKENS_BUCKETS),
    (STEP_SECONDS, STEP_SECONDS_BUCKETS),
    (ANTICIPATION_SECONDS, ANTICIPATION_SECONDS_BUCKETS),
];

/// Describes every metric to the exporter.
pub fn describe() {
    inflight_net::metrics::describe();
    for &(name, kind, unit, help) in INVENTORY {
        match kind {
            MetricKind::Counter => metrics::describe_counter!(name, unit, help),
            MetricKind::Gauge => metrics::describe_gauge!(name, unit, help),
            MetricKind::Histogram => metrics::describe_histogram!(name, unit, help),
        }
    }
}

/// Counts a session closed after a protocol violation by its router.
pub(crate) fn protocol_violation(kind: &'static str) {
    metrics::counter!(VIOLATIONS, "kind" => kind).increment(1);
}

/// Counts a call rejected for want of authentication.
pub(crate) fn unauthenticated(reason: &'static str) {
    metrics::counter!(UNAUTHENTICATED, "reason" => reason).increment(1);
}

/// Gauge of the bytes of messages being received.
pub(crate) fn receive_bytes() -> Gauge {
    metrics::gauge!(RECEIVE_BYTES)
}

/// Handles of the metrics that change with every iteration, looked up once.
pub(crate) struct StepMetrics {
    running: Gauge,
    waiting: Gauge,
    blocks_used: Gauge,
    pub commands: Gauge,
    pub iterations: Counter,
    pub step_seconds: Histogram,
    pub step_tokens: Histogram,
    pub tokens: Counter,
    pub sampled: Counter,
    drafted: Counter,
    accepted_drafts: Counter,
    pub draft_index_bytes: Gauge,
    swapped: Gauge,
    host_blocks_used: Gauge,
    recompute_preemptions: Counter,
    swap_preemptions: Counter,
    recomputed: Counter,
    admitted_tokens: Counter,
    cached_tokens: Counter,
    host_cached_tokens: Counter,
    offloaded: Counter,
    blocks_out: Counter,
    blocks_in: Counter,
    ttft_unmet: Counter,
    gap_unmet: Counter,
    anticipation_followed: Histogram,
    anticipation_in_vain: Histogram,
}

impl StepMetrics {
    pub fn new(blocks: u32) -> Self {
        metrics::gauge!(BLOCKS).set(blocks);
        Self {
            running: metrics::gauge!(RUNNING),
            waiting: metrics::gauge!(WAITING),
            blocks_used: metrics::gauge!(BLOCKS_USED),
            commands: metrics::gauge!(COMMANDS),
            iterations: metrics::counter!(ITERATIONS),
            step_seconds: metrics::histogram!(STEP_SECONDS),
            step_tokens: metrics::histogram!(STEP_TOKENS),
            tokens: metrics::counter!(TOKENS),
            sampled: metrics::counter!(SAMPLED),
            drafted: metrics::counter!(DRAFTED),
            accepted_drafts: metrics::counter!(ACCEPTED_DRAFTS),
            draft_index_bytes: metrics::gauge!(DRAFT_INDEX_BYTES),
            swapped: metrics::gauge!(SWAPPED),
            host_blocks_used: metrics::gauge!(HOST_BLOCKS_USED),
            recompute_preemptions: metrics::counter!(PREEMPTIONS, "kind" => "recompute"),
            swap_preemptions: metrics::counter!(PREEMPTIONS, "kind" => "swap"),
            recomputed: metrics::counter!(RECOMPUTED),
            admitted_tokens: metrics::counter!(ADMITTED_TOKENS),
            cached_tokens: metrics::counter!(CACHED_TOKENS),
            host_cached_tokens: metrics::counter!(HOST_CACHED_TOKENS),
            offloaded: metrics::counter!(OFFLOADED_BLOCKS),
            blocks_out: metrics::counter!(SWAPPED_BLOCKS, "direction" => "out"),
            blocks_in: metrics::counter!(SWAPPED_BLOCKS, "direction" => "in"),
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

    /// Sets the gauges to `now` and adds the difference between `before` and `now` to the counters.
    pub fn record(&self, before: &Load, now: &Load) {
        self.running.set(now.running);
        self.waiting.set(now.waiting);
        self.swapped.set(now.swapped);
        self.blocks_used.set(now.blocks_used);
        self.host_blocks_used.set(now.host_blocks_used);
        self.drafted.increment(now.drafted_tokens - before.drafted_tokens);
        self.accepted_drafts.increment(now.accepted_drafts - before.accepted_drafts);
        self.recompute_preemptions.increment(now.recompute_preemptions - before.recompute_preemptions);
        self.swap_preemptions.increment(now.swap_preemptions - before.swap_preemptions);
        self.recomputed.increment(now.recomputed_tokens - before.recomputed_tokens);
        self.admitted_tokens.increment(now.admitted_tokens - before.admitted_tokens);
        self.cached_tokens.increment(now.cached_tokens - before.cached_tokens);
        self.host_cached_tokens.increment(now.host_cached_tokens - before.host_cached_tokens);
        self.offloaded.increment(now.blocks_offloaded - before.blocks_offloaded);
        self.blocks_out.increment(now.blocks_swapped_out - before.blocks_swapped_out);
        self.blocks_in.increment(now.blocks_swapped_in - before.blocks_swapped_in);
        self.ttft_unmet.increment(now.first_token_objective_unmet - before.first_token_objective_unmet);
        self.gap_unmet.increment(now.gap_objective_unmet - before.gap_objective_unmet);
    }
}

/// Counts an iteration in which the first waiting sequence was not admitted.
pub(crate) fn blocked(reason: &'static str) {
    metrics::counter!(BLOCKED, "reason" => reason).increment(1);
}

/// Sets whether the recording has ended with an error.
pub(crate) fn recording_failed(failed: bool) {
    metrics::gauge!(RECORDING_FAILED).set(u8::from(failed));
}

pub(crate) fn sessions(change: f64) {
    metrics::gauge!(SESSIONS).increment(change);
}

pub(crate) fn session_rejected() {
    metrics::counter!(REFUSED_SESSIONS).increment(1);
}
