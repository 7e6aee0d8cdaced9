//! Random faults of every kind under a load of resuming streams: processes killed and suspended, wall clocks set,
//! a lying worker, a lying router, clients that never read, recordings on a full disk.
//!
//! Every stream must be whole and byte-identical, or fail with a sentence; none may hang.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_client::{GenerateStream, ResumePolicy};
use inflight_harness::{RoleProcess, eventually, exclusive, scrape};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{GenerateRequest, SamplingParams, StopConditions};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::lying_worker::{LyingWorker, lie_as_router};
use crate::program;
use crate::secrets::{OLD, Secrets};
use crate::wall_clock::{ClockLibrary, FakeClock, JUMPS};

const STREAMS: usize = 48;
const REQUESTS: usize = 12;
/// Streams that are opened and never read.
const UNREAD_STREAMS: usize = 8;
/// Default time of fault injection in seconds; `INFLIGHT_CHAOS_SECONDS` overrides it.
const SECONDS: u64 = 8;
/// Time in which faults of every kind occur.
const LONG: Duration = Duration::from_secs(60);
/// Time after which a stream counts as hung. A request that meets lost workers again and again is in quarantine for
/// a while.
const HUNG: Duration = Duration::from_secs(180);
/// Timeout of the requests. Wall clocks jump further, so a deadline by a wall clock shows as DEADLINE_EXCEEDED.
const DEADLINE: Duration = Duration::from_secs(600);
/// Statuses with which a stream may fail: no capacity, no worker, or too many attempts that lost their worker.
const FAILURES: [Code; 4] = [Code::Unavailable, Code::ResourceExhausted, Code::Aborted, Code::Internal];

fn seconds() -> Duration {
    let given = std::env::var("INFLIGHT_CHAOS_SECONDS").ok().and_then(|given| given.parse().ok());
    Duration::from_secs(given.unwrap_or(SECONDS))
}

fn request(number: u64, random: &mut StdRng) -> GenerateRequest {
    GenerateRequest {
        input: Some(Input::Text("Once upon a time. ".repeat(1 + number as usize % 7))),
        sampling: Some(SamplingParams {
            temperature: Some(0.8),
            seed: Some(number),
            ..SamplingParams::default()
        }),
        stop: Some(StopConditions {
            max_tokens: Some(random.random_range(20..200)),
            ignore_eos: true,
            ..StopConditions::default()
        }),
        return_token_ids: true,
        ..GenerateRequest::default()
    }
}

/// Generates with the resuming client, from any of the routers.
async fn generate(channels: &[Channel], request: GenerateRequest) -> Result<Vec<u32>, Status> {
    let clients = channels.iter().cloned().map(InferenceClient::new).collect();
    let policy = ResumePolicy { patience: Duration::from_secs(60), ..ResumePolicy::default() };
    let mut stream = GenerateStream::new(clients, request).with_policy(policy).with_timeout(DEADLINE);
    let (mut tokens, mut completed) = (Vec::new(), false);
    while let Some(response) = stream.message().await? {
        match response.event {
            Some(Event::Delta(delta)) => tokens.extend(delta.token_ids),
            Some(Event::Completed(_)) => completed = true,
            _ => {}
        }
    }
    if completed { Ok(tokens) } else { Err(Status::unknown("the stream ended without `completed`")) }
}

fn channel(router: &RoleProcess) -> Result<Channel> {
    Ok(Endpoint::from_shared(format!("http://{}", router.address))?.connect_lazy())
}

/// Waits until a router has a session with `least` workers or more.
pub async fn connected(router: &RoleProcess, least: f64) -> Result<()> {
    eventually("the workers are connected", || async {
        let connected = scrape(router.metrics).await?.total("inflight_router_workers_connected")?;
        ensure!(connected >= least, "{connected} of {least}");
        Ok(())
    })
    .await
}

struct Cluster {
    workers: Vec<RoleProcess>,
    routers: Vec<RoleProcess>,
    /// Wall clocks of the workers and routers.
    clocks: Vec<FakeClock>,
    _liar: LyingWorker,
}

impl Cluster {
    async fn start(folder: &Path, secrets: &Secrets, seed: u64) -> Result<Self> {
        let key = folder.join("key");
        std::fs::write(&key, "a key of the cluster that all of its routers share\n")?;
        let library = ClockLibrary::build(folder)?;
        let mut clocks = Vec::new();
        for number in 0..5 {
            clocks.push(FakeClock::new(&library, folder, &format!("clock-{number}"))?);
        }
        let mut workers = Vec::new();
        for number in 0..3 {
            let mut flags = vec![secrets.flag("secret-file"), "--threads=1".to_owned()];
            flags.extend(["--kv-cache-bytes=64MiB", "--heartbeat=250ms"].map(str::to_owned));
            if number == 0 {
                flags.push("--record=/dev/full".to_owned());
            }
            let clock = clocks[number].variables();
            workers.push(RoleProcess::start_with_env(program().to_owned(), "worker", &flags, &clock).await?);
        }
        let liar = LyingWorker::start(&workers[0], OLD.as_bytes().to_vec(), false, seed).await?;
        let mut addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
        addresses.push(liar.address.to_string());
        let mut routers = Vec::new();
        for number in 0..2 {
            let mut flags = vec![
                format!("--workers={}", addresses.join(",")),
                format!("--resume-key-file={}", key.display()),
                secrets.flag("worker-secret-file"),
            ];
            let timeouts =
                ["--reconnect-backoff-max=500ms", "--connect-timeout=2s", "--no-worker-timeout=60s"];
            flags.extend(timeouts.map(str::to_owned));
            if number == 0 {
                flags.push("--record=/dev/full".to_owned());
            }
            let clock = clocks[workers.len() + number].variables();
            routers.push(RoleProcess::start_with_env(program().to_owned(), "router", &flags, &clock).await?);
        }
        for router in &routers {
            connected(router, 3.0).await?;
        }
        Ok(Self { workers, routers, clocks, _liar: liar })
    }

    /// Newest lines of the logs of all processes.
    fn newest_lines(&self) -> String {
        let newest = |role: &RoleProcess| {
            let log = role.log();
            let lines: Vec<&str> = log.lines().collect();
            format!("{}:\n{}\n", role.address, lines[lines.len().saturating_sub(40)..].join("\n"))
        };
        self.workers.iter().chain(&self.routers).map(newest).collect()
    }

    /// Whether a router has closed a session after a protocol violation; one that does not answer counts nothing.
    async fn liar_is_exposed(&self) -> bool {
        for router in &self.routers {
            if let Ok(Ok(metrics)) = timeout(Duration::from_millis(500), scrape(router.metrics)).await
                && metrics.total("inflight_router_protocol_violations_total").is_ok_and(|total| total > 0.0)
            {
                return true;
            }
        }
        false
    }

    /// Kills or suspends a random process, sets its clock, or lies to a random worker.
    async fn fault(&mut self, random: &mut StdRng, counts: &mut [u32; 4]) -> Result<()> {
        let processes = self.workers.len() + self.routers.len();
        let index = random.random_range(0..processes);
        let kind = random.random_range(0..4);
        counts[kind] += 1;
        let worker = self.workers[index % self.workers.len()].address;
        let victim = self.workers.iter_mut().chain(&mut self.routers).nth(index).context("in range")?;
        match kind {
            0 => {
                victim.signal(libc::SIGKILL)?;
                victim.wait().await?;
                victim.restart().await
            }
            1 => {
                // Longer than three heartbeats: its sessions are lost.
                victim.signal(libc::SIGSTOP)?;
                sleep(Duration::from_millis(random.random_range(800..1500))).await;
                victim.signal(libc::SIGCONT)
            }
            2 => self.clocks[index].jump(JUMPS[random.random_range(0..JUMPS.len())]),
            // A worker that restarts or is suspended does not answer; that is no finding.
            _ => {
                let _ = timeout(Duration::from_secs(2), lie_as_router(worker, OLD.as_bytes(), random)).await;
                Ok(())
            }
        }
    }
}

/// Outcomes of the streams.
#[derive(Debug, Default)]
struct Tally {
    whole: u32,
    failed: u32,
    /// Failed streams that could not be resumed because a clock had jumped ahead.
    stale: u32,
}

/// Repeats requests until `done`, and compares each output with the undisturbed one.
async fn stream(
    number: usize,
    channels: Arc<Vec<Channel>>,
    requests: Arc<Vec<GenerateRequest>>,
    expected: Arc<Vec<Vec<u32>>>,
    done: Arc<AtomicBool>,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut next = number;
    while !done.load(Ordering::Acquire) {
        let index = next % REQUESTS;
        next += 7;
        let ended = timeout(HUNG, generate(&channels, requests[index].clone())).await;
        match ended.with_context(|| format!("request {index} hung"))? {
            Ok(tokens) => {
                ensure!(tokens == expected[index], "request {index} has other tokens: {tokens:?}");
                tally.whole += 1;
            }
            Err(status) => {
                let sentence = status.message().split(' ').count() >= 4;
                let stale = status.code() == Code::FailedPrecondition
                    && status.message().starts_with("the cursor was issued");
                ensure!(
                    sentence && (stale || FAILURES.contains(&status.code())),
                    "request {index}: {status:?}"
                );
                tally.failed += 1;
                tally.stale += u32::from(stale);
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    Ok(tally)
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_every_kind_lose_no_token_and_hang_no_stream() -> Result<()> {
    let given = std::env::var("INFLIGHT_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random);
    endure(seed).await.with_context(|| format!("INFLIGHT_TEST_SEED={seed} repeats the sequence of faults"))
}

async fn endure(seed: u64) -> Result<()> {
    let _exclusive = exclusive().await;
    let folder = inflight_fixtures::TempDir::new("endurance")?;
    let secrets = Secrets::new(&[OLD])?;
    let mut random = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::start(folder.path(), &secrets, seed).await?;

    // The undisturbed outputs, from a worker alone.
    let requests: Vec<_> = (0..REQUESTS as u64).map(|number| request(number, &mut random)).collect();
    let flags = [format!("--workers={}", cluster.workers[1].address), secrets.flag("worker-secret-file")];
    let calm = RoleProcess::start(program().to_owned(), "router", &flags).await?;
    connected(&calm, 1.0).await?;
    let calm_channel = [channel(&calm)?];
    let expected =
        try_join_all(requests.iter().map(|request| generate(&calm_channel, request.clone()))).await?;
    drop(calm);

    let channels = cluster.routers.iter().map(channel).collect::<Result<Vec<_>>>()?;
    let (channels, requests, expected) = (Arc::new(channels), Arc::new(requests), Arc::new(expected));
    let done = Arc::new(AtomicBool::new(false));
    let mut streams = tokio::task::JoinSet::new();
    for number in 0..STREAMS {
        streams.spawn(stream(number, channels.clone(), requests.clone(), expected.clone(), done.clone()));
    }
    let end = Instant::now() + seconds();
    let (mut counts, mut unread, mut exposed) = ([0; 4], Vec::new(), false);
    while Instant::now() < end {
        let next = Instant::now() + Duration::from_secs(1);
        cluster.fault(&mut random, &mut counts).await?;
        exposed |= cluster.liar_is_exposed().await;
        // Streams of killed routers are gone; a new one takes the place of the oldest.
        let mut client = InferenceClient::new(channels[random.random_range(0..channels.len())].clone());
        if let Ok(Ok(stream)) =
            timeout(Duration::from_millis(500), client.generate(requests[0].clone())).await
        {
            unread.push(stream.into_inner());
        }
        if unread.len() > UNREAD_STREAMS {
            unread.remove(0);
        }
        tokio::time::sleep_until(next).await;
    }
    done.store(true, Ordering::Release);
    let mut total = Tally::default();
    while let Some(tally) = streams.join_next().await {
        let tally = tally?.with_context(|| cluster.newest_lines())?;
        total.whole += tally.whole;
        total.failed += tally.failed;
        total.stale += tally.stale;
    }
    let [kills, suspensions, jumps, lies] = counts;
    println!(
        "{} whole streams, {} failed with a sentence, {} of them with a stale cursor; {kills} kills, {suspensions} suspensions, \
         {jumps} clock jumps, {lies} lying routers, {} unread, the lying worker exposed: {exposed}",
        total.whole,
        total.failed,
        total.stale,
        unread.len()
    );
    ensure!(total.whole > total.failed, "more streams failed than ended");
    if seconds() >= LONG {
        ensure!(counts.iter().all(|count| *count > 0), "a kind of fault did not occur");
        ensure!(!unread.is_empty(), "no stream was unread");
        ensure!(exposed, "no router has closed the session of the lying worker");
    }
    drop(unread);
    // The processes live, and serve as before.
    let after = generate(&channels, requests[0].clone()).await?;
    ensure!(after == expected[0]);
    let months = cluster.clocks[0].months()?;
    for role in cluster.workers.iter().chain(&cluster.routers) {
        ensure!(!role.log().contains("panicked"), "a panic: {}", role.log());
        let faked = months.iter().any(|month| role.log().contains(month));
        ensure!(faked, "its clock is not in {months:?}: {}", role.log());
    }
    Ok(())
}
