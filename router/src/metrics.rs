//! Table of all metrics of the router.

use metrics::Unit;

/// Kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricKind {
    /// Monotonic counter.
    Counter,
    /// Value that goes up and down.
    Gauge,
    /// Distribution, with the upper bounds of its buckets.
    Histogram(&'static [f64]),
}

/// Description of a metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Exported name.
    pub name: &'static str,
    /// Kind.
    pub kind: MetricKind,
    /// Unit.
    pub unit: Unit,
    /// Help text.
    pub help: &'static str,
    /// Names of the labels.
    pub labels: &'static [&'static str],
}

/// Buckets of request durations, in seconds (OpenTelemetry GenAI conventions).
pub const DURATION_BUCKETS: &[f64] =
    &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// Buckets of times to first token, in seconds (OpenTelemetry GenAI conventions).
pub const FIRST_TOKEN_BUCKETS: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Buckets of times between tokens, in seconds (OpenTelemetry GenAI conventions).
pub const PER_TOKEN_BUCKETS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

/// Buckets of gaps between tokens, in seconds: from a fraction of a decode step to a stall.
pub const GAP_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0,
    5.0, 10.0,
];

macro_rules! metrics_table {
    ($($id:ident = $name:literal, $kind:expr, $unit:expr, [$($label:literal),*], $help:literal;)*) => {
        $(pub(crate) const $id: &str = $name;)*

        /// All metrics of the router.
        pub const METRICS: &[Metric] = &[
            $(Metric { name: $name, kind: $kind, unit: $unit, help: $help, labels: &[$($label),*] },)*
        ];
    };
}

metrics_table! {
    REQUESTS = "inflight_router_requests_total", MetricKind::Counter, Unit::Count, ["outcome"],
        "Generate calls that ended, by outcome";
    HTTP_IGNORED_FIELDS = "inflight_router_http_ignored_fields_total", MetricKind::Counter, Unit::Count, ["api", "field"],
        "Fields of HTTP requests that had no effect, by API and name; `unknown` for those of no API";
    RECEIVE_BYTES = "inflight_router_receive_bytes", MetricKind::Gauge, Unit::Bytes, [],
        "Bytes of request messages that are being received or tokenized";
    UNREAD_BYTES = "inflight_router_unread_bytes", MetricKind::Gauge, Unit::Bytes, [],
        "Bytes of response data that clients have not read, with 8 KiB for each frame";
    TASK_PANICS = "inflight_router_task_panics_total", MetricKind::Counter, Unit::Count, ["task"],
        "Panics of background tasks, each followed by a restart, by task";
    QUEUE_BYPASSES = "inflight_router_queue_bypasses_total", MetricKind::Counter, Unit::Count, [],
        "Requests dispatched ahead of a head-of-line request that fits on no worker";
    ROUTERS = "inflight_router_cluster_routers", MetricKind::Gauge, Unit::Count, [],
        "Routers that share the workers; cluster-wide limits are divided by it";
    RECORDING_FAILED = "inflight_router_recording_failed", MetricKind::Gauge, Unit::Count, [],
        "1 if the recording (--record) has ended with an error, else 0";
    TENANT_REJECTIONS = "inflight_router_tenant_rejections_total", MetricKind::Counter, Unit::Count, ["tenant", "quota"],
        "Requests rejected by a limit of their tenant, by tenant and limit";
    THROTTLED_KEY_FAILURES = "inflight_router_throttled_key_failures_total", MetricKind::Counter, Unit::Count, [],
        "Calls with a failed API key beyond the rate of their address";
    KEY_FAILURE_ADDRESSES = "inflight_router_key_failure_addresses", MetricKind::Gauge, Unit::Count, [],
        "Client addresses whose failed API keys are counted";
    IGNORED_WEIGHTS = "inflight_router_ignored_weights_total", MetricKind::Counter, Unit::Count, [],
        "Requests without a key whose weight or priority was ignored";
    TOKENIZE_WAITING = "inflight_router_tokenize_queue_requests", MetricKind::Gauge, Unit::Count, [],
        "Requests with large prompts that wait for a tokenizer thread";
    TOKENIZE_SECONDS = "inflight_router_tokenize_queue_seconds", MetricKind::Histogram(FIRST_TOKEN_BUCKETS), Unit::Seconds, [],
        "Time that a piece of a large prompt waits for a tokenizer thread";
    TOKENIZE_CANCELLED = "inflight_router_tokenize_cancelled_total", MetricKind::Counter, Unit::Count, [],
        "Large prompts whose tokenizing ended early: cancelled, past the deadline, displaced or refused";
    GRAMMAR_WAITING = "inflight_router_grammar_queue_requests", MetricKind::Gauge, Unit::Count, [],
        "Requests with a new grammar that wait for a process to compile it";
    GRAMMAR_QUEUE_SECONDS = "inflight_router_grammar_queue_seconds", MetricKind::Histogram(FIRST_TOKEN_BUCKETS), Unit::Seconds, [],
        "Time that a request with a new grammar waits for a process to compile it";
    GRAMMAR_CANCELLED = "inflight_router_grammar_cancelled_total", MetricKind::Counter, Unit::Count, [],
        "Requests with a new grammar that ended before it was compiled: cancelled, past the deadline or displaced";
    STREAMS = "inflight_router_open_calls", MetricKind::Gauge, Unit::Count, [],
        "Open Generate and Tokenize calls";
    KSERVE_STREAMS = "inflight_router_kserve_streams", MetricKind::Gauge, Unit::Count, [],
        "Open ModelStreamInfer calls, with and without requests";
    QUEUE_REQUESTS = "inflight_router_queue_requests", MetricKind::Gauge, Unit::Count, [],
        "Requests in the queue";
    QUEUE_TOKENS = "inflight_router_queue_tokens", MetricKind::Gauge, Unit::Count, [],
        "Tokens in the queue: prompts plus max_tokens of all choices";
    QUEUE_REQUESTS_MAX = "inflight_router_queue_requests_max", MetricKind::Gauge, Unit::Count, [],
        "Maximum requests in the queue (--queue-requests-max)";
    QUEUE_TOKENS_MAX = "inflight_router_queue_tokens_max", MetricKind::Gauge, Unit::Count, [],
        "Maximum tokens in the queue (--queue-tokens-max)";
    STREAMS_MAX = "inflight_router_open_calls_max", MetricKind::Gauge, Unit::Count, [],
        "Maximum open Generate calls (--streams-max)";
    RECEIVE_BYTES_MAX = "inflight_router_receive_bytes_max", MetricKind::Gauge, Unit::Bytes, [],
        "Maximum bytes of request messages that are being received or tokenized (--receive-bytes-max)";
    UNREAD_BYTES_MAX = "inflight_router_unread_bytes_max", MetricKind::Gauge, Unit::Bytes, [],
        "Maximum bytes of response data that clients have not read (--unread-bytes-max)";
    TOKENIZE_WAITING_MAX = "inflight_router_tokenize_queue_requests_max", MetricKind::Gauge, Unit::Count, [],
        "Maximum requests with large prompts that wait for a tokenizer thread, and with new grammars that wait for a process (--tokenize-queue-max)";
    BYPASS_MAX = "inflight_router_bypass_max", MetricKind::Gauge, Unit::Count, [],
        "Maximum requests dispatched ahead of a head-of-line request that fits on no worker (--bypass-max)";
    WORKER_COMMANDS_MAX = "inflight_router_worker_command_queue_messages_max", MetricKind::Gauge, Unit::Count, [],
        "Maximum messages to a worker that it has not read (--worker-commands-max)";
    RETRY_RATE = "inflight_router_retry_rate", MetricKind::Gauge, Unit::Count, [],
        "Maximum resubmissions a second after losses of workers (--retry-rate)";
    MODEL_WORKERS = "inflight_router_model_workers", MetricKind::Gauge, Unit::Count, ["model"],
        "Workers that serve a model and do not drain";
    MODEL_QUEUE_REQUESTS = "inflight_router_model_queue_requests", MetricKind::Gauge, Unit::Count, ["model"],
        "Requests in the queue, by model";
    MODEL_SEQUENCES = "inflight_router_model_sequences", MetricKind::Gauge, Unit::Count, ["model"],
        "Sequences in flight at workers from this router, by model";
    MODEL_KV_BLOCKS = "inflight_router_model_kv_blocks", MetricKind::Gauge, Unit::Count, ["model"],
        "KV blocks in the pools of the connected workers, by model";
    MODEL_KV_BLOCKS_USED = "inflight_router_model_kv_blocks_used", MetricKind::Gauge, Unit::Count, ["model"],
        "KV blocks in use in the pools of the connected workers, by requests of all routers, by model";
    COLD_START_REQUESTS = "inflight_router_cold_start_requests", MetricKind::Gauge, Unit::Count, ["model"],
        "Requests held until a worker serves their model, one of --expect-models";
    FINISHED_CHOICES = "inflight_router_finished_choices_total", MetricKind::Counter, Unit::Count, ["model", "reason"],
        "Choices of admitted requests that ended, by finish reason: stop, length, deadline, cancelled or error";
    QUEUE_SECONDS = "inflight_router_queue_seconds", MetricKind::Histogram(FIRST_TOKEN_BUCKETS), Unit::Seconds, ["model"],
        "Queueing time of a request, from arrival to its first dispatch";
    WORKERS_CONFIGURED = "inflight_router_workers_configured", MetricKind::Gauge, Unit::Count, [],
        "Workers named by discovery";
    WORKERS_CONNECTED = "inflight_router_workers_connected", MetricKind::Gauge, Unit::Count, [],
        "Workers with an open session";
    SESSIONS_LOST = "inflight_router_sessions_lost_total", MetricKind::Counter, Unit::Count, ["worker"],
        "Sessions that ended other than by a drain";
    WORKER_REQUESTS = "inflight_router_worker_requests", MetricKind::Gauge, Unit::Count, ["worker"],
        "Requests in flight at a worker from this router";
    WORKER_SEQUENCES = "inflight_router_worker_sequences", MetricKind::Gauge, Unit::Count, ["worker"],
        "Sequences in flight at a worker from this router";
    WORKER_SEQUENCES_GRANTED = "inflight_router_worker_sequences_granted", MetricKind::Gauge, Unit::Count, ["worker"],
        "Sequences that a worker grants this router";
    WORKER_BLOCKS = "inflight_router_worker_blocks", MetricKind::Gauge, Unit::Count, ["worker"],
        "KV blocks reserved at a worker by requests of this router";
    WORKER_BLOCKS_GRANTED = "inflight_router_worker_blocks_granted", MetricKind::Gauge, Unit::Count, ["worker"],
        "KV blocks that a worker grants this router";
    WORKER_COMMANDS = "inflight_router_worker_command_queue_messages", MetricKind::Gauge, Unit::Count, ["worker"],
        "Messages to a worker that it has not read";
    COMMAND_OVERFLOWS = "inflight_router_worker_command_overflows_total", MetricKind::Counter, Unit::Count, ["worker"],
        "Sessions closed because the worker did not read its commands";
    RESUBMISSIONS = "inflight_router_resubmissions_total", MetricKind::Counter, Unit::Count, ["reason"],
        "Requests resubmitted after their session was lost or their worker returned them, by reason";
    FINGERPRINT_CHANGES = "inflight_router_fingerprint_changes_total", MetricKind::Counter, Unit::Count, [],
        "Streams that continued on a worker with another numerics fingerprint; their tokens may differ";
    MIXED_FINGERPRINTS = "inflight_router_mixed_fingerprint_models", MetricKind::Gauge, Unit::Count, [],
        "Models whose workers have different numerics fingerprints: their streams may fail over to other tokens";
    QUARANTINED_REQUESTS = "inflight_router_quarantined_requests_total", MetricKind::Counter, Unit::Count, [],
        "Requests quarantined after two workers in a row were lost before their first token";
    RETRY_QUEUE = "inflight_router_retry_queue_requests", MetricKind::Gauge, Unit::Count, [],
        "Resubmissions that wait for the retry budget";
    QUARANTINE = "inflight_router_quarantine_queue_requests", MetricKind::Gauge, Unit::Count, [],
        "Quarantined requests that wait for a worker of their own";
    PAUSED_STREAMS = "inflight_router_paused_streams_total", MetricKind::Counter, Unit::Count, [],
        "Requests paused because their client fell too far behind its stream";
    EJECTIONS = "inflight_router_ejections_total", MetricKind::Counter, Unit::Count, [],
        "Outlier ejections: workers excluded from placement after consecutive failures";
    WORKERS_EJECTED = "inflight_router_workers_ejected", MetricKind::Gauge, Unit::Count, [],
        "Workers that are ejected now";
    VIOLATIONS = "inflight_router_protocol_violations_total", MetricKind::Counter, Unit::Count, ["worker", "kind"],
        "Sessions closed after a protocol violation by the worker, by kind";
    DISCOVERY_FAILURES = "inflight_router_discovery_failures_total", MetricKind::Counter, Unit::Count, ["source"],
        "Failed lookups of workers, by discovery source";
    PREFIX_INDEX_BLOCKS = "inflight_router_prefix_index_blocks", MetricKind::Gauge, Unit::Count, [],
        "KV blocks in the prefix index, over all workers";
    PREFIX_INDEX_RESYNCS = "inflight_router_prefix_index_resyncs_total", MetricKind::Counter, Unit::Count, ["worker"],
        "Snapshots of a worker's prefix cache requested after missed events";
    PREFIX_INDEX_OVERFULL = "inflight_router_prefix_index_dropped_events_total", MetricKind::Counter, Unit::Count, ["worker"],
        "Prefix-cache events dropped: the worker reported more blocks than it has";
    PLACED_TOKENS = "inflight_router_dispatched_prompt_tokens_total", MetricKind::Counter, Unit::Count, [],
        "Prompt tokens of dispatched requests, resubmissions included";
    PLACED_CACHED_TOKENS = "inflight_router_dispatched_cached_tokens_total", MetricKind::Counter, Unit::Count, [],
        "Dispatched prompt tokens that the router expected in the worker's prefix cache";
    STALE_UPDATES = "inflight_router_stale_updates_total", MetricKind::Counter, Unit::Count, [],
        "Sequence updates dropped: they belong to an older attempt or to no request in flight";
    STALLED_STREAMS = "inflight_router_stalled_streams_total", MetricKind::Counter, Unit::Count, [],
        "Streams whose client fell more than 256 tokens behind";
    PROMPT_TOKENS = "inflight_router_prompt_tokens_total", MetricKind::Counter, Unit::Count, ["model"],
        "Prompt tokens of dispatched requests, once per request";
    COMPLETION_TOKENS = "inflight_router_completion_tokens_total", MetricKind::Counter, Unit::Count, ["model"],
        "Tokens delivered to clients";
    UNBILLED_TOKENS = "inflight_router_unbilled_tokens_total", MetricKind::Counter, Unit::Count, ["model"],
        "Tokens generated past a stop string or a cancellation, delivered to no client";
    GRAMMAR_SECONDS = "inflight_router_grammar_compile_seconds", MetricKind::Histogram(FIRST_TOKEN_BUCKETS), Unit::Seconds, [],
        "Duration of compiling the grammar of a request";
    GRAMMAR_LOOKUPS = "inflight_router_grammar_cache_lookups_total", MetricKind::Counter, Unit::Count, ["outcome"],
        "Grammars of requests, by whether the cache had their outcome: hit, miss";
    GRAMMARS = "inflight_router_grammar_cache_entries", MetricKind::Gauge, Unit::Count, [],
        "Entries of the cache of compiled grammars, of the model used last";
    GRAMMARS_REFUSED = "inflight_router_grammars_refused_total", MetricKind::Counter, Unit::Count, [],
        "Requests refused for their grammar";
    USAGE_LINES = "inflight_router_usage_lines_total", MetricKind::Counter, Unit::Count, [],
        "Lines written to the usage log and synced";
    USAGE_LINES_LOST = "inflight_router_usage_lines_lost_total", MetricKind::Counter, Unit::Count, [],
        "Requests without a line in the usage log, which could not be written; each line is in the router's log";
    USAGE_QUEUE = "inflight_router_usage_queue_lines", MetricKind::Gauge, Unit::Count, [],
        "Lines that wait to be written to the usage log and synced";
    USAGE_ERRORS = "inflight_router_usage_log_errors_total", MetricKind::Counter, Unit::Count, [],
        "Failed attempts to write or sync the usage log; it is retried";
    USAGE_FILES_REMOVED = "inflight_router_usage_files_removed_total", MetricKind::Counter, Unit::Count, [],
        "Oldest files of the usage log, removed by the limit on their number";
    REQUEST_SECONDS = "gen_ai_server_request_duration_seconds", MetricKind::Histogram(DURATION_BUCKETS), Unit::Seconds,
        ["gen_ai_request_model", "gen_ai_operation_name", "error_type"],
        "Request duration, from arrival to the last token";
    FIRST_TOKEN_SECONDS = "gen_ai_server_time_to_first_token_seconds", MetricKind::Histogram(FIRST_TOKEN_BUCKETS),
        Unit::Seconds, ["gen_ai_request_model", "gen_ai_operation_name"],
        "Time to first token, from arrival";
    VIEWERS = "inflight_router_viewers", MetricKind::Gauge, Unit::Count, [],
        "Viewers of the live view (Watch and /ui/events)";
    VIEWERS_REFUSED = "inflight_router_viewers_refused_total", MetricKind::Counter, Unit::Count, [],
        "Viewers refused by the limit of --viewers-max";
    VIEWER_BYTES = "inflight_router_viewer_bytes_total", MetricKind::Counter, Unit::Bytes, ["protocol"],
        "Bytes sent to viewers of the live view, by protocol";
    VIEWER_SKIPPED_UPDATES = "inflight_router_viewer_skipped_updates_total", MetricKind::Counter, Unit::Count, [],
        "Updates left out because a viewer read too slowly or its --viewer-bytes-per-second were spent";
    INTER_TOKEN_SECONDS = "inflight_router_inter_token_seconds", MetricKind::Histogram(GAP_BUCKETS), Unit::Seconds,
        ["model"],
        "Every gap between tokens of a choice, as they come from the worker; tokens that come together are one";
    PER_TOKEN_SECONDS = "gen_ai_server_time_per_output_token_seconds", MetricKind::Histogram(PER_TOKEN_BUCKETS),
        Unit::Seconds, ["gen_ai_request_model", "gen_ai_operation_name"],
        "Mean time between the tokens of a request after its first";
}

/// Registers kind, unit and help of every metric with the installed recorder.
pub fn describe() {
    inflight_net::metrics::describe();
    for metric in METRICS {
        match metric.kind {
            MetricKind::Counter => metrics::describe_counter!(metric.name, metric.unit, metric.help),
            MetricKind::Gauge => {
                metrics::describe_gauge!(metric.name, metric.unit, metric.help);
                // Exported from the start, so that zero differs from unknown.
                if metric.labels.is_empty() {
                    metrics::gauge!(metric.name).increment(0.0);
                }
            }
            MetricKind::Histogram(_) => metrics::describe_histogram!(metric.name, metric.unit, metric.help),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_are_unique_and_contain_their_unit() {
        for (at, metric) in METRICS.iter().enumerate() {
            assert!(METRICS[..at].iter().all(|other| other.name != metric.name), "{} twice", metric.name);
            assert_eq!(
                matches!(metric.kind, MetricKind::Counter),
                metric.name.ends_with("_total"),
                "{}",
                metric.name
            );
            if let MetricKind::Histogram(buckets) = metric.kind {
                assert!(buckets.is_sorted() && metric.name.ends_with("_seconds"), "{}", metric.name);
            }
        }
    }
}
