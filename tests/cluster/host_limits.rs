//! Limits of the host: memory that workers promise beside each other, open files, a full disk.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, eventually, run, scrape};
use inflight_proto::v1::{GenerateRequest, ListModelsRequest, StopConditions, generate_request::Input};
use tokio::net::TcpStream;

use crate::program;

/// Flags of a worker with a KV pool of `bytes` in large blocks, and a ledger in `folder`.
fn flags(bytes: u64, folder: &Path) -> Vec<String> {
    let mut flags = ["--device=cpu", "--threads=1", "--block-tokens=256", "--host-cache-bytes=0"]
        .map(str::to_owned)
        .to_vec();
    flags.push(format!("--kv-cache-bytes={bytes}"));
    flags.push(format!("--reservation-dir={}", folder.display()));
    flags
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_memory_does_not_fit_beside_another_is_refused_until_that_one_is_killed() -> Result<()>
{
    let folder = TempDir::new("ledger")?;
    let ledger = folder.path().join("reservations");
    // Two of them exceed the memory, one does not. Pools take memory at first use.
    let bytes = inflight_worker::host_memory_limit().context("this is Linux")? / 5 * 3;
    let mut first = RoleProcess::start(program().to_owned(), "worker", &flags(bytes, &ledger)).await?;
    let promised = scrape(first.metrics).await?.total("inflight_worker_promised_bytes")?;
    ensure!(promised > bytes as f64 && promised < bytes as f64 * 1.1, "{promised} of {bytes}");

    let second = flags(bytes, &ledger);
    let mut arguments = vec!["worker", "--listen=127.0.0.1:0", "--metrics-listen=off"];
    arguments.extend(second.iter().map(String::as_str));
    let refused = run(program(), &arguments, "").await?;
    ensure!(refused.code == Some(1), "{refused:?}");
    for clue in ["another worker of this host has promised", "GiB", "lower --kv-cache-bytes"] {
        ensure!(refused.stderr.contains(clue), "no {clue:?} in {}", refused.stderr);
    }

    // Without a directory, others are not seen, and the worker starts.
    let unusable = flags(bytes, Path::new("/proc/none"));
    let alone = RoleProcess::start(program().to_owned(), "worker", &unusable).await?;
    ensure!(alone.log().contains("--reservation-dir"), "{}", alone.log());

    first.signal(libc::SIGKILL)?;
    first.wait().await?;
    RoleProcess::start(program().to_owned(), "worker", &second).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recording_on_a_full_disk_is_a_metric_and_a_finding_and_serving_goes_on() -> Result<()> {
    let record = "--record=/dev/full".to_owned();
    let small = ["--threads=1", "--kv-cache-bytes=16MiB", "--host-cache-bytes=0"].map(str::to_owned);
    let mut worker_flags = small.to_vec();
    worker_flags.push(record.clone());
    let worker = RoleProcess::start(program().to_owned(), "worker", &worker_flags).await?;
    let workers = format!("--workers={}", worker.address);
    let router_flags = [workers, record, "--admin=read-only".to_owned()];
    let router = RoleProcess::start(program().to_owned(), "router", &router_flags).await?;
    let ready = || async {
        let models = router.client()?.list_models(ListModelsRequest {}).await?.into_inner().models;
        ensure!(!models.is_empty());
        Ok(())
    };
    eventually("the worker is connected", ready).await?;
    for _ in 0..2 {
        let request = GenerateRequest {
            input: Some(Input::Text("Once upon a time".to_owned())),
            stop: Some(StopConditions { max_tokens: Some(4), ignore_eos: true, ..StopConditions::default() }),
            ..GenerateRequest::default()
        };
        router.client()?.generate_unary(request).await?;
    }
    for (process, name) in
        [(&worker, "inflight_worker_recording_failed"), (&router, "inflight_router_recording_failed")]
    {
        let failed = || async {
            ensure!(scrape(process.metrics).await?.total(name)? == 1.0, "{}", process.log());
            Ok(())
        };
        eventually(name, failed).await?;
    }
    let (worker, router) = (worker.address.to_string(), router.address.to_string());
    let diagnosed = run(program(), &["diagnose", &worker], "").await?;
    ensure!(diagnosed.stdout.contains("recording failed: "), "{diagnosed:?}");
    let diagnosed = run(program(), &["diagnose", "--router", &router], "").await?;
    ensure!(diagnosed.stdout.contains("recording failed: the router's"), "{diagnosed:?}");
    Ok(())
}

#[tokio::test]
async fn a_hard_limit_of_open_files_below_the_connection_limits_is_warned_of() -> Result<()> {
    let occupied = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    let listen = format!("--listen={}", occupied.local_addr()?);
    // It ends after the check, as the port is taken.
    let script = format!(
        "ulimit -S -n 400; ulimit -H -n 500; exec '{}' router --metrics-listen=off --http-listen=off \
         --workers=127.0.0.1:1 {listen} --connections-max=",
        program().display()
    );
    for (connections, warned) in [("100", false), ("1000", true)] {
        let router = run(Path::new("/bin/sh"), &["-c", &(script.clone() + connections)], "").await?;
        ensure!(router.code == Some(1), "{router:?}");
        ensure!(router.stderr.contains("hard limit of open files") == warned, "{router:?}");
        for clue in ["limit=500", "needed=1321", "lower --connections-max"] {
            ensure!(router.stderr.contains(clue) == warned, "{clue}: {router:?}");
        }
    }
    Ok(())
}

/// Sets the soft limit of open files of another process.
fn set_open_files(pid: u32, files: u64) -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let pid = libc::pid_t::try_from(pid)?;
    // SAFETY: `limit` is valid for writing, and no new limit is given.
    let read = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) };
    ensure!(read == 0, "{}", std::io::Error::last_os_error());
    limit.rlim_cur = files.min(limit.rlim_max);
    // SAFETY: `limit` is valid for reading, and the old limit is not asked for.
    let set = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) };
    ensure!(set == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_without_file_descriptors_serves_new_clients_and_does_not_spin() -> Result<()> {
    let flags = ["--workers=127.0.0.1:1", "--http-listen=off"].map(str::to_owned);
    let router = RoleProcess::start(program().to_owned(), "router", &flags).await?;
    let samples = scrape(router.metrics).await?;
    let (open, max) = (samples.total("process_open_fds")?, samples.total("process_max_fds")?);
    ensure!(open > 5.0 && max > open, "{open} of {max}");
    set_open_files(router.pid, open as u64 + 10)?;
    let begun = std::time::Instant::now();
    let mut flood = Vec::new();
    for _ in 0..60 {
        flood.push(TcpStream::connect(router.address).await?);
    }
    let warned = || async {
        ensure!(router.log().contains("no file descriptor for a connection"), "{}", router.log());
        Ok(())
    };
    eventually("the log names the cause", warned).await?;
    // Connections that are not in use give way.
    let served = || async { Ok(router.client()?.list_models(ListModelsRequest {}).await?) };
    eventually("a client is served", served).await?;
    set_open_files(router.pid, max as u64)?;
    let failures = scrape(router.metrics).await?.total("inflight_accept_failures_total")?;
    let intervals = begun.elapsed().as_secs_f64() / 0.05;
    ensure!(failures >= 1.0 && failures <= 1.0 + intervals, "{failures} in {intervals} intervals");
    ensure!(router.log().matches("no file descriptor").count() == 1, "{}", router.log());
    drop(flood);
    Ok(())
}
