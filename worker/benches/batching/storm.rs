//! Inter-token latency of steady streams beside a storm of long prompts.

use std::sync::Arc;
use std::time::Duration;

use inflight_worker::engine::EngineOptions;
use inflight_worker_core::StepTargetOption;

use crate::engine_driver::{EngineDriver, EngineSize};
use crate::model::BenchModel;
use crate::options::{BenchResult, Options};
use crate::stats::{SplitMix64, machine_load, median, quantile};

/// First request id of long prompts.
const LONG: u64 = 1 << 32;
/// Prompt tokens of a stream; few, so that a stream's prefill costs about as much as a decode.
const PROMPT: u32 = 4;
/// Output tokens of a long prompt.
const ANSWER: u32 = 16;
/// Warm-up in seconds, until the streams are out of phase.
const WARM_UP: f64 = 2.0;

#[derive(Debug, Clone, Copy)]
struct StormLoad {
    streams: u64,
    prompt: u32,
    /// Seconds between long prompts.
    every: f64,
    /// Duration in seconds.
    seconds: f64,
    seed: u64,
}

/// Results of one phase; times in milliseconds.
struct PhaseResult {
    /// Inter-token latencies of the streams.
    between: Vec<f64>,
    /// Time to first token of each long prompt.
    first: Vec<f64>,
    /// Tokens per second of the streams.
    rate: f64,
    /// Mean prompt tokens of the iterations with both decodes and prefill.
    chunk: f64,
    /// Fraction of iterations with prefill among those with decodes.
    mixed: f64,
    /// Measured over predicted duration of the iterations with both.
    off: Vec<f64>,
}

pub fn run(options: &Options) -> BenchResult<()> {
    let load = StormLoad {
        streams: options.number("streams", 8, 1)?,
        prompt: options.number("prompt", 4000, 1)?,
        every: options.number("every", 3.0, 0.01)?,
        seconds: options.number("seconds", 15.0, 0.1)?,
        seed: options.number("seed", 1, 0)?,
    };
    let model = BenchModel::open(options, Some(4500))?;
    let size = EngineSize::of(options, 32, 512, 16)?;
    let (runs, factor) = (options.number("runs", 3, 1)?, options.number("target-factor", 1.8, 1.0)?);
    // Token budget for a long prompt in one iteration, beside everything else.
    let whole = EngineSize { batch_tokens: load.prompt + size.batch_tokens, ..size };
    println!(
        "{}: {} streams, a prompt of {} tokens every {} s, {} s each part, seed {}; load average {}",
        model.name,
        load.streams,
        load.prompt,
        load.every,
        load.seconds,
        load.seed,
        machine_load(),
    );
    // Warm-up of caches and clock frequency.
    phase(&model, &size, StepTargetOption::Off, &load, false)?;
    let (mut calm, mut chunked, mut unchunked) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        let alone = phase(&model, &size, StepTargetOption::Off, &load, false)?;
        // The step target follows the calm P99 of the same round, as the machine's speed may drift.
        let target = Duration::from_secs_f64(factor * quantile(&alone.between, 0.99) / 1e3);
        println!("step target {:.2} ms, {factor} times the calm P99", 1e3 * target.as_secs_f64());
        calm.push(alone);
        chunked.push(phase(&model, &size, StepTargetOption::Fixed(target), &load, true)?);
        unchunked.push(phase(&model, &whole, StepTargetOption::Off, &load, true)?);
    }
    println!(
        "\n| medians of {runs} | between tokens P50 / P99 / P99.9 / longest ms | streams tok/s | long prompts: first \
         token P50 / longest ms | prompt tokens beside decodes | iterations with both |\n|---|---|---|---|---|---|"
    );
    for (name, parts) in [("calm", &calm), ("storm, chunked", &chunked), ("storm, at once", &unchunked)] {
        let between = |q: f64| median(parts, |part| quantile(&part.between, q));
        let first = |q: f64| median(parts, |part| quantile(&part.first, q));
        println!(
            "| {name} | {:.2} / {:.2} / {:.2} / {:.1} | {:.0} | {:.0} / {:.0} | {:.0} | {:.1} % |",
            between(0.5),
            between(0.99),
            between(0.999),
            between(1.0),
            median(parts, |part| part.rate),
            first(0.5),
            first(1.0),
            median(parts, |part| part.chunk),
            100.0 * median(parts, |part| part.mixed),
        );
    }
    let ratios = |ours: &[PhaseResult], theirs: &[PhaseResult], figure: fn(&PhaseResult) -> f64| {
        let each = ours.iter().zip(theirs).map(|(ours, theirs)| figure(ours) / figure(theirs));
        let each: Vec<f64> = each.collect();
        format!(
            "{:.2} (from {:.2} to {:.2})",
            quantile(&each, 0.5),
            quantile(&each, 0.0),
            quantile(&each, 1.0)
        )
    };
    let p99 = |part: &PhaseResult| quantile(&part.between, 0.99);
    println!("\nP99 between tokens, chunked over calm: {}", ratios(&chunked, &calm, p99));
    println!(
        "longest between tokens, over calm P99: chunked {:.1}, at once {:.1}",
        median(&chunked, |part| quantile(&part.between, 1.0)) / median(&calm, p99),
        median(&unchunked, |part| quantile(&part.between, 1.0)) / median(&calm, p99),
    );
    let first = |part: &PhaseResult| quantile(&part.first, 0.5);
    println!("first token of long prompts, chunked over at once: {}", ratios(&chunked, &unchunked, first));
    let off = |q: f64| median(&chunked, |part| quantile(&part.off, q));
    println!(
        "iterations with both, chunked: took {:.2} / {:.2} / {:.2} of what was predicted (P10 / P50 / P90)",
        off(0.1),
        off(0.5),
        off(0.9)
    );
    println!("load average at the end {}", machine_load());
    Ok(())
}

/// Runs one phase with a new engine; with long prompts if `storm`.
fn phase(
    model: &BenchModel,
    size: &EngineSize,
    target: StepTargetOption,
    load: &StormLoad,
    storm: bool,
) -> BenchResult<PhaseResult> {
    let mut engine_options = EngineOptions::default();
    engine_options.scheduling.step_target = target;
    let mut driver = EngineDriver::new(model, size, engine_options)?;
    let vocab = model.dir.config().vocab_size as u32;
    let mut random = SplitMix64(load.seed);
    let contents: Vec<Arc<[u32]>> = (0..4).map(|_| random.tokens(load.prompt, vocab).into()).collect();
    let mut start = |driver: &mut EngineDriver, stream: u64| {
        // Different lengths, so that streams do not start together, and long ones, so that few start.
        let output = random.lognormal(600.0, 0.4, (200, 1000));
        driver.submit(stream, &random.tokens(PROMPT, vocab).into(), output);
    };
    (0..load.streams).for_each(|stream| start(&mut driver, stream));
    let mut latest: Vec<Option<f64>> = vec![None; load.streams as usize];
    let mut between = Vec::new();
    // Due time and time to first token of each long prompt.
    let (mut due, mut first): (Vec<f64>, Vec<Option<f64>>) = Default::default();
    let (mut mixed, mut with_decodes, mut beside) = (0u32, 0u32, 0u64);
    let mut off = Vec::new();
    loop {
        let now = driver.now().as_secs_f64();
        let end = WARM_UP + load.seconds;
        // After the end nothing is measured, but every long prompt gets its first token.
        if now >= end && first.iter().all(Option::is_some) {
            break;
        }
        // The first one is due after half an interval. TTFT counts from the due time, to avoid coordinated
        // omission.
        let next = WARM_UP + load.every * (due.len() as f64 + 0.5);
        if storm && now >= next && next < end {
            let long = due.len() as u64;
            driver.submit(LONG + long, &contents[long as usize % contents.len()], ANSWER);
            due.push(next);
            first.push(None);
        }
        let step = driver.step()?;
        let now = driver.now().as_secs_f64();
        let plan = driver.plan();
        let counts = (WARM_UP..end).contains(&now);
        if plan.decodes > 0 && counts {
            let prefill = plan.tokens() - plan.decodes;
            with_decodes += 1;
            mixed += u32::from(prefill > 0);
            if let (true, Some((predicted, took))) = (prefill > 0, driver.last_step()) {
                off.push(took.as_secs_f64() / predicted.as_secs_f64());
            }
            beside += u64::from(prefill);
        }
        for request in step.tokens {
            match latest.get_mut(request as usize) {
                Some(latest) => {
                    let before = latest.replace(now).filter(|_| counts);
                    between.extend(before.map(|before| 1e3 * (now - before)));
                }
                None => {
                    let long = (request - LONG) as usize;
                    first[long].get_or_insert(1e3 * (now - due[long]));
                }
            }
        }
        for request in step.ended.into_iter().filter(|request| *request < LONG) {
            latest[request as usize] = None;
            start(&mut driver, request);
        }
    }
    Ok(PhaseResult {
        rate: between.len() as f64 / load.seconds,
        between,
        first: first.into_iter().flatten().collect(),
        chunk: beside as f64 / f64::from(mixed.max(1)),
        mixed: f64::from(mixed) / f64::from(with_decodes.max(1)),
        off,
    })
}
