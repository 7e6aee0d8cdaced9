//! Iterations launched on the runtime and not completed.

use std::collections::VecDeque;

use inflight_worker_core::{Chunk, Preemption};

use super::chunk_owner::ChunkOwner;
use super::iteration_masks::IterationMasks;

/// Iteration launched on the runtime and not completed.
#[derive(Debug, Default)]
pub(super) struct LaunchedIteration {
    pub number: u64,
    pub chunks: Vec<Chunk>,
    /// Number of scored positions by chunk; chunks behind the last scored one are left out.
    pub scored: Vec<u32>,
    pub masks: IterationMasks,
    /// Drafted tokens of the chunks, in their order.
    pub drafts: Vec<u32>,
    /// Number of decodes at the start of `chunks`.
    pub decodes: u32,
    /// Owners of the chunks, in their order; empty unless the engine is observed.
    pub owners: Vec<ChunkOwner>,
    /// Sequences preempted since the iteration before: by recompute, and by swap.
    pub preempted: (u32, u32),
}

/// Iterations in flight, the oldest first, and the one completed last.
#[derive(Debug, Default)]
pub(super) struct Launches {
    in_flight: VecDeque<LaunchedIteration>,
    /// Completed iterations, the newest last; their buffers are reused.
    completed: Vec<LaunchedIteration>,
    /// Sequences preempted since the last launch: by recompute, and by swap.
    preempted: (u32, u32),
}

impl Launches {
    /// Counts a preemption before the next iteration.
    pub fn count_preemption(&mut self, kind: Preemption) {
        match kind {
            Preemption::Recompute => self.preempted.0 += 1,
            Preemption::Swap => self.preempted.1 += 1,
        }
    }

    /// Returns an iteration without content but the preemptions before it.
    pub fn next(&mut self) -> LaunchedIteration {
        let mut next = self.completed.pop().unwrap_or_default();
        next.chunks.clear();
        next.scored.clear();
        next.masks.clear();
        next.drafts.clear();
        next.owners.clear();
        next.preempted = std::mem::take(&mut self.preempted);
        next
    }

    /// Adds an iteration to those in flight.
    pub fn launch(&mut self, launched: LaunchedIteration) {
        self.in_flight.push_back(launched);
    }

    /// Returns the number of iterations in flight.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns true if no iteration is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the oldest iteration in flight.
    pub fn oldest_mut(&mut self) -> Option<&mut LaunchedIteration> {
        self.in_flight.front_mut()
    }

    /// Returns the newest iteration in flight.
    pub fn newest(&self) -> Option<&LaunchedIteration> {
        self.in_flight.back()
    }

    /// Removes the oldest iteration in flight.
    pub fn pop(&mut self) -> Option<LaunchedIteration> {
        self.in_flight.pop_front()
    }

    /// Keeps an iteration as the one completed last.
    pub fn complete(&mut self, completed: LaunchedIteration) {
        self.completed.push(completed);
    }

    /// Returns the iteration completed last, until the next one is launched.
    pub fn completed(&self) -> Option<&LaunchedIteration> {
        self.completed.last()
    }

    /// Removes all iterations in flight, the oldest first, after a failure of the device.
    pub fn fail(&mut self) -> impl Iterator<Item = LaunchedIteration> + '_ {
        self.in_flight.drain(..)
    }
}
