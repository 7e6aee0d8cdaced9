//! Placement with the workers' reported caches, costs and loads.

use std::time::Duration;

use inflight_contract::MemoryShape;

use crate::{
    BlockHashChain, Candidate, Command, Estimate, IndexStatus, Notice, PlacementRequest, Placer, Policy,
    RequestSpec, SnapshotPiece, SubmissionId, WorkerId, WorkerStates, WorkerUpdate,
};

/// Maximum indexed blocks of one worker: 64 million tokens in blocks of 16.
pub(super) const INDEX_BLOCKS_MAX: usize = 1 << 22;
/// Cap on the expected output tokens of a request: max_tokens is rarely a good estimate, and placement uses
/// it only to weigh decodes against prefills.
const EXPECTED_OUTPUT_TOKENS: u32 = 256;

/// Placement policy with the state of all workers.
#[derive(Debug)]
pub(super) struct PlacementState {
    placer: Placer,
    workers: WorkerStates,
}

impl PlacementState {
    pub(super) fn new(policy: Box<dyn Policy>) -> Self {
        Self { placer: Placer::new(policy), workers: WorkerStates::default() }
    }

    pub(super) fn open(&mut self, worker: WorkerId, shape: MemoryShape, blocks: usize) {
        self.workers.open(worker, shape, blocks.min(INDEX_BLOCKS_MAX));
    }

    pub(super) fn close(&mut self, worker: WorkerId) {
        self.workers.close(worker);
    }

    pub(super) fn worker_states(&self) -> &WorkerStates {
        &self.workers
    }

    /// Whether requests need the hash chains of their prompts.
    pub(super) fn reads_prefixes(&self) -> bool {
        self.placer.reads_prefixes()
    }

    /// Applies an update of a worker. Returns whether a snapshot of its prefix cache must be requested.
    pub(super) fn apply_update(
        &mut self,
        worker: WorkerId,
        update: &WorkerUpdate,
        commands: &mut Vec<Command>,
    ) -> bool {
        if let Some(cost) = update.cost {
            self.workers.set_cost(worker, cost);
        }
        if let Some(load) = update.load {
            self.workers.set_load(worker, load, update.submissions_received);
        }
        if !self.reads_prefixes() {
            return false;
        }
        let snapshot = update.cache_snapshot.as_ref().map(|piece| {
            let next = piece.next_event;
            let (device, host) = (&piece.device[..], &piece.host[..]);
            self.workers.load(worker, SnapshotPiece { first: piece.first, device, host, next })
        });
        let events = update.cache_events.as_ref();
        let events =
            events.map(|events| self.workers.apply(worker, events.first, events.changes.iter().copied()));
        let mut lost = false;
        for step in [snapshot, events].into_iter().flatten() {
            match step {
                IndexStatus::Followed | IndexStatus::Ignored => {}
                IndexStatus::Lost => {
                    commands.push(Command::Notice(Notice::PrefixIndexLost { worker }));
                    lost = true;
                }
                IndexStatus::Overfull => {
                    commands.push(Command::Notice(Notice::PrefixIndexOverfull { worker }));
                }
            }
        }
        lost
    }

    /// Returns the predicted cost at a worker of a request that has `generated` tokens already.
    pub(super) fn estimate(&self, worker: WorkerId, spec: &RequestSpec, generated: usize) -> Estimate {
        self.workers.estimate(worker, size(spec, generated).prompt_tokens, &spec.chains)
    }

    pub(super) fn choose(
        &mut self,
        spec: &RequestSpec,
        generated: usize,
        candidates: &[Candidate],
    ) -> Option<WorkerId> {
        self.placer.choose(&size(spec, generated), candidates)
    }

    /// Records a dispatch to a worker. Returns the tokens of prompt and earlier output, and how many of them are expected in the worker's
    /// prefix cache.
    pub(super) fn route(
        &mut self,
        worker: WorkerId,
        submission: SubmissionId,
        spec: &RequestSpec,
        generated: usize,
    ) -> (u32, u32) {
        let tokens = size(spec, generated).prompt_tokens;
        let estimate = self.workers.estimate(worker, tokens, &spec.chains);
        let cached_tokens = estimate.cached.tokens();
        self.workers.route(worker, submission, tokens, &spec.chains, &estimate);
        (tokens, cached_tokens)
    }

    /// Returns the predicted time to first token of a request dispatched to a worker now; `None` if the
    /// worker has not reported its cost model.
    pub(super) fn first_token(&self, worker: WorkerId, spec: &RequestSpec) -> Option<Duration> {
        let estimate = self.workers.estimate(worker, spec.prompt_tokens, &spec.chains);
        self.workers
            .knows_cost(worker)
            .then(|| Duration::try_from_secs_f64(estimate.first_token(spec.prompt_tokens)).ok())
            .flatten()
    }

    /// Records the end of a submission.
    pub(super) fn settle(&mut self, worker: WorkerId, submission: SubmissionId) {
        self.workers.settle(worker, submission);
    }
}

/// Returns the hash chains of a prompt, one per block size.
pub fn prompt_chains(tenant: &str, prompt: &[u32], block_sizes: &[u32]) -> Vec<BlockHashChain> {
    block_sizes.iter().map(|size| BlockHashChain::of_prompt(tenant, prompt, *size)).collect()
}

fn size(spec: &RequestSpec, generated: usize) -> PlacementRequest {
    let generated = u32::try_from(generated).unwrap_or(u32::MAX);
    PlacementRequest {
        prompt_tokens: spec.prompt_tokens.saturating_add(generated),
        output_tokens: spec.max_tokens.saturating_sub(generated).min(EXPECTED_OUTPUT_TOKENS),
    }
}
