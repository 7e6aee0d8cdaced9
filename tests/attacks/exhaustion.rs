//! Resource exhaustion by unauthenticated clients, while a tenant is served.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use inflight_harness::{LocalCluster, run, scrape};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Request as HttpRequest;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::{Service as _, ServiceExt as _};

use crate::{TENANTS, program, short_request, with_key};

const MIB: f64 = (1 << 20) as f64;
/// Body with one gRPC message of `announced` bytes whose last byte is never sent.
struct Unfinished {
    announced: u32,
    sent: usize,
}

impl HttpBody for Unfinished {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        const FRAME: usize = 16 << 10;
        let this = self.get_mut();
        let all = 5 + this.announced as usize - 1;
        if this.sent >= all {
            return Poll::Pending;
        }
        let mut frame = vec![0; FRAME.min(all - this.sent)];
        if this.sent == 0 {
            frame[1..5].copy_from_slice(&this.announced.to_be_bytes());
        }
        this.sent += frame.len();
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(frame)))))
    }
}

/// Makes a call with an [`Unfinished`] message; returns its status code.
async fn unfinished(channel: Channel, path: &str, announced: u32) -> Result<Code> {
    let mut request = HttpRequest::new(Body::new(Unfinished { announced, sent: 0 }));
    *request.uri_mut() = format!("http://router{path}").parse()?;
    *request.method_mut() = tonic::codegen::http::Method::POST;
    request.headers_mut().insert("content-type", "application/grpc".parse()?);
    request.headers_mut().insert("te", "trailers".parse()?);
    let mut channel = channel;
    let response = channel.ready().await?.call(request).await?;
    if let Some(status) = Status::from_header_map(response.headers()) {
        return Ok(status.code());
    }
    let ended = response.into_body().collect().await?;
    let trailers = ended.trailers().context("an answer without trailers")?;
    Ok(Status::from_header_map(trailers).context("trailers without a status")?.code())
}

async fn resident(cluster: &LocalCluster) -> Result<f64> {
    Ok(scrape(cluster.router.metrics).await?.total("process_resident_memory_peak_bytes")? / MIB)
}

/// Completes a request of the tenant.
async fn serve_tenant(cluster: &LocalCluster) -> Result<()> {
    let request = with_key(short_request(), "t")?;
    let mut stream = cluster.client().await?.generate(request).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_unfinished_messages_take_no_memory_from_tenants() -> Result<()> {
    const CALLS: usize = 192;
    let folder = inflight_fixtures::TempDir::new("attacks")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, TENANTS)?;
    let tenants = format!("--tenants-file={}", file.display());
    let environment = [("INFLIGHT_ROUTER_MESSAGE_TIMEOUT", "2s".into())];
    let cluster = LocalCluster::start_with_env(program(), &["--workers=1", &tenants], &environment).await?;
    serve_tenant(&cluster).await?;
    let before = resident(&cluster).await?;
    let channel = Channel::from_shared(cluster.endpoint.clone())?.connect().await?;
    for (path, announced, code) in [
        ("/grpc.health.v1.Health/Check", 4 << 20, Code::ResourceExhausted),
        ("/grpc.health.v1.Health/Watch", 4 << 20, Code::ResourceExhausted),
        // Reflection answers the requests it has read and then ends with OK when the request stream breaks.
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", 4 << 20, Code::Ok),
        ("/inflight.v1.Inference/Generate", 4 << 20, Code::Unauthenticated),
    ] {
        let started = Instant::now();
        let calls = (0..CALLS).map(|_| unfinished(channel.clone(), path, announced));
        let calls = tokio::spawn(join_all(calls.collect::<Vec<_>>()));
        serve_tenant(&cluster).await?;
        for ended in calls.await? {
            let ended = ended?;
            ensure!([code, Code::ResourceExhausted].contains(&ended), "{path} ended with {ended:?}");
        }
        println!("{path}: {CALLS} calls ended after {:?}", started.elapsed());
    }
    // Below the size limit, up to 32 unauthenticated calls may wait for the message timeout; others fail at once.
    let calls = (0..CALLS).map(|_| unfinished(channel.clone(), "/grpc.health.v1.Health/Check", 1000));
    let ended = join_all(calls.collect::<Vec<_>>()).await.into_iter().collect::<Result<Vec<_>>>()?;
    let late = ended.iter().filter(|code| **code == Code::DeadlineExceeded).count();
    let beyond = ended.iter().filter(|code| **code == Code::ResourceExhausted).count();
    ensure!(late > 0 && late <= 32 && late + beyond == CALLS, "{late} were late, {beyond} were too many");
    let after = resident(&cluster).await?;
    println!("the router's peak of memory went from {before:.1} to {after:.1} MiB");
    ensure!(after - before <= 32.0, "the router took {:.1} MiB", after - before);
    serve_tenant(&cluster).await
}

/// Opens `count` connections that send one byte and then stay open.
async fn one_byte(address: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        let mut stream = TcpStream::connect(address).await?;
        // Fails if the connection was evicted already.
        let _ = stream.write_all(b"G").await;
        held.push(stream);
    }
    Ok(held)
}

async fn probe(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes())
        .await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_calls_succeed_beside_a_thousand_one_byte_connections() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let worker = cluster.workers.first().context("one was started")?;
    let mut held = Vec::new();
    for address in [cluster.router.metrics, worker.metrics, cluster.router.address, worker.address] {
        held.push(one_byte(address, 1100).await?);
    }
    for metrics in [cluster.router.metrics, worker.metrics] {
        for path in ["/livez", "/metrics"] {
            let answer = tokio::time::timeout(Duration::from_secs(5), probe(metrics, path)).await??;
            ensure!(answer.starts_with("HTTP/1.1 200"), "{path} said {answer}");
        }
    }
    let mut client = cluster.client().await?;
    let mut stream = client.generate(short_request()).await?.into_inner();
    while stream.message().await?.is_some() {}
    let secret = format!("--worker-secret-file={}", cluster.worker_secret_file.display());
    let diagnosed = run(program(), &["diagnose", &secret, &worker.address.to_string()], "").await?;
    ensure!(diagnosed.code == Some(0), "diagnose said {}", diagnosed.stderr);
    Ok(())
}
