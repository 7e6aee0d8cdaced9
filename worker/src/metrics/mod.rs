//! Inventory of the worker's Prometheus metrics.

mod groups;
mod step;
mod tenants;

use std::time::Duration;

pub(crate) use groups::GroupMetrics;
use inflight_runtime::{DEVICE_COMMANDS, GEMM_REJECTIONS, GPU_PATH, PROMISED_BYTES};
use inflight_worker_core::policy::Aging;
use metrics::{Gauge, Unit};
pub(crate) use step::StepMetrics;
pub(crate) use tenants::TenantMetrics;

pub(crate) const ENDED: &str = "inflight_worker_finished_sequences_total";
pub(crate) const NON_FINITE: &str = "inflight_worker_non_finite_sequences_total";
const SELF_TESTS: &str = "inflight_worker_self_tests_total";
const RUNNING: &str = "inflight_worker_running_sequences";
const WAITING: &str = "inflight_worker_waiting_sequences";
const BLOCKS_USED: &str = "inflight_worker_kv_blocks_used";
const BLOCKS: &str = "inflight_worker_kv_blocks";
const SESSIONS: &str = "inflight_worker_sessions";
const QUEUED_BYTES: &str = "inflight_worker_queued_submission_bytes";
const BUNDLE_STREAMS: &str = "inflight_worker_bundle_streams";
const COMMANDS: &str = "inflight_worker_engine_queue_commands";
const ITERATIONS: &str = "inflight_worker_iterations_total";
const STEP_SECONDS: &str = "inflight_worker_iteration_seconds";
const STEP_TOKENS: &str = "inflight_worker_iteration_tokens";
const TOKENS: &str = "inflight_worker_tokens_total";
const STEP_DECODES: &str = "inflight_worker_iteration_decodes";
const STEP_PREFILL_TOKENS: &str = "inflight_worker_iteration_prefill_tokens";
const PREFILL_TOKENS: &str = "inflight_worker_prefill_tokens_total";
const PREDICTION: &str = "inflight_worker_iteration_prediction_ratio";
const QUEUE_SECONDS: &str = "inflight_worker_queue_seconds";
const TOTAL_QUEUE_SECONDS: &str = "inflight_worker_total_queue_seconds";
const TENANT_SERVICE: &str = "inflight_worker_tenant_service_tokens_total";
const TENANT_WEIGHT: &str = "inflight_worker_tenant_weight";
const MODEL_INFO: &str = "inflight_worker_model_info";
const UNFILLED: &str = "inflight_worker_kv_unfilled_tokens";
const BLOCK_TOKENS: &str = "inflight_worker_kv_block_tokens";
const BLOCK_BYTES: &str = "inflight_worker_kv_block_bytes";
const GROUP_BLOCKS: &str = "inflight_worker_kv_group_blocks";
const GROUP_LAYERS: &str = "inflight_worker_kv_group_layers";
const GROUP_SPAN_BLOCKS: &str = "inflight_worker_kv_group_span_blocks";
const GROUP_UNUSED: &str = "inflight_worker_kv_group_unused_bytes";
const STATE_BLOCKS: &str = "inflight_worker_kv_state_blocks";
const SNAPSHOTS: &str = "inflight_worker_kv_snapshots";
const HOST_BLOCKS: &str = "inflight_worker_host_kv_blocks";
const SEQUENCES_MAX: &str = "inflight_worker_sequences_max";
const BATCH_TOKENS_MAX: &str = "inflight_worker_batch_tokens_max";
const WAITING_MAX: &str = "inflight_worker_waiting_sequences_max";
const CONTEXT_MAX: &str = "inflight_worker_context_tokens_max";
const KV_WATERMARK: &str = "inflight_worker_kv_watermark_blocks";
const DECODE_RESERVE: &str = "inflight_worker_decode_reserve_tokens";
const PREEMPTION_THRESHOLD: &str = "inflight_worker_preemption_threshold";
const BYPASS_MAX: &str = "inflight_worker_bypass_max";
const AGING_THRESHOLD: &str = "inflight_worker_aging_threshold_seconds";
const AGING_TOKENS_PER_SECOND: &str = "inflight_worker_aging_tokens_per_second";
const AGING_TOKENS_MAX: &str = "inflight_worker_aging_tokens_max";
const AGING_LEVEL_EVERY: &str = "inflight_worker_aging_level_seconds";
const AGING_LEVELS_MAX: &str = "inflight_worker_aging_levels_max";
const DRAFTS_MAX: &str = "inflight_worker_drafts_max";
const SESSIONS_MAX: &str = "inflight_worker_sessions_max";
const SWAPPED_BYTES: &str = "inflight_worker_swapped_bytes_total";
const PREEMPTION_COST: &str = "inflight_worker_preemption_predicted_microseconds_total";
const EVICTED_HITS: &str = "inflight_worker_evicted_hit_tokens_total";
const SAMPLED: &str = "inflight_worker_generated_tokens_total";
const DRAFTED: &str = "inflight_worker_drafted_tokens_total";
const ACCEPTED_DRAFTS: &str = "inflight_worker_accepted_drafts_total";
const PREDICTED: &str = "inflight_worker_predicted_tokens_total";
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
const UNREAD_BYTES: &str = "inflight_worker_unread_bytes";
const VIOLATIONS: &str = "inflight_worker_protocol_violations_total";
const UNAUTHENTICATED: &str = "inflight_worker_unauthenticated_calls_total";
const RECORDING_FAILED: &str = "inflight_worker_recording_failed";
const REFUSED_SESSIONS: &str = "inflight_worker_sessions_rejected_total";
pub(crate) const MASK_SECONDS: &str = "inflight_worker_mask_seconds";
pub(crate) const MASK_WAIT_SECONDS: &str = "inflight_worker_mask_wait_seconds";
pub(crate) const GRAMMAR_SECONDS: &str = "inflight_worker_grammar_compile_seconds";
const GRAMMAR_LOOKUPS: &str = "inflight_worker_grammar_cache_lookups_total";
const GRAMMARS: &str = "inflight_worker_grammar_cache_entries";
pub(crate) const MATCHER_BYTES: &str = "inflight_worker_matcher_bytes";
const OBSERVERS: &str = "inflight_worker_observers";
const DROPPED_ITERATIONS: &str = "inflight_worker_observed_iterations_dropped_total";

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

/// Buckets of the durations of token masks, in seconds.
pub const MASK_SECONDS_BUCKETS: &[f64] =
    &[1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1];

/// Name, kind, unit and help text of every metric that a worker exports.
pub const INVENTORY: &[(&str, MetricKind, Unit, &str)] = &[
    (RUNNING, MetricKind::Gauge, Unit::Count, "Sequences in the running batch"),
    (WAITING, MetricKind::Gauge, Unit::Count, "Sequences that wait for admission to the batch"),
    (BLOCKS_USED, MetricKind::Gauge, Unit::Count, "KV blocks in use"),
    (BLOCKS, MetricKind::Gauge, Unit::Count, "KV blocks in the pool"),
    (UNFILLED, MetricKind::Gauge, Unit::Count, "Positions of running sequences' KV blocks without a token"),
    (BLOCK_TOKENS, MetricKind::Gauge, Unit::Count, "Tokens per KV block (--block-tokens)"),
    (BLOCK_BYTES, MetricKind::Gauge, Unit::Bytes, "Bytes per KV block; 0 on simulated devices"),
    (GROUP_BLOCKS, MetricKind::Gauge, Unit::Count, "KV blocks of running sequences, by group of layers"),
    (GROUP_LAYERS, MetricKind::Gauge, Unit::Count, "Layers by group: those that keep the same positions"),
    (GROUP_SPAN_BLOCKS, MetricKind::Gauge, Unit::Count, "KV blocks per --block-tokens tokens, by group"),
    (GROUP_UNUSED, MetricKind::Gauge, Unit::Bytes, "Unused bytes of these blocks, by group of layers"),
    (STATE_BLOCKS, MetricKind::Gauge, Unit::Count, "KV blocks of running sequences' recurrent states"),
    (SNAPSHOTS, MetricKind::Gauge, Unit::Count, "Snapshots of recurrent states in the prefix cache"),
    (HOST_BLOCKS, MetricKind::Gauge, Unit::Count, "KV blocks in the host pool (--host-cache-bytes)"),
    (
        SEQUENCES_MAX,
        MetricKind::Gauge,
        Unit::Count,
        "Maximum sequences in the running batch (--max-sequences)",
    ),
    (BATCH_TOKENS_MAX, MetricKind::Gauge, Unit::Count, "Maximum tokens of an iteration (--max-batch-tokens)"),
    (WAITING_MAX, MetricKind::Gauge, Unit::Count, "Maximum sequences that wait for admission to the batch"),
    (
        CONTEXT_MAX,
        MetricKind::Gauge,
        Unit::Count,
        "Maximum tokens of a sequence: the context length (--max-context-tokens), or what the KV pool holds",
    ),
    (
        KV_WATERMARK,
        MetricKind::Gauge,
        Unit::Count,
        "KV blocks that admission keeps free for the growth of running sequences (--kv-watermark)",
    ),
    (
        DECODE_RESERVE,
        MetricKind::Gauge,
        Unit::Count,
        "Output tokens for which a sequence reserves KV blocks at admission (--decode-reserve-tokens)",
    ),
    (
        PREEMPTION_THRESHOLD,
        MetricKind::Gauge,
        Unit::Count,
        "Minimum difference of priorities for a waiting sequence to preempt a running one (--preemption-threshold)",
    ),
    (
        BYPASS_MAX,
        MetricKind::Gauge,
        Unit::Count,
        "Maximum sequences admitted past a waiting one for which too few KV blocks are free (--bypass-max)",
    ),
    (
        AGING_THRESHOLD,
        MetricKind::Gauge,
        Unit::Seconds,
        "Queueing time after which a sequence goes before all that have waited less, with --policy fair (--aging-threshold)",
    ),
    (
        AGING_TOKENS_PER_SECOND,
        MetricKind::Gauge,
        Unit::Count,
        "Service forgiven per second of queueing, with --policy fair (--aging-tokens-per-second)",
    ),
    (
        AGING_TOKENS_MAX,
        MetricKind::Gauge,
        Unit::Count,
        "Maximum service forgiven for queueing, with --policy fair (--aging-tokens-max)",
    ),
    (
        AGING_LEVEL_EVERY,
        MetricKind::Gauge,
        Unit::Seconds,
        "Queueing time per priority level gained, with --policy priority (--aging-level-every)",
    ),
    (
        AGING_LEVELS_MAX,
        MetricKind::Gauge,
        Unit::Count,
        "Maximum priority levels gained by queueing, with --policy priority (--aging-levels-max)",
    ),
    (
        DRAFTS_MAX,
        MetricKind::Gauge,
        Unit::Count,
        "Maximum tokens drafted for a sequence and iteration (--drafts-max); 0 without drafts",
    ),
    (SESSIONS_MAX, MetricKind::Gauge, Unit::Count, "Maximum open sessions with routers (--max-sessions)"),
    (SESSIONS, MetricKind::Gauge, Unit::Count, "Open sessions with routers"),
    (
        QUEUED_BYTES,
        MetricKind::Gauge,
        Unit::Bytes,
        "Memory of submissions that the engine has not taken yet, at most 256 MiB; at the limit, sessions read no further messages",
    ),
    (BUNDLE_STREAMS, MetricKind::Gauge, Unit::Count, "Model bundles being sent to routers, at most 64"),
    (OBSERVERS, MetricKind::Gauge, Unit::Count, "Observers of the iterations, for live views"),
    (
        DROPPED_ITERATIONS,
        MetricKind::Counter,
        Unit::Count,
        "Iterations that an observer missed because it read too slowly",
    ),
    (COMMANDS, MetricKind::Gauge, Unit::Count, "Commands queued for the engine"),
    (
        DEVICE_COMMANDS,
        MetricKind::Gauge,
        Unit::Count,
        "Commands queued for the GPU's device thread; 0 on other devices",
    ),
    (
        GPU_PATH,
        MetricKind::Gauge,
        Unit::Count,
        "1 if a fast path of the GPU is in use, else 0, by path; the log says why one is not",
    ),
    (
        GEMM_REJECTIONS,
        MetricKind::Counter,
        Unit::Count,
        "GEMM algorithms that rejected a number of rows they had been chosen for; another one computes it since",
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
        MASK_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Duration of computing the token mask of a constrained choice",
    ),
    (
        MASK_WAIT_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Time for which the engine waited for the token masks of an iteration",
    ),
    (
        GRAMMAR_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Duration of compiling the grammar of a submission",
    ),
    (
        GRAMMAR_LOOKUPS,
        MetricKind::Counter,
        Unit::Count,
        "Grammars of submissions, by whether the cache had them: hit, miss",
    ),
    (GRAMMARS, MetricKind::Gauge, Unit::Count, "Entries of the cache of compiled grammars"),
    (
        MATCHER_BYTES,
        MetricKind::Gauge,
        Unit::Bytes,
        "Memory of the grammar states of all constrained choices, estimated",
    ),
    (
        STEP_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Duration of an iteration: forward pass and sampling",
    ),
    (STEP_TOKENS, MetricKind::Histogram, Unit::Count, "Tokens computed in an iteration"),
    (TOKENS, MetricKind::Counter, Unit::Count, "Tokens computed: prompt, recomputed and generated"),
    (STEP_DECODES, MetricKind::Histogram, Unit::Count, "Sequences that decode in an iteration"),
    (STEP_PREFILL_TOKENS, MetricKind::Histogram, Unit::Count, "Prompt tokens computed in an iteration"),
    (PREFILL_TOKENS, MetricKind::Counter, Unit::Count, "Prompt tokens computed, recomputed ones included"),
    (
        PREDICTION,
        MetricKind::Histogram,
        Unit::Count,
        "Measured over predicted duration of an iteration: the error of the cost model",
    ),
    (
        QUEUE_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Queueing time of a sequence in the worker, from its submission to its first admission to the batch",
    ),
    (
        TOTAL_QUEUE_SECONDS,
        MetricKind::Histogram,
        Unit::Seconds,
        "Queueing time of a sequence in router and worker together, from the request's arrival at the router to its first \
         admission to the batch; sequences that continue after a failure do not count",
    ),
    (
        TENANT_SERVICE,
        MetricKind::Counter,
        Unit::Count,
        "Service by tenant: computed prompt tokens count once, generated ones twice, recomputed ones not; at most 100 tenants \
         have a label of their own, the rest is `(other)`",
    ),
    (
        TENANT_WEIGHT,
        MetricKind::Gauge,
        Unit::Count,
        "Weight by tenant, of the tenants with a label of their own: its fair share is the weight over the sum of the weights \
         of those that have work",
    ),
    (
        MODEL_INFO,
        MetricKind::Gauge,
        Unit::Count,
        "1, with the served model, its architecture and the numerics fingerprint as labels",
    ),
    (SAMPLED, MetricKind::Counter, Unit::Count, "Tokens generated"),
    (DRAFTED, MetricKind::Counter, Unit::Count, "Drafted tokens computed and verified (--drafts)"),
    (ACCEPTED_DRAFTS, MetricKind::Counter, Unit::Count, "Drafted tokens that became output"),
    (PREDICTED, MetricKind::Counter, Unit::Count, "Tokens predicted by the MTP layer (--drafts mtp, auto)"),
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
    (
        SWAPPED_BYTES,
        MetricKind::Counter,
        Unit::Bytes,
        "Bytes of KV blocks swapped between device and host, by direction",
    ),
    (
        PREEMPTION_COST,
        MetricKind::Counter,
        Unit::Count,
        "Predicted cost of all preemptions in microseconds, by kind: if all were by recompute, if all were by swap, and as \
         chosen",
    ),
    (
        EVICTED_HITS,
        MetricKind::Counter,
        Unit::Count,
        "Admitted tokens whose blocks had been evicted from the prefix cache: hits of a pool twice as large",
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
    (
        NON_FINITE,
        MetricKind::Counter,
        Unit::Count,
        "Sequences that failed because logits were infinite or NaN: the model overflows on them, or the device is broken",
    ),
    (
        SELF_TESTS,
        MetricKind::Counter,
        Unit::Count,
        "Self-tests, by outcome: passed, failed, or without an answer",
    ),
    (RECEIVE_BYTES, MetricKind::Gauge, Unit::Bytes, "Bytes of router messages that are being received"),
    (
        UNREAD_BYTES,
        MetricKind::Gauge,
        Unit::Bytes,
        "Bytes of responses that routers have not read, with 8 KiB for each frame; beyond 256 MiB, connections without progress are closed",
    ),
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

/// Histogram buckets of the decoding sequences per iteration.
pub const STEP_DECODES_BUCKETS: &[f64] = &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
/// Histogram buckets of the prompt tokens per iteration; the first one counts iterations without prefill.
pub const STEP_PREFILL_TOKENS_BUCKETS: &[f64] =
    &[0.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0];
/// Histogram buckets of measured over predicted durations.
pub const PREDICTION_BUCKETS: &[f64] = &[0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0];
/// Histogram buckets of the queueing times, in seconds.
pub const QUEUE_SECONDS_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Histogram buckets by metric name.
pub const BUCKETS: &[(&str, &[f64])] = &[
    (STEP_DECODES, STEP_DECODES_BUCKETS),
    (STEP_PREFILL_TOKENS, STEP_PREFILL_TOKENS_BUCKETS),
    (PREDICTION, PREDICTION_BUCKETS),
    (QUEUE_SECONDS, QUEUE_SECONDS_BUCKETS),
    (TOTAL_QUEUE_SECONDS, QUEUE_SECONDS_BUCKETS),
    (STEP_TOKENS, STEP_TOKENS_BUCKETS),
    (STEP_SECONDS, STEP_SECONDS_BUCKETS),
    (MASK_SECONDS, MASK_SECONDS_BUCKETS),
    (MASK_WAIT_SECONDS, MASK_SECONDS_BUCKETS),
    (GRAMMAR_SECONDS, STEP_SECONDS_BUCKETS),
    (ANTICIPATION_SECONDS, ANTICIPATION_SECONDS_BUCKETS),
];

/// Returns the names of a metric's labels.
pub fn labels(metric: &str) -> &'static [&'static str] {
    match metric {
        GPU_PATH => &["path"],
        GRAMMAR_LOOKUPS | ANTICIPATION_SECONDS | SELF_TESTS => &["outcome"],
        TENANT_SERVICE | TENANT_WEIGHT => &["tenant"],
        MODEL_INFO => &["model", "architecture", "fingerprint"],
        PREEMPTIONS | PREEMPTION_COST | VIOLATIONS => &["kind"],
        SWAPPED_BLOCKS | SWAPPED_BYTES => &["direction"],
        SLO_UNMET => &["objective"],
        GROUP_BLOCKS | GROUP_LAYERS | GROUP_SPAN_BLOCKS | GROUP_UNUSED => &["group"],
        BLOCKED | ENDED | UNAUTHENTICATED => &["reason"],
        _ => &[],
    }
}

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

/// Gauge of the bytes of responses that peers have not read.
pub(crate) fn unread_bytes() -> Gauge {
    metrics::gauge!(UNREAD_BYTES)
}

/// Records the lookup of a submission's grammar: whether the cache had it, and how long it took.
pub(crate) fn grammar_lookup(hit: bool, took: Duration, entries: usize) {
    metrics::counter!(GRAMMAR_LOOKUPS, "outcome" => if hit { "hit" } else { "miss" }).increment(1);
    if !hit {
        metrics::histogram!(GRAMMAR_SECONDS).record(took.as_secs_f64());
    }
    metrics::gauge!(GRAMMARS).set(entries as f64);
}

/// Counts an iteration in which the first waiting sequence was not admitted.
pub(crate) fn blocked(reason: &'static str) {
    metrics::counter!(BLOCKED, "reason" => reason).increment(1);
}

/// Counts a self-test.
pub(crate) fn self_test(outcome: &'static str) {
    metrics::counter!(SELF_TESTS, "outcome" => outcome).increment(1);
}

/// Sets whether the recording has ended with an error.
pub(crate) fn recording_failed(failed: bool) {
    metrics::gauge!(RECORDING_FAILED).set(u8::from(failed));
}

pub(crate) fn sessions(change: f64) {
    metrics::gauge!(SESSIONS).increment(change);
}

/// Increments the gauge of bytes of queued submissions by a change in KiB.
pub(crate) fn queued_kib(change: f64) {
    metrics::gauge!(QUEUED_BYTES).increment(change * 1024.0);
}

pub(crate) fn bundle_streams(change: f64) {
    metrics::gauge!(BUNDLE_STREAMS).increment(change);
}

pub(crate) fn observers(change: f64) {
    metrics::gauge!(OBSERVERS).increment(change);
}

/// Counts an iteration that an observer missed.
pub(crate) fn iteration_dropped() {
    metrics::counter!(DROPPED_ITERATIONS).increment(1);
}

/// Sets the gauge of the session limit.
pub(crate) fn sessions_max(max: usize) {
    metrics::gauge!(SESSIONS_MAX).set(max as f64);
}

/// Sets the gauges of the aging of waiting sequences.
pub(crate) fn aging(aging: &Aging) {
    metrics::gauge!(AGING_THRESHOLD).set(aging.threshold.as_secs_f64());
    metrics::gauge!(AGING_TOKENS_PER_SECOND).set(aging.tokens_per_second);
    metrics::gauge!(AGING_TOKENS_MAX).set(aging.tokens_max);
    metrics::gauge!(AGING_LEVEL_EVERY).set(aging.level_every.as_secs_f64());
    metrics::gauge!(AGING_LEVELS_MAX).set(aging.levels_max);
}

/// Exports the served model.
pub(crate) fn model_info(model: &str, architecture: &str, fingerprint: &str) {
    let labels = [("model", model), ("architecture", architecture), ("fingerprint", fingerprint)];
    let labels = labels.map(|(name, value)| metrics::Label::new(name, value.to_owned()));
    metrics::gauge!(MODEL_INFO, labels.to_vec()).set(1);
}

pub(crate) fn session_rejected() {
    metrics::counter!(REFUSED_SESSIONS).increment(1);
}
