//! OTLP trace collector.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value;
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
    /// Attribute names, and values as text.
    pub attributes: Vec<(String, String)>,
}

/// OTLP/gRPC collector that stores all received spans.
#[derive(Debug, Clone)]
pub struct Collector {
    /// Address on which the collector listens.
    pub address: SocketAddr,
    spans: Arc<Mutex<Vec<RecordedSpan>>>,
}

impl Collector {
    /// Starts a collector on a free port; it runs as long as the tokio runtime.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let collector = Self { address: listener.local_addr()?, spans: Arc::default() };
        let service = TraceServiceServer::new(TraceSink(Arc::clone(&collector.spans)));
        let serving = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(serving);
        Ok(collector)
    }

    /// Returns the spans received so far.
    pub fn spans(&self) -> Vec<RecordedSpan> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct TraceSink(Arc<Mutex<Vec<RecordedSpan>>>);

#[tonic::async_trait]
impl TraceService for TraceSink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service = attributes.into_iter().find(|attribute| attribute.key == "service.name");
            let service = service.map(|attribute| text(attribute.value)).unwrap_or_default();
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(RecordedSpan {
                    service: service.clone(),
                    name: span.name,
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    attributes: span.attributes.into_iter().map(|a| (a.key, text(a.value))).collect(),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn text(value: Option<opentelemetry_proto::tonic::common::v1::AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(any_value::Value::StringValue(text)) => text,
        Some(other) => format!("{other:?}"),
        None => String::new(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
