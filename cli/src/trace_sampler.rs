//! Sampling of traces: by this process's own draw where a trace comes from a client, which could otherwise have all of its requests
//! exported.

use opentelemetry::trace::{Link, SpanKind, TraceContextExt as _, TraceId, TraceState};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{SamplingDecision, SamplingResult, ShouldSample};

/// Who decides whether a trace that comes from another process is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteParent {
    /// This process: its callers are clients.
    Draws,
    /// The caller, by the flag `sampled` of its `traceparent`.
    Decides,
}

/// Exports a share of the traces that begin in this process. Spans within it follow their parents.
#[derive(Debug, Clone)]
pub struct TraceSampler {
    /// Share of the traces, from 0 to 1.
    pub ratio: f64,
    /// What the flag of another process counts.
    pub remote: RemoteParent,
}

impl ShouldSample for TraceSampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        _: TraceId,
        _: &str,
        _: &SpanKind,
        _: &[KeyValue],
        _: &[Link],
    ) -> SamplingResult {
        let parent = parent
            .filter(|parent| parent.has_active_span())
            .map(|parent| parent.span().span_context().clone());
        let decides = |parent: &&opentelemetry::trace::SpanContext| {
            parent.is_valid() && (!parent.is_remote() || self.remote == RemoteParent::Decides)
        };
        let sampled = match parent.as_ref().filter(decides) {
            Some(parent) => parent.is_sampled(),
            // Not by the trace's id, which a client chooses.
            None => rand::random::<f64>() < self.ratio,
        };
        SamplingResult {
            decision: if sampled { SamplingDecision::RecordAndSample } else { SamplingDecision::Drop },
            attributes: Vec::new(),
            trace_state: parent.map_or_else(TraceState::default, |parent| parent.trace_state().clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags};

    use super::*;

    fn samples(ratio: f64, remote: RemoteParent, parent: Option<(bool, bool)>) -> bool {
        let parent = parent.map(|(is_remote, sampled)| {
            let flags = TraceFlags::default().with_sampled(sampled);
            let span = SpanContext::new(
                TraceId::from(1u128),
                SpanId::from(1u64),
                flags,
                is_remote,
                TraceState::default(),
            );
            Context::new().with_remote_span_context(span)
        });
        let sampler = TraceSampler { ratio, remote };
        let result =
            sampler.should_sample(parent.as_ref(), TraceId::from(1u128), "a", &SpanKind::Server, &[], &[]);
        result.decision == SamplingDecision::RecordAndSample
    }

    #[test]
    fn a_client_decides_neither_that_its_requests_are_exported_nor_that_they_are_not() {
        for flag in [false, true] {
            assert!(samples(1.0, RemoteParent::Draws, Some((true, flag))));
            assert!(!samples(0.0, RemoteParent::Draws, Some((true, flag))));
            for ratio in [0.0, 1.0] {
                assert_eq!(samples(ratio, RemoteParent::Decides, Some((true, flag))), flag);
                assert_eq!(
                    samples(ratio, RemoteParent::Draws, Some((false, flag))),
                    flag,
                    "within the process"
                );
            }
        }
        assert!(samples(1.0, RemoteParent::Decides, None) && !samples(0.0, RemoteParent::Draws, None));
    }
}
