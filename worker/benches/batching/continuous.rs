//! Continuous versus static batching with the same number of slots.

use std::collections::VecDeque;
use std::sync::Arc;

use inflight_worker::PolicyKind;
use inflight_worker::engine::EngineOptions;

use crate::engine_driver::{EngineDriver, EngineSize};
use crate::model::BenchModel;
use crate::options::{BenchResult, Options};
use crate::stats::{SplitMix64, machine_load, median, quantile};

/// Request of the list.
struct ListedRequest {
    prompt: Arc<[u32]>,
    output: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum BatchingMode {
    /// Continuous batching: a finished sequence is replaced in the next iteration.
    Continuous,
    /// Static batching: a batch runs until its last sequence ends; finished sequences are not computed.
    Static,
    /// Static batching in which finished sequences are computed as padding.
    Padded,
}

const BATCHING_MODES: [(BatchingMode, &str); 3] = [
    (BatchingMode::Continuous, "continuous (fair)"),
    (BatchingMode::Static, "static"),
    (BatchingMode::Padded, "static, padded"),
];

/// Results of one pass over the list.
struct PassResult {
    tokens_per_second: f64,
    /// P50 and P99 of the inter-token latency, in milliseconds.
    between: [f64; 2],
    /// P50 and P99 of the time to first token, in milliseconds.
    first: [f64; 2],
    /// Fraction of slots, over the iterations with waiting requests, that computed for a requested token.
    occupancy: f64,
    /// Tokens in the KV cache over tokens of allocated blocks.
    kv: f64,
}

pub fn run(options: &Options) -> BenchResult<()> {
    let model = BenchModel::open(options, None)?;
    let size = EngineSize::of(options, 16, 2048, 16)?;
    let (count, runs) = (options.number("requests", 480, 1)?, options.number("runs", 3, 1)?);
    let clients = options.number("clients", 3 * size.sequences, 1)?;
    let seed = options.number("seed", 1, 0)?;
    let jobs = jobs(count, seed, model.dir.config().vocab_size as u32);
    let mean = |length: fn(&ListedRequest) -> u32| {
        jobs.iter().map(|job| f64::from(length(job))).sum::<f64>() / count as f64
    };
    println!(
        "{} ({count} requests, {clients} clients, {} slots, {} tokens an iteration, seed {seed}); prompts {:.0} \
         tokens in the mean, outputs {:.0} and up to {}; load average {}",
        model.name,
        size.sequences,
        size.batch_tokens,
        mean(|job| job.prompt.len() as u32),
        mean(|job| job.output),
        jobs.iter().map(|job| job.output).max().unwrap_or_default(),
        machine_load(),
    );
    // Warm-up of caches and clock frequency.
    pass(&model, &size, &jobs[..jobs.len().min(64)], clients, BatchingMode::Continuous)?;
    let mut passes: [Vec<PassResult>; 3] = Default::default();
    for _ in 0..runs {
        for ((mode, _), passes) in BATCHING_MODES.iter().zip(&mut passes) {
            passes.push(pass(&model, &size, &jobs, clients, *mode)?);
        }
    }
    println!(
        "\n| medians of {runs} | output tok/s | between tokens P50 / P99 ms | first token P50 / P99 ms | \
         slots in use | KV efficiency |\n|---|---|---|---|---|---|"
    );
    for ((_, name), passes) in BATCHING_MODES.iter().zip(&passes) {
        println!(
            "| {name} | {:.0} | {:.2} / {:.2} | {:.0} / {:.0} | {:.1} % | {:.1} % |",
            median(passes, |pass| pass.tokens_per_second),
            median(passes, |pass| pass.between[0]),
            median(passes, |pass| pass.between[1]),
            median(passes, |pass| pass.first[0]),
            median(passes, |pass| pass.first[1]),
            100.0 * median(passes, |pass| pass.occupancy),
            100.0 * median(passes, |pass| pass.kv),
        );
    }
    let [continuous, unpadded, padded] = &passes;
    println!();
    for (name, baseline) in [("static", unpadded), ("static, padded", padded)] {
        let ratios: Vec<f64> = continuous
            .iter()
            .zip(baseline)
            .map(|(ours, theirs)| ours.tokens_per_second / theirs.tokens_per_second)
            .collect();
        println!(
            "throughput over {name}: {:.2} (from {:.2} to {:.2})",
            quantile(&ratios, 0.5),
            quantile(&ratios, 0.0),
            quantile(&ratios, 1.0)
        );
    }
    println!("load average at the end {}", machine_load());
    Ok(())
}

/// Returns a list with heavy-tailed lengths: half of the outputs are under 43 tokens, 1 % over 300.
fn jobs(count: usize, seed: u64, vocab: u32) -> Vec<ListedRequest> {
    let mut random = SplitMix64(seed);
    let mut job = || {
        let prompt = random.lognormal(51.0, 0.6, (4, 256));
        let output = random.lognormal(43.0, 0.88, (2, 390));
        ListedRequest { prompt: random.tokens(prompt, vocab).into(), output }
    };
    (0..count).map(|_| job()).collect()
}

/// Serves the list once with a new engine.
fn pass(
    model: &BenchModel,
    size: &EngineSize,
    jobs: &[ListedRequest],
    clients: u32,
    mode: BatchingMode,
) -> BenchResult<PassResult> {
    let policy = if mode == BatchingMode::Continuous { PolicyKind::Fair } else { PolicyKind::Static };
    let mut engine_options = EngineOptions::default();
    engine_options.scheduling.policy = policy.into();
    let mut driver = EngineDriver::new(model, size, engine_options)?;
    let mut submitted = vec![0.0; jobs.len()];
    let mut got: Vec<Vec<f64>> = vec![Vec::new(); jobs.len()];
    // Requests waiting for a padded batch; only in that mode.
    let mut queue: VecDeque<usize> = VecDeque::new();
    // Request of each slot, once it got a token.
    let mut slot_requests: Vec<Option<usize>> = vec![None; size.sequences as usize];
    let (mut next, mut left, mut send) = (0, jobs.len(), clients as usize);
    let (mut busy, mut slots, mut used, mut allocated) = (0u64, 0u64, 0u64, 0u64);
    let mut idle = true;
    let begun = driver.now().as_secs_f64();
    let mut last = begun;
    while left > 0 {
        for _ in 0..std::mem::take(&mut send).min(jobs.len() - next) {
            submitted[next] = driver.now().as_secs_f64();
            match mode {
                BatchingMode::Padded => queue.push_back(next),
                _ => driver.submit(next as u64, &jobs[next].prompt, jobs[next].output),
            }
            next += 1;
        }
        if idle && mode == BatchingMode::Padded {
            let group: Vec<usize> = queue.drain(..queue.len().min(size.sequences as usize)).collect();
            let longest = group.iter().map(|job| jobs[*job].output).max().unwrap_or_default();
            group.iter().for_each(|&job| driver.submit(job as u64, &jobs[job].prompt, longest));
        }
        let step = driver.step()?;
        idle = step.idle;
        let now = driver.now().as_secs_f64();
        let (plan, load) = (driver.plan(), driver.load());
        plan.admitted.iter().for_each(|(_, slot)| slot_requests[*slot as usize] = None);
        let useful = |slot: u32| {
            slot_requests[slot as usize].is_none_or(|job| got[job].len() < jobs[job].output as usize)
        };
        let useful = plan.chunks.iter().filter(|chunk| useful(chunk.slot));
        if load.waiting > 0 || !queue.is_empty() {
            slots += u64::from(size.sequences);
            busy += useful.clone().count() as u64;
        }
        if !plan.chunks.is_empty() {
            used += useful.map(|chunk| u64::from(chunk.start + chunk.len)).sum::<u64>();
            allocated += u64::from(load.blocks_used * size.block_tokens);
        }
        let sampling = plan.chunks.iter().filter(|chunk| chunk.samples);
        for (chunk, job) in sampling.zip(&step.tokens) {
            let job = *job as usize;
            slot_requests[chunk.slot as usize] = Some(job);
            if got[job].len() < jobs[job].output as usize {
                got[job].push(now);
                last = now;
                if got[job].len() == jobs[job].output as usize {
                    (left, send) = (left - 1, send + 1);
                }
            }
        }
    }
    let between: Vec<f64> =
        got.iter().flat_map(|times| times.windows(2).map(|two| 1e3 * (two[1] - two[0]))).collect();
    let first: Vec<f64> = got.iter().zip(&submitted).map(|(times, from)| 1e3 * (times[0] - from)).collect();
    let both = |values: &[f64]| [quantile(values, 0.5), quantile(values, 0.99)];
    let tokens: usize = got.iter().map(Vec::len).sum();
    Ok(PassResult {
        tokens_per_second: tokens as f64 / (last - begun),
        between: both(&between),
        first: both(&first),
        occupancy: busy as f64 / slots.max(1) as f64,
        kv: used as f64 / allocated.max(1) as f64,
    })
}
