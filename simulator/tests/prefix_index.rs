//! A router's prefix index fed by the real scheduler: whatever is stored, evicted, kept on the host, lost on
//! the way or told again after a reconnect, it says what the worker has, or knows that it knows nothing.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeSet;
use std::time::Duration;

use inflight_contract::{BlockHash, TenantService, TokenCost, Weight};
use inflight_router_core::{CacheChange, IndexStep, PrefixIndex, SnapshotPiece, Tier};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CacheEvent, CacheTier, CostModel, CostPrior, Limits, NewSequence, Outcome, Scheduler, Time, Verdict,
};
use proptest::prelude::*;

const BLOCK: u32 = 4;

#[derive(Debug, Clone)]
enum Op {
    /// A prompt of a family: those of one family begin alike.
    Submit { family: u32, blocks: u32, output: u32, tenant: bool },
    /// So many iterations.
    Run(u32),
    /// The next update never arrives.
    Lose,
    /// The session opens again: a snapshot in so many pieces.
    Reconnect(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0u32..4, 1u32..12, 1u32..10, any::<bool>())
            .prop_map(|(family, blocks, output, tenant)| Op::Submit { family, blocks, output, tenant }),
        8 => (1u32..12).prop_map(Op::Run),
        1 => Just(Op::Lose),
        1 => (1usize..4).prop_map(Op::Reconnect),
    ]
}

fn tier(tier: CacheTier) -> Tier {
    match tier {
        CacheTier::Device => Tier::Device,
        CacheTier::Host => Tier::Host,
    }
}

/// The worker's side: a scheduler on a device that takes a millisecond for everything.
struct Source {
    scheduler: Scheduler,
    now: Time,
    next: u64,
    outputs: u64,
}

impl Source {
    fn new() -> Self {
        // Far too small, so that everything is evicted again and again, and a host pool behind it.
        let limits = Limits { host_blocks: 16, ..Limits::new(BLOCK, 24, 6, 16) };
        let tenants = TenantService::new(TokenCost::default(), 10);
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
            order: None,
            charged_tokens: 0,
        };
        // What is too long for the pool is refused.
        let _ = self.scheduler.submit(new, self.now);
    }

    /// One iteration, or a copy.
    fn run(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        let plan = self.scheduler.plan(self.now);
        let (number, chunks) = (plan.number, plan.chunks.clone());
        let transfers: Vec<_> = plan.transfers.iter().map(|transfer| transfer.id).collect();
        for id in transfers {
            self.scheduler.transfer_done(id, true, Duration::from_millis(1), self.now).unwrap();
        }
        if !chunks.is_empty() {
            let verdicts: Vec<Verdict> = chunks
                .iter()
                .filter(|chunk| chunk.samples)
                .map(|chunk| {
                    let full = (chunk.start + chunk.len + 1).is_multiple_of(BLOCK);
                    self.outputs += 1;
                    let hash = full.then(|| {
                        BlockHash::from_raw(u128::from(self.outputs) << 70 | u128::from(self.outputs))
                    });
                    Verdict { stop: false, hash }
                })
                .collect();
            let outcome = Outcome { verdicts: &verdicts, took: Duration::from_millis(1) };
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

fn greet(index: &mut PrefixIndex, has: &BTreeSet<(Tier, u64)>, next: u64, pieces: usize) {
    let all: Vec<(Tier, u64)> = has.iter().copied().collect();
    let size = all.len().div_ceil(pieces).max(1);
    let parts: Vec<&[(Tier, u64)]> = if all.is_empty() { vec![&[]] } else { all.chunks(size).collect() };
    for (nth, part) in parts.iter().enumerate() {
        let of =
            |wanted| -> Vec<u64> { part.iter().filter(|one| one.0 == wanted).map(|one| one.1).collect() };
        let (device, host) = (of(Tier::Device), of(Tier::Host));
        let next = (nth + 1 == parts.len()).then_some(next);
        let step = index.load(SnapshotPiece { first: nth == 0, device: &device, host: &host, next });
        assert_eq!(step, IndexStep::Followed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn it_agrees_with_the_scheduler_through_evictions_losses_and_reconnects(
        ops in prop::collection::vec(op(), 1..80), greeted in any::<bool>()
    ) {
        let mut source = Source::new();
        let new = || PrefixIndex::new(24 + 16);
        let mut index = new();
        let (mut lose, mut lost, mut evictions) = (false, false, 0);
        if greeted {
            greet(&mut index, &source.has(), 0, 1);
        }
        for op in ops {
            match op {
                Op::Submit { family, blocks, output, tenant } => {
                    source.submit(family, blocks, output, if tenant { "a" } else { "b" });
                }
                Op::Run(iterations) => (0..iterations).for_each(|_| source.run()),
                Op::Lose => lose = true,
                Op::Reconnect(pieces) => {
                    source.events();
                    index = new();
                    greet(&mut index, &source.has(), source.next, pieces);
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
            prop_assert_eq!(step, if lost { IndexStep::Lost } else { IndexStep::Followed });
            if std::mem::take(&mut lost) {
                prop_assert!(index.is_empty());
                greet(&mut index, &source.has(), source.next, 2);
            }
            let has = source.has();
            for (tier, block) in &has {
                prop_assert!(index.holds(*tier, *block), "after {} evictions", evictions);
            }
            let blocks: BTreeSet<u64> = has.iter().map(|(_, block)| *block).collect();
            prop_assert_eq!(index.len(), blocks.len(), "it names what is not there");
        }
    }
}
