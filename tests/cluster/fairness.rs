//! Weighted fairness between tenants over real routers and workers: unequal weights, a flooding tenant, and
//! queueing times beyond the aging threshold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, exclusive};
use inflight_proto::v1::GenerateRequest;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::program;
use crate::requests::sampled;
use crate::storm::{all_connected, flags};

const WORKERS: usize = 4;
const ROUTERS: usize = 2;
const SEQUENCES: u32 = 8;
/// Output tokens per request; each token takes a step of 20 ms.
const OUTPUT: u32 = 20;
/// Length of a measurement window, in seconds.
const SECONDS: u64 = 10;

/// Tenants: API key, its SHA-256, weight, and open requests per router. Each has more requests open than its
/// share of the workers' slots, so every tenant is always backlogged.
const TENANTS: [(&str, &str, u32, usize); 3] = [
    ("one", "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed", 1, 8),
    ("three", "8b5b9db0c13db24256c829aa364aa90c6d2eba318b9232a4ab9313b954d3555f", 3, 24),
    ("flood", "d8864644c15d33be9c0aef2d08c8fc105adc040de488b0116882a2cc6aa4492b", 1, 800),
];

/// Keeps one request of a tenant open at a router and counts its tokens, until `stop` is set.
async fn closed_loop(
    mut client: InferenceClient<Channel>,
    tenant: usize,
    stream: usize,
    tokens: Arc<[AtomicU64; TENANTS.len()]>,
    stop: Arc<AtomicBool>,
) -> Result<()> {
    for nth in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let prompt = format!("{stream} and {nth} begin a story of {tenant} that nobody else tells");
        match generate(&mut client, tenant, sampled(&prompt, OUTPUT, nth), &tokens[tenant]).await {
            Ok(()) => {}
            Err(status) if status.code() == Code::ResourceExhausted => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(status) => return Err(status).with_context(|| TENANTS[tenant].0),
        }
    }
    Ok(())
}

async fn generate(
    client: &mut InferenceClient<Channel>,
    tenant: usize,
    request: GenerateRequest,
    tokens: &AtomicU64,
) -> Result<(), Status> {
    let mut request = Request::new(request);
    let key = TENANTS[tenant].0.parse().map_err(|_| Status::internal("the key is no header"))?;
    request.metadata_mut().insert("x-api-key", key);
    let mut messages = client.generate(request).await?.into_inner();
    while let Some(message) = messages.message().await? {
        if let Some(Event::Delta(delta)) = message.event {
            tokens.fetch_add(delta.token_ids.len() as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn tenants_get_their_weights_across_routers_and_a_flood_gains_nothing() -> Result<()> {
    let _exclusive = exclusive().await;
    let folder = TempDir::new("fairness")?;
    let tenants = TENANTS.map(|(name, digest, weight, _)| {
        format!("[tenants.{name}]\nlimits = {{ weight = {weight} }}\nkeys = [{{ sha256 = \"{digest}\" }}]\n")
    });
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, tenants.concat())?;
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        let worker = flags(&[
            "--device=sim:flat,step=0.02,prompt_token=0.0001",
            &format!("--max-sequences={SEQUENCES}"),
        ]);
        workers.push(RoleProcess::start(program().to_owned(), "worker", &worker).await?);
    }
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router = flags(&[
        &format!("--workers={}", addresses.join(",")),
        &format!("--tenants-file={}", file.display()),
        "--queue-requests-max=8192",
        "--aging-threshold=300ms",
    ]);
    let mut routers = Vec::new();
    for _ in 0..ROUTERS {
        let router = RoleProcess::start(program().to_owned(), "router", &router).await?;
        all_connected(&router).await?;
        routers.push(router);
    }
    let tokens = Arc::new([const { AtomicU64::new(0) }; TENANTS.len()]);
    let stop = Arc::new(AtomicBool::new(false));
    let mut streams = JoinSet::new();
    for (number, router) in routers.iter().enumerate() {
        for (tenant, (.., open)) in TENANTS.into_iter().enumerate() {
            let client = router.client()?;
            for nth in 0..open {
                let stream = number + ROUTERS * nth;
                streams.spawn(closed_loop(client.clone(), tenant, stream, tokens.clone(), stop.clone()));
            }
        }
    }
    let count = || tokens.each_ref().map(|tokens| tokens.load(Ordering::Relaxed));
    // Warm-up: fills every queue.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = count();
    let mut fair = Ok(());
    // Noise of a busy machine averages out over a longer window; unfairness does not.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(SECONDS)).await;
        fair = check(&before, &count());
        if fair.is_ok() {
            break;
        }
    }
    stop.store(true, Ordering::Relaxed);
    fair?;
    while let Some(ended) = streams.join_next().await {
        ended??;
    }
    Ok(())
}

/// Checks that the tokens per weight of every tenant are within 5 % of the first tenant's.
fn check(before: &[u64; TENANTS.len()], after: &[u64; TENANTS.len()]) -> Result<()> {
    let share = |tenant: usize| (after[tenant] - before[tenant]) as f64 / f64::from(TENANTS[tenant].2);
    let shares: [f64; TENANTS.len()] = std::array::from_fn(share);
    println!(
        "tokens over weight: {shares:?}; 1 to {:.3}, the flood 1 to {:.3}",
        3.0 * shares[1] / shares[0],
        shares[2] / shares[0]
    );
    for (tenant, (name, ..)) in TENANTS.into_iter().enumerate().skip(1) {
        let ratio = shares[tenant] / shares[0];
        ensure!((0.95..=1.05).contains(&ratio), "{name} gets {ratio:.3} of its weighted share; {shares:?}");
    }
    Ok(())
}
