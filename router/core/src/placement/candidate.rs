use super::Estimate;

/// Capacity at a worker, as grants and requests count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Credits {
    /// Sequences (choices) in flight.
    pub sequences: u32,
    /// KV blocks for their admission.
    pub blocks: u32,
}

impl Credits {
    /// Whether `need` more fit when `used` of these are taken. A shrunken grant may be below what is used.
    pub fn fit(self, used: Credits, need: Credits) -> bool {
        let within = |bound: u32, used: u32, need: u32| u64::from(used) + u64::from(need) <= u64::from(bound);
        within(self.sequences, used.sequences, need.sequences)
            && within(self.blocks, used.blocks, need.blocks)
    }
}

/// Whether a worker may have a request at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Standing {
    /// It may.
    #[default]
    Serving,
    /// It serves another model, or its limits are too low for the request.
    Unfit,
    /// It finishes what it has and takes nothing new.
    Draining,
    /// It failed too often, or is kept for another request.
    Ejected,
}

/// A worker that could run a request, as one session knows it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Candidate {
    /// The worker's index in the router's list.
    pub worker: usize,
    /// Whether it may have the request.
    pub standing: Standing,
    /// What the session may have in flight.
    pub grant: Credits,
    /// What it has in flight.
    pub used: Credits,
    /// Sequences beyond the grant that the request may use: 0 unless it outranks something in flight.
    pub urgent: u32,
    /// What the request needs there (workers may have blocks of different sizes).
    pub need: Credits,
    /// It failed this request before: taken only if there is no other.
    pub avoid: bool,
    /// What is known of it with the request in mind.
    pub estimate: Estimate,
}

impl Candidate {
    /// Whether the request may be handed over now. A session with nothing in flight takes any request as soon
    /// as it has a grant: a request larger than every grant would otherwise wait for ever. One that outranks something in
    /// flight goes a few sequences beyond the grant. Its blocks do not matter then: its worker takes them from what it
    /// outranks.
    pub fn has_room(&self) -> bool {
        let idle = self.used.sequences == 0;
        self.grant.fit(self.used, self.need)
            || (idle && self.grant.sequences > 0 && self.grant.blocks > 0)
            || (self.urgent > 0 && self.beyond().fit(self.used, self.need))
    }

    fn beyond(&self) -> Credits {
        Credits { sequences: self.grant.sequences.saturating_add(self.urgent), blocks: u32::MAX }
    }

    /// The load after taking the request: the fuller of the two bounds, as a fraction. Another router's load shows in
    /// it, for it makes the grant smaller.
    pub(super) fn load(&self) -> Fraction {
        let sequences = Fraction::new(self.used.sequences, self.need.sequences, self.grant.sequences);
        let blocks = Fraction::new(self.used.blocks, self.need.blocks, self.grant.blocks);
        sequences.max(blocks)
    }
}

/// A non-negative fraction, compared exactly.
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
