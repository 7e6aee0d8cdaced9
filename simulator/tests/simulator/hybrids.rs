//! Prefix cache of a model with recurrent layers on a trace of conversations, against that of a model with full attention alone in as many
//! blocks of the same size.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use inflight_contract::{MemoryShape, TokenCost, VirtualTokenCounters, Weight};
use inflight_fixtures::is_thorough;
use inflight_simulator::cluster::{ClusterRequest, conversations, read_mooncake};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    BlockHash, CostModel, CostPrior, IterationOutcome, NewSequence, Scheduler, SchedulerLimits,
    SnapshotShape, Time, TokenVerdict,
};

/// Tokens of a span.
const SPAN: u32 = 16;
/// Tokens of a block of the trace.
const TRACE_BLOCK: u32 = 512;

/// Request with the hashes of its spans, prompt and output.
struct Turn {
    arrival: Time,
    prompt: u32,
    output: u32,
    hashes: Vec<BlockHash>,
}

/// Reconstructs multi-turn conversations from a trace whose block ids cover whole blocks of 512 tokens only. A request whose prompt has all
/// whole blocks of an earlier prompt counts as the next turn of that conversation: it repeats the prompt and, with `outputs`, its answer.
fn turns(requests: &[ClusterRequest], outputs: bool) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for (nth, request) in requests.iter().enumerate() {
        let common = |other: &ClusterRequest| {
            let pairs = request.blocks.iter().zip(&other.blocks).take_while(|(a, b)| a == b);
            pairs.count() as u32
        };
        let parent = (0..nth).max_by_key(|earlier| common(&requests[*earlier]));
        let shared = parent.map_or(0, |parent| {
            let (blocks, turn) = (common(&requests[parent]), &turns[parent]);
            let whole = turn.prompt / TRACE_BLOCK;
            let end = turn.prompt + if outputs { turn.output } else { 0 };
            match blocks {
                0 => 0,
                _ if blocks >= whole && request.prompt_tokens >= end => end,
                _ => (blocks * TRACE_BLOCK).min(turn.prompt),
            }
        });
        let of_parent = parent.map_or(&[][..], |parent| &turns[parent].hashes[..(shared / SPAN) as usize]);
        let count = (request.prompt_tokens + request.output_tokens) / SPAN;
        let own = (of_parent.len() as u32..count).map(|span| {
            BlockHash::from_raw(((nth as u128 + 1) << 64) | (u128::from(span + 1) * 0x9e37_79b9_7f4a_7c15))
        });
        turns.push(Turn {
            arrival: request.arrival,
            prompt: request.prompt_tokens,
            output: request.output_tokens,
            hashes: of_parent.iter().copied().chain(own).collect(),
        });
    }
    turns
}

/// Serves the requests and returns the share of prompt tokens that were in the prefix cache.
fn hit_rate(turns: &[Turn], limits: SchedulerLimits) -> f64 {
    let cost = CostModel::new(CostPrior::default());
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
    let mut scheduler = Scheduler::new(limits, PolicyKind::Fcfs.build(), cost, tenants).unwrap();
    let mut live = BTreeMap::new();
    let mut arriving: VecDeque<&Turn> = turns.iter().collect();
    let mut now = Time::ZERO;
    let mut verdicts = Vec::new();
    while !arriving.is_empty() || !scheduler.is_idle() {
        if scheduler.is_idle() {
            now = now.max(arriving[0].arrival);
        }
        while arriving.front().is_some_and(|turn| turn.arrival <= now) {
            let turn = arriving.pop_front().unwrap();
            let new = NewSequence {
                known_tokens: turn.prompt,
                max_tokens: turn.output,
                priority: 0,
                deadline: None,
                tenant: "tenant",
                weight: Weight::default(),
                hashes: &turn.hashes[..(turn.prompt / SPAN) as usize],
                group: None,
                virtual_start_time: None,
                charged_tokens: 0,
                scored: Default::default(),
            };
            live.insert(scheduler.submit(new, now).unwrap(), (turn, turn.prompt));
        }
        let plan = scheduler.plan(now);
        // As of a model of 9 billion parameters on a GPU.
        let took = Duration::from_micros(8_000 + 20 * u64::from(plan.tokens()));
        let number = plan.number;
        verdicts.clear();
        for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
            let (turn, known) = live.get_mut(&chunk.id).unwrap();
            *known += 1;
            let hash = turn.hashes[(*known / SPAN - 1) as usize];
            verdicts.push(TokenVerdict { stop: false, hash: known.is_multiple_of(SPAN).then_some(hash) });
        }
        let ran = !plan.chunks.is_empty();
        now = now.after(took);
        if ran {
            scheduler.commit(number, IterationOutcome { verdicts: &verdicts, accepted: &[], took }).unwrap();
        }
        scheduler.drain_cache_events().count();
        scheduler.drain_freed_slots().count();
        scheduler.drain_ended().count();
    }
    let load = scheduler.load();
    assert_eq!(load.blocks_used, 0, "blocks without a sequence have an owner");
    load.cached_tokens as f64 / load.admitted_tokens as f64
}

/// Limits of a model with full attention alone, and of Qwen3.5 9B in blocks of its size.
fn limits(blocks: u32) -> [SchedulerLimits; 2] {
    let dense = SchedulerLimits { waiting_max: 10_000, ..SchedulerLimits::new(SPAN, blocks, 128, 2048) };
    let shape = MemoryShape::uniform(SPAN).with_state(145).unwrap();
    let hybrid = SchedulerLimits { shape, snapshot: Some(SnapshotShape { blocks: 101, every: 16 }), ..dense };
    [dense, hybrid]
}

/// Whether the next turn of a conversation repeats the answer as it was or, as of models that reason, without a part of it.
#[test]
fn conversations_resume_from_snapshots() {
    let path = crate::common::trace("mooncake/conversation_trace.first45min.jsonl");
    let (count, pools) =
        if is_thorough() { (1500, vec![16_384, 65_536, 262_144]) } else { (500, vec![16_384, 131_072]) };
    let generated = || conversations(count, 3.31, 1);
    let requests = path.map_or_else(generated, |path| read_mooncake(&path, count, 1).unwrap());
    for outputs in [false, true] {
        let turns = turns(&requests, outputs);
        for blocks in &pools {
            let rate = |limits| 100.0 * hit_rate(&turns, limits);
            let [dense, hybrid] = limits(*blocks).map(rate);
            // The hit rate of an LRU cache has steps, so it is compared with a smaller cache: a snapshot has the blocks of 1,616 tokens, and a
            // running sequence those of 2,320 beside its keys and values.
            let fewer = rate(limits(blocks / 4 * 3)[0]);
            let of = if outputs { "the answer" } else { "the prompt" };
            println!(
                "turns continue {of}, {blocks} blocks: {hybrid:.1} % cached; with full attention {dense:.1} %, in 3/4 of the blocks \
                 {fewer:.1} %"
            );
            assert!(hybrid > 0.6 * fewer, "{hybrid} against {fewer} in {blocks} blocks");
        }
    }
}
