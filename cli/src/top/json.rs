//! JSON of updates, for `inflight top --json`: the JSON mapping of proto3, but 64-bit integers are numbers, enums are the
//! lower-case last word of their name, and fields with default values are left out. The router's `/ui/events` has the
//! same.

use inflight_proto::v1::{
    ClusterDiagnosis, ClusterFinding, ClusterView, IterationView, Load, Percentiles, RequestState,
    RequestView, SlotView, SlotWork, TenantBlocks, TenantView, WatchResponse, WorkerFacts, WorkerLimits,
    WorkerView,
};
use serde_json::{Map, Value};

use super::state::state_name;

/// Returns an update as a JSON object.
pub fn update(update: &WatchResponse) -> Value {
    update.json().unwrap_or_default()
}

/// Field of a message.
trait Field {
    /// JSON value of the field; `None` for the default value.
    fn json(&self) -> Option<Value>;
}

macro_rules! scalars {
    ($($type:ty)*) => {
        $(impl Field for $type {
            fn json(&self) -> Option<Value> {
                (*self != <$type>::default()).then(|| Value::from(self.clone()))
            }
        })*
    };
}

scalars!(bool i32 u32 u64 f32 f64 String);

impl Field for Option<u32> {
    fn json(&self) -> Option<Value> {
        self.map(Value::from) // present, also as 0
    }
}

impl Field for Vec<String> {
    fn json(&self) -> Option<Value> {
        (!self.is_empty()).then(|| Value::from(self.clone()))
    }
}

/// Name of a field in lowerCamelCase.
fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut text, word| {
        let mut letters = word.chars();
        text.extend(letters.next().map(|letter| letter.to_ascii_uppercase()));
        text.push_str(letters.as_str());
        text
    })
}

/// Implements [`Field`] for messages. All fields must be listed; a state is behind the semicolon.
macro_rules! messages {
    ($($type:ident { $($field:ident),* $(; $state:ident)? })*) => {
        $(impl Field for $type {
            fn json(&self) -> Option<Value> {
                let Self { $($field,)* $($state)? } = self;
                let mut object = Map::new();
                $(object.extend($field.json().map(|value| (camel_case(stringify!($field)), value)));)*
                $(
                    let state = RequestState::try_from(*$state).unwrap_or_default();
                    if state != RequestState::Unspecified {
                        object.insert(stringify!($state).to_owned(), Value::from(state_name(state)));
                    }
                )?
                Some(Value::Object(object))
            }
        }

        impl Field for Option<$type> {
            fn json(&self) -> Option<Value> {
                self.as_ref()?.json()
            }
        }

        impl Field for Vec<$type> {
            fn json(&self) -> Option<Value> {
                (!self.is_empty()).then(|| self.iter().filter_map(Field::json).collect())
            }
        })*
    };
}

messages! {
    WatchResponse { number, unix_ms, cluster, workers, tenants, requests, skipped_updates, diagnosis }
    ClusterDiagnosis { findings, undiagnosed_workers, omitted_findings }
    ClusterFinding { worker, other_workers, bottleneck, window_share, evidence, advice }
    ClusterView {
        router, version, routers, open_requests, queued_requests, in_flight_requests, retrying_requests,
        output_tokens_per_second, prompt_tokens_per_second, ended_per_second, first_token_ms, gap_ms, queue_ms, viewers,
        models, can_kill_workers
    }
    Percentiles { p50, p90, p99 }
    TenantView {
        tenant, weight, service_per_second, share, fair_share, queued_requests, in_flight_requests, kv_blocks
    }
    WorkerView {
        name, address, model, state, limits, load, kv_blocks_cached, step_target_us, requests, slots, iterations,
        skipped_iterations, kv_by_tenant, up_number, facts
    }
    WorkerFacts {
        version, device, tensor_parallel, memory_bytes, weight_bytes, kv_cache_bytes, weight_encoding, kv_encoding
    }
    WorkerLimits { vocab_size, context_tokens, block_tokens, kv_blocks, max_sequences, host_kv_blocks, kv_tokens }
    Load {
        running_sequences, waiting_sequences, kv_blocks_used, preemptions, mean_iteration_us, swapped_sequences,
        host_kv_blocks_used, predicted_ttft_us, prefill_backlog_us, prefill_slowdown, decode_iteration_us
    }
    TenantBlocks { tenant, blocks }
    SlotView { slot, request, tenant, choice, kv_blocks, tokens; state }
    IterationView { number, duration_us, predicted_us, target_us, work, preempted, swapped }
    SlotWork { slot, request, prefill_tokens, drafted_tokens, generated_tokens, tenant }
    RequestView {
        number, request_id, tenant, model, priority, age_ms, prompt_tokens, cached_tokens, computed_tokens,
        output_tokens, max_tokens, choices, kv_blocks, worker, attempts, waiting_reason, outcome; state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn defaults_are_left_out_names_are_camel_case_and_states_are_words() {
        let request = RequestView {
            number: u64::MAX,
            request_id: "a\"\u{202e}\n".to_owned(),
            priority: -1,
            state: RequestState::Quarantined.into(),
            ..RequestView::default()
        };
        let slots = vec![SlotView { slot: Some(0), request: 1, ..SlotView::default() }, SlotView::default()];
        let worker = WorkerView { limits: Some(WorkerLimits::default()), slots, ..WorkerView::default() };
        let percentiles = Percentiles { p50: 0.5, p90: f64::NAN, p99: 0.0 };
        let cluster = ClusterView {
            first_token_ms: Some(percentiles),
            models: vec![String::new(), "m".to_owned()],
            can_kill_workers: true,
            ..ClusterView::default()
        };
        let response = WatchResponse {
            number: 1,
            cluster: Some(cluster),
            workers: vec![worker],
            requests: vec![request, RequestView { state: 99, ..RequestView::default() }],
            ..WatchResponse::default()
        };
        let expected = json!({
            "number": 1,
            "cluster": {
                "firstTokenMs": { "p50": 0.5, "p90": null }, "models": ["", "m"], "canKillWorkers": true,
            },
            "workers": [{ "limits": {}, "slots": [{ "slot": 0, "request": 1 }, {}] }],
            "requests": [
                { "number": u64::MAX, "requestId": "a\"\u{202e}\n", "priority": -1, "state": "quarantined" }, {},
            ],
        });
        assert_eq!(update(&response), expected);
        assert!(!update(&response).to_string().contains('\n'), "one line");
    }
}
