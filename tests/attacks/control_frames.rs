//! Floods of HTTP/2 frames that ask for nothing: each connection is closed after some thousand, and tenants are served.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, eventually, scrape};
use inflight_proto::v1::inference_client::InferenceClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{TENANTS, program, short_request, with_key};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Name, type, stream and payload of each kind of frame.
const KINDS: [(&str, u8, u8, &[u8]); 6] = [
    ("PING", 6, 0, &[0; 8]),
    ("SETTINGS", 4, 0, &[]),
    ("WINDOW_UPDATE", 8, 0, &[0, 0, 0, 1]),
    ("PRIORITY", 2, 1, &[0, 0, 0, 0, 7]),
    ("an unknown type", 0x77, 0, &[0; 16]),
    ("an answer to a PING that was not sent", 6, 0, &[1; 8]),
];
/// Bytes after which a flood has not been stopped.
const BYTES_MAX: usize = 64 << 20;

/// Floods an address until it closes the connection; returns the bytes written.
async fn flood(target: SocketAddr, kind: u8, stream: u8, payload: &[u8], flags: u8) -> Result<usize> {
    let (mut reader, mut writer) = TcpStream::connect(target).await?.into_split();
    // What is answered is read, so that only the count of frames can end the flood.
    let answers = tokio::spawn(async move {
        let mut answers = vec![0; 64 << 10];
        while reader.read(&mut answers).await.is_ok_and(|bytes| bytes > 0) {}
    });
    let head = [0, 0, u8::try_from(payload.len())?, kind, flags, 0, 0, 0, stream];
    let frames = [&head[..], payload].concat().repeat(1000);
    let mut written = 0;
    if writer.write_all(PREFACE).await.is_ok() {
        while written < BYTES_MAX && writer.write_all(&frames).await.is_ok() {
            written += frames.len();
        }
    }
    drop(writer);
    answers.await?;
    Ok(written)
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_frames_that_ask_for_nothing_end_their_connections_and_delay_nobody() -> Result<()> {
    let folder = inflight_fixtures::TempDir::new("control-frames")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, TENANTS)?;
    let tenants = format!("--tenants-file={}", file.display());
    let cluster = LocalCluster::start(program(), &["--workers=1", &tenants]).await?;
    let http: SocketAddr = cluster.http.trim_start_matches("http://").parse()?;
    let mut client = InferenceClient::connect(cluster.endpoint.clone()).await?;
    let floods = async {
        for (name, kind, stream, payload) in KINDS {
            for target in [cluster.router.address, http, cluster.workers[0].address] {
                let flags = u8::from(name.starts_with("an answer"));
                let written = tokio::time::timeout(
                    Duration::from_secs(20),
                    flood(target, kind, stream, payload, flags),
                );
                let written = written.await.with_context(|| format!("{name} at {target} never ended"))??;
                ensure!(written < BYTES_MAX, "{written} bytes of {name} at {target}");
            }
        }
        anyhow::Ok(())
    };
    let served = async {
        for _ in 0..20 {
            client.generate_unary(with_key(short_request(), "t")?).await?;
        }
        anyhow::Ok(())
    };
    tokio::try_join!(floods, served)?;
    for role in [cluster.router.metrics, cluster.workers[0].metrics] {
        eventually("the closed connections are counted", || async {
            let samples = scrape(role).await?;
            let closed = samples
                .series()
                .filter(|(name, _)| name.contains("connections_closed") && name.contains("control_frames"));
            let closed: f64 = closed.map(|(_, count)| count).sum();
            ensure!(closed >= KINDS.len() as f64, "{closed} connections");
            Ok(())
        })
        .await?;
    }
    Ok(())
}
