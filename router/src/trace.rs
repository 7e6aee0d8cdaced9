//! Trace context propagation (W3C Trace Context over OpenTelemetry).

use std::collections::HashMap;

use opentelemetry::propagation::Extractor;
use opentelemetry::trace::TraceContextExt;
pub(crate) use opentelemetry::trace::TraceId;
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
    /// Returns the id of the trace if the context says that it is exported (the flag `sampled`).
    pub(crate) fn exported_trace(&self) -> Option<TraceId> {
        let mut fields = self.traceparent.split('-').skip(1);
        let (id, _span, flags) = (fields.next()?, fields.next()?, fields.next()?);
        let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        let id = TraceId::from_hex(id).ok()?;
        (sampled && id != TraceId::INVALID).then_some(id)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_trace_is_known_if_it_is_exported() {
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        let of = |traceparent: &str| {
            let context = TraceContext { traceparent: traceparent.to_owned(), ..TraceContext::default() };
            context.exported_trace().map(|id| id.to_string())
        };
        assert_eq!(of(&format!("00-{id}-00f067aa0ba902b7-01")).as_deref(), Some(id));
        for other in ["00", "", "00-x-y-01"].map(str::to_owned).into_iter().chain([
            format!("00-{id}-00f067aa0ba902b7-00"),
            format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            format!("00-{id}-00f067aa0ba902b7"),
        ]) {
            assert_eq!(of(&other), None, "{other}");
        }
    }
}
