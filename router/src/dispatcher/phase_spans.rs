//! Tracing spans of a request's phases: in the queue, on a worker, between two workers, paused.

use tracing::{Span, info_span};

/// Spans of the phases of a request, one after the other, all children of the request's span.
#[derive(Debug)]
pub(crate) struct PhaseSpans {
    /// Span of the request; none once it has ended, because the last reference to a span closes it.
    request: Span,
    /// Span of the current phase.
    phase: Span,
    attempts: u32,
}

impl PhaseSpans {
    /// Begins with the wait in the queue.
    pub(super) fn new(request: Span) -> Self {
        let phase = info_span!(parent: &request, "queue");
        Self { request, phase, attempts: 0 }
    }

    /// The request was dispatched to a worker.
    pub(super) fn attempt(&mut self, worker: &str) {
        self.attempts += 1;
        self.enter(
            |request, attempt| info_span!(parent: request, "attempt", otel.kind = "client", attempt, worker),
        );
    }

    /// The worker was lost or returned the request, which waits for another worker.
    pub(super) fn retry(&mut self, reason: &'static str) {
        self.enter(|request, after| info_span!(parent: request, "retry", reason, after_attempt = after));
    }

    /// The request is paused until its client reads again.
    pub(super) fn pause(&mut self) {
        self.enter(|request, after| info_span!(parent: request, "paused", after_attempt = after));
    }

    /// The request has ended.
    pub(super) fn end(&mut self) {
        (self.phase, self.request) = (Span::none(), Span::none());
    }

    /// Returns the span of the current phase; `None` if it has ended or spans are off.
    pub(super) fn current(&self) -> Option<Span> {
        (!self.phase.is_none()).then(|| self.phase.clone())
    }

    /// Closes the current phase and opens the next one, unless the request has ended or spans are off.
    fn enter(&mut self, next: impl FnOnce(&Span, u32) -> Span) {
        self.phase = Span::none();
        if !self.request.is_none() {
            self.phase = next(&self.request, self.attempts);
        }
    }
}
