//! Starts that must fail, with words that help and nothing left behind.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use anyhow::{Result, ensure};
use inflight_fixtures::{Arch, Checkpoint, Damage, Dtype, TempDir};
use inflight_tests::{CommandOutput, run};

use crate::program;

fn check(finished: &CommandOutput, code: i32, pieces: &[&str]) -> Result<()> {
    ensure!(finished.code == Some(code), "exit code {code} was expected: {finished:?}");
    for piece in pieces {
        ensure!(finished.stderr.contains(piece), "{piece:?} was expected: {finished:?}");
    }
    ensure!(!finished.stderr.contains("panic"), "{finished:?}");
    finished.tag.check_gone()
}

fn taken() -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

#[tokio::test]
async fn a_taken_port_is_named_with_the_flag_that_changes_it() -> Result<()> {
    let (_listener, address) = taken()?;
    let port = address.port().to_string();
    let place = format!("cannot listen on {address}");
    let router = run(program(), &["up", "--port", &port, "--metrics-port=0"], "").await?;
    check(&router, 1, &[&place, "--port", "in use"])?;
    let metrics = run(program(), &["up", "--port=0", "--metrics-port", &port], "").await?;
    check(&metrics, 1, &[&place, "--metrics-port", "in use"])?;
    let listen = address.to_string();
    let alone = run(program(), &["worker", "--metrics-listen=off", "--listen", &listen], "").await?;
    check(&alone, 1, &[&listen, "in use"])?;
    let alone = ["router", "--metrics-listen=off", "--workers=127.0.0.1:1", "--listen", &listen];
    check(&run(program(), &alone, "").await?, 1, &[&listen, "in use"])?;
    let alone = ["worker", "--listen=127.0.0.1:0", "--metrics-listen", &listen];
    check(&run(program(), &alone, "").await?, 1, &[&place, "--metrics-listen", "in use"])
}

#[tokio::test]
async fn a_missing_model_is_named() -> Result<()> {
    let up = run(program(), &["up", "--port=0", "--model=/no/such/model"], "").await?;
    check(&up, 1, &["/no/such/model", "no such directory"])?;
    let worker = ["worker", "--listen=127.0.0.1:0", "--metrics-listen=off", "--model=/no/such/model"];
    check(&run(program(), &worker, "").await?, 1, &["/no/such/model"])
}

#[tokio::test]
async fn a_worker_that_dies_at_its_start_ends_up_with_its_last_words() -> Result<()> {
    let folder = Checkpoint::new(Arch::Llama2, Dtype::F32).write_temp()?;
    Damage::TruncatedWeights.apply(folder.path())?;
    let model = folder.path().to_string_lossy().into_owned();
    let up = run(program(), &["up", "--port=0", "--model", &model], "").await?;
    let clue = Damage::TruncatedWeights.clue();
    check(&up, 1, &["ended before it was ready: exit code 1; its last lines:", "│ error:", clue])
}

#[tokio::test]
async fn a_bad_configuration_is_refused_by_file_line_and_key() -> Result<()> {
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
    let nobody = run(program(), &["router", "--metrics-listen=off"], "").await?;
    check(&nobody, 2, &["no workers are given"])?;
    let device = run(program(), &["worker", "--device=abacus"], "").await?;
    check(&device, 2, &["unknown device `abacus`", "cpu"])?;
    let block = run(program(), &["worker", "--block-tokens=3"], "").await?;
    check(&block, 2, &["block_tokens is 3"])?;
    let simulated = run(program(), &["worker", "--device=sim:flat", "--tensor-parallel=2"], "").await?;
    check(&simulated, 2, &["tensor_parallel is 2", "1 on a simulated device"])?;
    let gpus = ["worker", "--device=cuda", "--tensor-parallel=2", "--gpu=0,0"];
    check(&run(program(), &gpus, "").await?, 2, &["gpu is 0,0", "different GPUs"])?;
    let gpus = ["worker", "--device=cuda", "--tensor-parallel=2", "--gpu=1"];
    check(&run(program(), &gpus, "").await?, 2, &["gpu is 1", "as many GPUs as there are ranks"])?;
    let threads = ["worker", "--device=cpu", "--threads=1", "--tensor-parallel=2"];
    check(&run(program(), &threads, "").await?, 2, &["threads is 1", "at least tensor_parallel"])?;
    let listen = ["--listen=127.0.0.1:0", "--metrics-listen=off"];
    let odd = ["worker", "--device=cpu", "--tensor-parallel=4", listen[0], listen[1]];
    let odd = run(program(), &odd, "").await?;
    check(&odd, 1, &["--tensor-parallel 4 can't divide this model", "6 attention heads", "1, 2, 6 would do"])
}

#[tokio::test]
async fn flags_win_over_the_environment_and_that_over_the_file_and_that_over_the_default() -> Result<()> {
    let folder = TempDir::new("config")?;
    let path = folder.path().join("worker.toml");
    fs::write(&path, "block_tokens = 3\nlisten = \"127.0.0.1:0\"\nmetrics-listen = \"off\"\n")?;
    let config = format!("--config={}", path.display());
    let program = program().to_string_lossy();
    let worker = |first: &'static str, last: &'static str| {
        let (config, program) = (config.clone(), program.clone());
        async move { run(Path::new("env"), &[first, &program, "worker", &config, last], "").await }
    };
    // Three and five are no powers of two, so each refusal tells which value was in force.
    check(&worker("NONE=1", "--log=info").await?, 2, &["block_tokens is 3"])?;
    check(&worker("INFLIGHT_WORKER_BLOCK_TOKENS=5", "--log=info").await?, 2, &["block_tokens is 5"])?;
    check(&worker("INFLIGHT_WORKER_BLOCK_TOKENS=5", "--block-tokens=7").await?, 2, &["block_tokens is 7"])
}

#[tokio::test]
async fn generate_says_that_nobody_answers() -> Result<()> {
    let (listener, address) = taken()?;
    drop(listener);
    let endpoint = format!("http://{address}");
    let nobody = run(program(), &["generate", "--endpoint", &endpoint, "Hello"], "").await?;
    check(&nobody, 3, &[&format!("cannot connect to {endpoint}"), "inflight up"])?;
    let nonsense = run(program(), &["generate", "--endpoint", "not a url", "Hello"], "").await?;
    check(&nonsense, 2, &["--endpoint"])?;
    let empty = run(program(), &["generate", "--endpoint", &endpoint], "").await?;
    check(&empty, 2, &["the prompt is empty"])
}
