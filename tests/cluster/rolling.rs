//! Rolling restart of every worker and router under load.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use inflight_harness::{RoleProcess, exclusive};
use inflight_proto::v1::GenerateRequest;
use inflight_proto::v1::inference_client::InferenceClient;
use tonic::Code;
use tonic::transport::Channel;

use crate::program;
use crate::requests::{GenerationResult, generate, sampled};
use crate::storm::{all_connected, ensure_same, flags, idle, worker_flags};

const WORKERS: usize = 3;
const ROUTERS: usize = 2;
const STREAMS: usize = 48;

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_every_process_loses_no_token() -> Result<()> {
    let _exclusive = exclusive().await;
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        workers.push(RoleProcess::start(program().to_owned(), "worker", &worker_flags()).await?);
    }
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router_flags = flags(&[
        &format!("--workers={}", addresses.join(",")),
        "--reconnect-backoff-max=300ms",
        "--drain-grace=300ms",
        "--drain-timeout=50s",
    ]);
    let mut routers = Vec::new();
    for _ in 0..ROUTERS {
        let router = RoleProcess::start(program().to_owned(), "router", &router_flags).await?;
        all_connected(&router).await?;
        routers.push(router);
    }
    let clients: Vec<_> = routers.iter().map(RoleProcess::client).collect::<Result<_>>()?;
    let requests: Vec<_> = (0..16).map(|i| sampled("Once upon a time", 100 + 20 * i, i.into())).collect();
    let baseline = try_join_all(requests.iter().map(|request| {
        let mut client = clients[0].clone();
        async move { generate(&mut client, request.clone()).await }
    }))
    .await?;

    let (stop, rejected) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (requests, baseline) = (Arc::new(requests), Arc::new(baseline));
    let mut streams = tokio::task::JoinSet::new();
    for stream in 0..STREAMS {
        let clients = clients.clone();
        let (requests, baseline) = (Arc::clone(&requests), Arc::clone(&baseline));
        let (stop, rejected) = (Arc::clone(&stop), Arc::clone(&rejected));
        streams.spawn(async move {
            let mut ended = 0;
            while !stop.load(Ordering::Relaxed) {
                let index = (stream + 5 * ended) % requests.len();
                let result = generate_with_retries(&clients, stream, &requests[index], &rejected).await?;
                ensure_same(&baseline[index], &result).with_context(|| format!("request {index}"))?;
                ended += 1;
            }
            anyhow::Ok(ended)
        });
    }
    for worker in &mut workers {
        worker.signal(libc::SIGTERM)?;
        let status = worker.wait().await?;
        ensure!(status.success(), "{status}; it wrote:\n{}", worker.log());
        ensure!(worker.log().contains("draining"), "it wrote:\n{}", worker.log());
        worker.restart().await?;
        for router in &routers {
            all_connected(router).await?;
        }
    }
    ensure!(rejected.load(Ordering::Relaxed) == 0, "a call was rejected while workers restarted");
    for router in &mut routers {
        router.signal(libc::SIGTERM)?;
        let status = router.wait().await?;
        ensure!(status.success(), "{status}; it wrote:\n{}", router.log());
        router.restart().await?;
        all_connected(router).await?;
    }
    stop.store(true, Ordering::Relaxed);
    let mut ended = 0;
    while let Some(stream) = streams.join_next().await {
        ended += stream??;
    }
    println!("{ended} complete streams, {} retried calls", rejected.load(Ordering::Relaxed));
    for router in &routers {
        idle(&workers, router).await?;
    }
    Ok(())
}

/// Generates to the end of the stream. A call rejected before it started is retried on the other router.
async fn generate_with_retries(
    clients: &[InferenceClient<Channel>],
    first: usize,
    request: &GenerateRequest,
    rejected: &AtomicU32,
) -> Result<GenerationResult> {
    for router in (first..first + 1000).map(|n| n % clients.len()) {
        let mut client = clients[router].clone();
        match client.generate(request.clone()).await {
            Ok(response) => {
                let mut stream = response.into_inner();
                return GenerationResult::default()
                    .read_rest(&mut stream)
                    .await
                    .context("after it had begun");
            }
            // A draining router returns UNAVAILABLE. For a connection closed during a call, tonic may report
            // CANCELLED or UNKNOWN with an error source, which a status from a server never has.
            Err(status) if status.code() == Code::Unavailable || status.source().is_some() => {
                rejected.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(status) => return Err(status.into()),
        }
    }
    bail!("rejected a thousand times")
}
