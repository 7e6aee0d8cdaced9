//! Workers killed and suspended repeatedly under a full load of streams; also helpers shared by other tests.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use inflight_harness::{RoleProcess, eventually, exclusive, scrape};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::{Instant, sleep, sleep_until};

use crate::program;
use crate::requests::{GenerationResult, generate, sampled};

const WORKERS: usize = 4;
const STREAMS: usize = 200;
const MAX_SEQUENCES: u32 = 128;
/// Distinct requests; the streams repeat them.
const REQUESTS: usize = 40;
/// Default length of fault injection, in seconds; `INFLIGHT_CHAOS_SECONDS` overrides it.
const SECONDS: u64 = 15;

fn seconds() -> Duration {
    let given = std::env::var("INFLIGHT_CHAOS_SECONDS").ok().and_then(|given| given.parse().ok());
    Duration::from_secs(given.unwrap_or(SECONDS))
}

/// Converts flags to owned strings.
pub fn flags(flags: &[&str]) -> Vec<String> {
    flags.iter().map(|flag| (*flag).to_owned()).collect()
}

/// Returns the flags of a small worker with a short heartbeat, whose loss is noticed soon.
pub fn worker_flags() -> Vec<String> {
    flags(&[
        "--kv-cache-bytes=64MiB",
        "--threads=1",
        "--heartbeat=250ms",
        "--drain-timeout=20s",
        &format!("--max-sequences={MAX_SEQUENCES}"),
    ])
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn workers_killed_and_suspended_every_second_lose_no_token_and_no_grant() -> Result<()> {
    let seed =
        std::env::var("INFLIGHT_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    storm(seed).await.with_context(|| format!("INFLIGHT_TEST_SEED={seed} repeats the sequence of faults"))
}

async fn storm(seed: u64) -> Result<()> {
    let _exclusive = exclusive().await;
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        workers.push(RoleProcess::start(program().to_owned(), "worker", &worker_flags()).await?);
    }
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router = flags(&[
        &format!("--workers={}", addresses.join(",")),
        "--reconnect-backoff-max=500ms",
        "--connect-timeout=2s",
        "--no-worker-timeout=60s",
    ]);
    let router = RoleProcess::start(program().to_owned(), "router", &router).await?;
    let client = router.client()?;
    all_connected(&router).await?;

    let mut random = StdRng::seed_from_u64(seed);
    let requests: Vec<_> = (0..REQUESTS as u64)
        .map(|i| sampled(&"Once upon a time. ".repeat(1 + i as usize % 7), random.random_range(100..400), i))
        .collect();
    let baseline = try_join_all(requests.iter().map(|request| {
        let mut client = client.clone();
        async move { generate(&mut client, request.clone()).await }
    }))
    .await?;
    idle(&workers, &router).await?;

    let end = Instant::now() + seconds();
    let (requests, baseline) = (Arc::new(requests), Arc::new(baseline));
    let connections: Vec<_> = (0..STREAMS / 10).map(|_| router.client()).collect::<Result<_>>()?;
    let mut streams = tokio::task::JoinSet::new();
    for stream in 0..STREAMS {
        let (requests, baseline) = (Arc::clone(&requests), Arc::clone(&baseline));
        // Several connections: streams beyond the server's limit per connection would wait.
        let mut client = connections[stream % connections.len()].clone();
        streams.spawn(async move {
            let mut ended = 0u32;
            while Instant::now() < end {
                let index = (stream + 7 * ended as usize) % REQUESTS;
                let result = generate(&mut client, requests[index].clone()).await?;
                ensure!(
                    result == baseline[index],
                    "request {index} changed: expected {:?}, got {result:?}",
                    baseline[index]
                );
                ended += 1;
            }
            anyhow::Ok(ended)
        });
    }
    // Kills and suspensions.
    let mut faults = [0; 2];
    let mut next = Instant::now();
    while next < end {
        let victim = &mut workers[random.random_range(0..WORKERS)];
        if random.random() {
            faults[0] += 1;
            victim.signal(libc::SIGKILL)?;
            victim.wait().await?;
            victim.restart().await?;
        } else {
            // Longer than three heartbeats, so that the router closes the session and reconnects later.
            faults[1] += 1;
            victim.signal(libc::SIGSTOP)?;
            sleep(Duration::from_millis(random.random_range(800..1500))).await;
            victim.signal(libc::SIGCONT)?;
        }
        next += Duration::from_secs(1);
        sleep_until(next).await;
    }
    let mut ended = 0;
    while let Some(stream) = streams.join_next().await {
        ended += stream??;
    }
    let samples = scrape(router.metrics).await?;
    let moved = samples.total("inflight_router_resubmissions_total")?;
    let [kills, suspensions] = faults;
    println!(
        "{ended} complete streams after {kills} kills and {suspensions} suspensions; {moved} resubmissions"
    );
    ensure!(moved >= f64::from(kills), "only {moved} streams were resubmitted after {kills} kills");
    let outcomes =
        samples.series().filter(|(series, _)| series.starts_with("inflight_router_requests_total"));
    for (series, count) in outcomes {
        ensure!(series.contains("completed") || count == 0.0, "{series} is {count}");
    }
    all_connected(&router).await?;
    idle(&workers, &router).await?;
    eventually("the router holds all grants again", || async {
        let now = scrape(router.metrics).await?.total("inflight_router_worker_sequences_granted")?;
        let all = f64::from(MAX_SEQUENCES) * WORKERS as f64;
        ensure!(now > all, "{now} sequences granted, not more than {all}");
        Ok(())
    })
    .await
}

/// Waits until the router has a session with every worker.
pub async fn all_connected(router: &RoleProcess) -> Result<()> {
    eventually("every worker is connected", || async {
        let samples = scrape(router.metrics).await?;
        let connected = samples.total("inflight_router_workers_connected")?;
        let known = samples.total("inflight_router_workers_configured")?;
        ensure!(connected == known && known > 0.0, "{connected} of {known}");
        Ok(())
    })
    .await
}

/// Waits until the router and the workers have no open call, queued request, sequence or allocated block.
pub async fn idle(workers: &[RoleProcess], router: &RoleProcess) -> Result<()> {
    let zero = async |role: &RoleProcess, gauges: &[&str]| {
        let samples = scrape(role.metrics).await?;
        for gauge in gauges {
            let value = match samples.total(gauge) {
                Ok(value) => value,
                // One series per worker with a session, so there may be none.
                Err(_) if gauge.starts_with("inflight_router_worker_") => continue,
                Err(error) => return Err(error),
            };
            if value != 0.0 {
                bail!("{gauge} is {value}");
            }
        }
        Ok(())
    };
    eventually("the router is idle", || {
        zero(
            router,
            &[
                "inflight_router_open_calls",
                "inflight_router_queue_requests",
                "inflight_router_queue_tokens",
                "inflight_router_retry_queue_requests",
                "inflight_router_quarantine_queue_requests",
                "inflight_router_worker_requests",
                "inflight_router_worker_sequences",
                "inflight_router_worker_blocks",
            ],
        )
    })
    .await?;
    for worker in workers {
        eventually("the worker is idle", || {
            zero(
                worker,
                &[
                    "inflight_worker_kv_blocks_used",
                    "inflight_worker_running_sequences",
                    "inflight_worker_waiting_sequences",
                ],
            )
        })
        .await?;
    }
    Ok(())
}

/// Checks that a result equals that of the baseline run.
pub fn ensure_same(expected: &GenerationResult, got: &GenerationResult) -> Result<()> {
    ensure!(expected == got, "expected {expected:?}, got {got:?}");
    Ok(())
}
