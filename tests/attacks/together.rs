//! All attacks of one tenant with a key at once: the other tenant is served, and the router keeps memory and threads for it.

use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{LocalCluster, eventually, exclusive, scrape};
use inflight_proto::v1::StopConditions;
use inflight_proto::v1::constraint::Grammar;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::Channel;

use crate::grammars::{generate, helpers, hostile, start_with};
use crate::{short_request, with_key};

const MIB: f64 = (1 << 20) as f64;
/// Clients with hostile grammars, bodies without an end, streams that nobody reads, and bodies of [`LARGE_BYTES`] with many prompts.
const GRAMMARS: usize = 8;
const BODIES: usize = 60;
const STREAMS: usize = 4_096;
const LARGE_BODIES: usize = 110;
const LARGE_BYTES: usize = 2 << 20;
/// Streams on one connection.
const STREAMS_EACH: usize = 256;

/// What the attackers hold until the test ends.
#[derive(Default)]
struct Held {
    connections: Vec<TcpStream>,
    streams: Vec<tonic::Streaming<inflight_proto::v1::GenerateResponse>>,
    refused: usize,
}

/// Head of a completions request over HTTP/1.1 by the hostile tenant.
fn head(address: SocketAddr, bytes: usize) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer f\r\ncontent-type: application/json\r\n\
         content-length: {bytes}\r\n\r\n"
    )
}

/// Sends bodies without their last byte.
async fn hold_bodies(address: SocketAddr) -> Result<Held> {
    const BYTES: usize = 4 << 20;
    let mut held = Held::default();
    for _ in 0..BODIES {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(head(address, BYTES).as_bytes()).await?;
        // A refused one is closed meanwhile.
        held.refused += usize::from(stream.write_all(&vec![b' '; BYTES - 1]).await.is_err());
        held.connections.push(stream);
    }
    Ok(held)
}

/// Opens streams and reads nothing of them.
async fn hold_streams(endpoint: String) -> Result<Held> {
    let mut held = Held::default();
    for _ in 0..STREAMS / STREAMS_EACH {
        // Without a window, the router can send no message of a stream.
        let endpoint = Channel::from_shared(endpoint.clone())?.initial_stream_window_size(0);
        let channel = endpoint.connect().await?;
        let mut client = inflight_proto::v1::inference_client::InferenceClient::new(channel);
        for _ in 0..STREAMS_EACH {
            let mut request = short_request();
            request.stop =
                Some(StopConditions { max_tokens: Some(8), ignore_eos: true, ..StopConditions::default() });
            match client.generate(with_key(request, "f")?).await {
                Ok(stream) => held.streams.push(stream.into_inner()),
                Err(_) => held.refused += 1,
            }
        }
    }
    Ok(held)
}

/// Sends bodies with 128 prompts that share 65,536 allowed tokens; the answers are not read.
async fn send_large_bodies(address: SocketAddr) -> Result<Held> {
    let allowed = (0..65_536).map(|id| (id % 1_000).to_string()).collect::<Vec<_>>().join(",");
    let text = "many words ".repeat((LARGE_BYTES - allowed.len()) / 128 / 11);
    let prompts = (0..128).map(|_| format!("{text:?}")).collect::<Vec<_>>().join(",");
    let body = format!(
        r#"{{"model":"inflight-demo","prompt":[{prompts}],"max_tokens":1,"allowed_token_ids":[{allowed}]}}"#
    );
    let mut held = Held::default();
    for _ in 0..LARGE_BODIES {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(head(address, body.len()).as_bytes()).await?;
        held.refused += usize::from(stream.write_all(body.as_bytes()).await.is_err());
        held.connections.push(stream);
    }
    Ok(held)
}

/// Sends bodies of tools with schemas of millions of small values, which take many times their bytes once decoded.
async fn send_tools(address: SocketAddr) -> Result<Held> {
    let values = vec!["0"; 1_900_000].join(",");
    let body = format!(
        r#"{{"model":"inflight-demo","messages":[{{"role":"user","content":"a"}}],"tools":[{{"type":"function","function":{{"name":"a","parameters":{{"enum":[{values}]}}}}}}]}}"#
    );
    let mut held = Held::default();
    for _ in 0..LARGE_BODIES / 12 {
        let mut stream = TcpStream::connect(address).await?;
        let head = head(address, body.len()).replace("completions", "chat/completions");
        stream.write_all(head.as_bytes()).await?;
        held.refused += usize::from(stream.write_all(body.as_bytes()).await.is_err());
        held.connections.push(stream);
    }
    Ok(held)
}

/// Completes a text of the other tenant over HTTP, by a body that is read in turns.
async fn complete_by_large_body(address: SocketAddr) -> Result<()> {
    let body = format!(r#"{{"model":"inflight-demo","prompt":"a","max_tokens":1{}}}"#, " ".repeat(100 << 10));
    let head = head(address, body.len()).replace("Bearer f", "Bearer t").replacen(
        "\r\n",
        "\r\nconnection: close\r\n",
        1,
    );
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}

/// Processor time of a process and of its children that have ended, in seconds.
fn processor_seconds(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: f64 = fields.skip(11).take(4).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    ticks / 100.0
}

#[tokio::test(flavor = "multi_thread")]
async fn all_attacks_of_one_tenant_at_once_refuse_no_call_of_the_other() -> Result<()> {
    let (cluster, _folder): (LocalCluster, TempDir) =
        start_with(&["--workers=1", "--device=sim:flat"], exclusive().await).await?;
    let mut tenant = cluster.client().await?;
    generate(&mut tenant, Some(Grammar::Regex("[a-c]{3}".to_owned())), "t").await?;
    let address: SocketAddr = cluster.http.trim_start_matches("http://").parse()?;
    let samples = || scrape(cluster.router.metrics);
    let calm = samples().await?.total("process_resident_memory_bytes")? / MIB;
    // The attackers have threads of their own, behind those of the cluster: what they compute is not its doing.
    let attackers = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .on_thread_start(|| {
            let _ = rustix::process::nice(19);
            // Such as /sys/fs/cgroup/cpu/NAME/tasks, to give them a share of a processor.
            if let Some(tasks) = std::env::var_os("INFLIGHT_ATTACK_TASKS") {
                let _ = std::fs::write(tasks, "0");
            }
        })
        .build()?;
    // Dropped within another runtime, it would panic.
    let attackers = ManuallyDrop::new(attackers);
    let over = Arc::new(AtomicBool::new(false));
    let mut floods = Vec::new();
    for at in 0..GRAMMARS {
        let (mut client, over) = (cluster.client().await?, over.clone());
        floods.push(attackers.spawn(async move {
            let mut refused = 0;
            for number in (at..).step_by(GRAMMARS) {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                refused += usize::from(generate(&mut client, Some(hostile(number)), "f").await.is_err());
            }
            refused
        }));
    }
    let begun = Instant::now();
    let bodies = attackers.spawn(hold_bodies(address));
    let streams = attackers.spawn(hold_streams(cluster.endpoint.clone()));
    let large = attackers.spawn(send_large_bodies(address));
    let tools = attackers.spawn(send_tools(address));
    let mut waits = Vec::new();
    while waits.len() < 40
        || !(bodies.is_finished() && streams.is_finished() && large.is_finished() && tools.is_finished())
    {
        ensure!(begun.elapsed() < Duration::from_secs(120), "the attacks do not come to an end");
        let asked = Instant::now();
        let number = waits.len();
        if number % 4 == 1 {
            complete_by_large_body(address).await.with_context(|| format!("call {number}"))?;
            waits.push(asked.elapsed());
            continue;
        }
        let grammar = number.is_multiple_of(8).then(|| Grammar::Regex(format!("[a-c]{{3}}{number}")));
        // Over a new connection each, as a client that has just come.
        generate(&mut cluster.client().await?, grammar, "t")
            .await
            .with_context(|| format!("call {number}"))?;
        waits.push(asked.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let wall = begun.elapsed().as_secs_f64();
    let compiled: f64 = helpers(cluster.router.pid).into_iter().map(processor_seconds).sum();
    over.store(true, Ordering::Relaxed);
    let held = [bodies.await??, streams.await??, large.await??, tools.await??];
    let now = samples().await?;
    let grown = now.total("process_resident_memory_peak_bytes")? / MIB - calm;
    let longest = now.total("inflight_longest_poll_seconds")?;
    waits.sort();
    println!(
        "{} calls of the tenant: median {:?}, at most {:?}; the router took {grown:.0} MiB; longest poll {:.1} ms; helpers {compiled:.1} s of \
         {wall:.1} s; refused {} bodies, {} streams, {} large bodies, {} with tools",
        waits.len(),
        waits[waits.len() / 2],
        waits[waits.len() - 1],
        1e3 * longest,
        held[0].refused,
        held[1].refused,
        held[2].refused,
        held[3].refused,
    );
    ensure!(held[2].refused < LARGE_BODIES, "no large body was received");
    ensure!(held[1].streams.len() > 2_000, "only {} streams were opened", held[1].streams.len());
    ensure!(grown <= 256.0, "the router took {grown:.0} MiB");
    // A poll also takes as long as the system gives its thread to other processes, which on two busy cores happens to some: work on a
    // body of megabytes would make dozens of them slow.
    let slow = now.total("inflight_slow_polls_total")?;
    ensure!(
        slow <= 3.0 && longest <= 0.25,
        "{slow} polls took a thread of the runtime for over 50 ms, the longest for {:.0} ms",
        1e3 * longest
    );
    // One slot is never a single tenant's: on two cores, the flood has one, and the tenant's own grammars take little.
    ensure!(compiled <= 1.25 * wall + 2.0, "grammars took {compiled:.1} s of processor time in {wall:.1} s");
    for flood in floods {
        ensure!(flood.await? > 0, "no hostile grammar was refused");
    }
    drop(held);
    ManuallyDrop::into_inner(attackers).shutdown_background();
    eventually("the pools are empty again", || async {
        let used = samples().await?.total("inflight_router_receive_bytes")?;
        ensure!(used < 1e6, "{used} bytes are reserved");
        Ok(())
    })
    .await
}
