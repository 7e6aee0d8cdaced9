//! Clients that leave and workers that die.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt as _;
use futures::future::try_join_all;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_tests::{LocalCluster, ClusterMember, eventually, kill, scrape};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::OnceCell;
use tonic::Request;
use tonic::transport::Channel;

use crate::program;
use crate::requests::{GenerationResult, generate, model, sampled};

/// Calls made in the test of cancels.
const CALLS: u64 = 1_000;
/// Of them, how many at once.
const AT_ONCE: usize = 48;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_random_cancels_and_drops_leave_nothing_behind() -> Result<()> {
    let seed =
        std::env::var("INFLIGHT_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    cancels(seed).await.with_context(|| format!("INFLIGHT_TEST_SEED={seed} repeats this run"))
}

async fn cancels(seed: u64) -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--max-sequences=16"]).await?;
    let client = cluster.client().await?;
    let endpoint = Arc::new(cluster.endpoint.clone());
    let leavers =
        (0..CALLS).map(|call| leave(StdRng::seed_from_u64(seed ^ call), client.clone(), endpoint.clone()));
    let mut outcomes = futures::stream::iter(leavers).buffer_unordered(AT_ONCE);
    let mut left = 0;
    while let Some(outcome) = outcomes.next().await {
        left += u32::from(outcome?);
    }
    ensure!(left > CALLS as u32 / 2, "only {left} calls left early");
    let mut withdrawn = 0.0;
    for member in &cluster.workers {
        eventually(&format!("{} is idle", member.name), || idle(member)).await?;
        let ended = scrape(member.metrics).await?;
        let cancelled = ended
            .series()
            .filter(|(series, _)| series.contains("finished_sequences_total{reason=\"cancelled\"}"));
        withdrawn += cancelled.map(|(_, count)| count).sum::<f64>();
    }
    ensure!(withdrawn >= 100.0, "only {withdrawn} sequences were withdrawn from workers");
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
    // And it still answers.
    let answer = generate(&mut cluster.client().await?, sampled("Once", 8, 0)).await?;
    ensure!(answer.tokens.len() == 8);
    Ok(())
}

/// Starts a generation and leaves it in one of the ways a client can. Whether it left before the end.
async fn leave(
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
    let way = random.random_range(0..5);
    // With a connection of its own, a client's drop takes the connection with it.
    if way == 0 {
        client = InferenceClient::connect(endpoint.to_string()).await?;
    }
    if way == 1 {
        request.set_timeout(Duration::from_micros(random.random_range(100..50_000)));
    }
    if way == 2 {
        // Left before the router may even have answered; the duration is part of the workload.
        let patience = Duration::from_micros(random.random_range(0..20_000));
        return Ok(tokio::time::timeout(patience, client.generate(request)).await.is_err());
    }
    let Ok(response) = client.generate(request).await else { return Ok(true) };
    let mut stream = response.into_inner();
    let patience = if way == 4 { u32::MAX } else { random.random_range(0..20) };
    for _ in 0..patience {
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
async fn a_killed_worker_costs_no_stream_and_no_token_and_the_killed_come_back() -> Result<()> {
    let mut cluster = LocalCluster::start(program(), &[]).await?;
    let mut client = cluster.client().await?;
    let tokens = model(&mut client).await?.context_tokens - 64;
    // Enough work for the kill to fall into its midst, however late this process gets its turn.
    let requests: Vec<_> = (0..64).map(|seed| sampled("Once upon a time", tokens, seed)).collect();
    let undisturbed = try_join_all(requests.iter().map(|request| {
        let mut client = client.clone();
        async move { generate(&mut client, request.clone()).await }
    }))
    .await?;

    let killed = OnceCell::new();
    let disturbed = try_join_all(requests.iter().map(|request| {
        let (mut client, killed, workers) = (client.clone(), &killed, &cluster.workers);
        async move {
            let mut stream = client.generate(request.clone()).await?.into_inner();
            let begun = GenerationResult::begin(&mut stream).await?;
            killed.get_or_try_init(|| kill_the_busier(workers)).await?;
            begun.read(&mut stream).await
        }
    }))
    .await?;
    let victim = killed.into_inner().context("nobody was killed")?;
    for (request, (expected, got)) in undisturbed.iter().zip(&disturbed).enumerate() {
        ensure!(expected == got, "request {request} changed: expected {expected:?}, got {got:?}");
    }
    let moved =
        scrape(cluster.router.metrics).await?.total("inflight_router_resubmissions_total").unwrap_or(0.0);
    ensure!(moved >= 1.0, "the kill disturbed no stream");

    comes_back(&mut cluster, &victim).await?;
    let asked = client.clone();
    eventually("the router finds the worker again", || {
        let mut client = asked.clone();
        async move {
            let workers = model(&mut client).await?.workers;
            ensure!(workers == 2, "{workers} workers");
            Ok(())
        }
    })
    .await?;

    let router = cluster.router.clone();
    kill(router.pid, libc::SIGKILL)?;
    comes_back(&mut cluster, &router).await?;
    let answer = generate(&mut cluster.client().await?, requests[0].clone()).await?;
    ensure!(answer == undisturbed[0], "another answer: {answer:?}");
    Ok(())
}

/// Kills the worker that runs most, as by predicted cost all may have gone to one.
async fn kill_the_busier(workers: &[ClusterMember]) -> Result<ClusterMember> {
    let mut busier = None;
    for worker in workers {
        let running = scrape(worker.metrics).await?.total("inflight_worker_running_sequences")?;
        if busier.as_ref().is_none_or(|(most, _)| running > *most) {
            busier = Some((running, worker));
        }
    }
    let (_, victim) = busier.context("there are no workers")?;
    kill(victim.pid, libc::SIGKILL)?;
    Ok(victim.clone())
}

/// Waits until `up` has started a killed member again, at its old addresses.
async fn comes_back(cluster: &mut LocalCluster, victim: &ClusterMember) -> Result<()> {
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
