//! Startup failures: exit code, helpful error message, no process left.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use anyhow::{Result, ensure};
use inflight_fixtures::{Arch, Checkpoint, Corruption, Dtype, TempDir};
use inflight_harness::{CommandOutput, run};

use crate::program;

fn check(finished: &CommandOutput, code: i32, pieces: &[&str]) -> Result<()> {
    ensure!(finished.code == Some(code), "exit code {code} was expected: {finished:?}");
    for piece in pieces {
        ensure!(finished.stderr.contains(piece), "{piece:?} was expected: {finished:?}");
    }
    ensure!(!finished.stderr.contains("panic"), "{finished:?}");
    finished.tag.check_gone()
}

/// Returns a listener and its address.
fn occupied_port() -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

#[tokio::test]
async fn an_occupied_port_is_reported_with_the_flag_that_changes_it() -> Result<()> {
    let (_listener, address) = occupied_port()?;
    let port = address.port().to_string();
    let message = format!("cannot listen on {address}");
    let router = run(program(), &["up", "--port", &port, "--metrics-port=0"], "").await?;
    check(&router, 1, &[&message, "--port", "in use"])?;
    let metrics = run(program(), &["up", "--port=0", "--metrics-port", &port], "").await?;
    check(&metrics, 1, &[&message, "--metrics-port", "in use"])?;
    let listen = address.to_string();
    let worker = run(program(), &["worker", "--metrics-listen=off", "--listen", &listen], "").await?;
    check(&worker, 1, &[&listen, "in use"])?;
    let router = ["router", "--metrics-listen=off", "--workers=127.0.0.1:1", "--listen", &listen];
    check(&run(program(), &router, "").await?, 1, &[&listen, "in use"])?;
    let worker = ["worker", "--listen=127.0.0.1:0", "--metrics-listen", &listen];
    check(&run(program(), &worker, "").await?, 1, &[&message, "--metrics-listen", "in use"])
}

#[tokio::test]
async fn a_missing_model_directory_is_reported() -> Result<()> {
    let up = run(program(), &["up", "--port=0", "--model=/no/such/model"], "").await?;
    check(&up, 1, &["/no/such/model", "no such directory"])?;
    let worker = ["worker", "--listen=127.0.0.1:0", "--metrics-listen=off", "--model=/no/such/model"];
    check(&run(program(), &worker, "").await?, 1, &["/no/such/model"])
}

#[tokio::test]
async fn up_fails_with_the_last_log_lines_of_a_worker_that_cannot_start() -> Result<()> {
    let folder = Checkpoint::new(Arch::Llama2, Dtype::F32).write_temp()?;
    Corruption::TruncatedWeights.apply(folder.path())?;
    let model = folder.path().to_string_lossy().into_owned();
    let up = run(program(), &["up", "--port=0", "--model", &model], "").await?;
    let clue = Corruption::TruncatedWeights.clue();
    check(&up, 1, &["ended before it was ready: exit code 1; its last lines:", "│ error:", clue])
}

#[tokio::test]
async fn an_invalid_configuration_is_rejected_by_file_line_and_key() -> Result<()> {
    let folder = TempDir::new("config")?;
    let path = folder.path().join("router.toml");
    let file = path.to_string_lossy().into_owned();
    fs::write(&path, "workers = [\"127.0.0.1:1\"]\nqueue_request_max = 5\n")?;
    let unknown = run(program(), &["router", "--config", &file], "").await?;
    check(&unknown, 2, &[&format!("{file}:2: unknown key `queue_request_max`"), "queue-requests-max"])?;
    fs::write(&path, "queue-requests-max = \"many\"\n")?;
    let mistyped = run(program(), &["router", "--config", &file], "").await?;
    check(&mistyped, 2, &[&format!("{file}:1: key `queue-requests-max`: expected an integer")])?;
    let missing = run(program(), &["worker", "--config", "/no/such/file.toml"], "").await?;
    check(&missing, 2, &["cannot read the configuration file /no/such/file.toml"])?;
    let workerless = run(program(), &["router", "--metrics-listen=off"], "").await?;
    check(&workerless, 2, &["no workers are given"])?;
    let device = run(program(), &["worker", "--device=abacus"], "").await?;
    check(&device, 2, &["unknown device `abacus`", "cpu"])?;
    let block = run(program(), &["worker", "--block-tokens=3"], "").await?;
    check(&block, 2, &["--block-tokens is 3"])?;
    let simulated = run(program(), &["worker", "--device=sim:flat", "--tensor-parallel=2"], "").await?;
    check(&simulated, 2, &["--tensor-parallel is 2", "1 on a simulated device"])?;
    let gpus = ["worker", "--device=cuda", "--tensor-parallel=2", "--gpu=0,0"];
    check(&run(program(), &gpus, "").await?, 2, &["gpu is 0,0", "different GPUs"])?;
    let gpus = ["worker", "--device=cuda", "--tensor-parallel=2", "--gpu=1"];
    check(&run(program(), &gpus, "").await?, 2, &["gpu is 1", "as many GPUs as there are ranks"])?;
    let threads = ["worker", "--device=cpu", "--threads=1", "--tensor-parallel=2"];
    check(&run(program(), &threads, "").await?, 2, &["--threads is 1", "at least --tensor-parallel"])?;
    let listen = ["--listen=127.0.0.1:0", "--metrics-listen=off"];
    let odd = ["worker", "--device=cpu", "--tensor-parallel=3", listen[0], listen[1]];
    let odd = run(program(), &odd, "").await?;
    check(&odd, 1, &["--tensor-parallel 3 can't divide this model", "4 attention heads", "1, 2, 4 would do"])
}

#[tokio::test]
async fn flags_override_environment_variables_which_override_the_file() -> Result<()> {
    let folder = TempDir::new("config")?;
    let path = folder.path().join("worker.toml");
    fs::write(&path, "block_tokens = 3\nlisten = \"127.0.0.1:0\"\nmetrics-listen = \"off\"\n")?;
    let config = format!("--config={}", path.display());
    let program = program().to_string_lossy();
    let worker = |first: &'static str, last: &'static str| {
        let (config, program) = (config.clone(), program.clone());
        async move { run(Path::new("env"), &[first, &program, "worker", &config, last], "").await }
    };
    // 3, 5 and 7 are not powers of two, so the error message shows which value was in force.
    check(&worker("NONE=1", "--log=info").await?, 2, &["--block-tokens is 3"])?;
    check(&worker("INFLIGHT_WORKER_BLOCK_TOKENS=5", "--log=info").await?, 2, &["--block-tokens is 5"])?;
    check(&worker("INFLIGHT_WORKER_BLOCK_TOKENS=5", "--block-tokens=7").await?, 2, &["--block-tokens is 7"])
}

#[tokio::test]
async fn generate_reports_an_unreachable_endpoint_and_invalid_arguments() -> Result<()> {
    let (listener, address) = occupied_port()?;
    drop(listener);
    let endpoint = format!("http://{address}");
    let unreachable = run(program(), &["generate", "--endpoint", &endpoint, "Hello"], "").await?;
    check(&unreachable, 3, &[&format!("cannot connect to {endpoint}"), "inflight up"])?;
    let invalid = run(program(), &["generate", "--endpoint", "not a url", "Hello"], "").await?;
    check(&invalid, 2, &["--endpoint"])?;
    let empty = run(program(), &["generate", "--endpoint", &endpoint], "").await?;
    check(&empty, 2, &["the prompt is empty"])
}
