//! Roofline benchmark of whole models on the CPU runtime: `cargo bench -p inflight-worker --bench shares --
//! [--shapes 135m,0.5b,1.1b] [--weights bf16,int8,int4] [--kv int8] [--threads N] [--ranks N]
//! [--rounds N] [--models DIR]`.
//!
//! Models have real shapes and random weights. Each round measures memory bandwidth and peak arithmetic
//! beside the model, so that ratios compare adjacent measurements; results are medians over rounds.
//! `--models` caches the checkpoints in a directory. Run it on an idle machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::SamplingParams;
use inflight_fixtures::{BenchmarkShape, TempDir};
use inflight_kernels::cpu::roofline::{Arithmetic, Memory, arithmetic};
use inflight_kernels::cpu::{Isa, KvDtype, Pool};
use inflight_kernels::{Dtype, philox4x32};
use inflight_models::{ModelConfig, ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, Sampled, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, kv_bytes_per_token};

type BenchResult<T> = Result<T, Box<dyn std::error::Error>>;

/// Tokens of the measured prefill, and token budget of a batch.
const PROMPT: usize = 512;
const BLOCK_TOKENS: usize = 16;
/// Maximum tokens per sequence.
const CONTEXT: usize = 1024;
/// Sequences of the mixed workload.
const STREAMS: usize = 32;
const LIMIT_TIME: Duration = Duration::from_millis(120);
/// Context of decoding sequences in tokens.
const DECODE_CONTEXT: usize = 128;
/// Alternations between decode steps and memory bandwidth.
const ALTERNATIONS: usize = 7;
/// Minimum duration of one measurement of a model.
const MEASURE_TIME_MIN: Duration = Duration::from_millis(400);

fn main() -> BenchResult<()> {
    let options = Options::parse()?;
    let folder = match &options.models {
        Some(folder) => folder.clone(),
        None => TempDir::new("inflight-shares")?.keep(),
    };
    let pool = Pool::new(options.threads)?;
    let memory = Memory::new(512 << 20, true)?;
    println!("{} threads, {}, {} rounds", options.threads, Isa::detect().name(), options.rounds);
    println!(
        "| shape, weights | ready s | resident / (weights + KV) | limits: GB/s, GFLOP/s or GOP/s | decode, 1 stream: tok/s | share of reading | \
         prefill {PROMPT}: tok/s | share of arithmetic | decode, 16 streams: over 1 | all work, 32 streams: tok/s | share of arithmetic |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for shape in &options.shapes {
        let path = folder.join(shape.name());
        if !path.join("model.safetensors").is_file() {
            shape.write(&path)?;
        }
        for weights in &options.weights {
            measure(&options, *shape, weights, &path, &pool, &memory)?;
        }
    }
    if options.models.is_none() {
        std::fs::remove_dir_all(folder)?;
    }
    Ok(())
}

struct Options {
    shapes: Vec<BenchmarkShape>,
    weights: Vec<String>,
    kv: KvDtype,
    threads: usize,
    ranks: usize,
    rounds: usize,
    models: Option<PathBuf>,
}

impl Options {
    fn parse() -> BenchResult<Self> {
        let mut options = Self {
            shapes: BenchmarkShape::all().to_vec(),
            weights: ["bf16", "int8", "int4"].map(str::to_owned).to_vec(),
            kv: Dtype::Bf16.into(),
            threads: std::thread::available_parallelism()?.get(),
            ranks: 1,
            rounds: 3,
            models: None,
        };
        // `cargo bench` appends `--bench`.
        let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--shapes" => options.shapes = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--weights" => options.weights = value.split(',').map(str::to_owned).collect(),
                "--kv" if value == "int8" => options.kv = KvDtype::Int8,
                "--threads" => options.threads = value.parse()?,
                "--ranks" => options.ranks = value.parse()?,
                "--rounds" => options.rounds = value.parse()?,
                "--models" => options.models = Some(value.into()),
                _ => return Err(format!("unknown option {name}").into()),
            }
        }
        Ok(options)
    }
}

/// Results of one round by name.
type Round = BTreeMap<&'static str, f64>;

fn measure(
    options: &Options,
    shape: BenchmarkShape,
    weights: &str,
    path: &std::path::Path,
    pool: &Pool,
    memory: &Memory,
) -> BenchResult<()> {
    let isa = Isa::detect();
    let before = resident();
    let begun = Instant::now();
    let model = ModelDir::open(&ModelSource::Directory(path.to_owned()))?;
    let config = model.config().clone();
    let block_bytes = kv_bytes_per_token(&config, options.kv) * BLOCK_TOKENS;
    let blocks = STREAMS * CONTEXT / BLOCK_TOKENS;
    let cpu = CpuOptions {
        threads: Some(options.threads),
        kv_bytes: (blocks * block_bytes) as u64,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS as u32,
        slots: STREAMS as u32,
        batch_tokens: PROMPT as u32,
        context_tokens: None,
        isa: None,
        quantize: if weights == "bf16" { None } else { Some(weights.parse()?) },
        kv_dtype: Some(options.kv),
        tensor_parallel: options.ranks,
        mtp: false,
    };
    let mut runtime = CpuRuntime::load(&model, &cpu, &|_, _| {})?;
    let ready = begun.elapsed().as_secs_f64();
    let mut workload = Workload::new(&mut runtime, &config, options.kv);
    let kind = if weights == "bf16" { Arithmetic::Bf16 } else { Arithmetic::Int8 };
    let mut rounds: Vec<Round> = Vec::new();
    for round in 0..options.rounds {
        let peak = arithmetic(pool, isa, kind, LIMIT_TIME);
        let (alone, read) = workload.decode_and_read(&|| memory.read(pool, isa, LIMIT_TIME / 4))?;
        let prefill = workload.prefill()?;
        let batched = workload.decode(16, MEASURE_TIME_MIN)?;
        let all = workload.mixed(round as u32)?;
        let peak_after = arithmetic(pool, isa, kind, LIMIT_TIME);
        let peak = peak.max(peak_after);
        rounds.push(Round::from([
            ("read", read / 1e9),
            ("peak", peak / 1e9),
            ("alone", alone.tokens),
            ("reading", alone.bytes / read),
            ("prefill", prefill.tokens),
            ("computing", prefill.operations / peak),
            ("batched", batched.tokens / alone.tokens),
            ("all", all.tokens),
            ("share", all.operations / peak),
        ]));
    }
    let of = |name: &str| {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[name]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let held = (runtime.weight_bytes() + blocks * block_bytes) as f64;
    println!(
        "| {shape} {weights} | {ready:.2} | {:.3} | {:.1}, {:.0} | {:.1} | {:.1} % | {:.0} | {:.1} % | {:.2} | {:.0} | {:.1} % |",
        (resident() - before) / held,
        of("read"),
        of("peak"),
        of("alone"),
        of("reading") * 100.0,
        of("prefill"),
        of("computing") * 100.0,
        of("batched"),
        of("all"),
        of("share") * 100.0,
    );
    Ok(())
}

/// Rates per second.
#[derive(Default, Clone, Copy)]
struct Rates {
    tokens: f64,
    bytes: f64,
    operations: f64,
}

/// Runs batches on a runtime; each slot has its own KV blocks.
struct Workload<'a> {
    runtime: &'a mut CpuRuntime,
    config: &'a ModelConfig,
    kv: KvDtype,
    weight_bytes: f64,
    batch: Batch,
    sampled: Vec<Sampled>,
}

impl<'a> Workload<'a> {
    fn new(runtime: &'a mut CpuRuntime, config: &'a ModelConfig, kv: KvDtype) -> Self {
        let weight_bytes = runtime.weight_bytes() as f64;
        Self { runtime, config, kv, weight_bytes, batch: Batch::default(), sampled: Vec::new() }
    }

    fn attach(&mut self, slot: usize) -> BenchResult<()> {
        let setup = SlotSetup {
            sampling: Arc::new(SamplingParams::greedy()),
            choice: 0,
            prompt: &[],
            generated: &[],
            eos_token_ids: &[],
        };
        Ok(self.runtime.attach(slot as u32, &setup)?)
    }

    /// Adds `count` pseudo-random tokens of a sequence from `position` on; samples from the last one if
    /// `sample`.
    fn push(&mut self, slot: usize, position: usize, count: usize, sample: bool) {
        let per_sequence = CONTEXT / BLOCK_TOKENS;
        let first = slot * per_sequence;
        let end = first + (position + count).div_ceil(BLOCK_TOKENS);
        let blocks: Vec<u32> = (first as u32..end as u32).collect();
        let vocab = self.config.vocab_size as u32;
        let token = |i: usize| philox4x32([i as u32, slot as u32, 0, 0], [3, 0])[0] % vocab;
        let tokens: Vec<u32> = (position..position + count).map(token).collect();
        self.batch.push_sequence(&tokens, position as u32, &blocks);
        if sample {
            self.batch.sample_last_row(slot as u32);
        }
    }

    /// Operations of GEMMs and attention for `count` tokens from `position` on, without the LM head; a
    /// multiply-add is two.
    fn operations(&self, position: usize, count: usize) -> f64 {
        let config = self.config;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size);
        let attended: usize = (position + 1..=position + count).sum();
        2.0 * config.layers.len() as f64 * (layer as f64 * count as f64 + 2.0 * (queries * attended) as f64)
    }

    fn head_operations(&self) -> f64 {
        2.0 * (self.config.hidden_size * self.config.vocab_size) as f64
    }

    /// Alternates decode steps of one sequence with measurements of memory bandwidth by `read`, in bytes per
    /// second, which may drift within a second. Returns the pair of median ratio.
    fn decode_and_read(&mut self, read: &dyn Fn() -> f64) -> BenchResult<(Rates, f64)> {
        let mut pairs = Vec::new();
        let mut before = read();
        for _ in 0..ALTERNATIONS {
            let rates = self.decode(1, MEASURE_TIME_MIN / 4)?;
            let after = read();
            pairs.push((rates, before.max(after)));
            before = after;
        }
        pairs.sort_by(|a, b| (a.0.bytes / a.1).total_cmp(&(b.0.bytes / b.1)));
        Ok(pairs[ALTERNATIONS / 2])
    }

    /// Measures decode steps of `streams` sequences for at least `least`, at least five.
    fn decode(&mut self, streams: usize, least: Duration) -> BenchResult<Rates> {
        for slot in 0..streams {
            self.attach(slot)?;
            self.batch.clear();
            self.push(slot, 0, DECODE_CONTEXT, false);
            self.runtime.execute(&mut self.batch, &mut self.sampled)?;
        }
        let per_token = kv_bytes_per_token(self.config, self.kv) as f64;
        let begun = Instant::now();
        let mut times = Vec::new();
        while begun.elapsed() < least || times.len() < 5 {
            self.batch.clear();
            (0..streams).for_each(|slot| self.push(slot, DECODE_CONTEXT, 1, true));
            let took = self.runtime.execute(&mut self.batch, &mut self.sampled)?.as_secs_f64();
            times.push(took);
        }
        times.sort_by(f64::total_cmp);
        let took = times[times.len() / 2];
        let bytes = self.weight_bytes + per_token * (streams * DECODE_CONTEXT) as f64;
        Ok(Rates { tokens: streams as f64 / took, bytes: bytes / took, operations: 0.0 })
    }

    /// Measures the prefill of one prompt in one step.
    fn prefill(&mut self) -> BenchResult<Rates> {
        self.attach(0)?;
        let begun = Instant::now();
        let mut times = Vec::new();
        while begun.elapsed() < 2 * MEASURE_TIME_MIN || times.len() < 3 {
            self.batch.clear();
            self.push(0, 0, PROMPT, true);
            times.push(self.runtime.execute(&mut self.batch, &mut self.sampled)?.as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let took = times[times.len() / 2];
        let operations = self.operations(0, PROMPT) + self.head_operations();
        Ok(Rates { tokens: PROMPT as f64 / took, bytes: 0.0, operations: operations / took })
    }

    /// Measures a closed loop of 32 streams with lognormal lengths: prompts with a mean of 115 tokens up to
    /// 500, outputs with a mean of 62 up to 390. Each step decodes all streams and fills the batch with
    /// prefill chunks.
    fn mixed(&mut self, seed: u32) -> BenchResult<Rates> {
        let mut drawn = 0;
        let mut lognormal = |mean: f64, sigma: f64, most: usize| {
            drawn += 1;
            let raw = philox4x32([drawn, 1, 0, 0], [seed, 0]);
            let (a, b) = ((f64::from(raw[0]) + 0.5) / 4294967296.0, f64::from(raw[1]) / 4294967296.0);
            let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
            let value = (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp();
            (value.round() as usize).clamp(4, most)
        };
        // Prompt tokens, output tokens, tokens computed so far.
        let mut streams: Vec<(usize, usize, usize)> = Vec::new();
        for slot in 0..STREAMS {
            self.attach(slot)?;
            let (prompt, output) = (lognormal(115.0, 0.8, 500), lognormal(62.0, 0.9, 390));
            streams.push((prompt, output, 0));
        }
        let (mut tokens, mut operations, mut took, mut steps) = (0.0, 0.0, 0.0, 0);
        while took < 4.0 * MEASURE_TIME_MIN.as_secs_f64() {
            self.batch.clear();
            let mut done = 0.0;
            for slot in 0..STREAMS {
                let (prompt, output, fed) = streams[slot];
                if fed >= prompt {
                    self.push(slot, fed, 1, true);
                    done += self.operations(fed, 1) + self.head_operations();
                    streams[slot].2 += 1;
                    if fed + 1 >= prompt + output {
                        streams[slot] = (lognormal(115.0, 0.8, 500), lognormal(62.0, 0.9, 390), 0);
                    }
                }
            }
            for slot in 0..STREAMS {
                let (prompt, _, fed) = streams[slot];
                let count = prompt.saturating_sub(fed).min(PROMPT - self.batch.rows());
                // A stream that has just ended starts again in the next step.
                let in_step = self.batch.tables[0]
                    .blocks
                    .iter()
                    .any(|block| *block as usize / (CONTEXT / BLOCK_TOKENS) == slot);
                if count == 0 || in_step {
                    continue;
                }
                let last = fed + count == prompt;
                self.push(slot, fed, count, last);
                done += self.operations(fed, count) + if last { self.head_operations() } else { 0.0 };
                streams[slot].2 += count;
            }
            let rows = self.batch.rows();
            let time = self.runtime.execute(&mut self.batch, &mut self.sampled)?.as_secs_f64();
            steps += 1;
            // Warm-up: the first steps are prefill only.
            if steps > STREAMS / 4 {
                tokens += rows as f64;
                operations += done;
                took += time;
            }
        }
        Ok(Rates { tokens: tokens / took, bytes: 0.0, operations: operations / took })
    }
}

/// Resident set size of the process in bytes.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
    line.trim().trim_end_matches("kB").trim().parse::<f64>().unwrap_or(0.0) * 1024.0
}
