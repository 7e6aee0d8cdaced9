//! `--metrics-compat vllm`: metrics under the names of vLLM, for autoscalers, gateways, dashboards and load
//! generators that read those. Each is computed at the scrape from metrics of ours.
//!
//! Routers export what clients see, workers what their devices do, and `num_requests_waiting` is a part at each, so
//! that a sum over all processes is right. For gateways, which see routers alone, routers export their part of
//! `num_requests_running`, too, and the use of all KV pools behind them: these are to be summed over one role.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::exposition::{self, Family, FamilyKind, HistogramSample, Sample, escape};

/// Names under which metrics are exported beside ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricsCompat {
    /// vLLM's metric names.
    Vllm,
}

/// How a metric of ours becomes one of vLLM's.
struct Rule {
    ours: &'static str,
    vllm: &'static str,
    help: &'static str,
}

/// Metrics whose values are ours, summed over all labels but the model's.
const RULES: &[Rule] = &[
    rule(
        "inflight_worker_running_sequences",
        "vllm:num_requests_running",
        "Sequences in the running batch of this worker",
    ),
    rule(
        "inflight_router_model_sequences",
        "vllm:num_requests_running",
        "Sequences in flight at workers from this router",
    ),
    rule(
        "inflight_worker_waiting_sequences",
        "vllm:num_requests_waiting",
        "Requests that wait in this process",
    ),
    rule(
        "inflight_router_model_queue_requests",
        "vllm:num_requests_waiting",
        "Requests that wait in this process",
    ),
    rule("inflight_worker_preemptions_total", "vllm:num_preemptions_total", "Preemptions"),
    rule(
        "inflight_worker_admitted_tokens_total",
        "vllm:prefix_cache_queries_total",
        "Tokens that were looked up in the prefix cache",
    ),
    rule(
        "inflight_worker_cached_tokens_total",
        "vllm:prefix_cache_hits_total",
        "Tokens that were found in the prefix cache",
    ),
    rule("inflight_worker_iteration_tokens", "vllm:iteration_tokens_total", "Tokens of an iteration"),
    rule(
        "inflight_worker_total_queue_seconds",
        "vllm:request_queue_time_seconds",
        "Queueing time in router and worker together",
    ),
    rule("inflight_router_prompt_tokens_total", "vllm:prompt_tokens_total", "Prompt tokens of requests"),
    rule(
        "inflight_router_completion_tokens_total",
        "vllm:generation_tokens_total",
        "Tokens delivered to clients",
    ),
    rule(
        "gen_ai_server_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
        "Time to first token, from arrival at the router",
    ),
    rule(
        "inflight_router_inter_token_seconds",
        "vllm:inter_token_latency_seconds",
        "Every gap between tokens",
    ),
    rule(
        "inflight_router_inter_token_seconds",
        "vllm:time_per_output_token_seconds",
        "Every gap between tokens",
    ),
    rule(
        "gen_ai_server_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a request after its first",
    ),
    rule(
        "gen_ai_server_request_duration_seconds",
        "vllm:e2e_request_latency_seconds",
        "Duration of completed requests, from arrival at the router",
    ),
];

const fn rule(ours: &'static str, vllm: &'static str, help: &'static str) -> Rule {
    Rule { ours, vllm, help }
}

/// Labels of ours that name the model.
const MODEL_LABELS: [&str; 2] = ["model", "gen_ai_request_model"];

/// Returns the additional lines of a scrape, for what this process has rendered; a comment if that cannot be
/// read.
pub fn render(compat: MetricsCompat, rendered: &str) -> String {
    let MetricsCompat::Vllm = compat;
    match exposition::parse(rendered) {
        Ok(families) => vllm(&families),
        Err(error) => format!("# no metrics under vLLM's names: {error}\n"),
    }
}

fn vllm(families: &[Family]) -> String {
    let family = |name: &str| families.iter().find(|family| family.name == name);
    let model = only_model(families);
    let mut text = String::new();
    for Rule { ours, vllm, help } in RULES {
        let Some(family) = family(ours) else { continue };
        match family.kind {
            FamilyKind::Histogram => write_histograms(&mut text, vllm, help, family, &model),
            kind => {
                let mut sums: BTreeMap<String, f64> = BTreeMap::new();
                for sample in &family.samples {
                    *sums.entry(model_of(&sample.labels, &model)).or_default() += sample.value;
                }
                let sums = sums.into_iter().map(|(model, sum)| (labels(&model, &[]), sum));
                write_values(&mut text, vllm, help, kind, sums);
            }
        }
    }
    let value = |name: &str| family(name)?.samples.first().map(|sample| sample.value);
    if let (Some(used), Some(blocks)) =
        (value("inflight_worker_kv_blocks_used"), value("inflight_worker_kv_blocks"))
    {
        let share = if blocks > 0.0 { used / blocks } else { 0.0 };
        write_usage(&mut text, &[(labels(&model, &[]), share)]);
        let tokens = value("inflight_worker_kv_block_tokens").unwrap_or_default();
        let (tokens, blocks) = (tokens.to_string(), blocks.to_string());
        let info = labels(&model, &[("block_size", &tokens), ("num_gpu_blocks", &blocks)]);
        let help = "Size and number of the KV blocks, as labels";
        write_values(&mut text, "vllm:cache_config_info", help, FamilyKind::Gauge, [(info, 1.0)]);
    }
    if let (Some(used), Some(blocks)) =
        (family("inflight_router_model_kv_blocks_used"), family("inflight_router_model_kv_blocks"))
    {
        let blocks: BTreeMap<String, f64> =
            blocks.samples.iter().map(|sample| (model_of(&sample.labels, &model), sample.value)).collect();
        let share = |sample: &Sample| {
            let name = model_of(&sample.labels, &model);
            // A model without workers has no blocks.
            let blocks = blocks.get(&name).copied().filter(|blocks| *blocks > 0.0)?;
            Some((labels(&name, &[]), sample.value / blocks))
        };
        let shares: Vec<_> = used.samples.iter().filter_map(share).collect();
        write_usage(&mut text, &shares);
    }
    if let Some(finished) = family("inflight_router_finished_choices_total") {
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        for sample in &finished.samples {
            let reason = sample.labels.iter().find(|(name, _)| name == "reason");
            let reason = match reason.map_or("", |(_, reason)| reason.as_str()) {
                reason @ ("stop" | "length" | "error") => reason,
                _ => "abort",
            };
            let labels = labels(&model_of(&sample.labels, &model), &[("finished_reason", reason)]);
            *sums.entry(labels).or_default() += sample.value;
        }
        let help = "Choices that ended, by reason";
        write_values(&mut text, "vllm:request_success_total", help, FamilyKind::Counter, sums);
    }
    text
}

/// Returns the model of this process; empty if it serves none or several.
fn only_model(families: &[Family]) -> String {
    let names = ["inflight_worker_model_info", "inflight_router_model_workers"];
    let of_models = families.iter().filter(|family| names.contains(&family.name.as_str()));
    let mut models = of_models.flat_map(|family| &family.samples).map(|sample| model_of(&sample.labels, ""));
    match (models.next(), models.next()) {
        (Some(model), None) => model,
        _ => String::new(),
    }
}

fn model_of(labels: &[(String, String)], otherwise: &str) -> String {
    let model = labels.iter().find(|(name, _)| MODEL_LABELS.contains(&name.as_str()));
    model.map_or(otherwise, |(_, model)| model).to_owned()
}

/// Returns the labels of a sample, as text.
fn labels(model: &str, more: &[(&str, &str)]) -> String {
    let label = |(name, value): &(&str, &str)| format!(",{name}=\"{}\"", escape(value));
    let more: String = more.iter().map(label).collect();
    format!("model_name=\"{}\"{more}", escape(model))
}

/// Writes KV pool utilization by label set, under both metric names that vLLM has used for it.
fn write_usage(text: &mut String, shares: &[(String, f64)]) {
    for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
        let help = "Share of the KV blocks in use, from 0 to 1";
        write_values(text, name, help, FamilyKind::Gauge, shares.iter().cloned());
    }
}

/// Writes the values of a counter or gauge by their labels.
fn write_values(
    text: &mut String,
    name: &str,
    help: &str,
    kind: FamilyKind,
    values: impl IntoIterator<Item = (String, f64)>,
) {
    let kind = if kind == FamilyKind::Counter { "counter" } else { "gauge" };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in values {
        let _ = writeln!(text, "{name}{{{labels}}} {value}");
    }
}

/// Writes the histograms of a metric, summed for each model. Requests that failed are left out, as vLLM
/// does.
fn write_histograms(text: &mut String, name: &str, help: &str, family: &Family, only: &str) {
    let mut merged: BTreeMap<String, HistogramSample> = BTreeMap::new();
    let failed = |sample: &&HistogramSample| {
        sample.labels.iter().any(|(name, value)| name == "error_type" && !value.is_empty())
    };
    for sample in family.histograms.iter().filter(|sample| !failed(sample)) {
        match merged.entry(model_of(&sample.labels, only)) {
            std::collections::btree_map::Entry::Vacant(vacant) => drop(vacant.insert(sample.clone())),
            std::collections::btree_map::Entry::Occupied(mut other) => {
                let other = other.get_mut();
                other.sum += sample.sum;
                other.count += sample.count;
                // All have the buckets of their metric.
                let pairs = other.buckets.iter_mut().zip(&sample.buckets);
                pairs.for_each(|(bucket, (_, more))| bucket.1 += more);
            }
        }
    }
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
    for (model, HistogramSample { buckets, sum, count, .. }) in merged {
        let labels = labels(&model, &[]);
        for (bound, up_to) in buckets {
            let bound = if bound.is_infinite() { "+Inf".to_owned() } else { bound.to_string() };
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {up_to}");
        }
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTER: &str = r#"
# TYPE inflight_router_model_workers gauge
inflight_router_model_workers{model="a"} 2
# TYPE inflight_router_model_queue_requests gauge
inflight_router_model_queue_requests{model="a"} 3
# TYPE inflight_router_model_sequences gauge
inflight_router_model_sequences{model="a"} 7
inflight_router_model_sequences{model="b"} 1
# TYPE inflight_router_model_kv_blocks gauge
inflight_router_model_kv_blocks{model="a"} 400
inflight_router_model_kv_blocks{model="b"} 0
# TYPE inflight_router_model_kv_blocks_used gauge
inflight_router_model_kv_blocks_used{model="a"} 100
inflight_router_model_kv_blocks_used{model="b"} 0
# TYPE inflight_router_finished_choices_total counter
inflight_router_finished_choices_total{model="a",reason="stop"} 5
inflight_router_finished_choices_total{model="a",reason="cancelled"} 1
inflight_router_finished_choices_total{model="a",reason="deadline"} 2
# TYPE gen_ai_server_request_duration_seconds histogram
gen_ai_server_request_duration_seconds_bucket{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type="",le="1"} 1
gen_ai_server_request_duration_seconds_bucket{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type="",le="+Inf"} 2
gen_ai_server_request_duration_seconds_sum{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type=""} 2.5
gen_ai_server_request_duration_seconds_count{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type=""} 2
gen_ai_server_request_duration_seconds_bucket{gen_ai_request_model="a",gen_ai_operation_name="text_completion",error_type="",le="1"} 4
gen_ai_server_request_duration_seconds_bucket{gen_ai_request_model="a",gen_ai_operation_name="text_completion",error_type="",le="+Inf"} 4
gen_ai_server_request_duration_seconds_sum{gen_ai_request_model="a",gen_ai_operation_name="text_completion",error_type=""} 1
gen_ai_server_request_duration_seconds_count{gen_ai_request_model="a",gen_ai_operation_name="text_completion",error_type=""} 4
gen_ai_server_request_duration_seconds_bucket{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type="cancelled",le="1"} 9
gen_ai_server_request_duration_seconds_bucket{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type="cancelled",le="+Inf"} 9
gen_ai_server_request_duration_seconds_sum{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type="cancelled"} 9
gen_ai_server_request_duration_seconds_count{gen_ai_request_model="a",gen_ai_operation_name="chat",error_type="cancelled"} 9
"#;

    const WORKER: &str = r#"
# TYPE inflight_worker_model_info gauge
inflight_worker_model_info{model="a\"b",architecture="x",fingerprint="f"} 1
# TYPE inflight_worker_running_sequences gauge
inflight_worker_running_sequences 4
# TYPE inflight_worker_kv_blocks gauge
inflight_worker_kv_blocks 200
# TYPE inflight_worker_kv_blocks_used gauge
inflight_worker_kv_blocks_used 50
# TYPE inflight_worker_kv_block_tokens gauge
inflight_worker_kv_block_tokens 16
# TYPE inflight_worker_preemptions_total counter
inflight_worker_preemptions_total{kind="swap"} 2
inflight_worker_preemptions_total{kind="recompute"} 3
"#;

    #[test]
    fn values_are_summed_by_model_and_failed_requests_left_out_of_latencies() {
        let text = render(MetricsCompat::Vllm, ROUTER);
        for line in [
            "vllm:num_requests_waiting{model_name=\"a\"} 3",
            "vllm:num_requests_running{model_name=\"a\"} 7",
            "vllm:num_requests_running{model_name=\"b\"} 1",
            "vllm:kv_cache_usage_perc{model_name=\"a\"} 0.25",
            "vllm:gpu_cache_usage_perc{model_name=\"a\"} 0.25",
            "vllm:request_success_total{model_name=\"a\",finished_reason=\"abort\"} 3",
            "vllm:request_success_total{model_name=\"a\",finished_reason=\"stop\"} 5",
            "# TYPE vllm:e2e_request_latency_seconds histogram",
            "vllm:e2e_request_latency_seconds_bucket{model_name=\"a\",le=\"1\"} 5",
            "vllm:e2e_request_latency_seconds_bucket{model_name=\"a\",le=\"+Inf\"} 6",
            "vllm:e2e_request_latency_seconds_sum{model_name=\"a\"} 3.5",
            "vllm:e2e_request_latency_seconds_count{model_name=\"a\"} 6",
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is missing:\n{text}");
        }
        assert!(
            !text.contains("usage_perc{model_name=\"b\"}"),
            "a model without workers has no pool:\n{text}"
        );
        exposition::parse(&text).unwrap();
    }

    #[test]
    fn a_worker_has_its_own_model_whose_name_is_escaped() {
        let text = render(MetricsCompat::Vllm, WORKER);
        for line in [
            r#"vllm:num_requests_running{model_name="a\"b"} 4"#,
            r#"vllm:kv_cache_usage_perc{model_name="a\"b"} 0.25"#,
            r#"vllm:gpu_cache_usage_perc{model_name="a\"b"} 0.25"#,
            r#"vllm:cache_config_info{model_name="a\"b",block_size="16",num_gpu_blocks="200"} 1"#,
            r#"vllm:num_preemptions_total{model_name="a\"b"} 5"#,
        ] {
            assert!(text.lines().any(|written| written == line), "{line} is missing:\n{text}");
        }
    }

    #[test]
    fn a_scrape_that_cannot_be_read_says_so() {
        assert!(render(MetricsCompat::Vllm, "what?").starts_with("# no metrics under vLLM's names: line 1"));
    }
}
