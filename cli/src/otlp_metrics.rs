//! Export of the process's metrics over OTLP/gRPC: the values that a scrape would have, at an interval.
//!
//! A task of its own exports one snapshot at a time, so a slow or absent collector delays nothing and costs the
//! memory of one snapshot.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum, metric,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use crate::exposition::{self, Family, FamilyKind, HistogramSample};
use crate::metrics_endpoint;

/// Timeout of an export.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Running export; the last snapshot is sent by [`MetricsExport::stop`].
#[derive(Debug)]
pub struct MetricsExport {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl MetricsExport {
    /// Begins to export every `interval`. `resource` is the attributes of the process.
    ///
    /// # Errors
    /// The URL is not valid.
    pub fn start(
        url: &str,
        interval: Duration,
        resource: &[(&str, &str)],
    ) -> Result<Self, tonic::transport::Error> {
        let channel =
            Endpoint::from_shared(url.to_owned())?.connect_timeout(TIMEOUT).timeout(TIMEOUT).connect_lazy();
        let attributes = resource.iter().map(|(name, value)| attribute(name, value)).collect();
        let exporter = Exporter {
            client: MetricsServiceClient::new(channel),
            resource: Resource { attributes, ..Resource::default() },
            started: unix_nanos(),
            failing: false,
        };
        let (stop, stopped) = oneshot::channel();
        Ok(Self { stop, task: tokio::spawn(exporter.run(interval, stopped)) })
    }

    /// Flushes the last values, within 5 seconds in total, an export in progress included.
    pub async fn stop(self) {
        // Fails only if the task has panicked, which is logged.
        let _ = self.stop.send(());
        if tokio::time::timeout(TIMEOUT, self.task).await.is_err() {
            tracing::warn!("failed to export the last metrics: no response within {} s", TIMEOUT.as_secs());
        }
    }
}

struct Exporter {
    client: MetricsServiceClient<Channel>,
    resource: Resource,
    /// Time since which counters count.
    started: u64,
    failing: bool,
}

impl Exporter {
    async fn run(mut self, interval: Duration, mut stopped: oneshot::Receiver<()>) {
        let mut ticks = tokio::time::interval(interval);
        // After a slow export the next one is due an interval later.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let stops = tokio::select! {
                _ = ticks.tick() => false,
                // An error means that the process ends without a stop.
                _ = &mut stopped => true,
            };
            self.export().await;
            if stops {
                return;
            }
        }
    }

    async fn export(&mut self) {
        let families = match exposition::parse(&metrics_endpoint::snapshot()) {
            Ok(families) => families,
            Err(error) => return tracing::warn!(%error, "cannot export metrics"),
        };
        let request = request(&families, self.resource.clone(), self.started, unix_nanos());
        // The endpoint's timeout ends at the response's headers.
        let outcome = tokio::time::timeout(TIMEOUT, self.client.export(request)).await;
        let failure = match outcome {
            Ok(Ok(response)) => response
                .into_inner()
                .partial_success
                .map(|partial| partial.error_message)
                .filter(|m| !m.is_empty()),
            Ok(Err(status)) => Some(status.to_string()),
            Err(_) => Some(format!("no response within {} s", TIMEOUT.as_secs())),
        };
        let failing = failure.is_some();
        // Said once, until it works again.
        if let (Some(error), false) = (failure, self.failing) {
            tracing::warn!(error, "the collector does not take metrics; trying again at every interval");
        } else if self.failing && !failing {
            tracing::info!("the collector takes metrics again");
        }
        self.failing = failing;
    }
}

fn unix_nanos() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}

fn attribute(name: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
    KeyValue { key: name.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// Returns the message with all metrics.
fn request(families: &[Family], resource: Resource, started: u64, now: u64) -> ExportMetricsServiceRequest {
    let scope = InstrumentationScope {
        name: "inflight".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let metrics = families.iter().map(|family| metric(family, started, now)).collect();
    let scope_metrics = ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() };
    let resource_metrics = ResourceMetrics {
        resource: Some(resource),
        scope_metrics: vec![scope_metrics],
        ..ResourceMetrics::default()
    };
    ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] }
}

fn metric(family: &Family, started: u64, now: u64) -> Metric {
    let temporality = AggregationTemporality::Cumulative.into();
    let data = match family.kind {
        FamilyKind::Counter => metric::Data::Sum(Sum {
            // Counters are of whole numbers; a double holds them up to 2^53.
            data_points: points(family, started, now, |value| Number::AsInt(value as i64)),
            aggregation_temporality: temporality,
            is_monotonic: true,
        }),
        FamilyKind::Gauge => {
            metric::Data::Gauge(Gauge { data_points: points(family, 0, now, Number::AsDouble) })
        }
        FamilyKind::Histogram => metric::Data::Histogram(Histogram {
            data_points: family.histograms.iter().map(|sample| distribution(sample, started, now)).collect(),
            aggregation_temporality: temporality,
        }),
    };
    Metric {
        name: metric_name(&family.name),
        description: family.help.clone(),
        unit: unit(&family.name).to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}

fn points(family: &Family, started: u64, now: u64, number: fn(f64) -> Number) -> Vec<NumberDataPoint> {
    let point = |sample: &exposition::Sample| NumberDataPoint {
        attributes: attributes(&sample.labels),
        start_time_unix_nano: started,
        time_unix_nano: now,
        value: Some(number(sample.value)),
        ..NumberDataPoint::default()
    };
    family.samples.iter().map(point).collect()
}

fn distribution(sample: &HistogramSample, started: u64, now: u64) -> HistogramDataPoint {
    // A bucket of the text format counts the values up to its bound, one of OTLP those above the bound before.
    let up_to = sample.buckets.iter().map(|(_, count)| *count);
    let before = std::iter::once(0).chain(up_to.clone());
    HistogramDataPoint {
        attributes: attributes(&sample.labels),
        start_time_unix_nano: started,
        time_unix_nano: now,
        count: sample.count,
        sum: Some(sample.sum),
        bucket_counts: up_to.zip(before).map(|(count, before)| count.saturating_sub(before)).collect(),
        explicit_bounds: sample
            .buckets
            .iter()
            .map(|(bound, _)| *bound)
            .filter(|bound| bound.is_finite())
            .collect(),
        ..HistogramDataPoint::default()
    }
}

fn attributes(labels: &[(String, String)]) -> Vec<KeyValue> {
    // Prometheus has no empty labels: they are absent.
    let given = labels.iter().filter(|(_, value)| !value.is_empty());
    given.map(|(name, value)| attribute(attribute_name(name), value)).collect()
}

/// Returns the name of a metric: OpenTelemetry's for those of its conventions, else ours.
fn metric_name(name: &str) -> String {
    match name {
        "gen_ai_server_request_duration_seconds" => "gen_ai.server.request.duration".to_owned(),
        "gen_ai_server_time_to_first_token_seconds" => "gen_ai.server.time_to_first_token".to_owned(),
        "gen_ai_server_time_per_output_token_seconds" => "gen_ai.server.time_per_output_token".to_owned(),
        ours => ours.to_owned(),
    }
}

fn attribute_name(label: &str) -> &str {
    match label {
        "gen_ai_request_model" => "gen_ai.request.model",
        "gen_ai_operation_name" => "gen_ai.operation.name",
        "error_type" => "error.type",
        label => label,
    }
}

/// Returns the unit of a metric, in UCUM.
fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    match name.rsplit_once('_').map_or("", |(_, last)| last) {
        "seconds" => "s",
        "microseconds" => "us",
        "bytes" => "By",
        _ => "1",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_becomes_sums_gauges_and_histograms_with_the_names_of_the_conventions() {
        let text = "# TYPE a_tokens_total counter\na_tokens_total{kind=\"x\",none=\"\"} 7\n\
                    # TYPE b_bytes gauge\nb_bytes -1.5\n\
                    # TYPE gen_ai_server_request_duration_seconds histogram\n\
                    gen_ai_server_request_duration_seconds_bucket{error_type=\"full\",le=\"1\"} 2\n\
                    gen_ai_server_request_duration_seconds_bucket{error_type=\"full\",le=\"+Inf\"} 5\n\
                    gen_ai_server_request_duration_seconds_sum{error_type=\"full\"} 9.5\n\
                    gen_ai_server_request_duration_seconds_count{error_type=\"full\"} 5\n";
        let request = request(&exposition::parse(text).unwrap(), Resource::default(), 1, 2);
        let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
        let names: Vec<_> =
            metrics.iter().map(|metric| (metric.name.as_str(), metric.unit.as_str())).collect();
        assert_eq!(
            names,
            [("a_tokens_total", "1"), ("b_bytes", "By"), ("gen_ai.server.request.duration", "s")]
        );
        let Some(metric::Data::Sum(sum)) = &metrics[0].data else { panic!("{:?}", metrics[0]) };
        assert!(sum.is_monotonic && sum.aggregation_temporality == AggregationTemporality::Cumulative as i32);
        assert_eq!(sum.data_points[0].value, Some(Number::AsInt(7)));
        assert_eq!(sum.data_points[0].attributes, [attribute("kind", "x")]);
        let Some(metric::Data::Gauge(gauge)) = &metrics[1].data else { panic!("{:?}", metrics[1]) };
        assert_eq!(gauge.data_points[0].value, Some(Number::AsDouble(-1.5)));
        let Some(metric::Data::Histogram(histogram)) = &metrics[2].data else { panic!("{:?}", metrics[2]) };
        let point = &histogram.data_points[0];
        assert_eq!((&point.bucket_counts[..], &point.explicit_bounds[..]), (&[2, 3][..], &[1.0][..]));
        assert_eq!((point.count, point.sum), (5, Some(9.5)));
        assert_eq!(point.attributes, [attribute("error.type", "full")]);
    }
}
