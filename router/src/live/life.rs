//! Life of a request: the changes of its state, in a bounded list.

use std::collections::VecDeque;
use std::sync::Arc;

use super::view::LifeEventView;

/// Events kept from the start of a life.
const FIRST_MAX: usize = 128;
/// Events kept from its end.
const LAST_MAX: usize = 128;

/// Change in the life of a request.
#[derive(Debug, Clone)]
struct LifeEvent {
    at_ms: u64,
    kind: &'static str,
    worker: Option<Arc<str>>,
    detail: String,
}

/// The first and the last events of a request.
#[derive(Debug, Default)]
pub(super) struct Life {
    first: Vec<LifeEvent>,
    last: VecDeque<LifeEvent>,
    omitted: u32,
}

impl Life {
    /// Adds an event.
    pub(super) fn push(&mut self, at_ms: u64, kind: &'static str, worker: Option<Arc<str>>, detail: String) {
        let event = LifeEvent { at_ms, kind, worker, detail };
        if self.first.len() < FIRST_MAX {
            self.first.push(event);
            return;
        }
        if self.last.len() == LAST_MAX {
            self.last.pop_front();
            self.omitted = self.omitted.saturating_add(1);
        }
        self.last.push_back(event);
    }

    /// Returns the events, oldest first, and the number left out between the first and the last ones.
    pub(super) fn view(&self) -> (Vec<LifeEventView>, u32) {
        let view = |event: &LifeEvent| LifeEventView {
            at_ms: event.at_ms,
            kind: event.kind,
            worker: event.worker.clone().unwrap_or_default(),
            detail: event.detail.clone(),
        };
        (self.first.iter().chain(&self.last).map(view).collect(), self.omitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_life_keeps_its_first_and_last_events_and_counts_the_rest() {
        let mut life = Life::default();
        for at in 0..1000 {
            life.push(at, "chunk", None, String::new());
        }
        let (events, omitted) = life.view();
        assert_eq!((events.len(), omitted), (FIRST_MAX + LAST_MAX, 1000 - 256));
        assert_eq!((events[127].at_ms, events[128].at_ms, events[255].at_ms), (127, 1000 - 128, 999));
    }
}
