//! Candidates of a placement: workers with their grants, usage and estimates.

use super::Estimate;
use crate::WorkerId;

/// Capacity of a worker in the units of grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Credits {
    /// Sequences (choices) in flight.
    pub sequences: u32,
    /// KV blocks reserved at admission.
    pub blocks: u32,
}

impl Credits {
    /// Whether `need` fits beside `used`. A shrunken grant may be below `used`.
    pub fn fit(self, used: Credits, need: Credits) -> bool {
        let within = |bound: u32, used: u32, need: u32| u64::from(used) + u64::from(need) <= u64::from(bound);
        within(self.sequences, used.sequences, need.sequences)
            && within(self.blocks, used.blocks, need.blocks)
    }
}

/// Whether a worker accepts a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Standing {
    /// Accepts it.
    #[default]
    Serving,
    /// Serves another model, or its limits are too low for the request.
    Unfit,
    /// Finishes its requests and accepts no new ones.
    Draining,
    /// Ejected as an outlier, or reserved for a quarantined request.
    Ejected,
}

/// Worker that could run a request, as one session knows it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Candidate {
    /// Index of the worker in the router's list.
    pub worker: WorkerId,
    /// Whether it accepts the request.
    pub standing: Standing,
    /// Credits granted to the session.
    pub grant: Credits,
    /// Credits in use.
    pub used: Credits,
    /// Sequences beyond the grant that the request may use; 0 unless it outranks a request in flight.
    pub priority_sequences: u32,
    /// Credits that the request needs there (block sizes differ between workers).
    pub need: Credits,
    /// It failed this request before; chosen only if there is no other.
    pub avoid: bool,
    /// Predicted cost of the request there.
    pub estimate: Estimate,
}

impl Candidate {
    /// Whether the request may be dispatched now. An idle session with a grant accepts any request, or one
    /// larger than every grant would wait forever. A request that outranks another in flight may use
    /// `priority_sequences` sequences beyond the grant; its blocks are not counted then, because the worker
    /// preempts for them.
    pub fn has_room(&self) -> bool {
        let idle = self.used.sequences == 0;
        self.grant.fit(self.used, self.need)
            || (idle && self.grant.sequences > 0 && self.grant.blocks > 0)
            || (self.priority_sequences > 0 && self.extended_grant().fit(self.used, self.need))
    }

    fn extended_grant(&self) -> Credits {
        Credits { sequences: self.grant.sequences.saturating_add(self.priority_sequences), blocks: u32::MAX }
    }

    /// Returns the load after dispatch: the larger of the used fractions of sequences and blocks. The load of
    /// other routers is included, because it shrinks the grant.
    pub(super) fn load(&self) -> Fraction {
        let sequences = Fraction::new(self.used.sequences, self.need.sequences, self.grant.sequences);
        let blocks = Fraction::new(self.used.blocks, self.need.blocks, self.grant.blocks);
        sequences.max(blocks)
    }
}

/// Non-negative fraction, compared exactly.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fraction {
    over: u64,
    under: u64,
}

impl Fraction {
    fn new(used: u32, need: u32, bound: u32) -> Self {
        Self { over: u64::from(used) + u64::from(need), under: u64::from(bound).max(1) }
    }
}

impl PartialEq for Fraction {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Fraction {}

impl PartialOrd for Fraction {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Fraction {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let scale = |a: u64, b: u64| u128::from(a) * u128::from(b);
        scale(self.over, other.under).cmp(&scale(other.over, self.under))
    }
}
