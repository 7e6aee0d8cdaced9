//! Trace context propagation (W3C Trace Context over OpenTelemetry).

use std::collections::HashMap;

use opentelemetry::propagation::Extractor;
use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Context, global};
use tonic::metadata::{KeyRef, MetadataMap};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

struct Metadata<'a>(&'a MetadataMap);

impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0
            .keys()
            .filter_map(|key| match key {
                KeyRef::Ascii(key) => Some(key.as_str()),
                KeyRef::Binary(_) => None,
            })
            .collect()
    }
}

/// Extracts the client's trace context with the process-wide propagator.
pub(crate) fn extract(metadata: &MetadataMap) -> Context {
    global::get_text_map_propagator(|propagator| propagator.extract(&Metadata(metadata)))
}

/// W3C trace context of a span; empty strings if it is not traced.
#[derive(Debug, Clone, Default)]
pub(crate) struct TraceContext {
    pub(crate) traceparent: String,
    pub(crate) tracestate: String,
}

impl TraceContext {
    /// Returns the context of a span; the client's if spans are not traced.
    pub(crate) fn of(span: &Span, client: &Context) -> Self {
        let mut carrier = HashMap::new();
        let own = span.context();
        let context = if own.span().span_context().is_valid() { &own } else { client };
        global::get_text_map_propagator(|propagator| propagator.inject_context(context, &mut carrier));
        let mut take = |key: &str| carrier.remove(key).unwrap_or_default();
        Self { traceparent: take("traceparent"), tracestate: take("tracestate") }
    }
}
