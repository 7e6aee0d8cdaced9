//! Pools that tenants share: one tenant with a key takes all it can, and the other is served.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{LocalCluster, eventually, scrape};
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{ListModelsRequest, StopConditions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::{TENANTS, program, short_request, with_key};

/// Adds a tenant with the SHA-256 of the API key `f`.
const FLOOD: &str = "[tenants.flood]\nkeys = [{ sha256 = \"252f10c83610ebca1a059c0bae8255eba2f95be4d1d7bcfa89d7248a82d9f111\" }]\n";

async fn start(environment: &[(&str, OsString)]) -> Result<(LocalCluster, TempDir)> {
    let folder = TempDir::new("shares")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, format!("{TENANTS}{FLOOD}"))?;
    let tenants = format!("--tenants-file={}", file.display());
    let cluster = LocalCluster::start_with_env(program(), &["--workers=1", &tenants], environment).await?;
    Ok((cluster, folder))
}

/// Completes requests of the tenant that takes nothing, over new connections.
async fn serve_tenant(cluster: &LocalCluster) -> Result<()> {
    for _ in 0..3 {
        let mut stream =
            cluster.client().await?.generate(with_key(short_request(), "t")?).await?.into_inner();
        while stream.message().await?.is_some() {}
    }
    Ok(())
}

/// Sends a request whose body lacks its last byte. Returns the connection, and what the router has answered until it reads no more.
async fn unfinished(address: SocketAddr, bytes: usize) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer f\r\ncontent-type: application/json\r\n\
         content-length: {bytes}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    // A refused one is closed meanwhile.
    let _ = stream.write_all(&vec![b' '; bytes - 1]).await;
    Ok(stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_without_an_end_leave_receive_bytes_to_others() -> Result<()> {
    const BYTES: usize = 4 << 20;
    let (cluster, _folder) = start(&[]).await?;
    let address = cluster.http.trim_start_matches("http://").parse()?;
    let mut held = Vec::new();
    for _ in 0..70 {
        held.push(unfinished(address, BYTES).await?);
    }
    eventually("the tenant has its share", || async {
        let used = scrape(cluster.router.metrics).await?.total("inflight_router_receive_bytes")?;
        // Three quarters of 256 MiB, less what no message of 4 MiB fills.
        ensure!((150.0..=193.0).contains(&(used / 1048576.0)), "{used} bytes are reserved");
        Ok(())
    })
    .await?;
    serve_tenant(&cluster).await?;
    // Where the machine is slow, the first bodies have met the limit of their time, and what they held is free again.
    let mut answer = None;
    while answer.is_none() {
        ensure!(held.len() < 140, "no body beyond the share is refused or closed");
        let (mut connection, mut text) = (unfinished(address, BYTES).await?, String::new());
        // The router may close the connection before it has read all, so that the answer is lost.
        match tokio::time::timeout(Duration::from_secs(2), connection.read_to_string(&mut text)).await {
            Ok(_) => answer = Some(text),
            Err(_) => held.push(connection),
        }
    }
    ensure!(answer.iter().all(|text| text.is_empty() || text.starts_with("HTTP/1.1 503")), "{answer:?}");
    drop(held);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_without_a_reader_leave_streams_to_others() -> Result<()> {
    let (cluster, _folder) = start(&[("INFLIGHT_ROUTER_STREAMS_MAX", "50".into())]).await?;
    let mut client = cluster.client().await?;
    let (mut held, mut refused) = (Vec::new(), 0);
    for _ in 0..50 {
        let mut request = short_request();
        request.stop =
            Some(StopConditions { max_tokens: Some(1000), ignore_eos: true, ..StopConditions::default() });
        match client.generate(with_key(request, "f")?).await {
            Ok(stream) => held.push(stream),
            Err(status) => {
                ensure!(status.code() == Code::ResourceExhausted, "{status:?}");
                ensure!(status.message().contains("its share of what is left"), "{status:?}");
                refused += 1;
            }
        }
    }
    ensure!(held.len() == 37 && refused == 13, "{} streams were opened, {refused} refused", held.len());
    serve_tenant(&cluster).await
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_with_open_calls_leave_connections_to_others() -> Result<()> {
    const MOST: usize = 50;
    let (cluster, _folder) = start(&[("INFLIGHT_ROUTER_CONNECTIONS_MAX", MOST.to_string().into())]).await?;
    let (mut held, mut refused) = (Vec::new(), 0);
    for _ in 0..MOST {
        let channel = Channel::from_shared(cluster.endpoint.clone())?.connect().await?;
        let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest::default()).await;
        let listed =
            InferenceClient::new(channel.clone()).list_models(with_key(ListModelsRequest {}, "f")?).await;
        refused += usize::from(listed.is_err());
        held.push((channel, watch));
    }
    ensure!((8..=18).contains(&refused), "{refused} of {MOST} connections were refused");
    for _ in 0..4 {
        serve_tenant(&cluster).await?;
    }
    drop(held);
    Ok(())
}
