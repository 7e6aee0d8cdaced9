//! Placement with the workers' reported caches, costs and loads.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use inflight_router_core::{
    Candidate, Chain, Estimate, Fleet, IndexStep, PlacementRequest, Placer, SnapshotPiece, WorkerUpdate,
};
use metrics::Gauge;

use crate::dispatcher::request::AdmittedCall;
use crate::metrics as names;
use crate::options::Options;

/// Maximum indexed blocks of one worker: 64 million tokens in blocks of 16.
pub(crate) const INDEX_BLOCKS_MAX: usize = 1 << 22;
/// Cap on the expected output tokens of a request: max_tokens is rarely a good estimate, and placement uses
/// it only to weigh decodes against prefills.
const EXPECTED_OUTPUT_TOKENS: u32 = 256;

/// Placement policy with the state of all workers.
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

    /// Applies an update of a worker. Returns whether a snapshot of its prefix cache must be requested.
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

    /// Hashes a prompt for each block size.
    pub(crate) fn chains(call: &AdmittedCall, block_sizes: &[u32]) -> Vec<Chain> {
        block_sizes.iter().map(|size| Chain::of_prompt(&call.tenant, &call.prompt, *size)).collect()
    }

    /// Returns the predicted cost at a worker of a request that has `generated` tokens already.
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

    /// Records a dispatch to a worker.
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

    /// Returns the predicted time to first token of a request dispatched to a worker now; `None` if the
    /// worker has not reported its cost model.
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

    /// Records the end of a submission.
    pub(crate) fn settle(&mut self, worker: usize, submission: u64) {
        self.fleet.settle(worker, submission);
    }
}

fn ask(call: &AdmittedCall, generated: usize) -> PlacementRequest {
    let tokens = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    PlacementRequest {
        prompt_tokens: tokens(call.prompt.len() + generated),
        output_tokens: call.max_tokens.saturating_sub(tokens(generated)).min(EXPECTED_OUTPUT_TOKENS),
    }
}
