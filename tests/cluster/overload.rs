//! Ten times as much as the workers can do, for a real router over real workers on simulated devices: what they can do is
//! done, the rest is refused at once, the important wait no longer than in calm, and nothing grows.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use inflight_proto::v1::GenerateRequest;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_tests::{RoleProcess, alone};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tonic::Code;
use tonic::transport::Channel;

use crate::program;
use crate::requests::sampled;
use crate::storm::{all_connected, flags, idle};

const WORKERS: usize = 2;
const SEQUENCES: u32 = 32;
/// Of a request on average; each takes a step of 10 ms.
const OUTPUT: u32 = 40;
/// Requests a second that fill all sequences of all workers all the time; prompts take a part of the steps, too.
const CAPACITY: f64 = WORKERS as f64 * SEQUENCES as f64 / (OUTPUT as f64 * 0.0125);
/// How long each phase lasts where nothing else is said: `INFLIGHT_OVERLOAD_SECONDS` says.
const SECONDS: f64 = 5.0;

fn seconds() -> f64 {
    let given = std::env::var("INFLIGHT_OVERLOAD_SECONDS").ok().and_then(|given| given.parse().ok());
    given.unwrap_or(SECONDS)
}

fn request(nth: u64, priority: i32) -> GenerateRequest {
    let tenant = if priority > 0 { "important".to_owned() } else { format!("tenant-{}", nth % 4) };
    // Prompts of some dozens of tokens that have nothing in common.
    let prompt =
        format!("{nth} is the number of a story that begins like this, and nobody knows how it goes on");
    // Of very different lengths, so that they do not all end at once.
    let output = OUTPUT / 4 + (nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32 % (3 * OUTPUT / 2 + 1);
    GenerateRequest { priority, tenant, ..sampled(&prompt, output, nth) }
}

/// What became of the requests of a phase.
#[derive(Debug, Default)]
struct Tally {
    /// Requests that were completed within the phase, after its first second.
    completed: u64,
    /// Seconds to the first token, of the ordinary and of the important.
    first_token: [Vec<f64>; 2],
    /// Seconds to the refusal.
    refused: Vec<f64>,
    refused_important: u64,
}

/// Sends requests at a steady rate, whatever comes of them, and waits for their ends. `important` of them a second are
/// of a higher priority.
async fn phase(
    clients: &[InferenceClient<Channel>],
    rate: f64,
    important: f64,
    numbers: u64,
) -> Result<Tally> {
    let tally = Arc::new(Mutex::new(Tally::default()));
    let (begun, length) = (Instant::now(), seconds());
    let (warm, end) = (begun + Duration::from_secs(1), begun + Duration::from_secs_f64(length));
    let mut tasks = JoinSet::new();
    let kinds = [(rate, 0), (important, 1)];
    for (kind, (rate, priority)) in kinds.into_iter().enumerate() {
        let (clients, tally) = (clients.to_vec(), tally.clone());
        tasks.spawn(async move {
            let mut calls = JoinSet::new();
            for nth in 0..(rate * length) as u64 {
                sleep_until(begun + Duration::from_secs_f64(nth as f64 / rate)).await;
                let mut client = clients[nth as usize % clients.len()].clone();
                let tally = tally.clone();
                calls.spawn(async move {
                    let number = (numbers << 32) | ((kind as u64) << 31) | nth;
                    call(&mut client, request(number, priority), kind, (warm, end), &tally).await
                });
            }
            while let Some(ended) = calls.join_next().await {
                ended??;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let mut tally = Arc::try_unwrap(tally).map_err(|_| anyhow::anyhow!("a call is left"))?.into_inner();
    tally.first_token.iter_mut().chain([&mut tally.refused]).for_each(|all| all.sort_by(f64::total_cmp));
    Ok(tally)
}

async fn call(
    client: &mut InferenceClient<Channel>,
    request: GenerateRequest,
    kind: usize,
    (warm, end): (Instant, Instant),
    tally: &Mutex<Tally>,
) -> Result<()> {
    let sent = Instant::now();
    let since = || sent.elapsed().as_secs_f64();
    let mut first = None;
    let outcome = async {
        let mut stream = client.generate(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            if let Some(Event::Delta(_)) = message.event {
                first.get_or_insert_with(since);
            }
        }
        Ok::<(), tonic::Status>(())
    };
    let outcome = outcome.await;
    let took = since();
    let mut tally = tally.lock().await;
    match outcome {
        Ok(()) => {
            tally.first_token[kind].push(first.context("a stream without tokens")?);
            let now = Instant::now();
            tally.completed += u64::from(now >= warm && now < end);
        }
        Err(status) if status.code() == Code::ResourceExhausted => {
            ensure!(first.is_none(), "refused after its first token");
            tally.refused.push(took);
            tally.refused_important += kind as u64;
        }
        Err(status) => bail!("{status}"),
    }
    Ok(())
}

/// Bytes of memory that a process holds.
fn resident(role: &RoleProcess) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", role.pid))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
}

fn percentile(ascending: &[f64], p: f64) -> f64 {
    let place = (p * ascending.len() as f64).ceil() as usize;
    ascending.get(place.max(1) - 1).copied().unwrap_or(f64::NAN)
}

fn report(name: &str, tally: &Tally) {
    let per_second = tally.completed as f64 / (seconds() - 1.0);
    let (ordinary, important) = (&tally.first_token[0], &tally.first_token[1]);
    println!(
        "{name:8} {per_second:6.1} completed/s; TTFT P50 {:.3} s P99 {:.3} s; important P50 {:.4} s P90 {:.4} s of {}; \
         {} refused, P50 {:.2} ms P99 {:.2} ms",
        percentile(ordinary, 0.5),
        percentile(ordinary, 0.99),
        percentile(important, 0.5),
        percentile(important, 0.9),
        important.len(),
        tally.refused.len(),
        1e3 * percentile(&tally.refused, 0.5),
        1e3 * percentile(&tally.refused, 0.99),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn at_ten_times_its_capacity_a_cluster_does_what_it_can_and_refuses_the_rest_at_once() -> Result<()> {
    let _alone = alone().await;
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        let worker = flags(&[
            "--device=sim:flat,step=0.01,prompt_token=0.0001",
            &format!("--max-sequences={SEQUENCES}"),
        ]);
        workers.push(RoleProcess::start(program().to_owned(), "worker", &worker).await?);
    }
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router = flags(&[&format!("--workers={}", addresses.join(",")), "--queue-requests-max=128"]);
    let router = RoleProcess::start(program().to_owned(), "router", &router).await?;
    all_connected(&router).await?;
    let clients: Vec<_> = (0..4).map(|_| router.client()).collect::<Result<_>>()?;

    let important = 10.0;
    let calm = phase(&clients, 0.3 * CAPACITY, important, 1).await?;
    report("0.3x", &calm);
    idle(&workers, &router).await?;
    let full = phase(&clients, CAPACITY, 0.0, 2).await?;
    report("1x", &full);
    idle(&workers, &router).await?;
    // The first overload brings every buffer to its size.
    let over = phase(&clients, 10.0 * CAPACITY, important, 3).await?;
    report("10x", &over);
    idle(&workers, &router).await?;
    let held = resident(&router)?;
    let again = phase(&clients, 10.0 * CAPACITY, important, 4).await?;
    report("10x", &again);
    idle(&workers, &router).await?;
    let later = resident(&router)?;
    println!(
        "the router holds {} MiB after the first overload, {} MiB after the second",
        held >> 20,
        later >> 20
    );

    for over in [&over, &again] {
        let goodput = over.completed as f64 / full.completed as f64;
        ensure!(goodput >= 0.95, "goodput falls to {goodput:.3} of that at 1x");
        let sent = 10.0 * CAPACITY * seconds();
        ensure!(over.refused.len() as f64 > 0.8 * sent, "of {sent} only {} were refused", over.refused.len());
        ensure!(over.refused_important == 0, "{} important requests were refused", over.refused_important);
        // A refusal waits for nothing that is served: it takes a fraction of the time to a first token. Each important
        // request may have taken the place of one that waited, which is refused late.
        let displaced = over.first_token[1].len().min(over.refused.len());
        let at_once = &over.refused[..over.refused.len() - displaced];
        let (refusal, served) = (percentile(at_once, 0.99), percentile(&over.first_token[0], 0.5));
        println!("P99 of the refusals at once: {:.2} ms", 1e3 * refusal);
        ensure!(refusal < served / 4.0, "a refusal takes {refusal} s, a first token {served} s");
        let important = percentile(&over.first_token[1], 0.5);
        let ratio = important / percentile(&calm.first_token[1], 0.5);
        println!("the important wait {ratio:.2} times as long for their first token as in calm");
        ensure!(important <= served / 4.0, "the important wait {important} s, the others {served} s");
    }
    ensure!(later <= held + held / 4, "the router grows from {held} to {later} bytes");
    Ok(())
}
