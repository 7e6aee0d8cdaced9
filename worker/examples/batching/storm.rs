//! Steady streams beside long prompts.

use std::sync::Arc;
use std::time::Duration;

use inflight_worker::engine::Settings;

use crate::driver::{Driver, Size};
use crate::model::Model;
use crate::options::{Options, Outcome};
use crate::stats::{Dice, machine_load, median, quantile};

/// Handles from here on are long prompts.
const LONG: u64 = 1 << 32;
/// Tokens of a stream's prompt: few, so that a stream's beginning weighs no more than a decode or so.
const PROMPT: u32 = 4;
/// Tokens that follow a long prompt.
const ANSWER: u32 = 16;
/// Seconds before anything counts: until the streams' lengths are mixed.
const WARM_UP: f64 = 2.0;

#[derive(Debug, Clone, Copy)]
struct Load {
    streams: u64,
    prompt: u32,
    /// Seconds.
    every: f64,
    seconds: f64,
    seed: u64,
}

/// What one part showed; milliseconds.
struct Part {
    between: Vec<f64>,
    /// Time to the first token of each long prompt.
    first: Vec<f64>,
    /// Decoded tokens of the streams in a second.
    rate: f64,
    /// Mean of prompt tokens in the iterations that had both decodes and prefill.
    chunk: f64,
    /// Share of iterations with prefill among those with decodes.
    mixed: f64,
    /// What the iterations that had both took, over what was predicted.
    off: Vec<f64>,
}

pub fn run(options: &Options) -> Outcome<()> {
    let load = Load {
        streams: options.number("streams", 8, 1)?,
        prompt: options.number("prompt", 4000, 1)?,
        every: options.number("every", 3.0, 0.01)?,
        seconds: options.number("seconds", 15.0, 0.1)?,
        seed: options.number("seed", 1, 0)?,
    };
    let model = Model::open(options, Some(4500))?;
    let size = Size::of(options, 32, 512, 16)?;
    let (runs, factor) = (options.number("runs", 3, 1)?, options.number("target-factor", 1.8, 1.0)?);
    // Room for the longest prompt beside everything else: it goes through in one iteration.
    let whole = Size { batch_tokens: load.prompt + size.batch_tokens, ..size };
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
    // The first part warms caches and the processor's clock up, and counts for nothing.
    part(&model, &size, None, &load, false)?;
    let (mut calm, mut chunked, mut unchunked) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        let alone = part(&model, &size, None, &load, false)?;
        // What a stream is promised: some multiple of its calm 99th percentile, that of the same minute.
        let target = Duration::from_secs_f64(factor * quantile(&alone.between, 0.99) / 1e3);
        println!("step target {:.2} ms, {factor} times the calm P99", 1e3 * target.as_secs_f64());
        calm.push(alone);
        chunked.push(part(&model, &size, Some(target), &load, true)?);
        unchunked.push(part(&model, &whole, None, &load, true)?);
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
    let ratios = |ours: &[Part], theirs: &[Part], figure: fn(&Part) -> f64| {
        let each = ours.iter().zip(theirs).map(|(ours, theirs)| figure(ours) / figure(theirs));
        let each: Vec<f64> = each.collect();
        format!(
            "{:.2} (from {:.2} to {:.2})",
            quantile(&each, 0.5),
            quantile(&each, 0.0),
            quantile(&each, 1.0)
        )
    };
    let p99 = |part: &Part| quantile(&part.between, 0.99);
    println!("\nP99 between tokens, chunked over calm: {}", ratios(&chunked, &calm, p99));
    println!(
        "longest between tokens, over calm P99: chunked {:.1}, at once {:.1}",
        median(&chunked, |part| quantile(&part.between, 1.0)) / median(&calm, p99),
        median(&unchunked, |part| quantile(&part.between, 1.0)) / median(&calm, p99),
    );
    let first = |part: &Part| quantile(&part.first, 0.5);
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

/// Runs the streams, and the long prompts if there is a storm, with a new engine.
fn part(model: &Model, size: &Size, target: Option<Duration>, load: &Load, storm: bool) -> Outcome<Part> {
    let mut driver = Driver::new(model, size, Settings { step_target: target, ..Settings::default() })?;
    let vocab = model.dir.config().vocab_size as u32;
    let mut dice = Dice(load.seed);
    let contents: Vec<Arc<[u32]>> = (0..4).map(|_| dice.tokens(load.prompt, vocab).into()).collect();
    let mut start = |driver: &mut Driver, stream: u64| {
        // Of different lengths, so that streams do not begin and end together, and long, so that few begin.
        let output = dice.lognormal(600.0, 0.4, (200, 1000));
        driver.submit(stream, &dice.tokens(PROMPT, vocab).into(), output);
    };
    (0..load.streams).for_each(|stream| start(&mut driver, stream));
    let mut latest: Vec<Option<f64>> = vec![None; load.streams as usize];
    let mut between = Vec::new();
    // When each long prompt was due, and how long its first token took.
    let (mut due, mut first): (Vec<f64>, Vec<Option<f64>>) = Default::default();
    let (mut mixed, mut with_decodes, mut beside) = (0u32, 0u32, 0u64);
    let mut off = Vec::new();
    loop {
        let now = driver.now().as_secs_f64();
        let end = WARM_UP + load.seconds;
        // Nothing counts any more then, but every long prompt gets its answer.
        if now >= end && first.iter().all(Option::is_some) {
            break;
        }
        // The first comes after half an interval. Its time counts from when it was due, not from when it was sent.
        let next = WARM_UP + load.every * (due.len() as f64 + 0.5);
        if storm && now >= next && next < end {
            let long = due.len() as u64;
            driver.submit(LONG + long, &contents[long as usize % contents.len()], ANSWER);
            due.push(next);
            first.push(None);
        }
        let turned = driver.turn()?;
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
        for request in turned.tokens {
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
        for request in turned.ended.into_iter().filter(|request| *request < LONG) {
            latest[request as usize] = None;
            start(&mut driver, request);
        }
    }
    Ok(Part {
        rate: between.len() as f64 / load.seconds,
        between,
        first: first.into_iter().flatten().collect(),
        chunk: beside as f64 / f64::from(mixed.max(1)),
        mixed: f64::from(mixed) / f64::from(with_decodes.max(1)),
        off,
    })
}
