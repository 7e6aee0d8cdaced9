//! Cancellation by clients, and crashes of workers and of the router.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt as _;
use futures::future::try_join_all;
use inflight_harness::{ClusterMember, LocalCluster, eventually, kill, scrape};
use inflight_proto::v1::inference_client::InferenceClient;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::OnceCell;
use tonic::Request;
use tonic::transport::Channel;

use crate::program;
use crate::requests::{GenerationResult, generate, model, sampled};

/// Calls in the cancellation test.
const CALLS: u64 = 1_000;
/// Concurrent calls in the cancellation test.
const CONCURRENCY: usize = 48;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_random_cancellations_leak_nothing() -> Result<()> {
    let seed =
        std::env::var("INFLIGHT_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    cancels(seed).await.with_context(|| format!("INFLIGHT_TEST_SEED={seed} repeats this run"))
}

async fn cancels(seed: u64) -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--max-sequences=16"]).await?;
    let client = cluster.client().await?;
    let endpoint = Arc::new(cluster.endpoint.clone());
    let calls = (0..CALLS).map(|call| {
        generate_and_cancel(StdRng::seed_from_u64(seed ^ call), client.clone(), endpoint.clone())
    });
    let mut outcomes = futures::stream::iter(calls).buffer_unordered(CONCURRENCY);
    let mut cancelled_calls = 0;
    while let Some(cancelled) = outcomes.next().await {
        cancelled_calls += u32::from(cancelled?);
    }
    ensure!(cancelled_calls > CALLS as u32 / 2, "only {cancelled_calls} calls were cancelled");
    let mut cancelled_sequences = 0.0;
    for member in &cluster.workers {
        eventually(&format!("{} is idle", member.name), || idle(member)).await?;
        let ended = scrape(member.metrics).await?;
        let cancelled = ended
            .series()
            .filter(|(series, _)| series.contains("finished_sequences_total{reason=\"cancelled\"}"));
        cancelled_sequences += cancelled.map(|(_, count)| count).sum::<f64>();
    }
    ensure!(cancelled_sequences >= 100.0, "workers cancelled only {cancelled_sequences} sequences");
    let router = cluster.router.metrics;
    eventually("the router is idle", || async move {
        let samples = scrape(router).await?;
        for gauge in
            ["inflight_router_open_calls", "inflight_router_queue_requests", "inflight_router_queue_tokens"]
        {
            ensure!(samples.total(gauge)? == 0.0, "{gauge} is {}", samples.total(gauge)?);
        }
        Ok(())
    })
    .await?;
    // The cluster still serves.
    let answer = generate(&mut cluster.client().await?, sampled("Once", 8, 0)).await?;
    ensure!(answer.tokens.len() == 8);
    Ok(())
}

/// Starts a generation and cancels it in a random way, or completes it. Returns whether it ended early.
async fn generate_and_cancel(
    mut random: StdRng,
    mut client: InferenceClient<Channel>,
    endpoint: Arc<String>,
) -> Result<bool> {
    let prompt = "Once upon a time. ".repeat(random.random_range(1..20));
    let mut message = sampled(&prompt, random.random_range(1..200), random.random());
    if let Some(sampling) = &mut message.sampling {
        sampling.n = Some(random.random_range(1..4));
    }
    let mut request = Request::new(message);
    let kind = random.random_range(0..5);
    // Connection loss: the drop of the only client on a connection closes it.
    if kind == 0 {
        client = InferenceClient::connect(endpoint.to_string()).await?;
    }
    // Deadline of the call.
    if kind == 1 {
        request.set_timeout(Duration::from_micros(random.random_range(100..50_000)));
    }
    if kind == 2 {
        // Cancelled possibly before the response headers; the duration is part of the workload.
        let patience = Duration::from_micros(random.random_range(0..20_000));
        return Ok(tokio::time::timeout(patience, client.generate(request)).await.is_err());
    }
    let Ok(response) = client.generate(request).await else { return Ok(true) };
    let mut stream = response.into_inner();
    let messages_max = if kind == 4 { u32::MAX } else { random.random_range(0..20) };
    for _ in 0..messages_max {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(false),
            Err(_) => return Ok(true),
        }
    }
    Ok(true)
}

async fn idle(member: &ClusterMember) -> Result<()> {
    let samples = scrape(member.metrics).await?;
    for gauge in [
        "inflight_worker_kv_blocks_used",
        "inflight_worker_running_sequences",
        "inflight_worker_waiting_sequences",
    ] {
        ensure!(samples.total(gauge)? == 0.0, "{gauge} is {}", samples.total(gauge)?);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_processes_are_restarted_and_a_killed_worker_loses_no_token() -> Result<()> {
    let mut cluster = LocalCluster::start(program(), &[]).await?;
    let mut client = cluster.client().await?;
    let most = if inflight_fixtures::is_thorough() { u32::MAX } else { 300 };
    let tokens = (model(&mut client).await?.context_tokens - 64).min(most);
    // Enough work that the kill interrupts streams even if this process is scheduled late.
    let requests: Vec<_> = (0..64).map(|seed| sampled("Once upon a time", tokens, seed)).collect();
    let baseline = try_join_all(requests.iter().map(|request| {
        let mut client = client.clone();
        async move { generate(&mut client, request.clone()).await }
    }))
    .await?;

    let killed = OnceCell::new();
    let interrupted = try_join_all(requests.iter().map(|request| {
        let (mut client, killed, workers) = (client.clone(), &killed, &cluster.workers);
        async move {
            let mut stream = client.generate(request.clone()).await?.into_inner();
            let partial = GenerationResult::until_first_tokens(&mut stream).await?;
            killed.get_or_try_init(|| kill_busiest(workers)).await?;
            partial.read_rest(&mut stream).await
        }
    }))
    .await?;
    let victim = killed.into_inner().context("no worker was killed")?;
    for (request, (expected, got)) in baseline.iter().zip(&interrupted).enumerate() {
        ensure!(expected == got, "request {request} changed: expected {expected:?}, got {got:?}");
    }
    let moved =
        scrape(cluster.router.metrics).await?.total("inflight_router_resubmissions_total").unwrap_or(0.0);
    ensure!(moved >= 1.0, "the kill interrupted no stream");

    wait_for_restart(&mut cluster, &victim).await?;
    let poller = client.clone();
    eventually("the router reconnects to the worker", || {
        let mut client = poller.clone();
        async move {
            let workers = model(&mut client).await?.workers;
            ensure!(workers == 2, "{workers} workers");
            Ok(())
        }
    })
    .await?;

    let router = cluster.router.clone();
    kill(router.pid, libc::SIGKILL)?;
    wait_for_restart(&mut cluster, &router).await?;
    let answer = generate(&mut cluster.client().await?, requests[0].clone()).await?;
    ensure!(answer == baseline[0], "another answer: {answer:?}");
    Ok(())
}

/// Kills the worker with the most running sequences: cost-based placement may have put all on one.
async fn kill_busiest(workers: &[ClusterMember]) -> Result<ClusterMember> {
    let mut busiest = None;
    for worker in workers {
        let running = scrape(worker.metrics).await?.total("inflight_worker_running_sequences")?;
        if busiest.as_ref().is_none_or(|(most, _)| running > *most) {
            busiest = Some((running, worker));
        }
    }
    let (_, victim) = busiest.context("there are no workers")?;
    kill(victim.pid, libc::SIGKILL)?;
    Ok(victim.clone())
}

/// Waits until `up` reports the death of `victim` and its restart on the same addresses.
async fn wait_for_restart(cluster: &mut LocalCluster, victim: &ClusterMember) -> Result<()> {
    let lost = cluster.event("lost").await?;
    ensure!(
        lost["name"] == victim.name && lost["status"].as_str().is_some_and(|s| s.contains("signal 9")),
        "{lost}"
    );
    let restarted = cluster.event("restarted").await?;
    ensure!(restarted["member"]["name"] == victim.name, "{restarted}");
    ensure!(restarted["member"]["address"] == victim.address.to_string(), "{restarted}");
    ensure!(restarted["member"]["metrics"] == victim.metrics.to_string(), "{restarted}");
    Ok(())
}
