//! Placement: the choice of a worker for a request.
//!
//! [`Placer`] filters the workers that accept it, a [`Policy`] picks one of those. Each policy has a file.

mod candidate;
mod cost;
mod estimate;
mod least_loaded;
mod power_of_two;
mod prefix;
mod random;
mod round_robin;
mod worker_states;

use std::fmt;
use std::str::FromStr;

use crate::WorkerId;
pub use candidate::{Candidate, Credits, Standing};
pub use cost::Cost;
pub use estimate::{Cached, Estimate, WorkerLoad};
pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub use prefix::Prefix;
pub use random::Random;
pub use round_robin::RoundRobin;
pub use worker_states::{BlockHashChain, WorkerStates};

/// Size of a request, for placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementRequest {
    /// Tokens of its prompt and of earlier attempts' output.
    pub prompt_tokens: u32,
    /// Expected output tokens.
    pub output_tokens: u32,
}

/// Placement policy: picks one of several workers that accept a request.
///
/// Candidates are filtered before, so every choice is valid; it depends on the request, on earlier requests
/// and on the seed.
pub trait Policy: Send + fmt::Debug {
    /// Returns an index into `workers`, which is not empty and sorted by worker.
    fn pick(&mut self, request: &PlacementRequest, workers: &[Candidate]) -> usize;

    /// Whether it uses cached prefixes, which costs a hash per block of the prompt.
    fn reads_prefixes(&self) -> bool {
        false
    }
}

/// Placement policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum PlacementKind {
    /// [`RoundRobin`].
    RoundRobin,
    /// [`LeastLoaded`].
    LeastLoaded,
    /// [`PowerOfTwo`].
    PowerOfTwo,
    /// [`Prefix`].
    Prefix,
    /// [`Cost`].
    #[default]
    Cost,
}

/// Unknown name of a placement policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown placement policy `{0}`; supported are {known}", known = PlacementKind::ALL.map(PlacementKind::name).join(", "))]
pub struct UnknownPlacement(String);

impl PlacementKind {
    /// All policies.
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::LeastLoaded, Self::PowerOfTwo, Self::Prefix, Self::Cost];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
            Self::Prefix => "prefix",
            Self::Cost => "cost",
        }
    }

    /// Creates the policy. Different seeds start with different workers, so that routers do not all choose
    /// the same one.
    pub fn build(self, seed: u64) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin::new(seed)),
            Self::LeastLoaded => Box::new(LeastLoaded::new(seed)),
            Self::PowerOfTwo => Box::new(PowerOfTwo::new(seed)),
            Self::Prefix => Box::new(Prefix::new(seed)),
            Self::Cost => Box::new(Cost::new(seed)),
        }
    }
}

impl FromStr for PlacementKind {
    type Err = UnknownPlacement;

    fn from_str(name: &str) -> Result<Self, UnknownPlacement> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownPlacement(name.to_owned()))
    }
}

impl fmt::Display for PlacementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Chooses the worker of a request: never one that does not accept it, and one that failed it before only if
/// no other worker accepts it at all, now or later.
#[derive(Debug)]
pub struct Placer {
    policy: Box<dyn Policy>,
    eligible: Vec<Candidate>,
}

impl Placer {
    /// Creates a placer with a policy.
    pub fn new(policy: Box<dyn Policy>) -> Self {
        Self { policy, eligible: Vec::new() }
    }

    /// Whether the candidates' estimates need cached prefixes.
    pub fn reads_prefixes(&self) -> bool {
        self.policy.reads_prefixes()
    }

    /// Returns the worker to dispatch to now; `None` if none has room.
    pub fn choose(&mut self, request: &PlacementRequest, candidates: &[Candidate]) -> Option<WorkerId> {
        let serving = |candidate: &&Candidate| candidate.standing == Standing::Serving;
        let untried = candidates.iter().filter(serving).any(|candidate| !candidate.avoid);
        self.eligible.clear();
        let eligible = candidates.iter().filter(serving).filter(|candidate| !(untried && candidate.avoid));
        self.eligible.extend(eligible.filter(|candidate| candidate.has_room()));
        self.eligible.sort_by_key(|candidate| candidate.worker);
        match self.eligible.as_slice() {
            [] => None,
            [only] => {
                let worker = only.worker;
                // Calls the policy to advance its round-robin state.
                self.policy.pick(request, &self.eligible);
                Some(worker)
            }
            several => {
                let picked = self.policy.pick(request, several);
                debug_assert!(picked < several.len(), "a policy picks from its list");
                several.get(picked).map(|candidate| candidate.worker)
            }
        }
    }
}

/// Round-robin tie-breaking: among equals, the first worker after the last chosen one.
#[derive(Debug, Clone, Copy, Default)]
struct TieBreaker {
    last: Option<WorkerId>,
    seed: u64,
}

impl TieBreaker {
    fn new(seed: u64) -> Self {
        Self { last: None, seed }
    }

    /// Returns the index of the minimum by `key`, round-robin among equals.
    fn best<K: Ord>(&mut self, workers: &[Candidate], key: impl Fn(&Candidate) -> K) -> usize {
        // Each router starts elsewhere, so that idle routers do not all choose the same worker.
        let last = *self.last.get_or_insert_with(|| {
            let start = (self.seed % workers.len().max(1) as u64) as usize;
            workers.get(start).map_or(WorkerId(0), |candidate| candidate.worker)
        });
        let order = |(_, candidate): &(usize, &Candidate)| {
            (key(candidate), candidate.worker <= last, candidate.worker)
        };
        let best = workers.iter().enumerate().min_by_key(order);
        let (place, worker) = best.map_or((0, last), |(place, candidate)| (place, candidate.worker));
        self.last = Some(worker);
        place
    }
}

/// Finite number with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ordered(f64);

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}
