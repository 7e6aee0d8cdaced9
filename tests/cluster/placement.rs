//! Prefix-aware placement of a real router over real workers on simulated devices.

use anyhow::{Result, ensure};
use inflight_harness::{RoleProcess, eventually, exclusive, scrape};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{GenerateRequest, TokenIds};

use crate::program;
use crate::requests::{generate, sampled};
use crate::storm::{all_connected, flags};

/// Prompt tokens; all but the last 32 are common to the turns of a conversation.
const PROMPT: u32 = 640;
/// Number of conversations; not a multiple of the workers, or round-robin would return each to its worker.
const CONVERSATIONS: u32 = 7;

fn turn(conversation: u32, nth: u32, tenant: &str) -> GenerateRequest {
    let common = (0..PROMPT - 32).map(|at| 300 + (at * 7 + conversation * 131) % 500);
    let own = (0..32).map(|at| 300 + (at * 11 + nth * 17) % 500);
    let ids = common.chain(own).collect();
    GenerateRequest {
        input: Some(Input::TokenIds(TokenIds { ids })),
        tenant: tenant.to_owned(),
        ..sampled("", 4, 7)
    }
}

/// Starts three workers and a router. Prefill is slow enough for a cached prefix to outweigh an idle worker.
async fn cluster(placement: &str) -> Result<(Vec<RoleProcess>, RoleProcess)> {
    let mut workers = Vec::new();
    for _ in 0..3 {
        let worker = flags(&["--device=sim:flat,step=0.001,prompt_token=0.00002", "--max-sequences=64"]);
        workers.push(RoleProcess::start(program().to_owned(), "worker", &worker).await?);
    }
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router = flags(&[
        &format!("--workers={}", addresses.join(",")),
        &format!("--placement={placement}"),
        "--reconnect-backoff-max=300ms",
    ]);
    let router = RoleProcess::start(program().to_owned(), "router", &router).await?;
    all_connected(&router).await?;
    Ok((workers, router))
}

/// Returns the prompt tokens that all workers found in their prefix caches.
async fn cached_tokens(workers: &[RoleProcess]) -> Result<f64> {
    let mut sum = 0.0;
    for worker in workers {
        sum += scrape(worker.metrics).await?.total("inflight_worker_cached_tokens_total").unwrap_or(0.0);
    }
    Ok(sum)
}

/// Runs three turns of each conversation; returns the prefix-cache hit rate of the second and third turns.
async fn hit_rate(placement: &str) -> Result<f64> {
    let (workers, router) = cluster(placement).await?;
    let mut client = router.client()?;
    for conversation in 0..CONVERSATIONS {
        generate(&mut client, turn(conversation, 0, "a")).await?;
    }
    let first = cached_tokens(&workers).await?;
    for nth in 1..3 {
        for conversation in 0..CONVERSATIONS {
            generate(&mut client, turn(conversation, nth, "a")).await?;
        }
    }
    let cacheable = f64::from(2 * CONVERSATIONS * (PROMPT - 32));
    Ok((cached_tokens(&workers).await? - first) / cacheable)
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_return_to_their_cached_prefix_except_under_round_robin() -> Result<()> {
    let _exclusive = exclusive().await;
    for placement in ["cost", "prefix"] {
        let rate = hit_rate(placement).await?;
        ensure!(rate == 1.0, "{placement}: hit rate {rate}");
    }
    let rate = hit_rate("round-robin").await?;
    ensure!(rate < 1.0, "round-robin: hit rate {rate}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_router_recovers_its_prefix_index_and_tenants_stay_isolated() -> Result<()> {
    let _exclusive = exclusive().await;
    let (workers, mut router) = cluster("cost").await?;
    for conversation in 0..6 {
        generate(&mut router.client()?, turn(conversation, 0, "a")).await?;
    }
    router.signal(libc::SIGTERM)?;
    router.wait().await?;
    router.restart().await?;
    all_connected(&router).await?;
    // At least 38 full blocks of each prompt, shared with no other.
    eventually("the prefix index is complete", || async {
        let blocks = scrape(router.metrics).await?.total("inflight_router_prefix_index_blocks")?;
        ensure!(blocks >= 6.0 * 38.0, "{blocks} blocks are indexed");
        Ok(())
    })
    .await?;
    let before = cached_tokens(&workers).await?;
    for conversation in 0..6 {
        generate(&mut router.client()?, turn(conversation, 1, "a")).await?;
    }
    let (hits, cacheable) = (cached_tokens(&workers).await? - before, 6.0 * f64::from(PROMPT - 32));
    ensure!(hits == cacheable, "{hits} of {cacheable} tokens were cached");
    let predicted = scrape(router.metrics).await?.total("inflight_router_dispatched_cached_tokens_total")?;
    ensure!(predicted == cacheable, "the router predicted {predicted}");
    for conversation in 0..6 {
        generate(&mut router.client()?, turn(conversation, 1, "b")).await?;
    }
    ensure!(cached_tokens(&workers).await? - before == cacheable, "a tenant hit another's blocks");
    let samples = scrape(router.metrics).await?;
    let predicted = samples.total("inflight_router_dispatched_cached_tokens_total")?;
    ensure!(predicted == cacheable, "the router predicted hits on another tenant's blocks");
    ensure!(samples.total("inflight_router_prefix_index_resyncs_total").is_err(), "cache events were lost");
    Ok(())
}
