//! Acceptance traces: which drafts a simulated source proposes and how many of them stand.

use inflight_traces::SplitMix64;

/// Drafts of a workload. Each decode is offered tokens with a probability; how many of them stand is drawn or
/// taken from a trace.
#[derive(Debug)]
pub struct AcceptanceTrace {
    proposal: f64,
    standing: Standing,
    rng: SplitMix64,
}

/// Number of drafts of a step that stand.
#[derive(Debug)]
enum Standing {
    /// Probability that a draft stands if all before it do.
    Probability(f64),
    /// Number per verified chunk, in order, from the beginning again at the end.
    Counts { counts: Vec<u32>, next: usize },
}

impl AcceptanceTrace {
    /// Creates a source that proposes tokens for a decode with probability `proposal`, of which each stands with
    /// probability `acceptance` if all before it do.
    pub fn random(proposal: f64, acceptance: f64, seed: u64) -> Self {
        Self { proposal, standing: Standing::Probability(acceptance), rng: SplitMix64::new(seed) }
    }

    /// Creates a source that proposes tokens for every decode; `counts` are the numbers of drafts that stand, by
    /// verified chunk in order, used again from the beginning at the end. An empty trace accepts none.
    pub fn recorded(counts: Vec<u32>) -> Self {
        Self { proposal: 1.0, standing: Standing::Counts { counts, next: 0 }, rng: SplitMix64::new(0) }
    }

    /// Returns true if the source has tokens for a decode.
    pub(crate) fn proposes(&mut self) -> bool {
        self.proposal >= 1.0 || self.rng.unit() < self.proposal
    }

    /// Returns the number of `drafts` drafts that stand.
    pub(crate) fn stand(&mut self, drafts: u32) -> u32 {
        match &mut self.standing {
            Standing::Probability(acceptance) => {
                let stands = |_: &u32| self.rng.unit() < *acceptance;
                (0..drafts).take_while(stands).count() as u32
            }
            Standing::Counts { counts, next } => {
                let count = counts.get(*next).copied().unwrap_or(0);
                *next = if *next + 1 < counts.len() { *next + 1 } else { 0 };
                count.min(drafts)
            }
        }
    }
}
