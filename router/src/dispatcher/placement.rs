//! What workers say of their caches, costs and loads, for the placement.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use inflight_router_core::{
    Ask, Candidate, Chain, Estimate, Fleet, IndexStep, Placer, SnapshotPiece, WorkerUpdate,
};
use metrics::Gauge;

use crate::dispatcher::request::AdmittedCall;
use crate::metrics as names;
use crate::options::Options;

/// Blocks of one worker in the index, whatever it says it has: 64 million tokens in blocks of 16.
pub(crate) const INDEX_BLOCKS_MAX: usize = 1 << 22;
/// Tokens that a request is expected to generate, if it may: few clients know, and the placement only weighs decodes against
/// prefills by it.
const EXPECTED_OUTPUT_TOKENS: u32 = 256;

/// The placement with all that it knows.
pub(crate) struct PlacementState {
    placer: Placer,
    fleet: Fleet,
    indexed: Gauge,
}

impl PlacementState {
    pub(crate) fn new(options: &Options) -> Self {
        let mut seed = DefaultHasher::new();
        (&options.router_id, &options.incarnation).hash(&mut seed);
        Self {
            placer: Placer::new(options.placement.build(seed.finish())),
            fleet: Fleet::default(),
            indexed: metrics::gauge!(names::PREFIX_INDEX_BLOCKS),
        }
    }

    pub(crate) fn open(&mut self, worker: usize, block_tokens: u32, blocks: usize) {
        self.fleet.open(worker, block_tokens, blocks.min(INDEX_BLOCKS_MAX));
        self.indexed.set(self.fleet.indexed_blocks() as f64);
    }

    pub(crate) fn close(&mut self, worker: usize) {
        self.fleet.close(worker);
        self.indexed.set(self.fleet.indexed_blocks() as f64);
    }

    /// Whether requests need [`PlacementState::chains`].
    pub(crate) fn reads_prefixes(&self) -> bool {
        self.placer.reads_prefixes()
    }

    /// Takes in what an update says. Returns whether the worker is to be asked for a snapshot of its cache.
    pub(crate) fn apply_update(&mut self, worker: usize, address: &str, update: &WorkerUpdate) -> bool {
        if let Some(cost) = update.cost {
            self.fleet.set_cost(worker, cost);
        }
        if let Some(load) = update.load {
            self.fleet.set_load(worker, load, update.submissions_received);
        }
        if !self.reads_prefixes() || (update.cache_snapshot.is_none() && update.cache_events.is_none()) {
            return false;
        }
        let mut lost = false;
        let mut take = |step| match step {
            IndexStep::Followed | IndexStep::Ignored => {}
            IndexStep::Lost => {
                metrics::counter!(names::PREFIX_INDEX_RESYNCS, "worker" => address.to_owned()).increment(1);
                lost = true;
            }
            IndexStep::Overfull => {
                metrics::counter!(names::PREFIX_INDEX_OVERFULL, "worker" => address.to_owned()).increment(1);
            }
        };
        if let Some(piece) = &update.cache_snapshot {
            let piece = SnapshotPiece {
                first: piece.first,
                device: &piece.device,
                host: &piece.host,
                next: piece.next_event,
            };
            take(self.fleet.load(worker, piece));
        }
        if let Some(events) = &update.cache_events {
            take(self.fleet.apply(worker, events.first, events.changes.iter().copied()));
        }
        self.indexed.set(self.fleet.indexed_blocks() as f64);
        lost
    }

    /// The names of a prompt's blocks, for each size of blocks.
    pub(crate) fn chains(call: &AdmittedCall, block_sizes: &[u32]) -> Vec<Chain> {
        block_sizes.iter().map(|size| Chain::of_prompt(&call.tenant, &call.prompt, *size)).collect()
    }

    /// What is known of a worker with a request in mind, of which `generated` tokens are there already.
    pub(crate) fn estimate(
        &self,
        worker: usize,
        call: &AdmittedCall,
        generated: usize,
        chains: &[Chain],
    ) -> Estimate {
        self.fleet.estimate(worker, ask(call, generated).prompt_tokens, chains)
    }

    pub(crate) fn choose(
        &mut self,
        call: &AdmittedCall,
        generated: usize,
        candidates: &[Candidate],
    ) -> Option<usize> {
        self.placer.choose(&ask(call, generated), candidates)
    }

    /// A request goes to a worker.
    pub(crate) fn route(
        &mut self,
        worker: usize,
        submission: u64,
        call: &AdmittedCall,
        generated: usize,
        chains: &[Chain],
    ) {
        let prompt_tokens = ask(call, generated).prompt_tokens;
        let estimate = self.fleet.estimate(worker, prompt_tokens, chains);
        metrics::counter!(names::PLACED_TOKENS).increment(prompt_tokens.into());
        metrics::counter!(names::PLACED_CACHED_TOKENS).increment(estimate.cached.tokens().into());
        self.fleet.route(worker, submission, prompt_tokens, chains, &estimate);
    }

    /// Predicted time to the first token at a worker once it has the request; `None` if the worker has not said what
    /// things cost there.
    pub(crate) fn first_token(
        &self,
        worker: usize,
        call: &AdmittedCall,
        chains: &[Chain],
    ) -> Option<Duration> {
        let prompt_tokens = ask(call, 0).prompt_tokens;
        let estimate = self.fleet.estimate(worker, prompt_tokens, chains);
        self.fleet
            .knows_cost(worker)
            .then(|| Duration::try_from_secs_f64(estimate.first_token(prompt_tokens)).ok())
            .flatten()
    }

    /// A submission has ended.
    pub(crate) fn settle(&mut self, worker: usize, submission: u64) {
        self.fleet.settle(worker, submission);
    }
}

fn ask(call: &AdmittedCall, generated: usize) -> Ask {
    let tokens = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    Ask {
        prompt_tokens: tokens(call.prompt.len() + generated),
        output_tokens: call.max_tokens.saturating_sub(tokens(generated)).min(EXPECTED_OUTPUT_TOKENS),
    }
}
