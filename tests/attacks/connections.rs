//! Floods of connections without a key and idle streams, while a tenant connects anew and is served.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, exclusive, scrape};
use inflight_proto::v1::inference_client::InferenceClient;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tonic::transport::Channel;

use crate::{TENANTS, program, short_request, with_key};

/// Default number of connections; `INFLIGHT_ATTACK_CONNECTIONS` overrides it. Half as many streams are idle.
const CONNECTIONS: usize = 1000;
/// Connections from each source address; `127.0.0.0/8` is all loopback.
const PER_ADDRESS: usize = 100;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Streams on each connection of the tenant.
const PER_CHANNEL: usize = 100;

fn connections() -> usize {
    let given = std::env::var("INFLIGHT_ATTACK_CONNECTIONS").ok().and_then(|given| given.parse().ok());
    given.unwrap_or(CONNECTIONS)
}

/// Raises the limit of open files of this process, which holds the clients' ends.
fn raise_file_limit(needed: usize) -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writing, and RLIMIT_NOFILE is a resource.
    ensure!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is valid for reading, and its soft limit does not exceed its hard limit.
    ensure!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0);
    ensure!(limit.rlim_max as usize >= needed, "{} open files are allowed, {needed} needed", limit.rlim_max);
    Ok(())
}

async fn connect_from(source: Ipv4Addr, target: SocketAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((source, 0)))?;
    Ok(socket.connect(target).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_served_beside_a_flood_of_connections_and_idle_streams() -> Result<()> {
    let exclusive = exclusive().await;
    let count = connections();
    raise_file_limit(count + 1000)?;
    let folder = inflight_fixtures::TempDir::new("connections")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, TENANTS)?;
    let tenants = format!("--tenants-file={}", file.display());
    let streams = count / 2;
    let environment = [
        // Beyond three quarters of them, a tenant gets only a share of the rest.
        ("INFLIGHT_ROUTER_STREAMS_MAX", (2 * streams).to_string().into()),
        ("INFLIGHT_ROUTER_QUEUE_REQUESTS_MAX", (streams + 100).to_string().into()),
        ("INFLIGHT_ROUTER_QUEUE_TOKENS_MAX", "100000000".into()),
    ];
    let cluster =
        LocalCluster::start_exclusive(program(), &["--workers=1", &tenants], &environment, exclusive).await?;
    let peak = || async {
        let samples = scrape(cluster.router.metrics).await?;
        anyhow::Ok(samples.total("process_resident_memory_peak_bytes")? / f64::from(1 << 20))
    };
    let before = peak().await?;

    // Idle streams of the tenant: queued behind each other, and not read.
    let mut idle = Vec::with_capacity(streams);
    for _ in 0..streams.div_ceil(PER_CHANNEL) {
        let channel = Channel::from_shared(cluster.endpoint.clone())?.connect().await?;
        let calls = (0..PER_CHANNEL.min(streams - idle.len())).map(|_| {
            let mut client = InferenceClient::new(channel.clone());
            async move { anyhow::Ok(client.generate(with_key(short_request(), "t")?).await?.into_inner()) }
        });
        idle.extend(futures::future::try_join_all(calls).await?);
    }
    let with_streams = peak().await?;

    // Connections of strangers: each says that it speaks HTTP/2, and nothing more.
    let mut flood = Vec::with_capacity(count);
    for number in 0..count {
        let host = u32::try_from(number / PER_ADDRESS)? + 2;
        let source = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) + host);
        let mut stream = connect_from(source, cluster.router.address).await?;
        // Fails where the router has closed another of them, or this one.
        let _ = stream.write_all(PREFACE).await;
        flood.push(stream);
        if number % 100 == 0 {
            let mut client = InferenceClient::connect(cluster.endpoint.clone()).await?;
            let call = client.generate_unary(with_key(short_request(), "t")?);
            tokio::time::timeout(Duration::from_secs(60), call).await.context("a tenant hung")??;
        }
    }
    let after = peak().await?;
    println!(
        "{count} connections and {streams} idle streams: the router's peak of memory was {before:.0} MiB before, {with_streams:.0} \
         with the streams, {after:.0} with all"
    );
    for mut stream in idle {
        while stream.message().await?.is_some() {}
    }
    Ok(())
}
