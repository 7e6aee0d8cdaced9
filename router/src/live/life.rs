//! Life of a request: the changes of its state, in a bounded list in the order in which they happened.
//!
//! The router's own events come in order. Those of a worker are reported up to a tenth of a second later, with times of the worker's clock.
//! Each is inserted between the events that it can only have happened between: behind the dispatch of its attempt and the
//! earlier events of its sequence, before the end of its choice and of its attempt, and on the right side of the first output.

use std::sync::Arc;

use super::view::LifeEventView;

/// Events kept from the start of a life.
const FIRST_MAX: usize = 128;
/// Events kept from its end.
const LAST_MAX: usize = 128;

/// What an event is for the order of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Nothing in particular.
    None,
    /// Dispatch of an attempt, whose number is set when it is submitted.
    Dispatch(Option<u32>),
    /// First output of an attempt.
    FirstOutput,
    /// End of a choice.
    ChoiceEnd(u32),
    /// End of an attempt, or of the request.
    AttemptEnd,
    /// Event of a sequence at a worker; `after_output`: it had generated a token.
    Sequence { sequence: u64, after_output: bool },
}

/// Change in the life of a request.
#[derive(Debug, Clone)]
struct LifeEvent {
    /// Time since the request's arrival, in microseconds.
    at_us: u64,
    kind: &'static str,
    worker: Option<Arc<str>>,
    detail: String,
    iteration: u64,
    mark: Mark,
}

/// Event of a sequence, as its worker reports it.
#[derive(Debug, Clone)]
pub(super) struct SequenceEvent {
    /// Time since the request's arrival, in microseconds.
    pub(super) at_us: u64,
    /// Attempt of the request.
    pub(super) attempt: u32,
    /// Choice of the sequence.
    pub(super) choice: u32,
    /// Number of the sequence at the worker.
    pub(super) sequence: u64,
    /// Whether the sequence had generated a token.
    pub(super) after_output: bool,
    /// Iteration in which it happened, or before which.
    pub(super) iteration: u64,
    /// Kind.
    pub(super) kind: &'static str,
    /// What happened.
    pub(super) detail: String,
}

/// The first and the last events of a request.
#[derive(Debug, Default)]
pub(super) struct Life {
    events: Vec<LifeEvent>,
    omitted: u32,
}

impl Life {
    /// Adds an event of the router.
    pub(super) fn push(
        &mut self,
        at_us: u64,
        kind: &'static str,
        worker: Option<Arc<str>>,
        detail: String,
        mark: Mark,
    ) {
        let later = |event: &LifeEvent| matches!(event.mark, Mark::Sequence { after_output: true, .. });
        let attempt = self.attempt_start(None);
        let at = match mark {
            // What the worker did next may be reported before the output has arrived.
            Mark::FirstOutput => self.events[attempt..].iter().position(later).map(|at| attempt + at),
            _ => None,
        };
        let event = LifeEvent { at_us, kind, worker, detail, iteration: 0, mark };
        self.insert_at(at.unwrap_or(self.events.len()), event);
    }

    /// Sets the number of the attempt that was dispatched last.
    pub(super) fn submitted(&mut self, attempt: u32) {
        let dispatches = self.events.iter_mut().rev().filter(|event| matches!(event.mark, Mark::Dispatch(_)));
        if let Some(last) = dispatches.take(1).find(|event| event.mark == Mark::Dispatch(None)) {
            last.mark = Mark::Dispatch(Some(attempt));
        }
    }

    /// Adds an event of a sequence. `choices`: choices of the request.
    pub(super) fn observed(&mut self, event: SequenceEvent, choices: u32) {
        let start = self.attempt_start(Some(event.attempt));
        let ends = |event: &LifeEvent| matches!(event.mark, Mark::AttemptEnd | Mark::Dispatch(_));
        let end = self.events[start..].iter().position(ends).map_or(self.events.len(), |at| start + at);
        let (mut lower, mut upper) = (start, end);
        for (at, other) in self.events.iter().enumerate().take(end).skip(start) {
            match other.mark {
                Mark::Sequence { sequence, .. } if sequence == event.sequence => lower = at + 1,
                Mark::ChoiceEnd(choice) if choice == event.choice => upper = upper.min(at),
                // Which choice had the first output is not known.
                Mark::FirstOutput if choices == 1 && event.after_output => lower = at + 1,
                Mark::FirstOutput if choices == 1 => upper = upper.min(at),
                _ => {}
            }
        }
        let upper = upper.max(lower);
        let at = (lower..upper).find(|at| self.events[*at].at_us > event.at_us).unwrap_or(upper);
        let worker = start.checked_sub(1).and_then(|dispatch| self.events[dispatch].worker.clone());
        let SequenceEvent { at_us, sequence, after_output, iteration, kind, detail, .. } = event;
        let mark = Mark::Sequence { sequence, after_output };
        self.insert_at(at, LifeEvent { at_us, kind, worker, detail, iteration, mark });
    }

    /// Returns the position behind the dispatch of an attempt; of the last one for `None`.
    fn attempt_start(&self, attempt: Option<u32>) -> usize {
        let dispatched = |event: &LifeEvent| match (event.mark, attempt) {
            (Mark::Dispatch(_), None) => true,
            (Mark::Dispatch(number), attempt) => number == attempt,
            _ => false,
        };
        let kept = if self.omitted > 0 { FIRST_MAX } else { 0 };
        self.events.iter().rposition(dispatched).map_or(kept, |at| at + 1)
    }

    /// Inserts an event. Its time is moved between those of its neighbours.
    fn insert_at(&mut self, at: usize, mut event: LifeEvent) {
        if let Some(next) = self.events.get(at) {
            event.at_us = event.at_us.min(next.at_us);
        }
        if let Some(before) = at.checked_sub(1).and_then(|before| self.events.get(before)) {
            event.at_us = event.at_us.max(before.at_us);
        }
        self.events.insert(at, event);
        if self.events.len() > FIRST_MAX + LAST_MAX {
            self.events.remove(FIRST_MAX);
            self.omitted = self.omitted.saturating_add(1);
        }
    }

    /// Returns the events, oldest first, and the number left out between the first and the last ones.
    pub(super) fn view(&self) -> (Vec<LifeEventView>, u32) {
        let view = |event: &LifeEvent| LifeEventView {
            at_ms: event.at_us / 1000,
            at_us: event.at_us,
            kind: event.kind,
            worker: event.worker.clone().unwrap_or_default(),
            detail: event.detail.clone(),
            iteration: event.iteration,
        };
        (self.events.iter().map(view).collect(), self.omitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(life: &mut Life, at_us: u64, kind: &'static str, mark: Mark) {
        life.push(at_us, kind, None, String::new(), mark);
    }

    fn observed(life: &mut Life, at_us: u64, kind: &'static str, attempt: u32, after_output: bool) {
        let event = SequenceEvent {
            at_us,
            attempt,
            choice: 0,
            sequence: attempt.into(),
            after_output,
            iteration: at_us,
            kind,
            detail: String::new(),
        };
        life.observed(event, 1);
    }

    fn kinds(life: &Life) -> Vec<(&'static str, u64)> {
        let (events, _) = life.view();
        assert!(events.is_sorted_by_key(|event| event.at_us), "{events:?}");
        events.iter().map(|event| (event.kind, event.at_us)).collect()
    }

    #[test]
    fn a_long_life_keeps_its_first_and_last_events_and_counts_the_rest() {
        let mut life = Life::default();
        for at in 0..1000 {
            push(&mut life, at, "chunk", Mark::None);
        }
        let (events, omitted) = life.view();
        assert_eq!((events.len(), omitted), (FIRST_MAX + LAST_MAX, 1000 - 256));
        assert_eq!((events[127].at_us, events[128].at_us, events[255].at_us), (127, 1000 - 128, 999));
    }

    #[test]
    fn late_events_of_a_worker_come_where_they_happened() {
        let mut life = Life::default();
        push(&mut life, 0, "arrived", Mark::None);
        push(&mut life, 10, "dispatched", Mark::Dispatch(None));
        life.submitted(1);
        push(&mut life, 30, "first_token", Mark::FirstOutput);
        push(&mut life, 60, "lost", Mark::AttemptEnd);
        push(&mut life, 60, "queued", Mark::None);
        push(&mut life, 70, "dispatched", Mark::Dispatch(None));
        life.submitted(2);
        push(&mut life, 90, "resumed", Mark::FirstOutput);
        push(&mut life, 95, "choice_ended", Mark::ChoiceEnd(0));
        push(&mut life, 95, "ended", Mark::AttemptEnd);
        // All of them are reported after the end, by clocks that are off by some milliseconds.
        observed(&mut life, 5, "admitted", 1, false);
        observed(&mut life, 33, "chunk", 1, false);
        observed(&mut life, 28, "preempted", 1, true);
        observed(&mut life, 99, "resumed", 1, true);
        observed(&mut life, 80, "admitted", 2, false);
        observed(&mut life, 85, "chunk", 2, false);
        assert_eq!(
            kinds(&life),
            [
                ("arrived", 0),
                ("dispatched", 10),
                ("admitted", 10),
                ("chunk", 30),
                ("first_token", 30),
                ("preempted", 30),
                ("resumed", 60),
                ("lost", 60),
                ("queued", 60),
                ("dispatched", 70),
                ("admitted", 80),
                ("chunk", 85),
                ("resumed", 90),
                ("choice_ended", 95),
                ("ended", 95),
            ]
        );
    }

    #[test]
    fn an_output_that_arrives_after_what_the_worker_did_next_comes_before_it() {
        let mut life = Life::default();
        push(&mut life, 10, "dispatched", Mark::Dispatch(None));
        life.submitted(1);
        observed(&mut life, 11, "admitted", 1, false);
        observed(&mut life, 20, "chunk", 1, false);
        observed(&mut life, 30, "preempted", 1, true);
        push(&mut life, 40, "first_token", Mark::FirstOutput);
        assert_eq!(
            kinds(&life),
            [("dispatched", 10), ("admitted", 11), ("chunk", 20), ("first_token", 30), ("preempted", 30)]
        );
    }
}
