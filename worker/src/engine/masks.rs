//! Token masks of the steps that sample constrained choices.
//!
//! A choice consumes its tokens as they are committed, on the engine's thread; its next mask is computed on the mask pool
//! while the device runs the forward pass, and supplied before the step is completed. A look-ahead step is launched before the
//! token in flight is known: only its sampling waits. The plan never depends on a mask.

use std::sync::Arc;

use inflight_grammar::{MaskOutcome, Matcher};
use inflight_grammar_service::Grammars;
use inflight_runtime::{self as runtime, TokenMasks};

use super::Engine;
use super::launches::LaunchedIteration;
use super::live_constraint::{ConstraintEnd, PREDICTED_MIN};
use super::mask_pool::{MaskJob, MaskPool, MaskResult, compute};

/// Masks of an engine: the pool, and buffers.
#[derive(Default)]
pub(super) struct MaskState {
    pool: Option<MaskPool>,
    next_ticket: u64,
    /// Results that arrived before those that the engine waited for.
    early: Vec<MaskResult>,
    spare: Vec<(Vec<u32>, Vec<u32>)>,
    masks: TokenMasks,
}

impl Engine {
    /// Sets the grammars of the model; without them, constrained requests are refused.
    pub fn set_grammars(&mut self, grammars: Arc<Grammars>) {
        self.grammars = Some(grammars);
    }

    /// Starts the masks of the oldest launched iteration, if it has masked rows and its predecessor is committed.
    pub(super) fn start_masks(&mut self) {
        let Some(iteration) = self.launches.oldest_mut() else { return };
        let LaunchedIteration { chunks, masks, drafts, .. } = iteration;
        if masks.chunks.is_empty() || std::mem::replace(&mut masks.started, true) {
            return;
        }
        let state = &mut self.masks;
        let words = TokenMasks::words(self.model.vocab_size);
        for masked in &masks.chunks {
            let live = self.live.get_mut(chunks[masked.chunk].id);
            let constraint = live.and_then(|live| live.constraint.as_mut());
            // An ended sequence draws a token that is discarded.
            let ticket = constraint.and_then(|constraint| {
                // With look-ahead, the next plan needs the forced tokens while the mask pool holds the matcher.
                let asked = self.scheduler.limits().depth > 1
                    && masked.drafts == 0
                    && self.scheduler.drafts_wanted(chunks[masked.chunk].id).forced > 0;
                constraint.predicted =
                    if asked { constraint.forced_tokens(PREDICTED_MIN as usize) } else { Vec::new() };
                let matcher = constraint.matcher.take_if(|matcher| matcher.has_begun())?;
                let own = &drafts[masked.first_draft..][..masked.drafts];
                Some(state.submit(matcher, constraint.ignore_eos, own, words))
            });
            masks.tickets.push(ticket);
        }
    }

    /// Waits for the masks of the oldest launched iteration and supplies them to the runtime.
    pub(super) fn supply_masks(&mut self) -> Result<(), runtime::Error> {
        let Some(LaunchedIteration { chunks, masks, .. }) = self.launches.oldest_mut() else { return Ok(()) };
        if masks.chunks.is_empty() {
            return Ok(());
        }
        let begun = std::time::Instant::now();
        let state = &mut self.masks;
        let words = TokenMasks::words(self.model.vocab_size);
        state.masks.clear(self.model.vocab_size);
        for (masked, ticket) in masks.chunks.drain(..).zip(masks.tickets.drain(..)) {
            let rows = 1 + masked.drafts;
            let Some(ticket) = ticket else {
                (0..rows).for_each(|_| _ = state.masks.push_row());
                continue;
            };
            let Some(result) = state.receive(ticket) else {
                return Err(runtime::Error::Device(
                    "the threads that compute token masks have ended".to_owned(),
                ));
            };
            metrics::histogram!(crate::metrics::MASK_SECONDS).record(result.took.as_secs_f64());
            result.masks.chunks_exact(words).take(result.rows).for_each(|mask| state.masks.push(mask));
            // Without a mask, a row draws a token that is discarded.
            (result.rows..rows).for_each(|_| _ = state.masks.push_row());
            let end = result.end.map(|end| match end {
                Err(error) => ConstraintEnd::Failed(error.to_string()),
                Ok(MaskOutcome::Complete | MaskOutcome::Masked) => ConstraintEnd::Complete,
            });
            state.spare.push((result.masks, result.drafts));
            let live = self.live.get_mut(chunks[masked.chunk].id);
            if let Some(constraint) = live.and_then(|live| live.constraint.as_mut()) {
                constraint.matcher = Some(result.matcher);
                constraint.end = end.map(|end| (result.rows, end));
            }
        }
        metrics::histogram!(crate::metrics::MASK_WAIT_SECONDS).record(begun.elapsed().as_secs_f64());
        self.publish_matcher_bytes();
        self.runtime.supply_masks(&mut self.masks.masks)
    }

    /// Publishes the memory of the states of all constrained choices.
    pub(super) fn publish_matcher_bytes(&self) {
        if let Some(grammars) = &self.grammars {
            metrics::gauge!(crate::metrics::MATCHER_BYTES).set(grammars.matcher_bytes() as f64);
        }
    }
}

impl MaskState {
    /// Submits the masks of a chunk with these drafts to the pool, which starts with the first one. Returns their ticket.
    fn submit(&mut self, matcher: Box<Matcher>, ignore_eos: bool, own: &[u32], words: usize) -> u64 {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let (masks, mut drafts) = self.spare.pop().unwrap_or_default();
        drafts.clear();
        drafts.extend_from_slice(own);
        if self.pool.is_none() {
            self.pool = MaskPool::start().inspect_err(|error| {
                tracing::warn!(%error, "cannot start threads for token masks; computing them on the engine's thread");
            }).ok();
        }
        let job = MaskJob { ticket, matcher, ignore_eos, drafts, words, masks };
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
