//! Measures and checks the CUDA runtime without router or network: one job in, one line of JSON out.
//!
//! `cargo run --release -p inflight-gpu-suite -- JOB`, where JOB is a JSON object
//! or the path of a file with one; `tests/gpu/run` creates the jobs. A job has a model directory and a task:
//! `logits` (teacher-forced, to a file), `steps` (times of decode and prefill), `determinism` (bits over
//! batch and chunk sizes), `replays` (many decode steps in a row), `swap` (transfers beside decoding), `serve` (an engine with a list of requests), `rounds`
//! (an engine with lists of requests that come one after the other), `drafts` (streams with drafts and without: bits and times).

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

mod bench;
mod checks;
mod drafts;
mod replays;
mod serve;
mod swap;

use std::error::Error;
use std::path::PathBuf;

use inflight_kernels::cuda::Replacement;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::DRAFT_ROWS;
use inflight_runtime_cuda::{CudaOptions, CudaRuntime, GemmTuning, GpuPaths, KvStore};
use serde::Deserialize;
use serde_json::{Value, json};

/// Result of a job.
pub type JobResult<T> = Result<T, Box<dyn Error>>;

/// Job: runtime configuration and task. Field names are the JSON format.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Job {
    model: PathBuf,
    /// GPU ordinals by rank.
    #[serde(default = "gpus")]
    gpus: Vec<usize>,
    /// Uses an NCCL communicator even for a single GPU.
    #[serde(default)]
    lone_communicator: bool,
    #[serde(default = "utilization")]
    utilization: f32,
    #[serde(default)]
    host_bytes: u64,
    #[serde(default = "slots")]
    slots: u32,
    #[serde(default = "batch_tokens")]
    batch_tokens: u32,
    context_tokens: Option<u32>,
    #[serde(default)]
    deterministic: bool,
    #[serde(default)]
    experimental: bool,
    #[serde(default)]
    fp8_kv_cache: bool,
    #[serde(default = "yes")]
    graphs: bool,
    #[serde(default = "yes")]
    copy_streams: bool,
    #[serde(default = "yes")]
    autotune: bool,
    #[serde(default = "yes")]
    overlap: bool,
    /// Check before the task.
    canonical: Option<checks::Canonical>,
    task: Task,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Task {
    Logits(checks::Logits),
    Determinism(checks::Determinism),
    Steps(bench::Steps),
    Swap(swap::Swap),
    Replays(replays::Replays),
    Serve(serve::Serve),
    Rounds(serve::Rounds),
    Drafts(drafts::Drafts),
}

fn gpus() -> Vec<usize> {
    vec![0]
}
fn utilization() -> f32 {
    0.9
}
fn slots() -> u32 {
    256
}
fn batch_tokens() -> u32 {
    8192
}
fn yes() -> bool {
    true
}

fn run(argument: &str) -> JobResult<Value> {
    let job: Job = if argument.starts_with('{') {
        serde_json::from_str(argument).map_err(|error| format!("the job is no valid one: {error}"))?
    } else {
        let text = std::fs::read(argument).map_err(|error| format!("{argument}: {error}"))?;
        serde_json::from_slice(&text).map_err(|error| format!("{argument} is no valid job: {error}"))?
    };
    let model = ModelDir::open(&ModelSource::Directory(job.model.clone()))?;
    let ordinal = job.gpus.first().copied().unwrap_or(0);
    let options = CudaOptions {
        gpus: job.gpus,
        lone_communicator: job.lone_communicator,
        utilization: job.utilization,
        kv_bytes: None,
        host_bytes: job.host_bytes,
        block_tokens: 16,
        slots: job.slots,
        draft_rows: if matches!(job.task, Task::Drafts(_)) { DRAFT_ROWS } else { 0 },
        batch_tokens: job.batch_tokens,
        context_tokens: job.context_tokens,
        kv_store: if job.fp8_kv_cache { KvStore::Fp8 } else { KvStore::Half },
        deterministic: job.deterministic,
        experimental: job.experimental,
        graphs: job.graphs,
        copy_streams: job.copy_streams,
        autotune: job.autotune,
        // Figures of a run do not depend on earlier ones.
        gemm_cache: None,
        overlap: job.overlap,
    };
    let replaced = Replacement::of_environment()?;
    let begun = std::time::Instant::now();
    let mut runtime = CudaRuntime::load(&model, &options, &|_, _| {})?;
    let loaded = begun.elapsed().as_secs_f64();
    let gemms: Vec<Value> = runtime.tuned().iter().map(gemm).collect();
    if let Some(rejected) = runtime.tuned().iter().find(|tuned| tuned.rejected) {
        return Err(format!(
            "a GEMM algorithm computes something else than the built-in kernel: {rejected:?}"
        )
        .into());
    }
    let fast_paths = runtime.paths().clone();
    check_paths(&fast_paths)?;
    let bound = job.canonical.as_ref().and_then(|check| check.bound);
    let canonical = job.canonical.map(|check| checks::canonical(&mut runtime, &check)).transpose();
    let canonical = canonical.map_err(|error| format!("the check before the task: {error}"))?;
    let result = match job.task {
        Task::Logits(task) => checks::logits(&mut runtime, &task)?,
        Task::Determinism(task) => checks::determinism(&mut runtime, &task)?,
        Task::Steps(task) => bench::steps(&mut runtime, &task, ordinal, bound)?,
        Task::Replays(task) => replays::replays(&mut runtime, &task)?,
        Task::Swap(task) => swap::swap(&mut runtime, &task)?,
        Task::Serve(task) => serve::serve(runtime, &task)?,
        Task::Rounds(serve::Rounds {}) => serve::rounds(runtime)?,
        Task::Drafts(task) => drafts::drafts(runtime, &task)?,
    };
    // A path may have been lost meanwhile.
    let paths = check_paths(&fast_paths)?;
    let replaced: serde_json::Map<String, Value> =
        replaced.iter().map(|image| (image.family.to_owned(), image.sha256.clone().into())).collect();
    Ok(json!({
        "load_seconds": loaded,
        "products": gemms,
        "replaced_images": replaced,
        "paths": paths,
        "canonical": canonical,
        "result": result,
    }))
}

/// Describes the fast paths of a runtime as they are now: true, or the reason why one is off.
///
/// # Errors
/// A path is missing, and no option has turned it off: figures would be those of another path.
fn check_paths(fast: &GpuPaths) -> JobResult<Value> {
    let mut paths = serde_json::Map::new();
    for (path, state) in fast.list() {
        if let Err(off) = state
            && off.costs
        {
            return Err(format!("the fast path {path} is off: {}", off.why).into());
        }
        let on = state.as_ref().map_or_else(|off| Value::from(off.why), |()| true.into());
        paths.insert(path.to_owned(), on);
    }
    Ok(paths.into())
}

/// Describes an autotuned GEMM: the chosen algorithm and the library's first one.
fn gemm(tuned: &GemmTuning) -> Value {
    json!({
        "shape": [tuned.m, tuned.n, tuned.k],
        "ways": tuned.ways,
        "way": tuned.way,
        "by": tuned.by,
        "own": tuned.own,
        "rejected": tuned.rejected,
        "us": tuned.seconds * 1e6,
        "first_us": tuned.first_seconds.map(|seconds| seconds * 1e6),
    })
}

fn main() {
    // What the runtime warns of belongs to the figures; standard output has JSON alone.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(tracing::Level::WARN)
        .init();
    let outcome = match std::env::args().nth(1) {
        Some(job) => run(&job).map_err(|error| error.to_string()),
        None => Err("give a job: a JSON object, or the path of a file with one".to_owned()),
    };
    match outcome {
        Ok(result) => println!("{result}"),
        Err(error) => {
            println!("{}", json!({ "error": error }));
            std::process::exit(1);
        }
    }
}
