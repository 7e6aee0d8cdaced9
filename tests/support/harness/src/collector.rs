//! OTLP collector of traces, metrics and logs.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric, number_data_point};
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Span received by the [`Collector`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedSpan {
    /// `service.name` of the process.
    pub service: String,
    /// Span name.
    pub name: String,
    /// Trace id, in lower-case hex.
    pub trace: String,
    /// Span id, in lower-case hex.
    pub id: String,
    /// Parent span id, in lower-case hex; empty for a root span.
    pub parent: String,
    /// Start and end, in nanoseconds since the Unix epoch.
    pub time: (u64, u64),
    /// Attribute names, and values as text.
    pub attributes: Vec<(String, String)>,
}

/// Value of a metric received by the [`Collector`]: the last one of its series.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedMetric {
    /// `service.name` of the process.
    pub service: String,
    /// `service.instance.id` of the process.
    pub instance: String,
    /// Name of the metric.
    pub name: String,
    /// Unit.
    pub unit: String,
    /// Attribute names, and values as text.
    pub attributes: Vec<(String, String)>,
    /// Value of a sum or gauge; number of values of a histogram.
    pub value: f64,
    /// Buckets of a histogram: their bounds, and the number of values in each.
    pub buckets: Option<(Vec<f64>, Vec<u64>)>,
}

/// Log event received by the [`Collector`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedLog {
    /// `service.name` of the process.
    pub service: String,
    /// Severity, such as `INFO`.
    pub severity: String,
    /// Message.
    pub body: String,
    /// Trace id, in lower-case hex; empty outside of a trace.
    pub trace: String,
    /// Attribute names, and values as text.
    pub attributes: Vec<(String, String)>,
}

#[derive(Debug, Default)]
struct Received {
    spans: Vec<RecordedSpan>,
    metrics: Vec<RecordedMetric>,
    logs: Vec<RecordedLog>,
}

/// OTLP/gRPC collector that stores all it receives.
#[derive(Debug, Clone)]
pub struct Collector {
    /// Address on which the collector listens.
    pub address: SocketAddr,
    received: Sink,
}

impl Collector {
    /// Starts a collector on a free port; it runs as long as the tokio runtime.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let collector = Self { address: listener.local_addr()?, received: Sink::default() };
        let sink = &collector.received;
        let serving = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(sink.clone()))
            .add_service(MetricsServiceServer::new(sink.clone()))
            .add_service(LogsServiceServer::new(sink.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(serving);
        Ok(collector)
    }

    /// Returns the spans received so far.
    pub fn spans(&self) -> Vec<RecordedSpan> {
        self.received.lock().spans.clone()
    }

    /// Returns the last value of each series received so far.
    pub fn metrics(&self) -> Vec<RecordedMetric> {
        self.received.lock().metrics.clone()
    }

    /// Returns the log events received so far.
    pub fn logs(&self) -> Vec<RecordedLog> {
        self.received.lock().logs.clone()
    }
}

#[derive(Debug, Clone, Default)]
struct Sink(Arc<Mutex<Received>>);

impl Sink {
    fn lock(&self) -> MutexGuard<'_, Received> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let spans = &mut self.lock().spans;
        for resource in request.into_inner().resource_spans {
            let service = service(resource.resource);
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(RecordedSpan {
                    service: service.clone(),
                    name: span.name,
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    time: (span.start_time_unix_nano, span.end_time_unix_nano),
                    attributes: texts(span.attributes),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Sink {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let received = &mut self.lock().metrics;
        for resource in request.into_inner().resource_metrics {
            let resource_attributes = resource.resource.unwrap_or_default().attributes;
            let named = |name: &str| named(&resource_attributes, name);
            let process = (named("service.name"), named("service.instance.id"));
            for metric in resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics) {
                for sample in samples(&process, metric) {
                    let same = |known: &RecordedMetric| {
                        (&known.service, &known.instance, &known.name, &known.attributes)
                            == (&sample.service, &sample.instance, &sample.name, &sample.attributes)
                    };
                    received.retain(|known| !same(known));
                    received.push(sample);
                }
            }
        }
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl LogsService for Sink {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        let logs = &mut self.lock().logs;
        for resource in request.into_inner().resource_logs {
            let service = service(resource.resource);
            for log in resource.scope_logs.into_iter().flat_map(|scope| scope.log_records) {
                logs.push(RecordedLog {
                    service: service.clone(),
                    severity: log.severity_text,
                    body: text(log.body),
                    trace: hex(&log.trace_id),
                    attributes: texts(log.attributes),
                });
            }
        }
        Ok(Response::new(ExportLogsServiceResponse::default()))
    }
}

/// Returns the last values of a metric's series. `process` is the service and the instance.
fn samples(process: &(String, String), metric: Metric) -> Vec<RecordedMetric> {
    let recorded = |attributes, value, buckets| RecordedMetric {
        service: process.0.clone(),
        instance: process.1.clone(),
        name: metric.name.clone(),
        unit: metric.unit.clone(),
        attributes: texts(attributes),
        value,
        buckets,
    };
    let number = |value: Option<number_data_point::Value>| match value {
        Some(number_data_point::Value::AsInt(value)) => value as f64,
        Some(number_data_point::Value::AsDouble(value)) => value,
        None => f64::NAN,
    };
    match metric.data {
        Some(metric::Data::Sum(sum)) => {
            let points = sum.data_points.into_iter();
            points.map(|point| recorded(point.attributes, number(point.value), None)).collect()
        }
        Some(metric::Data::Gauge(gauge)) => {
            let points = gauge.data_points.into_iter();
            points.map(|point| recorded(point.attributes, number(point.value), None)).collect()
        }
        Some(metric::Data::Histogram(histogram)) => {
            let points = histogram.data_points.into_iter();
            let buckets = |point| {
                let opentelemetry_proto::tonic::metrics::v1::HistogramDataPoint {
                    attributes,
                    count,
                    explicit_bounds,
                    bucket_counts,
                    ..
                } = point;
                recorded(attributes, count as f64, Some((explicit_bounds, bucket_counts)))
            };
            points.map(buckets).collect()
        }
        _ => Vec::new(),
    }
}

fn service(resource: Option<Resource>) -> String {
    named(&resource.unwrap_or_default().attributes, "service.name")
}

/// Returns the value of an attribute as text; empty if it is absent.
fn named(attributes: &[KeyValue], name: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == name);
    found.map(|attribute| text(attribute.value.clone())).unwrap_or_default()
}

fn texts(attributes: Vec<KeyValue>) -> Vec<(String, String)> {
    attributes.into_iter().map(|attribute| (attribute.key, text(attribute.value))).collect()
}

fn text(value: Option<AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(any_value::Value::StringValue(text)) => text,
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        Some(other) => format!("{other:?}"),
        None => String::new(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
