//! Iterations that were launched and are not committed.

use std::collections::VecDeque;
use std::time::Duration;

use super::CommitError;
use crate::cost::StepWork;
use crate::{Chunk, SequenceId};

/// Launched and uncommitted iteration.
#[derive(Debug, Default)]
pub(super) struct LaunchedIteration {
    pub number: u64,
    pub chunks: Vec<Chunk>,
    /// Sequences whose blocks are used by the iteration's block copies, once per copy.
    pub sources: Vec<u32>,
    pub work: StepWork,
    /// Share of prefills in the predicted duration.
    pub prefill_share: f64,
    /// Measured time of its predictions.
    pub predicting: Duration,
}

impl LaunchedIteration {
    /// Returns the number of accepted tokens over all sampling chunks.
    ///
    /// # Errors
    /// [`CommitError::Accepted`] if `accepted` does not fit the chunks with drafts.
    pub fn accepted_tokens(&self, accepted: &[u32]) -> Result<usize, CommitError> {
        let mut given = accepted.iter().copied();
        let mut tokens = 0;
        for chunk in self.chunks.iter().filter(|chunk| chunk.samples) {
            if chunk.drafts == 0 {
                tokens += 1;
                continue;
            }
            let given = given.next().unwrap_or(0);
            if !(1..=chunk.drafts + 1).contains(&given) {
                return Err(CommitError::Accepted { drafts: chunk.drafts, given });
            }
            tokens += given as usize;
        }
        match given.next() {
            Some(given) => Err(CommitError::Accepted { drafts: 0, given }),
            None => Ok(tokens),
        }
    }
}

/// Iterations in flight, the oldest first, and the number of all since the start.
#[derive(Debug, Default)]
pub(super) struct Launches {
    in_flight: VecDeque<LaunchedIteration>,
    /// Committed iterations whose buffers are reused.
    recycled: Vec<LaunchedIteration>,
    count: u64,
}

impl Launches {
    /// Counts the next iteration and returns it, without content.
    pub fn next(&mut self) -> LaunchedIteration {
        self.count += 1;
        let recycled = self.recycled.pop().unwrap_or_default();
        LaunchedIteration { number: self.count, ..recycled }
    }

    /// Adds an iteration to those in flight.
    pub fn launch(&mut self, launched: LaunchedIteration) {
        self.in_flight.push_back(launched);
    }

    /// Returns the oldest iteration in flight, whose number must be `given`.
    ///
    /// # Errors
    /// [`CommitError::UnknownIteration`] if it has another number, or if none is in flight.
    pub fn oldest(&self, given: u64) -> Result<&LaunchedIteration, CommitError> {
        match self.in_flight.front() {
            Some(launched) if launched.number == given => Ok(launched),
            other => {
                let in_flight = other.map(|launched| launched.number);
                Err(CommitError::UnknownIteration { given, in_flight })
            }
        }
    }

    /// Returns the oldest iteration in flight.
    pub fn oldest_mut(&mut self) -> Option<&mut LaunchedIteration> {
        self.in_flight.front_mut()
    }

    /// Removes the oldest iteration in flight.
    pub fn pop(&mut self) -> Option<LaunchedIteration> {
        self.in_flight.pop_front()
    }

    /// Keeps the buffers of an iteration, which are empty, for a later one.
    pub fn recycle(&mut self, launched: LaunchedIteration) {
        self.recycled.push(launched);
    }

    /// Returns the number of iterations in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the number of iterations since the start.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the number of a sequence's drafts in flight, for tests.
    pub fn drafts_of(&self, id: SequenceId) -> u32 {
        let chunks = self.in_flight.iter().flat_map(|launched| &launched.chunks);
        chunks.filter(|chunk| chunk.id == id).map(|chunk| chunk.drafts).sum()
    }
}
