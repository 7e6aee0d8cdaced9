//! Internal fragmentation of paged KV memory, and savings against reservation of the maximum sequence length.

use inflight_contract::{LayerGroup, MemoryShape};
use inflight_simulator::workload::Workload;
use inflight_simulator::{KvUsage, Records, Request, Simulation};
use inflight_traces::{read_lengths, read_vtc};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{CostModel, CostPrior, SchedulerLimits, Time};

use crate::common::{scheduler, trace};

const BLOCK_TOKENS: u32 = 16;
/// Maximum length of each sequence, as far as the scheduler knows.
const SEQUENCE_TOKENS: u32 = 8192;
const SEED: u64 = 8192;

/// Converts lengths to requests that all arrive at the start, so that memory limits the concurrency.
fn backlog(lengths: &[(u32, u32)]) -> Vec<Request> {
    let fits =
        |&&(prompt, output): &&(u32, u32)| prompt > 0 && output > 0 && prompt + output <= SEQUENCE_TOKENS;
    let request = |&(prompt, output): &(u32, u32)| {
        let max_tokens = SEQUENCE_TOKENS - prompt;
        Request { max_tokens, ..Request::new(Time::ZERO, 0, prompt, output) }
    };
    lengths.iter().filter(fits).map(request).collect()
}

fn lengths_of(workload: Workload) -> Vec<(u32, u32)> {
    let requests = workload.generate(SEED);
    requests.iter().map(|request| (request.prompt_tokens, request.output_tokens)).collect()
}

fn share_gpt() -> Vec<(u32, u32)> {
    let measured = trace("lengths/sharegpt_8k.first10000.csv").map(|path| read_lengths(&path).unwrap());
    let mut lengths = measured.unwrap_or_else(|| lengths_of(Workload::conversations(2000)));
    lengths.truncate(2000);
    lengths
}

fn vtc() -> Vec<(u32, u32)> {
    let Some(path) = trace("tenants/vtc_real_fcfs.csv") else { return lengths_of(Workload::chat()) };
    let served = read_vtc(&path).unwrap();
    served.iter().map(|request| (request.prompt_tokens, request.output_tokens)).collect()
}

fn paged(pool_tokens: u32) -> SchedulerLimits {
    SchedulerLimits {
        waiting_max: 10_000,
        prefix_cache: false,
        sequence_tokens: SEQUENCE_TOKENS,
        ..SchedulerLimits::new(BLOCK_TOKENS, pool_tokens / BLOCK_TOKENS, 256, 8192)
    }
}

/// A model of six layers per group of full attention, five of them with this window, in blocks of one layer's rows.
fn with_windows(window: Option<u32>, limits: SchedulerLimits) -> SchedulerLimits {
    let groups = [LayerGroup { blocks: 1, window: None }, LayerGroup { blocks: 5, window }];
    let all = [LayerGroup { blocks: 6, window: None }];
    let groups = if window.is_some() { &groups[..] } else { &all };
    SchedulerLimits {
        shape: MemoryShape::new(BLOCK_TOKENS, groups).unwrap(),
        blocks: limits.blocks * 6,
        ..limits
    }
}

fn kv_usage(name: &str, limits: SchedulerLimits, lengths: &[(u32, u32)]) -> KvUsage {
    let requests = backlog(lengths);
    let cost = CostModel::new(CostPrior::default());
    let mut simulation = Simulation::new(scheduler(limits, PolicyKind::Fair), cost);
    let mut records = Records::new(&requests);
    simulation.run(&requests, &mut records).unwrap();
    assert!(records.iter().all(|record| record.output_tokens == record.request.output_tokens));
    let kv = *records.kv();
    if !limits.shape.has_windows() {
        println!(
            "{name:24} waste {:6.3} %  (formula {:6.3} %)  with running prefills {:6.3} %",
            100.0 * kv.waste(),
            100.0 * kv.waste_expected(BLOCK_TOKENS),
            100.0 * kv.empty(),
        );
    }
    println!(
        "{name:24} {} blocks for one sequence of {:7} tokens  {:5.1} running  {} preemptions of {} requests",
        limits.blocks,
        limits.pool_tokens(),
        kv.concurrency(),
        records.preemptions(),
        requests.len(),
    );
    kv
}

#[test]
fn paging_wastes_half_a_block_per_sequence_and_no_more() {
    for (name, pool_tokens, lengths, most) in
        [("ShareGPT", 131_072, share_gpt(), 0.005), ("VTC", 65_536, vtc(), 0.04)]
    {
        // By default, admission also reserves the first output block.
        let kv = kv_usage(name, paged(pool_tokens), &lengths);
        assert!(kv.waste() < most, "{name}: {} of the allocated slots are wasted", kv.waste());
        let on_demand = SchedulerLimits { min_decode_tokens: 0, ..paged(pool_tokens) };
        let kv = kv_usage(&format!("{name}, on demand"), on_demand, &lengths);
        let error = kv.waste() / kv.waste_expected(BLOCK_TOKENS) - 1.0;
        assert!(error.abs() < 0.1, "{name}: the waste differs from the formula by {error}");
    }
}

#[test]
fn paging_runs_at_least_twice_the_sequences_of_maximum_reservation() {
    for (name, lengths) in [("ShareGPT", share_gpt()), ("VTC", vtc())] {
        let limits = paged(131_072);
        let paged = kv_usage(&format!("{name}, paged"), limits, &lengths);
        let max_reservation =
            SchedulerLimits { min_decode_tokens: SEQUENCE_TOKENS, watermark_blocks: 0, ..limits };
        let reserved = kv_usage(&format!("{name}, reserved"), max_reservation, &lengths);
        assert_eq!(reserved.running_max, 131_072 / SEQUENCE_TOKENS, "each sequence reserves the maximum");
        let ratio = paged.concurrency() / reserved.concurrency();
        println!("{name}: {ratio:.2} times the concurrency");
        assert!(ratio >= 2.0);
    }
}

#[test]
fn windows_run_more_sequences_in_the_same_memory() {
    for (name, lengths) in [("ShareGPT", share_gpt()), ("VTC", vtc())] {
        let [full, windows] = [None, Some(128)].map(|window| {
            let limits = with_windows(window, paged(65_536));
            kv_usage(&format!("{name}, window {window:?}"), limits, &lengths)
        });
        let ratio = windows.concurrency() / full.concurrency();
        println!("{name}: {ratio:.2} times the concurrency");
        assert!(ratio >= 1.2, "{name}: {ratio}");
    }
}
