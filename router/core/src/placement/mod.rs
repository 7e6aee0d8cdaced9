//! Where a request runs.
//!
//! [`Placer`] filters the workers that may have it, a [`Policy`] picks one of those. Each policy is a file.

mod candidate;
mod cost;
mod estimate;
mod fleet;
mod least_loaded;
mod power_of_two;
mod prefix;
mod random;
mod round_robin;

use std::fmt;
use std::str::FromStr;

pub use candidate::{Candidate, Credits, Standing};
pub use cost::Cost;
pub use estimate::{Cached, Estimate, WorkerLoad};
pub use fleet::{Chain, Fleet};
pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub use prefix::Prefix;
pub use random::Random;
pub use round_robin::RoundRobin;

/// A request, as far as its place depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Tokens of its prompt, those that earlier attempts generated included.
    pub prompt_tokens: u32,
    /// Tokens that it may be expected to generate.
    pub output_tokens: u32,
}

/// Picks one of several workers that may have a request.
///
/// What a policy sees has been filtered, so that it can't pick wrongly; what it picks depends on what it is asked, on
/// what it was asked before, and on its seed.
pub trait Policy: Send + fmt::Debug {
    /// The place of the worker in the list, which is not empty and is sorted by worker.
    fn pick(&mut self, ask: &Ask, workers: &[Candidate]) -> usize;

    /// Whether it looks at what of a prompt is cached: finding that out costs a hash for each block.
    fn reads_prefixes(&self) -> bool {
        false
    }
}

/// The policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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

/// No placement is called so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown placement policy `{0}`; supported are {known}", known = PlacementKind::ALL.map(PlacementKind::name).join(", "))]
pub struct UnknownPlacement(String);

impl PlacementKind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::LeastLoaded, Self::PowerOfTwo, Self::Prefix, Self::Cost];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
            Self::Prefix => "prefix",
            Self::Cost => "cost",
        }
    }

    /// The policy, fresh. Routers with different seeds do not all begin with the same worker.
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

/// Decides where a request runs: never at a worker that may not have it, and at one that failed it before only where
/// no other worker may have it at all, now or later.
#[derive(Debug)]
pub struct Placer {
    policy: Box<dyn Policy>,
    eligible: Vec<Candidate>,
}

impl Placer {
    /// With this policy.
    pub fn new(policy: Box<dyn Policy>) -> Self {
        Self { policy, eligible: Vec::new() }
    }

    /// Whether the candidates' estimates need to say what is cached.
    pub fn reads_prefixes(&self) -> bool {
        self.policy.reads_prefixes()
    }

    /// The worker to hand the request to now; `None` if there is none with room for it.
    pub fn choose(&mut self, ask: &Ask, candidates: &[Candidate]) -> Option<usize> {
        let serving = |candidate: &&Candidate| candidate.standing == Standing::Serving;
        let spoilt = candidates.iter().filter(serving).any(|candidate| !candidate.avoid);
        self.eligible.clear();
        let eligible = candidates.iter().filter(serving).filter(|candidate| !(spoilt && candidate.avoid));
        self.eligible.extend(eligible.filter(|candidate| candidate.has_room()));
        self.eligible.sort_by_key(|candidate| candidate.worker);
        match self.eligible.as_slice() {
            [] => None,
            [only] => {
                let worker = only.worker;
                // It takes part, so that a policy's turn goes on from here.
                self.policy.pick(ask, &self.eligible);
                Some(worker)
            }
            several => {
                let picked = self.policy.pick(ask, several);
                debug_assert!(picked < several.len(), "a policy picks from its list");
                several.get(picked).map(|candidate| candidate.worker)
            }
        }
    }
}

/// Whose turn it is among equals: the first worker behind the one taken last, round and round.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    last: Option<usize>,
    seed: u64,
}

impl Turn {
    fn new(seed: u64) -> Self {
        Self { last: None, seed }
    }

    /// The best by `key`, the one whose turn it is among equals.
    fn best<K: Ord>(&mut self, workers: &[Candidate], key: impl Fn(&Candidate) -> K) -> usize {
        // Each router begins elsewhere, so that several idle ones don't all begin with the same worker.
        let last = *self.last.get_or_insert_with(|| {
            let start = (self.seed % workers.len().max(1) as u64) as usize;
            workers.get(start).map_or(0, |candidate| candidate.worker)
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

/// A finite number in order.
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
