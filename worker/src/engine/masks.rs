//! Token masks of the steps that sample constrained choices.
//!
//! A choice consumes its tokens as they are committed, on the engine's thread; its next mask is computed on the mask pool
//! while the device runs the forward pass, and supplied before the step is completed. A look-ahead step is launched before the
//! token in flight is known: only its sampling waits. The plan never depends on a mask.

use std::sync::Arc;

use inflight_grammar::{Grammars, MaskOutcome, Matcher};
use inflight_runtime::{self as runtime, TokenMasks};

use super::live_constraint::ConstraintEnd;
use super::mask_pool::{MaskJob, MaskPool, MaskResult, compute};
use super::{Engine, LaunchedIteration};

/// Masks of a launched iteration.
#[derive(Debug, Default)]
pub(super) struct IterationMasks {
    /// Index of the chunk of each masked sample row.
    pub(super) chunks: Vec<usize>,
    /// Ticket of the mask of each of these rows; `None`: every token is allowed.
    tickets: Vec<Option<u64>>,
    started: bool,
}

/// Masks of an engine: the pool, and buffers.
#[derive(Default)]
pub(super) struct MaskState {
    pool: Option<MaskPool>,
    next_ticket: u64,
    /// Results that arrived before those that the engine waited for.
    early: Vec<MaskResult>,
    spare: Vec<Vec<u32>>,
    masks: TokenMasks,
}

impl Engine {
    /// Sets the grammars of the model; without them, constrained requests are refused.
    pub fn set_grammars(&mut self, grammars: Arc<Grammars>) {
        self.grammars = Some(grammars);
    }

    /// Starts the masks of the oldest launched iteration, if it has masked rows and its predecessor is committed.
    pub(super) fn start_masks(&mut self) {
        let Some(iteration) = self.launched.front_mut() else { return };
        let LaunchedIteration { chunks, masks, .. } = iteration;
        if masks.chunks.is_empty() || std::mem::replace(&mut masks.started, true) {
            return;
        }
        let state = &mut self.masks;
        let words = TokenMasks::words(self.model.vocab_size);
        for at in &masks.chunks {
            let live = self.live[chunks[*at].id.index()].as_mut();
            let constraint = live.and_then(|live| live.constraint.as_mut());
            // An ended sequence draws a token that is discarded.
            let ticket = constraint.and_then(|constraint| {
                let matcher = constraint.matcher.take_if(|matcher| matcher.has_begun())?;
                let mut mask = state.spare.pop().unwrap_or_default();
                mask.resize(words, 0);
                Some(state.submit(matcher, constraint.ignore_eos, mask))
            });
            masks.tickets.push(ticket);
        }
    }

    /// Waits for the masks of the oldest launched iteration and supplies them to the runtime.
    pub(super) fn supply_masks(&mut self) -> Result<(), runtime::Error> {
        let Some(LaunchedIteration { chunks, masks, .. }) = self.launched.front_mut() else { return Ok(()) };
        if masks.chunks.is_empty() {
            return Ok(());
        }
        let begun = std::time::Instant::now();
        let state = &mut self.masks;
        state.masks.clear(self.model.vocab_size);
        for (at, ticket) in masks.chunks.drain(..).zip(masks.tickets.drain(..)) {
            let Some(ticket) = ticket else {
                state.masks.push_row();
                continue;
            };
            let Some(MaskResult { matcher, mask, outcome, took, .. }) = state.receive(ticket) else {
                return Err(runtime::Error::Device(
                    "the threads that compute token masks have ended".to_owned(),
                ));
            };
            metrics::histogram!(crate::metrics::MASK_SECONDS).record(took.as_secs_f64());
            let end = match outcome {
                Ok(MaskOutcome::Masked) => None,
                Ok(MaskOutcome::Complete) => Some(ConstraintEnd::Complete),
                Err(error) => Some(ConstraintEnd::Failed(error.to_string())),
            };
            // Without a mask, the row draws a token that is discarded.
            if end.is_none() {
                state.masks.push(&mask)
            } else {
                _ = state.masks.push_row()
            };
            state.spare.push(mask);
            let live = self.live[chunks[at].id.index()].as_mut();
            if let Some(constraint) = live.and_then(|live| live.constraint.as_mut()) {
                constraint.matcher = Some(matcher);
                constraint.end = end;
            }
        }
        metrics::histogram!(crate::metrics::MASK_WAIT_SECONDS).record(begun.elapsed().as_secs_f64());
        self.runtime.supply_masks(&mut state.masks)
    }
}

impl IterationMasks {
    /// Empties the masks and keeps their buffers.
    pub(super) fn clear(&mut self) {
        self.chunks.clear();
        self.tickets.clear();
        self.started = false;
    }
}

impl MaskState {
    /// Submits a mask to the pool, which starts with the first one. Returns its ticket.
    fn submit(&mut self, matcher: Box<Matcher>, ignore_eos: bool, mask: Vec<u32>) -> u64 {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        if self.pool.is_none() {
            self.pool = MaskPool::start().inspect_err(|error| {
                tracing::warn!(%error, "cannot start threads for token masks; computing them on the engine's thread");
            }).ok();
        }
        let job = MaskJob { ticket, matcher, ignore_eos, mask };
        let refused = match &self.pool {
            Some(pool) => pool.submit(job).err(),
            None => Some(job),
        };
        self.early.extend(refused.map(compute));
        ticket
    }

    /// Waits for the result of a ticket. Results of iterations that failed are dropped.
    fn receive(&mut self, ticket: u64) -> Option<MaskResult> {
        loop {
            if let Some(at) = self.early.iter().position(|result| result.ticket == ticket) {
                return Some(self.early.swap_remove(at));
            }
            let result = self.pool.as_ref()?.receive()?;
            self.early.push(result);
        }
    }

    /// Forgets the results of iterations that failed.
    pub(super) fn forget(&mut self) {
        self.early.clear();
    }
}
