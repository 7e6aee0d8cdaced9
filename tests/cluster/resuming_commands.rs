//! `inflight generate` and `inflight bench --resume` over the death of their router.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{DEADLINE, RoleProcess, eventually, run, scrape};
use inflight_router::usage::{UsageRecord, read_usage};
use serde_json::Value;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;

use crate::program;
use crate::requests::{generate, sampled};
use crate::resumption::Cluster;
use crate::storm::all_connected;

const PROMPT: &str = "Once upon a time";

#[tokio::test(flavor = "multi_thread")]
async fn generate_prints_the_same_text_when_its_router_is_killed() -> Result<()> {
    const TOKENS: u32 = 900;
    let folder = TempDir::new("generate-resumes")?;
    let mut cluster = Cluster::start(folder.path()).await?;
    let expected = generate(&mut cluster.routers[0].client()?, sampled(PROMPT, TOKENS, 5)).await?;
    let endpoints = format!("http://{},http://{}", cluster.routers[0].address, cluster.routers[1].address);
    // On a busy machine the output may be complete before the router is dead.
    for _ in 0..10 {
        let mut child = Command::new(program())
            .args(["generate", "--raw", "--temperature=0.8", "--seed=5", "--ignore-eos"])
            .args(["--endpoint", &endpoints, &format!("--max-tokens={TOKENS}"), PROMPT])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut stdout = child.stdout.take().context("no standard output")?;
        let mut printed = vec![0; 16];
        stdout.read_exact(&mut printed).await?;
        cluster.routers[0].signal(libc::SIGKILL)?;
        tokio::time::timeout(DEADLINE, stdout.read_to_end(&mut printed)).await.context("it hangs")??;
        let status = child.wait().await?;
        ensure!(status.success(), "{status}");
        let printed = String::from_utf8(printed)?;
        ensure!(printed.trim_end() == expected.text.trim_end(), "{printed:?}, expected {:?}", expected.text);
        let mut records: Vec<UsageRecord> = Vec::new();
        read_usage(&cluster.logs[1..], None, |record| records.push(record))?;
        if let Some(record) = records.first() {
            ensure!(records.len() == 1 && record.completion_tokens == u64::from(TOKENS), "{records:?}");
            ensure!(record.resumed_tokens > Some(0), "it started over: {record:?}");
            return Ok(());
        }
        cluster.routers[0].wait().await?;
        cluster.routers[0].restart().await?;
        all_connected(&cluster.routers[0]).await?;
    }
    anyhow::bail!("no stream was cut off")
}

/// Returns the number of calls that are open at a router.
async fn open_calls(router: &RoleProcess) -> Result<f64> {
    // Absent before the first stream.
    Ok(scrape(router.metrics).await?.total("inflight_router_open_calls").unwrap_or(0.0))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn bench_completes_every_request_when_its_router_is_killed_only_with_resume() -> Result<()> {
    let folder = TempDir::new("bench-resumes")?;
    let mut cluster = Cluster::start(folder.path()).await?;
    for resume in [true, false] {
        let endpoint = format!("http://{}", cluster.routers[0].address);
        let mut arguments = vec!["bench", "--endpoint", &endpoint, "--concurrency=8", "--requests=40"];
        arguments.extend([
            "--rounds=1",
            "--warmup=0",
            "--prompt-tokens=8",
            "--output-tokens=900",
            "--json=-",
        ]);
        arguments.extend(resume.then_some("--resume"));
        let (finished, killed) = tokio::join!(run(program(), &arguments, ""), async {
            let router = &mut cluster.routers[0];
            eventually("all streams of the load are open", || async {
                let open = open_calls(router).await?;
                ensure!(open >= 8.0, "{open}");
                Ok(())
            })
            .await?;
            Cluster::kill(router).await
        });
        killed?;
        let finished = finished?;
        if !resume {
            ensure!(finished.code.is_some_and(|code| code != 0), "streams are lost: {finished:?}");
            continue;
        }
        ensure!(finished.code == Some(0), "{finished:?}");
        let report: Value =
            serde_json::from_str(&finished.stdout).with_context(|| format!("{finished:?}"))?;
        let requests = &report["points"][0]["endpoints"][0]["rounds"][0]["requests"];
        ensure!(requests["completed"] == 40 && requests["short"] == 0, "{requests}");
    }
    Ok(())
}
