//! Structured output: the cost of masks beside no masks, and tokens that a grammar forces as drafts beside none.

use std::collections::BTreeSet;
use std::sync::Arc;

use inflight_contract::{Constraint, Grammar, SamplingSpec};
use inflight_grammar::Vocabulary;
use inflight_grammar_service::Grammars;
use inflight_worker::Drafts;
use inflight_worker::engine::EngineOptions;

use crate::engine_driver::{EngineDriver, EngineSize};
use crate::model::BenchModel;
use crate::options::{BenchResult, Options};
use crate::stats::{SplitMix64, machine_load, quantile};

/// Text of the call of a tool whose arguments are short.
const CALL: &str = r#"{"type": "object", "additionalProperties": false, "required": ["name", "arguments"], "properties": {
    "name": {"const": "get_weather_forecast"},
    "arguments": {"type": "object", "additionalProperties": false, "required": ["city", "days", "unit", "include_hourly"],
        "properties": {"city": {"type": "string", "minLength": 6, "maxLength": 16}, "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["celsius", "fahrenheit"]}, "include_hourly": {"type": "boolean"}}}}}"#;
/// Words and punctuation of [`CALL`] as tokens, split where the tokenizers of usual models split them: `{"name": "x"}` is
/// `{"`, `name`, `":`, ` "`, `x`, `"}`.
const WORDS: [&str; 27] = [
    "name",
    "arguments",
    "city",
    "days",
    "unit",
    "include",
    "_h",
    "our",
    "ly",
    "cel",
    "sius",
    "f",
    "ahren",
    "heit",
    "get",
    "_weather",
    "_fore",
    "cast",
    "{\"",
    "\":",
    " \"",
    "\",",
    " {\"",
    " true",
    " false",
    " 7",
    "}}",
];
const PROMPT: u32 = 16;

/// Compared variants of a workload.
struct Workload {
    name: &'static str,
    streams: u64,
    /// Requests of each stream, one after another.
    requests: u64,
    max_tokens: u32,
    /// Grammar and maximum drafts, of the baseline and of the variant.
    variants: [(Option<Grammar>, u32); 2],
}

/// Returns a vocabulary like those of byte-level BPE: all bytes, words of [`CALL`], words of 2 to 12 letters, half of them
/// behind a space, and runs of punctuation, none with a space in it. The last `ends` tokens are control tokens.
fn vocabulary(size: usize, ends: usize) -> Vocabulary {
    const LETTERS: &[u8] = b"etaoinshrdlucmfwypvbgkjqxzETAOINS";
    const MARKS: &[u8] = b"\"{}[]:,.()<>=/\\-_#";
    let mut random = SplitMix64(1);
    let mut below = |bound: usize| (random.next() % bound as u64) as usize;
    let mut words: BTreeSet<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.extend(WORDS.map(|word| word.as_bytes().to_vec()));
    while words.len() < size - ends {
        let kind = below(10);
        let (letters, most) = if kind == 0 { (MARKS, 3) } else { (LETTERS, 11) };
        let mut word = if kind > 5 { vec![b' '] } else { Vec::new() };
        for _ in 0..2 + below(most) {
            // The first letters of the list are the most frequent ones.
            let first = below(letters.len());
            word.push(letters[below(first + 1)]);
        }
        words.insert(word);
    }
    let control = std::iter::repeat_n((&b"<control>"[..], true), ends);
    Vocabulary::from_tokens(words.iter().map(|word| (word.as_slice(), false)).chain(control))
}

/// JSON schema of an array of records, longer than any output of the benchmark. `most` bounds the characters of each free text.
fn records(most: Option<u32>) -> Grammar {
    let query = most.map_or_else(String::new, |most| format!(r#", "maxLength": {most}"#));
    Grammar::json_schema(format!(
        r#"{{"type": "array", "minItems": 400, "items": {{"type": "object", "additionalProperties": false,
        "required": ["query", "limit", "field"], "properties": {{"query": {{"type": "string"{query}}},
        "limit": {{"type": "integer", "minimum": 1, "maximum": 50}}, "field": {{"enum": ["author", "year", "title"]}}}}}}}}"#
    ))
}

pub fn run(options: &Options) -> BenchResult<()> {
    let model = BenchModel::open(options, Some(2048))?;
    let size = EngineSize::of(options, 16, 512, 16)?;
    let pairs = options.number("runs", 10, 1)?;
    let output = options.number("output", 100, 1)?;
    let drafts_max = options.number("drafts-max", 8, 1)?;
    let vocab = model.dir.config().vocab_size as u32;
    let eos = vocab - 1;
    let vocabulary = Arc::new(vocabulary(vocab as usize, 1));
    let is_word = |id: &u32| WORDS.iter().any(|word| word.as_bytes() == vocabulary.bytes(*id));
    // As a trained model does, prefers the usual tokens of a text that a grammar forces to shorter ones, and writes a space
    // behind a colon or a comma.
    let bias = |id: u32| 20.0 + 4.0 * vocabulary.bytes(id).len() as f32;
    let words = (0..vocab).filter(is_word).map(|id| (id, bias(id))).collect();
    let grammars = Arc::new(Grammars::new(vocab, &[eos], move || Ok(Arc::clone(&vocabulary))));
    let server = Server { model: &model, size, grammars, words };
    println!("model: {}, {vocab} tokens; machine load {}", model.name, machine_load());
    let call = || Some(Grammar::json_schema(CALL.to_owned()));
    let forced = |name, streams| Workload {
        name,
        streams,
        requests: 6,
        max_tokens: 200,
        variants: [(call(), 0), (call(), drafts_max)],
    };
    let masks = |name, most| Workload {
        name,
        streams: u64::from(size.sequences),
        requests: 1,
        max_tokens: output,
        variants: [(None, 0), (Some(records(most)), 0)],
    };
    let workloads = [
        masks("masks against none", None),
        masks("masks of strings of bounded length against none", Some(60)),
        forced("tool calls, forced tokens against none", 1),
        forced("tool calls, forced tokens against none", 4),
    ];
    println!("{pairs} pairs; ratio of tokens per second: median (lowest to highest pair)");
    println!("| workload | streams | tok/s baseline | variant | ratio | tokens per step | drafts accepted |");
    println!("|---|---|---|---|---|---|---|");
    let only: Option<String> = options.get("only")?;
    for workload in
        workloads.iter().filter(|workload| only.as_ref().is_none_or(|only| workload.name.contains(only)))
    {
        let (mut base, mut other, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..pairs {
            let once = |nth: usize| server.serve(workload, nth, pair);
            // Alternates which one goes first.
            let (a, b) = if pair % 2 == 0 {
                let a = once(0)?;
                (a, once(1)?)
            } else {
                let b = once(1)?;
                (once(0)?, b)
            };
            ratios.push(b.tokens_per_s / a.tokens_per_s);
            base.push(a);
            other.push(b);
        }
        let of = |runs: &[Figures], figure: fn(&Figures) -> f64| {
            quantile(&runs.iter().map(figure).collect::<Vec<_>>(), 0.5)
        };
        println!(
            "| {} | {} | {:.1} | {:.1} | {:.3} ({:.3} to {:.3}) | {:.2} | {:.0} % |",
            workload.name,
            workload.streams,
            of(&base, |run| run.tokens_per_s),
            of(&other, |run| run.tokens_per_s),
            quantile(&ratios, 0.5),
            quantile(&ratios, 0.0),
            quantile(&ratios, 1.0),
            of(&other, |run| run.tokens_per_step),
            100.0 * of(&other, |run| run.accepted),
        );
    }
    Ok(())
}

/// Figures of one run.
#[derive(Debug, Clone, Copy)]
struct Figures {
    tokens_per_s: f64,
    /// Output tokens per stream and step.
    tokens_per_step: f64,
    /// Share of drafts that stood.
    accepted: f64,
}

/// What the variants have in common.
struct Server<'m> {
    model: &'m BenchModel,
    size: EngineSize,
    grammars: Arc<Grammars>,
    /// Logit biases in favour of the tokens in [`WORDS`].
    words: Vec<(u32, f32)>,
}

impl Server<'_> {
    /// Runs the baseline (0) or the variant (1) of a workload; returns tokens per second.
    fn serve(&self, workload: &Workload, variant: usize, pair: u32) -> BenchResult<Figures> {
        let (grammar, drafts_max) = workload.variants[variant].clone();
        // A grammar ends its output itself; without one the length is that of the variant with one.
        let ignore_eos = grammar.is_none();
        let constraint = grammar.map(|grammar| Arc::new(Constraint { grammar, begins_after: None }));
        let sampling = SamplingSpec {
            temperature: 1.0,
            seed: u64::from(pair),
            ignore_eos,
            constraint,
            logit_bias: if workload.requests > 1 { self.words.clone() } else { Vec::new() },
            ..SamplingSpec::default()
        };
        let mut engine_options = EngineOptions::default();
        engine_options.scheduling.drafts = Drafts::PromptLookup;
        engine_options.scheduling.drafts_max = drafts_max;
        let mut driver =
            EngineDriver::new(self.model, &self.size, engine_options)?.with_sampling(sampling)?;
        driver.set_grammars(Arc::clone(&self.grammars));
        let vocab = self.model.dir.config().vocab_size as u32;
        let mut random = SplitMix64(u64::from(pair));
        let mut left = workload.streams * workload.requests;
        let mut submit = |driver: &mut EngineDriver| {
            if left > 0 {
                left -= 1;
                driver.submit(left, &random.tokens(PROMPT, vocab).into(), workload.max_tokens);
            }
        };
        (0..workload.streams).for_each(|_| submit(&mut driver));
        let (mut tokens, mut decodes, mut begun) = (0u64, 0u64, None);
        loop {
            let step = driver.step()?;
            if step.idle {
                break;
            }
            // The first iteration of prefill does not count.
            if begun.is_none() {
                begun = Some(driver.now());
                continue;
            }
            tokens += step.tokens.len() as u64;
            let computed: BTreeSet<u64> = step.tokens.iter().copied().collect();
            decodes += computed.len() as u64;
            step.ended.iter().for_each(|_| submit(&mut driver));
        }
        let took = begun.map_or(0.0, |begun| (driver.now() - begun).as_secs_f64());
        let load = driver.totals();
        Ok(Figures {
            tokens_per_s: tokens as f64 / took,
            tokens_per_step: tokens as f64 / decodes as f64,
            accepted: load.accepted_drafts as f64 / load.drafted_tokens.max(1) as f64,
        })
    }
}
