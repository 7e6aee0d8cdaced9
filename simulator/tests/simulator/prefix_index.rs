//! A router's prefix index fed by the real scheduler: under insertions, evictions, offloads, lost updates and
//! reconnects it equals the worker's cache, or detects that an update was lost.
use std::collections::BTreeSet;
use std::time::Duration;

use inflight_contract::{BlockHash, TokenCost, VirtualTokenCounters, Weight};
use inflight_router_core::{CacheChange, IndexStatus, PrefixIndex, SnapshotPiece, Tier};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CacheEvent, CacheTier, CostModel, CostPrior, IterationOutcome, NewSequence, Scheduler, SchedulerLimits,
    ScoredRange, Time, TokenVerdict,
};
use proptest::prelude::*;

const BLOCK: u32 = 4;

/// Operation of a random schedule.
#[derive(Debug, Clone)]
enum IndexOp {
    /// Submits a prompt of a family; prompts of one family share a prefix.
    Submit { family: u32, blocks: u32, output: u32, tenant: bool },
    /// Runs this many iterations.
    Run(u32),
    /// Drops the next update.
    Lose,
    /// Reopens the session, with a snapshot in this many pieces.
    Reconnect(usize),
}

fn index_op() -> impl Strategy<Value = IndexOp> {
    prop_oneof![
        5 => (0u32..4, 1u32..12, 1u32..10, any::<bool>())
            .prop_map(|(family, blocks, output, tenant)| IndexOp::Submit { family, blocks, output, tenant }),
        8 => (1u32..12).prop_map(IndexOp::Run),
        1 => Just(IndexOp::Lose),
        1 => (1usize..4).prop_map(IndexOp::Reconnect),
    ]
}

fn tier(tier: CacheTier) -> Tier {
    match tier {
        CacheTier::Device => Tier::Device,
        CacheTier::Host => Tier::Host,
    }
}

/// Worker side: a scheduler on a device that takes one millisecond per iteration and per copy.
struct CacheSource {
    scheduler: Scheduler,
    now: Time,
    next: u64,
    outputs: u64,
}

impl CacheSource {
    fn new() -> Self {
        // A tiny pool, to cause constant evictions, with a host pool.
        let limits = SchedulerLimits { host_blocks: 16, ..SchedulerLimits::new(BLOCK, 24, 6, 16) };
        let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
        let cost = CostModel::new(CostPrior::default());
        let scheduler = Scheduler::new(limits, PolicyKind::default().build(), cost, tenants).unwrap();
        Self { scheduler, now: Time::ZERO, next: 0, outputs: 0 }
    }

    fn submit(&mut self, family: u32, blocks: u32, output: u32, tenant: &str) {
        let tokens: Vec<u32> = (0..blocks * BLOCK + 1).map(|at| at * 31 + family).collect();
        let mut hashes = Vec::new();
        BlockHash::extend_chain(&mut hashes, BlockHash::root(tenant), &tokens, BLOCK as usize);
        let new = NewSequence {
            known_tokens: tokens.len() as u32,
            max_tokens: output,
            priority: 0,
            deadline: None,
            tenant,
            weight: Weight::default(),
            hashes: &hashes,
            group: None,
            virtual_start_time: None,
            charged_tokens: 0,
            scored: ScoredRange::default(),
        };
        // Prompts too long for the pool are rejected.
        let _ = self.scheduler.submit(new, self.now);
    }

    /// Runs one iteration or transfer.
    fn run(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        let plan = self.scheduler.plan(self.now);
        let (number, chunks) = (plan.number, plan.chunks.clone());
        let transfers: Vec<_> = plan.transfers.iter().map(|transfer| transfer.id).collect();
        for id in transfers {
            self.scheduler.transfer_done(id, true, Duration::from_millis(1), self.now).unwrap();
        }
        if !chunks.is_empty() {
            let verdicts: Vec<TokenVerdict> = chunks
                .iter()
                .filter(|chunk| chunk.samples)
                .map(|chunk| {
                    let full = (chunk.start + chunk.len + 1).is_multiple_of(BLOCK);
                    self.outputs += 1;
                    let hash = full.then(|| {
                        BlockHash::from_raw(u128::from(self.outputs) << 70 | u128::from(self.outputs))
                    });
                    TokenVerdict { stop: false, hash }
                })
                .collect();
            let outcome =
                IterationOutcome { verdicts: &verdicts, accepted: &[], took: Duration::from_millis(1) };
            self.scheduler.commit(number, outcome).unwrap();
        }
        self.scheduler.drain_ended().for_each(drop);
        self.scheduler.drain_freed_slots().for_each(drop);
    }

    fn events(&mut self) -> (u64, Vec<CacheChange>) {
        let changes: Vec<CacheChange> = self
            .scheduler
            .drain_cache_events()
            .map(|(of, event)| match event {
                CacheEvent::Stored(hash) => CacheChange::Stored(tier(of), hash.short()),
                CacheEvent::Removed(hash) => CacheChange::Removed(tier(of), hash.short()),
            })
            .collect();
        let first = self.next;
        self.next += changes.len() as u64;
        (first, changes)
    }

    fn has(&self) -> BTreeSet<(Tier, u64)> {
        self.scheduler.cache_contents().map(|(of, hash)| (tier(of), hash.short())).collect()
    }
}

fn load_snapshot(index: &mut PrefixIndex, has: &BTreeSet<(Tier, u64)>, next: u64, pieces: usize) {
    let all: Vec<(Tier, u64)> = has.iter().copied().collect();
    let size = all.len().div_ceil(pieces).max(1);
    let parts: Vec<&[(Tier, u64)]> = if all.is_empty() { vec![&[]] } else { all.chunks(size).collect() };
    for (nth, part) in parts.iter().enumerate() {
        let of =
            |wanted| -> Vec<u64> { part.iter().filter(|one| one.0 == wanted).map(|one| one.1).collect() };
        let (device, host) = (of(Tier::Device), of(Tier::Host));
        let next = (nth + 1 == parts.len()).then_some(next);
        let step = index.load(SnapshotPiece { first: nth == 0, device: &device, host: &host, next });
        assert_eq!(step, IndexStatus::Followed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_index_equals_the_cache_through_evictions_losses_and_reconnects(
        ops in prop::collection::vec(index_op(), 1..80), loaded in any::<bool>()
    ) {
        let mut source = CacheSource::new();
        let new = || PrefixIndex::new(24 + 16);
        let mut index = new();
        let (mut lose, mut lost, mut evictions) = (false, false, 0);
        if loaded {
            load_snapshot(&mut index, &source.has(), 0, 1);
        }
        for op in ops {
            match op {
                IndexOp::Submit { family, blocks, output, tenant } => {
                    source.submit(family, blocks, output, if tenant { "a" } else { "b" });
                }
                IndexOp::Run(iterations) => (0..iterations).for_each(|_| source.run()),
                IndexOp::Lose => lose = true,
                IndexOp::Reconnect(pieces) => {
                    source.events();
                    index = new();
                    load_snapshot(&mut index, &source.has(), source.next, pieces);
                    (lose, lost) = (false, false);
                }
            }
            let (first, changes) = source.events();
            if changes.is_empty() {
                continue;
            }
            evictions += changes.iter().filter(|change| matches!(change, CacheChange::Removed(..))).count();
            if std::mem::take(&mut lose) {
                lost = true;
                continue;
            }
            let step = index.apply(first, changes);
            prop_assert_eq!(step, if lost { IndexStatus::Lost } else { IndexStatus::Followed });
            if std::mem::take(&mut lost) {
                prop_assert!(index.is_empty());
                load_snapshot(&mut index, &source.has(), source.next, 2);
            }
            let has = source.has();
            for (tier, block) in &has {
                prop_assert!(index.holds(*tier, *block), "after {} evictions", evictions);
            }
            let blocks: BTreeSet<u64> = has.iter().map(|(_, block)| *block).collect();
            prop_assert_eq!(index.len(), blocks.len(), "the index contains uncached blocks");
        }
    }
}
