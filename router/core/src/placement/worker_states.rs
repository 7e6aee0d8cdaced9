//! State of all workers for placement: prefix indices, cost models, loads and dispatched prefill.

use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::{BlockHash, CostCoefficients, MemoryShape};
use serde::{Deserialize, Serialize};

use super::{Cached, Estimate, WorkerLoad};
use crate::prefix_index::{BlockMap, CacheChange, IndexStatus, PrefixIndex, SnapshotPiece, Tier};
use crate::{SubmissionId, WorkerId};

/// Short hashes of a prompt's full blocks, as prefix-cache events name them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockHashChain {
    block_tokens: u32,
    blocks: Arc<[u64]>,
}

impl BlockHashChain {
    /// Maximum blocks hashed; later ones count as not cached. Bounds the time of hashing a prompt.
    pub const BLOCKS_MAX: usize = 1 << 14;

    /// Hashes a prompt in blocks of `block_tokens`.
    pub fn of_prompt(tenant: &str, prompt: &[u32], block_tokens: u32) -> Self {
        let mut parent = BlockHash::root(tenant);
        let full = prompt.chunks_exact(block_tokens.max(1) as usize).take(Self::BLOCKS_MAX);
        let blocks = full.map(|tokens| {
            parent = parent.child(tokens);
            parent.short()
        });
        Self { block_tokens, blocks: blocks.collect() }
    }

    /// Creates a chain of given block hashes, for example from a trace.
    pub fn of_names(names: impl IntoIterator<Item = u64>, block_tokens: u32) -> Self {
        Self { block_tokens, blocks: names.into_iter().take(Self::BLOCKS_MAX).collect() }
    }

    /// Returns the tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
}

#[derive(Debug)]
struct Routed {
    chain: Option<BlockHashChain>,
    /// Sequence number of the submission in its session.
    number: u64,
}

#[derive(Debug)]
struct Member {
    shape: MemoryShape,
    index: PrefixIndex,
    /// Blocks of the requests in flight, each with their number: they are, or soon will be, on the device,
    /// whatever events have arrived.
    in_flight_blocks: BlockMap<u32>,
    routed: BTreeMap<SubmissionId, Routed>,
    /// Submissions sent in this session.
    sent: u64,
    /// Seconds of prefill of each submission, by number, that the last reported load does not include.
    unreported_prefill_s: BTreeMap<u64, f64>,
    /// Sum of these, which every placement reads.
    unreported_sum_s: f64,
    load: WorkerLoad,
    /// `None` until the worker has reported its cost model.
    cost: Option<CostCoefficients>,
}

/// What a router knows of its workers for placement: caches, costs, loads, and dispatched requests that they
/// have not yet accounted for. Workers are named by the router's indices, submissions by their ids.
///
/// **Invariants**: for each worker, `in_flight_blocks` counts exactly the blocks of the submissions in `routed`,
/// and `unreported_prefill_s` holds only submissions in `routed`; so both are bounded by the requests in
/// flight, and the index by the worker's pools.
#[derive(Debug, Default)]
pub struct WorkerStates {
    members: BTreeMap<WorkerId, Member>,
    /// Number of blocks in the indices of all workers.
    indexed_blocks: usize,
}

impl WorkerStates {
    /// Starts a session: nothing is known. The worker's pools have `blocks_max` blocks for memory of this shape.
    pub fn open(&mut self, worker: WorkerId, shape: MemoryShape, blocks_max: usize) {
        let member = Member {
            shape,
            index: PrefixIndex::new(blocks_max),
            in_flight_blocks: BlockMap::default(),
            routed: BTreeMap::new(),
            sent: 0,
            unreported_prefill_s: BTreeMap::new(),
            unreported_sum_s: 0.0,
            load: WorkerLoad::default(),
            cost: None,
        };
        self.close(worker);
        self.members.insert(worker, member);
    }

    /// Ends a session.
    pub fn close(&mut self, worker: WorkerId) {
        if let Some(member) = self.members.remove(&worker) {
            self.indexed_blocks -= member.index.len();
        }
    }

    /// Returns the number of blocks in the indices of all workers.
    pub fn indexed_blocks(&self) -> usize {
        self.indexed_blocks
    }

    /// Returns the prefix index of a worker.
    pub fn index(&self, worker: WorkerId) -> Option<&PrefixIndex> {
        self.members.get(&worker).map(|member| &member.index)
    }

    /// Stores a worker's cost model.
    pub fn set_cost(&mut self, worker: WorkerId, cost: CostCoefficients) {
        if let Some(member) = self.members.get_mut(&worker) {
            member.cost = Some(cost.sanitized());
        }
    }

    /// Whether a worker has reported its cost model in this session.
    pub fn knows_cost(&self, worker: WorkerId) -> bool {
        self.members.get(&worker).is_some_and(|member| member.cost.is_some())
    }

    /// Stores a worker's load, computed after it had received `taken` submissions of the session.
    pub fn set_load(&mut self, worker: WorkerId, load: WorkerLoad, taken: u64) {
        if let Some(member) = self.members.get_mut(&worker) {
            member.load = load;
            member.unreported_prefill_s = member.unreported_prefill_s.split_off(&taken);
            member.sum_unreported();
        }
    }

    /// Applies prefix-cache events of a worker, numbered from `first`.
    pub fn apply(
        &mut self,
        worker: WorkerId,
        first: u64,
        changes: impl IntoIterator<Item = CacheChange>,
    ) -> IndexStatus {
        let Some(member) = self.members.get_mut(&worker) else { return IndexStatus::Ignored };
        let before = member.index.len();
        let step = member.index.apply(first, changes);
        self.indexed_blocks = self.indexed_blocks - before + member.index.len();
        step
    }

    /// Loads a part of a snapshot of a worker's prefix cache.
    pub fn load(&mut self, worker: WorkerId, piece: SnapshotPiece<'_>) -> IndexStatus {
        let Some(member) = self.members.get_mut(&worker) else { return IndexStatus::Ignored };
        let before = member.index.len();
        let step = member.index.load(piece);
        self.indexed_blocks = self.indexed_blocks - before + member.index.len();
        step
    }

    /// Returns the prediction for a prompt of this length at a worker.
    pub fn estimate(&self, worker: WorkerId, prompt_tokens: u32, chains: &[BlockHashChain]) -> Estimate {
        let Some(member) = self.members.get(&worker) else { return Estimate::default() };
        let chain = chains.iter().find(|chain| chain.block_tokens == member.shape.block_tokens());
        Estimate {
            cached: chain.map_or_else(Cached::default, |chain| member.cached(chain, prompt_tokens)),
            cost: member.cost.unwrap_or_default(),
            load: member.load,
            unreported_prefill_s: member.unreported_sum_s,
        }
    }

    /// Records a dispatch to a worker, for which `estimate` was predicted.
    pub fn route(
        &mut self,
        worker: WorkerId,
        submission: SubmissionId,
        prompt_tokens: u32,
        chains: &[BlockHashChain],
        estimate: &Estimate,
    ) {
        let Some(member) = self.members.get_mut(&worker) else { return };
        let chain = chains.iter().find(|chain| chain.block_tokens == member.shape.block_tokens()).cloned();
        for block in chain.iter().flat_map(|chain| chain.blocks.iter()) {
            *member.in_flight_blocks.entry(*block).or_insert(0) += 1;
        }
        let number = member.sent;
        member.sent += 1;
        let prefill_s = estimate.prefill(prompt_tokens);
        member.unreported_prefill_s.insert(number, prefill_s);
        member.unreported_sum_s += prefill_s;
        let before = member.routed.insert(submission, Routed { chain, number });
        debug_assert!(before.is_none(), "a submission is routed once");
    }

    /// Records the end of a submission; its blocks are known by events from then on.
    pub fn settle(&mut self, worker: WorkerId, submission: SubmissionId) {
        let Some(member) = self.members.get_mut(&worker) else { return };
        let Some(Routed { chain, number }) = member.routed.remove(&submission) else { return };
        if member.unreported_prefill_s.remove(&number).is_some() {
            member.sum_unreported();
        }
        for block in chain.iter().flat_map(|chain| chain.blocks.iter()) {
            if let Some(count) = member.in_flight_blocks.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    member.in_flight_blocks.remove(block);
                }
            }
        }
    }
}

impl Member {
    /// Sums anew rather than subtracts: rounding errors would add up.
    fn sum_unreported(&mut self) {
        self.unreported_sum_s = self.unreported_prefill_s.values().sum();
    }

    /// Returns the cached prefix of a chain; the last token is always computed.
    fn cached(&self, chain: &BlockHashChain, prompt_tokens: u32) -> Cached {
        let on_device = |block: &&u64| {
            self.index.holds(Tier::Device, **block) || self.in_flight_blocks.contains_key(*block)
        };
        let announced = |block: &u64| self.index.holds(Tier::Device, *block);
        // With windows or recurrent states a sequence can resume behind a block although there is no announcement of earlier ones; the host
        // pool has no prefixes then. Of prompts in flight, few blocks will have a snapshot behind them.
        let (device, host) = if self.shape.state_blocks() > 0 {
            (chain.blocks.iter().rposition(announced).map_or(0, |last| last + 1), 0)
        } else if self.shape.has_windows() {
            (chain.blocks.iter().rposition(|block| on_device(&block)).map_or(0, |last| last + 1), 0)
        } else {
            let device = chain.blocks.iter().take_while(on_device).count();
            let after_device = chain.blocks[device..].iter();
            (device, after_device.take_while(|block| self.index.holds(Tier::Host, **block)).count())
        };
        let tokens =
            |blocks: usize| u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(chain.block_tokens);
        let most = prompt_tokens.saturating_sub(1);
        let device_tokens = tokens(device).min(most);
        let host_tokens = tokens(host).min(most - device_tokens);
        let host_blocks = host_tokens.div_ceil(chain.block_tokens.max(1));
        Cached { device_tokens, host_tokens, host_blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chain(names: &[u64]) -> Vec<BlockHashChain> {
        vec![BlockHashChain::of_names(names.iter().copied(), 4)]
    }

    #[test]
    fn a_cached_prefix_is_a_device_run_with_blocks_in_flight_then_a_host_run() {
        let mut fleet = WorkerStates::default();
        fleet.open(WorkerId(0), MemoryShape::uniform(4), 100);
        let stored = |tier, block| CacheChange::Stored(tier, block);
        fleet.apply(WorkerId(0), 0, [1, 2, 9].map(|block| stored(Tier::Device, block)));
        fleet.apply(WorkerId(0), 3, [4, 5, 7].map(|block| stored(Tier::Host, block)));
        let whole = chain(&[1, 2, 3, 4, 5, 6, 7]);
        let cached = |fleet: &WorkerStates| fleet.estimate(WorkerId(0), 29, &whole).cached;
        assert_eq!(cached(&fleet), Cached { device_tokens: 8, ..Cached::default() });
        fleet.route(WorkerId(0), SubmissionId(70), 12, &chain(&[1, 2, 3]), &Estimate::default());
        assert_eq!(cached(&fleet), Cached { device_tokens: 12, host_tokens: 8, host_blocks: 2 });
        fleet.route(WorkerId(0), SubmissionId(71), 29, &whole, &Estimate::default());
        fleet.settle(WorkerId(0), SubmissionId(70));
        assert_eq!(cached(&fleet).device_tokens, 28, "two had the blocks, one still has");
        assert_eq!(
            fleet.estimate(WorkerId(0), 28, &whole).cached.device_tokens,
            27,
            "the last token is computed"
        );
        fleet.settle(WorkerId(0), SubmissionId(71));
        fleet.settle(WorkerId(0), SubmissionId(71));
        assert_eq!(cached(&fleet).device_tokens, 8);
        assert_eq!(fleet.estimate(WorkerId(1), 29, &whole), Estimate::default(), "nobody");
    }

    #[test]
    fn a_prompts_chain_equals_the_workers_chain_for_its_tenant() {
        let prompt: Vec<u32> = (0..19).collect();
        let mut hashes = Vec::new();
        BlockHash::extend_chain(&mut hashes, BlockHash::root("a"), &prompt, 4);
        let expected: Vec<u64> = hashes.iter().map(|hash| hash.short()).collect();
        assert_eq!(BlockHashChain::of_prompt("a", &prompt, 4).blocks[..], expected[..]);
        assert_ne!(BlockHashChain::of_prompt("b", &prompt, 4).blocks[..], expected[..]);
    }

    proptest! {
        #[test]
        fn dispatched_prefill_counts_until_the_worker_has_reported_it(
            ops in prop::collection::vec((0u8..3, any::<prop::sample::Index>(), 1u32..500), 1..100)
        ) {
            let mut fleet = WorkerStates::default();
            fleet.open(WorkerId(3), MemoryShape::uniform(4), 100);
            // Handle and prefill of each submission sent, and whether it has ended.
            let mut sent: Vec<(f64, bool)> = Vec::new();
            let mut taken = 0;
            for (op, pick, tokens) in ops {
                match op {
                    0 => {
                        let chains = chain(&[u64::from(tokens % 7), u64::from(tokens % 5)]);
                        let estimate = fleet.estimate(WorkerId(3), tokens, &chains);
                        let handle = 100 + sent.len() as u64;
                        fleet.route(WorkerId(3), SubmissionId(handle), tokens, &chains, &estimate);
                        sent.push((estimate.prefill(tokens), false));
                    }
                    1 if !sent.is_empty() => {
                        let ended = pick.index(sent.len());
                        sent[ended].1 = true;
                        fleet.settle(WorkerId(3), SubmissionId(100 + ended as u64));
                    }
                    _ if !sent.is_empty() => {
                        taken = taken.max(pick.index(sent.len() + 1));
                        fleet.set_load(WorkerId(3), WorkerLoad::default(), taken as u64);
                    }
                    _ => {}
                }
                let expected: f64 = sent[taken..].iter().filter(|one| !one.1).map(|one| one.0).sum();
                let estimate = fleet.estimate(WorkerId(3), 9, &[]);
                prop_assert!((estimate.unreported_prefill_s - expected).abs() < 1e-9);
            }
            for handle in 0..sent.len() as u64 {
                fleet.settle(WorkerId(3), SubmissionId(100 + handle));
            }
            let member = &fleet.members[&WorkerId(3)];
            prop_assert!(member.in_flight_blocks.is_empty() && member.routed.is_empty() && member.unreported_prefill_s.is_empty());
        }
    }
}
