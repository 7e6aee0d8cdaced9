//! Drafts against none: a stream whose output repeats itself, and streams without repetition.

use std::sync::Arc;

use inflight_contract::SamplingSpec;
use inflight_worker::Drafts;
use inflight_worker::engine::EngineOptions;

use crate::engine_driver::{EngineDriver, EngineSize};
use crate::model::BenchModel;
use crate::options::{BenchResult, Options};
use crate::stats::{SplitMix64, machine_load, quantile};

/// Tokens of the repeating text: each is followed by the next one, but the first one by the second or the tenth,
/// as drawn.
const CYCLE: u32 = 16;
const FIRST_TOKEN: u32 = 100;
const JUMP: u32 = 9;

/// Compared workload.
struct Workload {
    name: &'static str,
    streams: u32,
    sampling: SamplingSpec,
}

/// Result of a run.
struct Figures {
    tokens_per_s: f64,
    /// Tokens per decode of an iteration.
    tokens_per_step: f64,
    /// Rejected drafts per computed row.
    wasted: f64,
}

/// Output of copied runs of 7 to 16 tokens with a choice between them, as of a file that is rewritten with edits.
fn repeating(seed: u64) -> SamplingSpec {
    let token = |nth: u32| FIRST_TOKEN + nth % CYCLE;
    let follows = |a: u32, b: u32| b == (a + 1) % CYCLE || a == 0 && b == JUMP;
    let pairs = (0..CYCLE).flat_map(|a| (0..CYCLE).map(move |b| (a, b)));
    let words = pairs.filter(|(a, b)| !follows(*a, *b)).map(|(a, b)| vec![token(a), token(b)]);
    SamplingSpec {
        temperature: 1.0,
        seed,
        allowed_token_ids: (0..CYCLE).map(token).collect(),
        bad_word_token_ids: words.collect(),
        ignore_eos: true,
        ..SamplingSpec::default()
    }
}

/// Output without repetition: drawn from the whole vocabulary.
fn plain(seed: u64) -> SamplingSpec {
    SamplingSpec { temperature: 1.0, seed, ignore_eos: true, ..SamplingSpec::default() }
}

pub fn run(options: &Options) -> BenchResult<()> {
    let model = BenchModel::open(options, Some(2048))?;
    let size = EngineSize::of(options, 16, 512, 16)?;
    let pairs = options.number("runs", 10, 1)?;
    let output = options.number("output", 200, 1)?;
    let drafts_max = options.number("drafts-max", 8, 1)?;
    let seed = options.number("seed", 1, 0)?;
    println!("model: {}; machine load {}", model.name, machine_load());
    println!("{pairs} pairs, {output} tokens a stream, at most {drafts_max} drafts");
    println!(
        "| workload | streams | tok/s without | with | ratio (lowest to highest pair) | tokens per step | rows wasted |"
    );
    println!("|---|---|---|---|---|---|---|");
    let workloads = [
        Workload { name: "repeating", streams: 1, sampling: repeating(seed) },
        Workload { name: "repeating", streams: 4, sampling: repeating(seed) },
        Workload { name: "plain", streams: 1, sampling: plain(seed) },
        Workload { name: "plain", streams: 4, sampling: plain(seed) },
        Workload { name: "plain", streams: 16, sampling: plain(seed) },
    ];
    for workload in workloads.iter().filter(|workload| workload.streams <= size.sequences) {
        let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..pairs {
            let once = |drafts| serve(&model, &size, workload, output, drafts, pair);
            // Alternates which one goes first.
            let (a, b) = if pair % 2 == 0 {
                let a = once(0)?;
                (a, once(drafts_max)?)
            } else {
                let b = once(drafts_max)?;
                (once(0)?, b)
            };
            ratios.push(b.tokens_per_s / a.tokens_per_s);
            without.push(a);
            with.push(b);
        }
        let of = |runs: &[Figures], figure: fn(&Figures) -> f64| {
            quantile(&runs.iter().map(figure).collect::<Vec<_>>(), 0.5)
        };
        println!(
            "| {} | {} | {:.1} | {:.1} | {:.2} ({:.2} to {:.2}) | {:.2} | {:.2} % |",
            workload.name,
            workload.streams,
            of(&without, |run| run.tokens_per_s),
            of(&with, |run| run.tokens_per_s),
            quantile(&ratios, 0.5),
            quantile(&ratios, 0.0),
            quantile(&ratios, 1.0),
            of(&with, |run| run.tokens_per_step),
            100.0 * of(&with, |run| run.wasted),
        );
    }
    Ok(())
}

fn serve(
    model: &BenchModel,
    size: &EngineSize,
    workload: &Workload,
    output: u32,
    drafts_max: u32,
    pair: u32,
) -> BenchResult<Figures> {
    let mut engine_options = EngineOptions::default();
    engine_options.scheduling.drafts = Drafts::PromptLookup;
    engine_options.scheduling.drafts_max = drafts_max;
    let sampling = workload.sampling.clone();
    let mut driver = EngineDriver::new(model, size, engine_options)?.with_sampling(sampling)?;
    let mut random = SplitMix64(u64::from(pair));
    let vocab = model.dir.config().vocab_size as u32;
    for request in 0..workload.streams {
        let prompt: Arc<[u32]> = random.tokens(64, vocab).into();
        driver.submit(request.into(), &prompt, output);
    }
    let (mut tokens, mut decodes, mut rows, mut begun) = (0, 0, 0, None);
    loop {
        let step = driver.step()?;
        let plan = driver.plan();
        if step.idle {
            break;
        }
        // From the end of the first iteration on that only decodes.
        if plan.decodes as usize == plan.chunks.len() && plan.decodes > 0 {
            if begun.is_none() {
                begun = Some(driver.now());
                continue;
            }
            tokens += step.tokens.len() as u64;
            decodes += u64::from(plan.decodes);
            rows += u64::from(plan.tokens());
        }
    }
    let took = begun.map_or(0.0, |begun| (driver.now() - begun).as_secs_f64());
    let load = driver.totals();
    Ok(Figures {
        tokens_per_s: tokens as f64 / took,
        tokens_per_step: tokens as f64 / decodes as f64,
        wasted: (load.drafted_tokens - load.accepted_drafts) as f64 / rows as f64,
    })
}
