//! Streams that outlive their routers: every router and every worker is killed in turn under resuming clients.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_client::{GenerateStream, ResumePolicy};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, eventually, exclusive, run, scrape};
use inflight_proto::v1::GenerateRequest;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::usage::read_usage;
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
/// Generating endpoints, in turn those of the requests over HTTP.
const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];

/// Two workers and two routers that share a resume key.
pub struct Cluster {
    workers: Vec<RoleProcess>,
    pub routers: Vec<RoleProcess>,
    /// Base URLs of the routers' HTTP APIs.
    urls: Vec<String>,
    /// Directories of the routers' usage logs.
    pub logs: Vec<PathBuf>,
}

impl Cluster {
    pub async fn start(folder: &Path) -> Result<Self> {
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
    pub async fn kill(victim: &mut RoleProcess) -> Result<()> {
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
    let over_http = http_requests(&requests, &cluster.urls).await?;
    for (request, result) in over_http.iter().zip(&expected).filter(|(asked, _)| asked["path"] == PATHS[0]) {
        ensure!(request["text"] == result.text, "{request} has not the text of {result:?}");
    }
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
    let http = json!({"urls": cluster.urls, "requests": over_http, "streams": STREAMS,
        "stop": stop.to_string_lossy()});
    let http = tokio::spawn(python("python3".to_owned(), http));
    let asked: Vec<Value> = requests.iter().zip(&*expected).zip(0..).map(task_request).collect();
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
    let mut bill = Bill::default();
    for (result, request) in expected.iter().zip(&over_http) {
        bill.add(counts_of_result(result)?, 1);
        bill.add(counts_of_request(request)?, 1);
    }
    let mut resumed = 0;
    while let Some(stream) = streams.join_next().await {
        let (counts, times) = stream??;
        for (result, count) in expected.iter().zip(counts) {
            bill.add(counts_of_result(result)?, count);
        }
        resumed += times;
    }
    let answer = http.await?.context("HTTP")?;
    for (request, count) in over_http.iter().zip(complete_counts(&answer)?) {
        bill.add(counts_of_request(request)?, count);
    }
    if let Some(grpc) = grpc {
        let counts = complete_counts(&grpc.await?.context("gRPC from Python")?)?;
        for (result, count) in expected.iter().zip(counts) {
            bill.add(counts_of_result(result)?, count);
        }
    }
    ensure!(resumed > 0, "no stream over gRPC was resumed");
    for path in PATHS {
        ensure!(answer["resumed"][path].as_u64() > Some(0), "no stream of {path} was resumed: {answer}");
    }
    for router in &mut cluster.routers {
        router.signal(libc::SIGTERM)?;
        router.wait().await?;
    }
    println!("{} streams; resumed: {resumed} over gRPC, over HTTP {}", bill.streams(), answer["resumed"]);
    bill.check_log(&cluster.logs)?;
    bill.check_command(&cluster.logs).await
}

/// Prompt and output tokens of a stream.
type Counts = (u64, u64);

/// Number of streams by their tokens.
#[derive(Default)]
struct Bill(BTreeMap<Counts, u64>);

impl Bill {
    fn add(&mut self, counts: Counts, streams: u64) {
        *self.0.entry(counts).or_default() += streams;
    }

    fn streams(&self) -> u64 {
        self.0.values().sum()
    }

    /// Checks that each stream has one line with all of its tokens.
    fn check_log(&self, logs: &[PathBuf]) -> Result<()> {
        let mut billed = Self::default();
        let mut incomplete = Vec::new();
        let reading = read_usage(logs, None, |record| match record.outcome.as_str() {
            "completed" => billed.add((record.prompt_tokens, record.completion_tokens), 1),
            _ => incomplete.push(record),
        })?;
        println!("{} lines of {} streams", reading.lines + reading.resumed, reading.lines);
        ensure!(incomplete.is_empty(), "{incomplete:?}");
        ensure!(billed.0 == self.0, "billed: {:?}, streams: {:?}", billed.0, self.0);
        ensure!((reading.duplicates, reading.damaged) == (0, 0), "{reading:?}");
        Ok(())
    }

    /// Checks the sums of `inflight usage`.
    async fn check_command(&self, logs: &[PathBuf]) -> Result<()> {
        let mut arguments = vec!["usage".to_owned(), "--json".to_owned()];
        arguments.extend(logs.iter().map(|log| log.to_string_lossy().into_owned()));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let finished = run(program(), &arguments, "").await?;
        ensure!(finished.code == Some(0), "{finished:?}");
        let printed: Value = serde_json::from_str(&finished.stdout)?;
        let sum = |tokens: fn(&Counts) -> u64| -> u64 {
            self.0.iter().map(|(counts, streams)| tokens(counts) * streams).sum()
        };
        let total = &printed["total"];
        ensure!(
            total["requests"] == self.streams()
                && total["prompt_tokens"] == sum(|counts| counts.0)
                && total["completion_tokens"] == sum(|counts| counts.1),
            "{printed}, but the streams were {:?}",
            self.0
        );
        Ok(())
    }
}

fn counts_of_result(result: &GenerationResult) -> Result<Counts> {
    let usage = result.usage.as_ref().context("no usage")?;
    Ok((usage.prompt_tokens.into(), usage.completion_tokens.into()))
}

fn counts_of_request(request: &Value) -> Result<Counts> {
    let count = |name: &str| request[name].as_u64().with_context(|| format!("no {name} in {request}"));
    Ok((count("prompt_tokens")?, count("completion_tokens")?))
}

/// Returns the requests over HTTP, to each endpoint in turn, with the answers of the cluster in one piece.
async fn http_requests(requests: &[GenerateRequest], urls: &[String]) -> Result<Vec<Value>> {
    let mut asked: Vec<Value> = requests.iter().enumerate().map(http_request).collect();
    let task = json!({"urls": urls, "requests": asked, "expect": true});
    let answer = python("python3".to_owned(), task).await?;
    for (at, request) in asked.iter_mut().enumerate() {
        for name in ["text", "prompt_tokens", "completion_tokens"] {
            request[name] = answer["results"][at][name].clone();
        }
    }
    Ok(asked)
}

/// Returns a request with its path. Without a seed in the API it is greedy.
fn http_request((index, request): (usize, &GenerateRequest)) -> Value {
    let Some(inflight_proto::v1::generate_request::Input::Text(prompt)) = &request.input else {
        return Value::Null;
    };
    let max_tokens = request.stop.as_ref().and_then(|stop| stop.max_tokens);
    let messages = json!([{"role": "user", "content": prompt}]);
    let sampled = json!({"max_tokens": max_tokens, "seed": index, "temperature": 0.8, "ignore_eos": true,
        "stream_options": {"include_usage": true}});
    let path = PATHS[index % PATHS.len()];
    let mut body = match path {
        "/v1/completions" | "/v1/chat/completions" => sampled,
        "/v1/responses" => json!({"max_output_tokens": max_tokens, "temperature": 0}),
        _ => json!({"max_tokens": max_tokens, "temperature": 0}),
    };
    match path {
        "/v1/completions" => body["prompt"] = json!(prompt),
        "/v1/responses" => body["input"] = json!(prompt),
        _ => body["messages"] = messages,
    }
    json!({"path": path, "body": body})
}

fn task_request(((request, result), seed): ((&GenerateRequest, &GenerationResult), u64)) -> Value {
    let Some(inflight_proto::v1::generate_request::Input::Text(prompt)) = &request.input else {
        return Value::Null;
    };
    let max_tokens = request.stop.as_ref().and_then(|stop| stop.max_tokens);
    json!({"prompt": prompt, "max_tokens": max_tokens, "seed": seed, "text": result.text})
}

/// Runs the Python client until its task ends. Returns what it printed.
async fn python(interpreter: String, task: Value) -> Result<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/python/resuming.py");
    let finished = run(Path::new(&interpreter), &[&script.to_string_lossy()], &task.to_string()).await?;
    ensure!(finished.code == Some(0), "{finished:?}");
    Ok(serde_json::from_str(&finished.stdout)?)
}

/// Returns the number of complete streams of each request.
fn complete_counts(answer: &Value) -> Result<Vec<u64>> {
    let counts = answer["complete"].as_array().context("no counts")?;
    counts.iter().map(|count| count.as_u64().context("no count")).collect()
}
