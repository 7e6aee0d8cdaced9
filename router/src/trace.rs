//! Trace context propagation (W3C Trace Context over OpenTelemetry).

use std::collections::HashMap;

use opentelemetry::propagation::Extractor;
use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Context, global};
use tonic::codegen::http::{HeaderMap, HeaderName};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

/// Extracts the client's trace context with the process-wide propagator.
pub(crate) fn extract(headers: &HeaderMap) -> Context {
    global::get_text_map_propagator(|propagator| propagator.extract(&Headers(headers)))
}

/// W3C trace context of a span; empty strings if it is not traced.
#[derive(Debug, Clone, Default)]
pub(crate) struct TraceContext {
    pub(crate) traceparent: String,
    pub(crate) tracestate: String,
}

impl TraceContext {
    /// Returns the context of a span; `None` if spans are not traced.
    pub(crate) fn traced(span: &Span) -> Option<Self> {
        let context = span.context();
        context.span().span_context().is_valid().then(|| Self::inject(&context))
    }

    /// Returns the context of a span; the client's if spans are not traced.
    pub(crate) fn of(span: &Span, client: &Context) -> Self {
        Self::traced(span).unwrap_or_else(|| Self::inject(client))
    }

    fn inject(context: &Context) -> Self {
        let mut carrier = HashMap::new();
        global::get_text_map_propagator(|propagator| propagator.inject_context(context, &mut carrier));
        let mut take = |key: &str| carrier.remove(key).unwrap_or_default();
        Self { traceparent: take("traceparent"), tracestate: take("tracestate") }
    }
}
