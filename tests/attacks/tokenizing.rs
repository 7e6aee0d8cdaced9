//! Floods of large texts: tenants take turns at the tokenizer, and a text beyond a limit is refused without being tokenized.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, eventually, exclusive, scrape};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{GenerateRequest, TokenizeRequest, TokenizeResponse, tokenize_request};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::{TENANTS, program, short_request, with_key};

const MIB: f64 = (1 << 20) as f64;
/// Adds a tenant with the SHA-256 of the API key `f`.
const FLOOD: &str = "[tenants.flood]\nkeys = [{ sha256 = \"252f10c83610ebca1a059c0bae8255eba2f95be4d1d7bcfa89d7248a82d9f111\" }]\n";
/// Metric with the number of steps (checks and text pieces) that have waited for a tokenizer slot.
const STEPS: &str = "inflight_router_tokenize_queue_seconds_count";

/// Starts a cluster of a model with a context of 262,144 tokens.
async fn start() -> Result<(LocalCluster, inflight_fixtures::TempDir)> {
    let folder = inflight_fixtures::TempDir::new("tokenizing")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, format!("{TENANTS}{FLOOD}"))?;
    let tenants = format!("--tenants-file={}", file.display());
    let flags =
        ["--workers=1", "--device=sim:flat,pool_tokens=300000", "--max-context-tokens=262144", &tenants];
    let cluster = LocalCluster::start_exclusive(program(), &flags, &[], exclusive().await).await?;
    Ok((cluster, folder))
}

async fn tokenize(
    client: &mut InferenceClient<Channel>,
    text: String,
    key: &str,
) -> Result<Result<TokenizeResponse, Status>> {
    let input = Some(tokenize_request::Input::Text(text));
    let request = with_key(TokenizeRequest { input, omit_pieces: true, ..TokenizeRequest::default() }, key)?;
    Ok(client.tokenize(request).await.map(tonic::Response::into_inner))
}

/// Returns a text of `count` words of 4 to 6 bytes, 1,000 different ones, that the tokenizer can split at every space.
fn words(count: usize) -> String {
    (0..count).map(|number| format!("n{}x ", number % 1000)).collect()
}

async fn sample(cluster: &LocalCluster, name: &str) -> Result<f64> {
    scrape(cluster.router.metrics).await?.total(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_text_waits_for_pieces_of_another_tenants_texts_not_for_the_texts() -> Result<()> {
    let (cluster, _folder) = start().await?;
    let slots = std::thread::available_parallelism()?.get();
    let (calls, text, own) = (3 * slots + 16, words(40_000), words(5_000));
    ensure!(own.len() > 16 << 10 && own.len() < 64 << 10, "{} bytes are not one queued piece", own.len());
    let mut tenant = cluster.client().await?;
    let expected = tokenize(&mut tenant, own.clone(), "t").await??;
    let before = sample(&cluster, STEPS).await?;
    tokenize(&mut tenant, text.clone(), "t").await??;
    let pieces = sample(&cluster, STEPS).await? - before;
    ensure!(pieces >= 4.0, "{} bytes are tokenized in {pieces} steps", text.len());

    // Keeps `calls` texts in flight until the tenant's calls are done.
    let (ended, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let mut flood = JoinSet::new();
    let channel = Channel::from_shared(cluster.endpoint.clone())?.connect().await?;
    for _ in 0..calls {
        let (mut client, text) = (InferenceClient::new(channel.clone()), text.clone());
        let (ended, over) = (ended.clone(), over.clone());
        flood.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                tokenize(&mut client, text.clone(), "f").await??;
                ended.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    eventually("the flood waits for the tokenizer", || async {
        let waiting = sample(&cluster, "inflight_router_tokenize_queue_requests").await?;
        ensure!(waiting as usize > calls / 2, "{waiting} wait");
        Ok(())
    })
    .await?;
    let mut passed = Vec::new();
    for _ in 0..5 {
        let ahead = ended.load(Ordering::Relaxed);
        let tokens = tokenize(&mut tenant, own.clone(), "t").await??;
        passed.push(ended.load(Ordering::Relaxed) - ahead);
        ensure!(tokens == expected, "other tokens beside the flood");
    }
    over.store(true, Ordering::Relaxed);
    while let Some(finished) = flood.join_next().await {
        finished??;
    }
    let total = ended.load(Ordering::Relaxed);
    println!(
        "{calls} texts of {pieces} steps at a time, {slots} slots: {passed:?} of {total} ended during the tenant's calls"
    );
    // First come, first served would complete every waiting text first. With fair queueing, a call waits for two slots, and only texts
    // whose last piece runs in one of them complete meanwhile. The minimum of five calls excludes delays of this test's process.
    let least = passed.iter().min().copied().unwrap_or_default();
    ensure!(least <= 2 * slots, "{passed:?} texts of the flood went first");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_cannot_fit_is_refused_without_being_tokenized() -> Result<()> {
    const CALLS: usize = 2;
    let (cluster, _folder) = start().await?;
    let mut client = cluster.client().await?;
    let before = sample(&cluster, "process_resident_memory_peak_bytes").await?;
    let text = "é".repeat(2_050_000);
    for _ in 0..CALLS {
        let input = Some(Input::Text(text.clone()));
        let request = with_key(GenerateRequest { input, ..short_request() }, "f")?;
        let refused = client.generate(request).await.err().context("a text of 4 MB was accepted")?;
        let tokenized =
            tokenize(&mut client, text.clone(), "f").await?.err().context("4 MB were tokenized")?;
        for status in [refused, tokenized] {
            ensure!(status.code() == Code::InvalidArgument, "{status:?}");
            ensure!(status.message().contains("are at least 4100000 tokens"), "{status:?}");
            ensure!(status.message().contains("the model takes"), "{status:?}");
        }
    }
    // The check is the only step of each; tokenizing would take 20 more.
    let steps = sample(&cluster, STEPS).await?;
    ensure!(steps <= 2.0 * CALLS as f64, "{steps} steps of the tokenizer's queue");
    let grown = (sample(&cluster, "process_resident_memory_peak_bytes").await? - before) / MIB;
    println!("{steps} steps; the router took {grown:.0} MiB");
    ensure!(grown < 64.0, "the router took {grown:.0} MiB");
    Ok(())
}
