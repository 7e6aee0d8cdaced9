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
    /// Maximum number by position in the output, from the beginning again at the end.
    Counts(Vec<u32>),
}

impl AcceptanceTrace {
    /// Creates a source that proposes tokens for a decode with probability `proposal`, of which each stands with
    /// probability `acceptance` if all before it do.
    pub fn random(proposal: f64, acceptance: f64, seed: u64) -> Self {
        Self { proposal, standing: Standing::Probability(acceptance), rng: SplitMix64::new(seed) }
    }

    /// Creates a source that proposes tokens for every decode. `counts` has, for each position in the output, the
    /// maximum number of drafts behind it that stand; longer outputs use it again from the beginning. An empty
    /// trace accepts none.
    pub fn recorded(counts: Vec<u32>) -> Self {
        Self { proposal: 1.0, standing: Standing::Counts(counts), rng: SplitMix64::new(0) }
    }

    /// Returns true if the source has tokens for a decode.
    pub(crate) fn proposes(&mut self) -> bool {
        self.proposal >= 1.0 || self.rng.unit() < self.proposal
    }

    /// Returns the number of `drafts` drafts that stand behind the `position`-th token of an output.
    pub(crate) fn stand(&mut self, position: u32, drafts: u32) -> u32 {
        match &mut self.standing {
            Standing::Probability(acceptance) => {
                let stands = |_: &u32| self.rng.unit() < *acceptance;
                (0..drafts).take_while(stands).count() as u32
            }
            Standing::Counts(counts) => {
                let at = position as usize % counts.len().max(1);
                counts.get(at).map_or(0, |count| *count.min(&drafts))
            }
        }
    }
}
