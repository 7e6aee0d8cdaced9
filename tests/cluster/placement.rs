//! The placement of a real router over real workers on simulated devices.

use anyhow::{Result, ensure};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{GenerateRequest, TokenIds};
use inflight_tests::{RoleProcess, alone, eventually, scrape};

use crate::program;
use crate::requests::{generate, sampled};
use crate::storm::{all_connected, flags};

/// Tokens of a prompt, and of it what two turns of a conversation have in common.
const PROMPT: u32 = 640;
/// Conversations at a time: no multiple of the workers, else taking turns would bring each back by chance.
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

/// Three workers and a router; the devices take long enough for a prompt that being idle is not all that counts.
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

/// Tokens of prompts that the workers found in their caches.
async fn found(workers: &[RoleProcess]) -> Result<f64> {
    let mut sum = 0.0;
    for worker in workers {
        sum += scrape(worker.metrics).await?.total("inflight_worker_cached_tokens_total").unwrap_or(0.0);
    }
    Ok(sum)
}

/// Runs the first turns of some conversations, then two more of each, one after the other. What the workers found of the
/// later turns, as a share of what they could have found.
async fn share_found(placement: &str) -> Result<f64> {
    let (workers, router) = cluster(placement).await?;
    let mut client = router.client()?;
    for conversation in 0..CONVERSATIONS {
        generate(&mut client, turn(conversation, 0, "a")).await?;
    }
    let first = found(&workers).await?;
    for nth in 1..3 {
        for conversation in 0..CONVERSATIONS {
            generate(&mut client, turn(conversation, nth, "a")).await?;
        }
    }
    let could = f64::from(2 * CONVERSATIONS * (PROMPT - 32));
    Ok((found(&workers).await? - first) / could)
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_find_their_workers_again_and_under_round_robin_they_do_not() -> Result<()> {
    let _alone = alone().await;
    for placement in ["cost", "prefix"] {
        let share = share_found(placement).await?;
        ensure!(share == 1.0, "{placement}: {share} of what is cached is found");
    }
    let share = share_found("round-robin").await?;
    ensure!(share < 1.0, "round-robin: {share} of what is cached is found");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_comes_later_learns_what_the_workers_have_and_a_tenant_finds_only_its_own() -> Result<()>
{
    let _alone = alone().await;
    let (workers, mut router) = cluster("cost").await?;
    for conversation in 0..6 {
        generate(&mut router.client()?, turn(conversation, 0, "a")).await?;
    }
    router.signal(libc::SIGTERM)?;
    router.wait().await?;
    router.restart().await?;
    all_connected(&router).await?;
    // 38 whole blocks of each prompt that nobody has in common, and what it generated.
    eventually("the caches are known", || async {
        let blocks = scrape(router.metrics).await?.total("inflight_router_prefix_index_blocks")?;
        ensure!(blocks >= 6.0 * 38.0, "{blocks} blocks are known");
        Ok(())
    })
    .await?;
    let before = found(&workers).await?;
    for conversation in 0..6 {
        generate(&mut router.client()?, turn(conversation, 1, "a")).await?;
    }
    let (hits, could) = (found(&workers).await? - before, 6.0 * f64::from(PROMPT - 32));
    ensure!(hits == could, "{hits} tokens of {could} are found");
    let expected = scrape(router.metrics).await?.total("inflight_router_dispatched_cached_tokens_total")?;
    ensure!(expected == could, "{expected} were expected");
    for conversation in 0..6 {
        generate(&mut router.client()?, turn(conversation, 1, "b")).await?;
    }
    ensure!(found(&workers).await? - before == could, "a tenant found another's blocks");
    let samples = scrape(router.metrics).await?;
    ensure!(samples.total("inflight_router_dispatched_cached_tokens_total")? == could, "or was expected to");
    ensure!(samples.total("inflight_router_prefix_index_resyncs_total").is_err(), "changes were missed");
    Ok(())
}
