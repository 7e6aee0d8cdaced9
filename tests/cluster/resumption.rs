//! Streams that outlive their routers: every router and every worker is killed in turn under resuming clients.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_client::{GenerateStream, ResumePolicy};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, eventually, exclusive, run, scrape};
use inflight_proto::v1::GenerateRequest;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::usage::{UsageRecord, read_usage};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::program;
use crate::requests::{GenerationResult, generate, sampled};
use crate::storm::{all_connected, flags, worker_flags};

/// Concurrent streams over gRPC, and over HTTP.
const STREAMS: usize = 64;
/// Streams of the Python client over gRPC.
const PYTHON_STREAMS: usize = 8;
/// Distinct requests; the streams repeat them.
const REQUESTS: usize = 12;

/// Two workers and two routers that share a resume key.
struct Cluster {
    workers: Vec<RoleProcess>,
    routers: Vec<RoleProcess>,
    /// Base URLs of the routers' HTTP APIs.
    urls: Vec<String>,
    /// Directories of the routers' usage logs.
    logs: Vec<PathBuf>,
}

impl Cluster {
    async fn start(folder: &Path) -> Result<Self> {
        let key = folder.join("key");
        std::fs::write(&key, "a key of the cluster that all of its routers share\n")?;
        let mut workers = Vec::new();
        for _ in 0..2 {
            workers.push(RoleProcess::start(program().to_owned(), "worker", &worker_flags()).await?);
        }
        let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
        let (mut routers, mut urls, mut logs) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..2 {
            // A free port, which is the same after a restart.
            let http = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
            let log = folder.join(format!("usage-{number}"));
            let flags = flags(&[
                &format!("--workers={}", addresses.join(",")),
                &format!("--http-listen={http}"),
                &format!("--resume-key-file={}", key.display()),
                &format!("--usage-log={}", log.display()),
                "--reconnect-backoff-max=500ms",
                "--connect-timeout=2s",
                "--no-worker-timeout=60s",
            ]);
            routers.push(RoleProcess::start(program().to_owned(), "router", &flags).await?);
            urls.push(format!("http://{http}"));
            logs.push(log);
        }
        for router in &routers {
            all_connected(router).await?;
        }
        Ok(Self { workers, routers, urls, logs })
    }

    /// Kills a process and starts it again.
    async fn kill(victim: &mut RoleProcess) -> Result<()> {
        victim.signal(libc::SIGKILL)?;
        victim.wait().await?;
        victim.restart().await
    }

    /// Waits until most of the clients' streams are open.
    async fn busy(&self, streams: usize) -> Result<()> {
        eventually("most streams are open", || async {
            let mut open = 0.0;
            for router in &self.routers {
                // Absent before the first stream.
                open += scrape(router.metrics).await?.total("inflight_router_open_calls").unwrap_or(0.0);
            }
            // The rest is between two streams: the clients share their cores with the cluster.
            ensure!(open >= 0.6 * streams as f64, "{open} of {streams}");
            Ok(())
        })
        .await
    }

    /// Kills every router and every worker in turn, then both routers at once, each under a full load of
    /// streams.
    async fn kill_all(&mut self, streams: usize) -> Result<()> {
        for victim in 0..4 {
            self.busy(streams).await?;
            let process = match victim {
                0 | 1 => &mut self.routers[victim],
                _ => &mut self.workers[victim - 2],
            };
            Self::kill(process).await?;
            for router in &self.routers {
                all_connected(router).await?;
            }
        }
        self.busy(streams).await?;
        try_join_all(self.routers.iter_mut().map(Self::kill)).await?;
        for router in &self.routers {
            all_connected(router).await?;
        }
        self.busy(streams).await
    }

    fn channels(&self) -> Result<Vec<Channel>> {
        let channel = |router: &RoleProcess| -> Result<Channel> {
            Ok(Endpoint::from_shared(format!("http://{}", router.address))?.connect_lazy())
        };
        self.routers.iter().map(channel).collect()
    }
}

/// Generates with the resuming client. Returns the output and how often the stream was resumed.
async fn resuming(channels: &[Channel], request: GenerateRequest) -> Result<(GenerationResult, u32)> {
    let clients = channels.iter().cloned().map(InferenceClient::new).collect();
    let policy = ResumePolicy { patience: std::time::Duration::from_secs(60), ..ResumePolicy::default() };
    let mut stream = GenerateStream::new(clients, request).with_policy(policy);
    let mut result = GenerationResult::default();
    while let Some(response) = stream.message().await? {
        result.add(response)?;
    }
    ensure!(result.usage.is_some(), "the stream ended without `completed`");
    Ok((result, stream.resumed()))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_router_and_worker_is_killed_and_each_stream_is_whole_and_billed_once() -> Result<()> {
    let _exclusive = exclusive().await;
    let folder = TempDir::new("resumption")?;
    let mut cluster = Cluster::start(folder.path()).await?;
    let requests: Vec<GenerateRequest> = (0..REQUESTS as u32)
        .map(|i| sampled(&"Once upon a time. ".repeat(1 + i as usize % 5), 150 + 17 * i, u64::from(i)))
        .collect();
    let client = cluster.routers[0].client()?;
    let expected = try_join_all(requests.iter().map(|request| {
        let mut client = client.clone();
        async move { generate(&mut client, request.clone()).await }
    }))
    .await?;
    let (requests, expected) = (Arc::new(requests), Arc::new(expected));

    let quiet = CancellationToken::new();
    let stop = folder.path().join("stop");
    let mut streams = tokio::task::JoinSet::new();
    let mut channels = Vec::new();
    for stream in 0..STREAMS {
        if stream % 16 == 0 {
            channels = cluster.channels()?;
        }
        let (mut channels, quiet) = (channels.clone(), quiet.clone());
        channels.rotate_left(stream % 2);
        let (requests, expected) = (Arc::clone(&requests), Arc::clone(&expected));
        streams.spawn(async move {
            let (mut complete, mut resumed) = (vec![0u64; REQUESTS], 0);
            let mut turn = stream;
            while !quiet.is_cancelled() {
                let index = turn % REQUESTS;
                let (result, times) = resuming(&channels, requests[index].clone()).await?;
                ensure!(
                    result == expected[index],
                    "request {index}: expected {:?}, got {result:?}",
                    expected[index]
                );
                complete[index] += 1;
                resumed += times;
                turn += 7;
            }
            Ok((complete, resumed))
        });
    }
    let asked: Vec<Value> = requests.iter().zip(&*expected).zip(0..).map(task_request).collect();
    let http =
        json!({"urls": cluster.urls, "requests": asked, "streams": STREAMS, "stop": stop.to_string_lossy()});
    let http = tokio::spawn(python("python3".to_owned(), http));
    let grpc = std::env::var("INFLIGHT_TEST_PYTHON").ok().map(|interpreter| {
        let targets: Vec<String> = cluster.routers.iter().map(|router| router.address.to_string()).collect();
        let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
        let task = json!({"targets": targets, "protos": protos.to_string_lossy(), "requests": asked,
            "streams": PYTHON_STREAMS, "stop": stop.to_string_lossy()});
        tokio::spawn(python(interpreter, task))
    });
    if grpc.is_none() {
        inflight_fixtures::skipped(
            "the Python client over gRPC",
            "INFLIGHT_TEST_PYTHON names no Python with grpcio-tools",
        );
    }

    let streams_of_clients = 2 * STREAMS + if grpc.is_some() { PYTHON_STREAMS } else { 0 };
    let killed = cluster.kill_all(streams_of_clients).await;
    quiet.cancel();
    std::fs::write(&stop, "")?;
    killed?;
    let mut complete = vec![1u64; REQUESTS];
    let add = |complete: &mut Vec<u64>, more: &[u64]| {
        complete.iter_mut().zip(more).for_each(|(sum, count)| *sum += count);
    };
    let mut resumed = 0;
    while let Some(stream) = streams.join_next().await {
        let (counts, times) = stream??;
        add(&mut complete, &counts);
        resumed += times;
    }
    let over_http = http.await?.context("HTTP")?;
    add(&mut complete, &over_http);
    if let Some(grpc) = grpc {
        add(&mut complete, &grpc.await?.context("gRPC from Python")?);
    }
    ensure!(resumed > 0, "no stream was resumed");
    for router in &mut cluster.routers {
        router.signal(libc::SIGTERM)?;
        router.wait().await?;
    }
    let mut records = Vec::new();
    let reading = read_usage(&cluster.logs, None, |record| records.push(record))?;
    let total: u64 = complete.iter().sum();
    println!(
        "{total} streams, {} over HTTP; {resumed} of those over gRPC resumed; {} lines of {} streams",
        over_http.iter().sum::<u64>(),
        reading.lines + reading.resumed,
        reading.lines
    );
    billed_once(&records, &complete, &expected)
}

/// Checks that each stream has one line with all of its tokens.
fn billed_once(records: &[UsageRecord], complete: &[u64], expected: &[GenerationResult]) -> Result<()> {
    let mut left: Vec<u64> = complete.to_vec();
    for record in records {
        ensure!(record.outcome == "completed", "{record:?}");
        let is_same = |result: &&GenerationResult| {
            let usage = result.usage.as_ref();
            usage.is_some_and(|usage| {
                u64::from(usage.prompt_tokens) == record.prompt_tokens
                    && u64::from(usage.completion_tokens) == record.completion_tokens
            })
        };
        let index = expected.iter().position(|result| is_same(&result));
        let index = index.with_context(|| format!("no request has the tokens of {record:?}"))?;
        left[index] = left[index].checked_sub(1).with_context(|| format!("billed twice: {record:?}"))?;
    }
    ensure!(left.iter().all(|left| *left == 0), "streams without a line, by request: {left:?}");
    Ok(())
}

fn task_request(((request, result), seed): ((&GenerateRequest, &GenerationResult), u64)) -> Value {
    let Some(inflight_proto::v1::generate_request::Input::Text(prompt)) = &request.input else {
        return Value::Null;
    };
    let max_tokens = request.stop.as_ref().and_then(|stop| stop.max_tokens);
    json!({"prompt": prompt, "max_tokens": max_tokens, "seed": seed, "text": result.text})
}

/// Runs the Python client until its task ends. Returns the number of complete streams of each request.
async fn python(interpreter: String, task: Value) -> Result<Vec<u64>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/python/resuming.py");
    let finished = run(Path::new(&interpreter), &[&script.to_string_lossy()], &task.to_string()).await?;
    ensure!(finished.code == Some(0), "{finished:?}");
    let counts: Value = serde_json::from_str(&finished.stdout)?;
    let counts = counts["complete"].as_array().context("no counts")?;
    counts.iter().map(|count| count.as_u64().context("no count")).collect()
}
