//! The inventory of metrics in the code makes docs/metrics.md, and dashboard and alert rules name nothing else.
//!
//! `INFLIGHT_WRITE_DOCS=1 cargo test --workspace --test repository metrics` writes docs/metrics.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use inflight_worker::metrics::MetricKind as WorkerKind;

/// Metric as it is documented.
struct Documented {
    name: &'static str,
    kind: &'static str,
    labels: String,
    help: &'static str,
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn router() -> Vec<Documented> {
    use inflight_router::metrics::{METRICS, MetricKind};
    let documented = |metric: &inflight_router::metrics::Metric| Documented {
        name: metric.name,
        kind: match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram(_) => "histogram",
        },
        labels: metric.labels.join(", "),
        help: metric.help,
    };
    METRICS.iter().map(documented).collect()
}

fn worker() -> Vec<Documented> {
    let documented = |(name, kind, _, help): &(&'static str, WorkerKind, _, &'static str)| Documented {
        name,
        kind: match kind {
            WorkerKind::Counter => "counter",
            WorkerKind::Gauge => "gauge",
            WorkerKind::Histogram => "histogram",
        },
        labels: inflight_worker::metrics::labels(name).join(", "),
        help,
    };
    inflight_worker::metrics::INVENTORY.iter().map(documented).collect()
}

fn connections() -> Vec<Documented> {
    let documented = |(name, help, labels): &(&'static str, &'static str, &[&str])| Documented {
        name,
        kind: if name.ends_with("_total") { "counter" } else { "gauge" },
        labels: labels.join(", "),
        help,
    };
    inflight_net::metrics::METRICS.iter().map(documented).collect()
}

fn table(title: &str, metrics: &[Documented]) -> String {
    let mut text = format!("\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for Documented { name, kind, labels, help } in metrics {
        text.push_str(&format!("| `{name}` | {kind} | {labels} | {help} |\n"));
    }
    text
}

#[test]
fn the_documented_metrics_are_those_of_the_inventory() {
    let mut text = String::from(
        "# Metrics\n\nEvery process serves these at `/metrics` of its metrics port, for Prometheus. The tables come from the \
         inventories in\n`router/src/metrics.rs`, `worker/src/metrics/mod.rs` and `net/src/metrics.rs`. A dashboard for Grafana \
         and alert rules are in\n`deploy/monitoring/`. `--metrics-compat vllm` adds [vLLM's names](coming-from.md#metrics), \
         `--otlp-signals metrics` exports all\nof them over [OTLP](operating.md#monitoring).\n",
    );
    text.push_str(&table("Router", &router()));
    text.push_str(&table("Worker", &worker()));
    text.push_str(&table("Router and worker", &connections()));
    let path = root().join("docs/metrics.md");
    if std::env::var_os("INFLIGHT_WRITE_DOCS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let documented = fs::read_to_string(&path).unwrap();
    assert!(
        documented == text,
        "docs/metrics.md differs from the inventory; write it with INFLIGHT_WRITE_DOCS=1 cargo test --workspace --test repository metrics"
    );
}

/// Returns the names in a text that look like metrics of ours.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("inflight_") || word.starts_with("gen_ai_")).collect()
}

#[test]
fn dashboard_and_alerts_name_only_metrics_that_exist() {
    let all: Vec<Documented> = [router(), worker(), connections()].into_iter().flatten().collect();
    let kinds: BTreeMap<&str, &str> = all.iter().map(|metric| (metric.name, metric.kind)).collect();
    let labels: BTreeSet<&str> = all.iter().flat_map(|metric| metric.labels.split(", ")).collect();
    for file in ["deploy/monitoring/dashboard.json", "deploy/monitoring/alerts.yaml"] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let names = named(&text);
        // A variable of the dashboard names metrics by a regular expression; some labels look like metrics.
        let names: Vec<&str> =
            names.into_iter().filter(|name| *name != "inflight_" && !labels.contains(name)).collect();
        assert!(names.len() > 5, "{file} names {names:?}");
        for name in names {
            let series = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let histogram = series.and_then(|base| kinds.get(base)).is_some_and(|kind| *kind == "histogram");
            let plain = kinds.get(name).is_some_and(|kind| *kind != "histogram");
            assert!(histogram || plain, "{file} names {name}, which no process exports");
        }
    }
}

#[test]
fn every_panel_of_the_dashboard_has_a_title_a_description_and_a_query() {
    let text = fs::read_to_string(root().join("deploy/monitoring/dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{} has the id of another panel", panel["title"]);
        if panel["type"] == "row" {
            continue;
        }
        assert!(panel["description"].as_str().is_some_and(|text| !text.is_empty()), "{}", panel["title"]);
        assert!(!panel["targets"].as_array().unwrap().is_empty(), "{}", panel["title"]);
    }
    assert!(panels.len() > 20);
}
