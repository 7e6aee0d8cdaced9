//! Upgrades from an earlier release to this build, and rollbacks, under load. `tests/upgrade/run` builds the
//! earlier release and sets [`EARLIER`].

use std::collections::BTreeMap;
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use inflight_fixtures::{BenchmarkShape, TempDir};
use inflight_harness::{RoleProcess, eventually, exclusive, scrape};
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{GenerateRequest, ListModelsRequest};
use tonic::Code;
use tonic::transport::Channel;

use crate::program;
use crate::requests::sampled;
use crate::storm::{all_connected, flags, idle, worker_flags};

/// Environment variable with the path of an earlier release's binary; without it the test is skipped.
const EARLIER: &str = "INFLIGHT_EARLIER_RELEASE";
const WORKERS: usize = 3;
const ROUTERS: usize = 2;
const STREAMS: usize = 24;
const REQUESTS: u32 = 12;

/// Tokens of one stream, and the numerics they were computed with.
#[derive(Debug, Default, Clone, PartialEq)]
struct Outcome {
    tokens: Vec<u32>,
    /// Numerics fingerprint of the worker that the stream started on.
    fingerprint: String,
    /// Announced changes: number of tokens before it, and the fingerprint from there on.
    changes: Vec<(usize, String)>,
}

async fn outcome(client: &mut InferenceClient<Channel>, request: &GenerateRequest) -> Result<Outcome> {
    let mut stream = client.generate(request.clone()).await?.into_inner();
    let mut outcome = Outcome::default();
    let mut usage = None;
    while let Some(response) = stream.message().await.context("after it had begun")? {
        match response.event.context("an empty message")? {
            Event::Started(started) => outcome.fingerprint = started.fingerprint,
            Event::Delta(delta) => outcome.tokens.extend(delta.token_ids),
            Event::FingerprintChanged(changed) => {
                outcome.changes.push((outcome.tokens.len(), changed.fingerprint));
            }
            Event::Completed(completed) => usage = completed.usage,
            Event::Finished(_) | Event::PromptLogprobs(_) => {}
        }
    }
    let usage = usage.context("the stream ended without `completed`")?;
    let asked = request.stop.as_ref().and_then(|stop| stop.max_tokens);
    ensure!(asked == Some(outcome.tokens.len() as u32), "{} of {asked:?} tokens", outcome.tokens.len());
    ensure!(usage.completion_tokens == outcome.tokens.len() as u32, "{usage:?}");
    Ok(outcome)
}

/// Reference outputs of the requests, generated without disturbance, by numerics fingerprint.
type Baselines = BTreeMap<String, Vec<Outcome>>;

/// Checks tokens up to the first change against the undisturbed result; those after one depend on where it was.
fn check(baselines: &Baselines, index: usize, outcome: &Outcome) -> Result<()> {
    let mut fingerprint = &outcome.fingerprint;
    let mut until = outcome.tokens.len();
    for (at, next) in &outcome.changes {
        ensure!(next != fingerprint, "a change to the same numerics was announced");
        if *at > 0 {
            until = *at;
            break;
        }
        fingerprint = next;
    }
    let expected =
        &baselines.get(fingerprint).with_context(|| format!("unknown numerics {fingerprint}"))?[index];
    ensure!(
        outcome.tokens[..until] == expected.tokens[..until],
        "request {index}: expected {expected:?}, got {outcome:?}"
    );
    Ok(())
}

/// A release and the flags of its workers.
#[derive(Debug, Clone)]
struct Build {
    program: PathBuf,
    worker_flags: Vec<String>,
}

struct Cluster {
    workers: Vec<RoleProcess>,
    routers: Vec<RoleProcess>,
}

impl Cluster {
    async fn start(build: &Build, workers: usize, routers: usize) -> Result<Self> {
        let mut cluster = Self { workers: Vec::new(), routers: Vec::new() };
        for _ in 0..workers {
            let worker = RoleProcess::start(build.program.clone(), "worker", &build.worker_flags).await?;
            cluster.workers.push(worker);
        }
        let addresses: Vec<String> =
            cluster.workers.iter().map(|worker| worker.address.to_string()).collect();
        let router_flags = flags(&[
            &format!("--workers={}", addresses.join(",")),
            "--reconnect-backoff-max=300ms",
            "--drain-grace=300ms",
            "--drain-timeout=50s",
        ]);
        for _ in 0..routers {
            let router = RoleProcess::start(build.program.clone(), "router", &router_flags).await?;
            all_connected(&router).await?;
            cluster.routers.push(router);
        }
        Ok(cluster)
    }

    fn clients(&self) -> Result<Vec<InferenceClient<Channel>>> {
        self.routers.iter().map(RoleProcess::client).collect()
    }

    async fn replace_workers(&mut self, build: &Build) -> Result<()> {
        for worker in &mut self.workers {
            stop(worker).await?;
            worker.restart_as(build.program.clone(), &build.worker_flags).await?;
            for router in &self.routers {
                all_connected(router).await?;
            }
        }
        Ok(())
    }

    async fn replace_routers(&mut self, build: &Build) -> Result<()> {
        for router in &mut self.routers {
            stop(router).await?;
            let flags = router.flags().to_vec();
            router.restart_as(build.program.clone(), &flags).await?;
            all_connected(router).await?;
        }
        Ok(())
    }
}

async fn stop(process: &mut RoleProcess) -> Result<()> {
    process.signal(libc::SIGTERM)?;
    let status = process.wait().await?;
    ensure!(status.success(), "{status}; it wrote:\n{}", process.log());
    Ok(())
}

/// Runs every request on an undisturbed cluster of one worker.
async fn baseline(build: &Build, requests: &[GenerateRequest], baselines: &mut Baselines) -> Result<String> {
    let cluster = Cluster::start(build, 1, 1).await?;
    let mut client = cluster.clients()?.remove(0);
    let mut outcomes = Vec::new();
    for request in requests {
        outcomes.push(outcome(&mut client, request).await?);
    }
    let fingerprint = outcomes[0].fingerprint.clone();
    ensure!(!fingerprint.is_empty() && outcomes.iter().all(|one| one.changes.is_empty()), "{outcomes:?}");
    if let Some(known) = baselines.get(&fingerprint) {
        ensure!(*known == outcomes, "two releases with one fingerprint generate different tokens");
    }
    baselines.insert(fingerprint.clone(), outcomes);
    Ok(fingerprint)
}

/// Generates on any router; a call that is rejected before it started is retried on the next one.
async fn generate_anywhere(
    clients: &[InferenceClient<Channel>],
    first: usize,
    request: &GenerateRequest,
) -> Result<Outcome> {
    for router in (first..first + 1000).map(|n| n % clients.len()) {
        match outcome(&mut clients[router].clone(), request).await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => {
                let status = error.downcast_ref::<tonic::Status>();
                let rejected = status
                    .is_some_and(|status| status.code() == Code::Unavailable || status.source().is_some());
                if !rejected || error.to_string().contains("after it had begun") {
                    return Err(error);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    bail!("rejected a thousand times")
}

/// Replaces every process of a cluster of `from` by one of `to` under load, and checks every stream. Returns the
/// number of streams and of announced changes.
async fn replace_all(
    from: &Build,
    to: &Build,
    routers_first: bool,
    requests: &Arc<Vec<GenerateRequest>>,
    baselines: &Arc<Baselines>,
) -> Result<(usize, usize)> {
    let mut cluster = Cluster::start(from, WORKERS, ROUTERS).await?;
    let clients = cluster.clients()?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut streams = tokio::task::JoinSet::new();
    for stream in 0..STREAMS {
        let (clients, requests) = (clients.clone(), Arc::clone(requests));
        let (baselines, stop) = (Arc::clone(baselines), Arc::clone(&stop));
        streams.spawn(async move {
            let (mut ended, mut changes) = (0, 0);
            while !stop.load(Ordering::Relaxed) {
                let index = (stream + 5 * ended) % requests.len();
                let outcome = generate_anywhere(&clients, stream + ended, &requests[index]).await?;
                check(&baselines, index, &outcome)?;
                ended += 1;
                changes += outcome.changes.len();
            }
            anyhow::Ok((ended, changes))
        });
    }
    if routers_first {
        cluster.replace_routers(to).await?;
        cluster.replace_workers(to).await?;
    } else {
        cluster.replace_workers(to).await?;
        cluster.replace_routers(to).await?;
    }
    stop.store(true, Ordering::Relaxed);
    let mut sum = (0, 0);
    while let Some(stream) = streams.join_next().await {
        let (ended, changes) = stream??;
        sum = (sum.0 + ended, sum.1 + changes);
    }
    for router in &cluster.routers {
        idle(&cluster.workers, router).await?;
    }
    Ok(sum)
}

/// The program of the earlier release; `None`, and a line for the summary, without one.
fn earlier_program() -> Option<PathBuf> {
    let earlier = std::env::var_os(EARLIER).map(PathBuf::from);
    if earlier.is_none() {
        inflight_fixtures::skipped("upgrades from an earlier release", "tests/upgrade/run was not used");
    }
    earlier
}

/// An earlier router cannot count the blocks of several groups of layers: a worker whose model has them refuses it by a sentence, the
/// router serves its other workers, and a router of this build serves both.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_groups_of_layers_refuses_earlier_routers_by_a_sentence_and_nothing_is_lost()
-> Result<()> {
    let Some(earlier) = earlier_program() else { return Ok(()) };
    let _exclusive = exclusive().await;
    let folder = TempDir::new("inflight-windows")?;
    BenchmarkShape::MiniGemma.write(folder.path())?;
    let windows = flags(&[&format!("--model={}", folder.path().display()), "--model-name=windows"]);
    let windows = [worker_flags(), windows].concat();
    let workers = [
        RoleProcess::start(program().to_owned(), "worker", &worker_flags()).await?,
        RoleProcess::start(program().to_owned(), "worker", &windows).await?,
    ];
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router_flags =
        flags(&[&format!("--workers={}", addresses.join(",")), "--reconnect-backoff-max=300ms"]);
    let router = RoleProcess::start(earlier, "router", &router_flags).await?;
    eventually("the earlier router is refused and serves the other worker", || async {
        ensure!(router.log().contains("update the router"), "it wrote:\n{}", router.log());
        let connected = scrape(router.metrics).await?.total("inflight_router_workers_connected")?;
        ensure!(connected == 1.0, "{connected} workers are connected");
        Ok(())
    })
    .await?;
    let mut client = router.client()?;
    let requests: Vec<_> = (0..REQUESTS).map(|i| sampled("Once upon a time", 40, i.into())).collect();
    let mut before = Vec::new();
    for request in &requests {
        before.push(outcome(&mut client, request).await?);
    }
    let now = RoleProcess::start(program().to_owned(), "router", &router_flags).await?;
    all_connected(&now).await?;
    let mut client = now.client()?;
    let models = client.list_models(ListModelsRequest {}).await?.into_inner().models;
    let other = models.into_iter().map(|model| model.name).find(|name| name != "windows");
    let other = other.context("the other worker's model is not listed")?;
    for (request, before) in requests.iter().zip(&before) {
        let of = |model: &str| GenerateRequest { model: model.to_owned(), ..request.clone() };
        ensure!(
            outcome(&mut client, &of(&other)).await? == *before,
            "another answer than by the earlier router"
        );
        outcome(&mut client, &of("windows")).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrades_and_rollbacks_lose_no_stream_and_announce_other_numerics() -> Result<()> {
    let Some(earlier) = earlier_program() else { return Ok(()) };
    let _exclusive = exclusive().await;
    // So short that streams are moved to other workers.
    const DRAIN: &str = "--drain-timeout=50ms";
    // Files that both builds serve: the embedded model of another release is another model, to which no stream moves.
    let folder = TempDir::new("inflight-upgrade")?;
    BenchmarkShape::Mini.write(folder.path())?;
    let model = format!("--model={}", folder.path().display());
    let build = |program: &Path, extra: &[&str]| Build {
        program: program.to_owned(),
        worker_flags: worker_flags()
            .into_iter()
            .filter(|flag| !flag.starts_with("--drain-timeout"))
            .chain(flags(&[&[DRAIN, &model], extra].concat()))
            .collect(),
    };
    let earlier = build(&earlier, &[]);
    let head = build(program(), &[]);
    // Stands for kernels of another version: another fingerprint in any case.
    let other = build(program(), &["--kv-cache-dtype=int8"]);
    let requests: Vec<_> =
        (0..REQUESTS).map(|i| sampled("Once upon a time", 60 + 20 * i, i.into())).collect();
    let mut baselines = Baselines::new();
    let before = baseline(&earlier, &requests, &mut baselines).await.context("the earlier release")?;
    let now = baseline(&head, &requests, &mut baselines).await.context("this build")?;
    ensure!(baseline(&other, &requests, &mut baselines).await? != now, "int8 has the same fingerprint");
    println!("numerics of the earlier release: {}", if before == now { "equal" } else { "different" });
    let (requests, baselines) = (Arc::new(requests), Arc::new(baselines));
    for (what, from, to, differ) in [
        ("upgrade", &earlier, &head, before != now),
        ("rollback", &head, &earlier, before != now),
        ("upgrade to other numerics", &earlier, &other, true),
        ("rollback from other numerics", &other, &earlier, true),
    ] {
        for routers_first in [true, false] {
            let order = if routers_first { "routers first" } else { "workers first" };
            let (streams, changes) = replace_all(from, to, routers_first, &requests, &baselines)
                .await
                .with_context(|| format!("{what}, {order}"))?;
            println!("{what}, {order}: {streams} streams complete, {changes} changes of numerics announced");
            ensure!((changes > 0) == differ, "{what}, {order}: {changes} changes were announced");
        }
    }
    Ok(())
}
