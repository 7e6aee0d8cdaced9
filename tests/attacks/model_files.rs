//! Model files that are overwritten or truncated under a running worker: it answers as before.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, is_alive};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{GenerateRequest, SamplingParams, StopConditions};

use crate::endurance::connected;
use crate::program;

/// Copies the demo model to a folder; returns the path of its weights.
fn copy_demo_model(folder: &Path) -> Result<PathBuf> {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/demo");
    for entry in fs::read_dir(demo)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), folder.join(entry.file_name()))?;
        }
    }
    Ok(folder.join("inflight-demo.gguf"))
}

/// Swaps the halves of the embedding by writing into the file.
fn swap_halves_of_embedding(weights: &Path) -> Result<()> {
    /// Last entry of the list of tensors, before the data, which begin with the embedding.
    const LAST_TENSOR: &[u8] = b"blk.4.ffn_down.weight";
    /// Of an entry after its name: number of dimensions, two dimensions, encoding, offset.
    const ENTRY_BYTES: usize = 4 + 2 * 8 + 4 + 8;
    /// 2048 rows of 256 elements in q8_0.
    const EMBEDDING_BYTES: usize = 2048 * 256 / 32 * 34;
    let bytes = fs::read(weights)?;
    let last = bytes.windows(LAST_TENSOR.len()).position(|name| name == LAST_TENSOR);
    let header = last.context("no such tensor")? + LAST_TENSOR.len() + ENTRY_BYTES;
    let start = header.next_multiple_of(32);
    let mut embedding = bytes[start..start + EMBEDDING_BYTES].to_vec();
    embedding.rotate_left(EMBEDDING_BYTES / 2);
    ensure!(embedding != bytes[start..start + EMBEDDING_BYTES], "the halves are equal");
    File::options().write(true).open(weights)?.write_all_at(&embedding, start as u64)?;
    Ok(())
}

/// Starts a worker with a model and a router in front of it.
async fn start(model: &Path, flags: &[&str]) -> Result<(RoleProcess, RoleProcess)> {
    let mut worker_flags = vec![format!("--model={}", model.display())];
    let small = ["--threads=1", "--kv-cache-bytes=16MiB"];
    worker_flags.extend(small.iter().chain(flags).map(|flag| (*flag).to_owned()));
    let worker = RoleProcess::start(program().to_owned(), "worker", &worker_flags).await?;
    let router_flags = [format!("--workers={}", worker.address)];
    let router = RoleProcess::start(program().to_owned(), "router", &router_flags).await?;
    connected(&router, 1.0).await?;
    Ok((worker, router))
}

/// Greedy answers to prompts that share no prefix, with the worker's fingerprint.
async fn answers(router: &RoleProcess) -> Result<Vec<(String, String)>> {
    let mut client = router.client()?;
    let mut answers = Vec::new();
    for prompt in ["What is the capital of France?", "Once upon a time", "a router forwards requests"] {
        let request = GenerateRequest {
            input: Some(Input::Text(prompt.to_owned())),
            sampling: Some(SamplingParams { temperature: Some(0.0), ..SamplingParams::default() }),
            stop: Some(StopConditions {
                max_tokens: Some(24),
                ignore_eos: true,
                ..StopConditions::default()
            }),
            ..GenerateRequest::default()
        };
        let mut answer = client.generate_unary(request).await?.into_inner();
        let choice = answer.choices.pop().context("an answer without a choice")?;
        answers.push((choice.text, answer.fingerprint));
    }
    Ok(answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_overwritten_or_truncated_under_a_worker_change_no_answer() -> Result<()> {
    let folder = TempDir::new("model-files")?;
    let weights = copy_demo_model(folder.path())?;
    let flags = ["--no-prefix-cache", "--fingerprint-cache=off"];
    let (worker, router) = start(&weights, &flags).await?;
    let before = answers(&router).await?;
    swap_halves_of_embedding(&weights)?;
    let overwritten = answers(&router).await?;
    ensure!(overwritten == before, "an overwritten file: {overwritten:?} instead of {before:?}");
    File::options().write(true).open(&weights)?.set_len(1000)?;
    let truncated = answers(&router).await?;
    ensure!(truncated == before, "a truncated file: {truncated:?} instead of {before:?}");
    ensure!(is_alive(worker.pid), "the worker ended; the log:\n{}", worker.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn overwritten_weights_have_another_fingerprint_at_the_next_start() -> Result<()> {
    let folder = TempDir::new("model-files")?;
    let weights = copy_demo_model(folder.path())?;
    let cache = folder.path().join("cache");
    let cache_flag = format!("--fingerprint-cache={}", cache.display());
    let mut fingerprints = Vec::new();
    for _ in 0..2 {
        let (_worker, router) = start(&weights, &[&cache_flag]).await?;
        fingerprints.push(answers(&router).await?.pop().context("no answer")?);
        swap_halves_of_embedding(&weights)?;
    }
    ensure!(fingerprints[0].1 != fingerprints[1].1, "other weights, the same fingerprint");
    ensure!(fingerprints[0].0 != fingerprints[1].0, "the test's change of the weights changes no answer");
    ensure!(!cache.exists(), "the digests of a small model are cached");
    Ok(())
}
