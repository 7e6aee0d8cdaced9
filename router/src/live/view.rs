//! What viewers see, free of the wire format. As JSON it follows the proto3 mapping, with three differences: 64-bit integers
//! are numbers, enums are lower-case words, and default values are left out.

use std::sync::Arc;

use serde::Serialize;

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Defines view structs whose fields with default values are omitted from their JSON.
macro_rules! views {
    ($($(#[$doc:meta])* struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $of:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Default, PartialEq, Serialize)]
            #[serde(rename_all = "camelCase")]
            pub(crate) struct $name {
                $(
                    $(#[$field_doc])*
                    #[serde(skip_serializing_if = "is_default")]
                    pub(crate) $field: $of,
                )*
            }
        )*
    };
}

/// State of a request or of a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Unknown.
    #[default]
    Unspecified,
    /// In the router's queue.
    Queued,
    /// At a worker, before its first iteration.
    Waiting,
    /// The prompt is being computed.
    Prefill,
    /// Generating.
    Decode,
    /// Preempted, to be recomputed.
    Preempted,
    /// Preempted, with its blocks in the host pool.
    Swapped,
    /// Waits for the retry budget.
    Retry,
    /// Waits for a worker of its own.
    Quarantined,
    /// Paused: the client does not read.
    Paused,
    /// Ended.
    Ended,
}

/// State of the connection to a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WorkerState {
    /// Disconnected: no open session.
    #[default]
    Disconnected,
    /// Connected: an open session.
    Connected,
    /// Draining: finishes its requests and accepts no new ones.
    Draining,
    /// Excluded from placement after failures.
    Ejected,
}

impl WorkerState {
    /// Returns its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::Connected => "connected",
            Self::Draining => "draining",
            Self::Ejected => "ejected",
        }
    }
}

views! {
    /// A request.
    struct RequestView {
        number: u64,
        request_id: Arc<str>,
        tenant: Arc<str>,
        model: Arc<str>,
        priority: i32,
        state: State,
        age_ms: u64,
        prompt_tokens: u32,
        cached_tokens: u32,
        computed_tokens: u32,
        output_tokens: u32,
        max_tokens: u32,
        choices: u32,
        kv_blocks: u32,
        worker: Arc<str>,
        attempts: u32,
        waiting_reason: Arc<str>,
        outcome: Arc<str>,
    }

    /// Change in the life of a request.
    struct LifeEventView {
        at_ms: u64,
        kind: &'static str,
        worker: Arc<str>,
        detail: String,
        iteration: u64,
        at_us: u64,
    }

    /// Life of a request.
    struct LifeView {
        request: RequestView,
        events: Vec<LifeEventView>,
        omitted_events: u32,
        age_us: u64,
        trace_id: String,
        trace_url: String,
    }

    /// Percentiles of the last minute, in milliseconds.
    struct Percentiles {
        p50: f64,
        p90: f64,
        p99: f64,
    }

    /// The whole cluster.
    struct ClusterView {
        router: Arc<str>,
        version: &'static str,
        routers: u32,
        open_requests: u32,
        queued_requests: u32,
        in_flight_requests: u32,
        retrying_requests: u32,
        output_tokens_per_second: f64,
        prompt_tokens_per_second: f64,
        ended_per_second: f64,
        first_token_ms: Percentiles,
        gap_ms: Percentiles,
        queue_ms: Percentiles,
        viewers: u32,
        models: Vec<String>,
        can_kill_workers: bool,
    }

    /// A tenant's share.
    struct TenantView {
        tenant: Arc<str>,
        weight: f64,
        service_per_second: f64,
        share: f64,
        fair_share: f64,
        queued_requests: u32,
        in_flight_requests: u32,
        kv_blocks: u32,
    }

    /// Limits of a worker.
    struct LimitsView {
        vocab_size: u32,
        context_tokens: u32,
        block_tokens: u32,
        kv_blocks: u32,
        max_sequences: u32,
        host_kv_blocks: u32,
        kv_tokens: u32,
    }

    /// Load of a worker.
    struct LoadView {
        running_sequences: u32,
        waiting_sequences: u32,
        kv_blocks_used: u32,
        preemptions: u64,
        mean_iteration_us: u64,
        swapped_sequences: u32,
        host_kv_blocks_used: u32,
        predicted_ttft_us: u64,
        prefill_backlog_us: u64,
        prefill_slowdown: f32,
        decode_iteration_us: u64,
    }

    /// Program, device and memory of a worker.
    struct FactsView {
        version: Arc<str>,
        device: Arc<str>,
        tensor_parallel: u32,
        memory_bytes: u64,
        weight_bytes: u64,
        kv_cache_bytes: u64,
        weight_encoding: Arc<str>,
        kv_encoding: Arc<str>,
    }

    /// A worker.
    struct WorkerView {
        name: Arc<str>,
        address: Arc<str>,
        model: Arc<str>,
        // Always there: a default would be left out, and no state is not "disconnected".
        state: Option<WorkerState>,
        limits: LimitsView,
        load: LoadView,
        kv_blocks_cached: u32,
        step_target_us: u64,
        requests: u32,
        slots: Vec<SlotView>,
        iterations: Vec<Arc<IterationView>>,
        skipped_iterations: u64,
        kv_by_tenant: Vec<TenantBlocks>,
        up_number: u32,
        facts: FactsView,
    }

    /// Bottleneck of workers or of the router.
    struct FindingView {
        worker: Arc<str>,
        other_workers: u32,
        bottleneck: Arc<str>,
        window_share: f64,
        evidence: Arc<str>,
        advice: Arc<str>,
    }

    /// Findings about the cluster.
    struct DiagnosisView {
        findings: Vec<FindingView>,
        undiagnosed_workers: u32,
        omitted_findings: u32,
    }

    /// KV blocks of a tenant.
    struct TenantBlocks {
        tenant: Arc<str>,
        blocks: u32,
    }

    /// A sequence in a slot, or preempted.
    struct SlotView {
        slot: Option<u32>,
        request: u64,
        tenant: Arc<str>,
        choice: u32,
        state: State,
        kv_blocks: u32,
        tokens: u32,
    }

    /// A completed iteration.
    struct IterationView {
        number: u64,
        duration_us: u32,
        predicted_us: u32,
        target_us: u32,
        work: Vec<SlotWork>,
        preempted: u32,
        swapped: u32,
    }

    /// Work of one slot in an iteration.
    struct SlotWork {
        slot: u32,
        request: u64,
        prefill_tokens: u32,
        drafted_tokens: u32,
        generated_tokens: u32,
        tenant: Arc<str>,
    }

    /// Update of a watch.
    struct WatchUpdate {
        number: u64,
        unix_ms: u64,
        cluster: ClusterView,
        workers: Vec<WorkerView>,
        tenants: Vec<TenantView>,
        requests: Vec<RequestView>,
        skipped_updates: u32,
        // An empty diagnosis is one, too.
        diagnosis: Option<Arc<DiagnosisView>>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_camel_case_names_numbers_lower_case_states_and_no_defaults() {
        let slot =
            SlotView { slot: Some(0), request: u64::MAX, state: State::Prefill, ..SlotView::default() };
        let json = serde_json::to_string(&slot).unwrap();
        assert_eq!(json, r#"{"slot":0,"request":18446744073709551615,"state":"prefill"}"#);
        let worker = WorkerView {
            state: Some(WorkerState::Disconnected),
            slots: vec![SlotView::default()],
            up_number: 2,
            ..WorkerView::default()
        };
        let json = serde_json::to_string(&worker).unwrap();
        assert_eq!(json, r#"{"state":"disconnected","slots":[{}],"upNumber":2}"#);
        let cluster = ClusterView {
            gap_ms: Percentiles { p50: 1.5, ..Percentiles::default() },
            output_tokens_per_second: 2.0,
            ..ClusterView::default()
        };
        let json = serde_json::to_string(&cluster).unwrap();
        assert_eq!(json, r#"{"outputTokensPerSecond":2.0,"gapMs":{"p50":1.5}}"#);
    }
}
