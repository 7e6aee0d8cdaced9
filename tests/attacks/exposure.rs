//! What `inflight up` exposes on an address of the network, and keys that would cross it unencrypted.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, run};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{TENANTS, program};

/// Sends the live view's request to kill the first worker, and returns the HTTP response.
async fn kill_worker(port: u16, headers: &str) -> Result<String> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).await?;
    let head = "POST /ui/workers/0/kill HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 0\r\nx-inflight-ui: 1\r\n";
    stream.write_all(format!("{head}{headers}\r\n").as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}

fn port(url: &str) -> Result<u16> {
    Ok(url.rsplit(':').next().context("no port")?.parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_network_address_nobody_without_a_key_may_kill_workers_and_metrics_stay_on_loopback()
-> Result<()> {
    let open = LocalCluster::start(program(), &["--host=0.0.0.0", "--workers=1"]).await?;
    let refused = kill_worker(port(&open.http)?, "").await?;
    ensure!(refused.starts_with("HTTP/1.1 403") && refused.contains("--admin on"), "{refused}");
    for member in open.workers.iter().chain([&open.router]) {
        ensure!(member.metrics.ip().is_loopback(), "{} shows metrics on {}", member.name, member.metrics);
    }
    for worker in &open.workers {
        ensure!(worker.address.ip().is_loopback(), "{} listens on {}", worker.name, worker.address);
    }
    drop(open);

    let folder = inflight_fixtures::TempDir::new("exposure")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, format!("{TENANTS}admin = true\n"))?;
    let tenants = format!("--tenants-file={}", file.display());
    let flags = ["--host=0.0.0.0", "--metrics-host=0.0.0.0", "--workers=1", &tenants];
    let mut guarded = LocalCluster::start(program(), &flags).await?;
    ensure!(
        guarded.router.metrics.ip().is_unspecified(),
        "{} ignores --metrics-host",
        guarded.router.metrics
    );
    let port = port(&guarded.http)?;
    let anonymous = kill_worker(port, "").await?;
    ensure!(anonymous.starts_with("HTTP/1.1 401"), "{anonymous}");
    let killed = kill_worker(port, "authorization: Bearer t\r\n").await?;
    ensure!(killed.starts_with("HTTP/1.1 204"), "{killed}");
    guarded.event("lost").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_would_cross_a_network_unencrypted_is_warned_about() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--host=0.0.0.0", "--workers=1"]).await?;
    let port = port(&cluster.endpoint)?;
    // On Linux, a connection to 0.0.0.0 reaches this host, but the address does not count as loopback.
    for (host, warned) in [("0.0.0.0", true), ("127.0.0.1", false)] {
        let endpoint = format!("--endpoint=http://{host}:{port}");
        let arguments = ["generate", &endpoint, "--api-key=no-key-at-all", "--max-tokens=1", "Once"];
        let ended = run(program(), &arguments, "").await?;
        ensure!(ended.code == Some(0), "{ended:?}");
        let warnings = ended.stderr.matches("the API key is sent to").count();
        ensure!(warnings == usize::from(warned), "{host}: {}", ended.stderr);
        ensure!(!warned || ended.stderr.contains("without encryption"), "{}", ended.stderr);
        ensure!(!ended.stderr.contains("no-key-at-all"), "the key is printed: {}", ended.stderr);
    }
    Ok(())
}
