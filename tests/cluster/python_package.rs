//! The Python package as its users have it: built as a wheel, installed, and used by the code of its README, whose stream
//! survives the router that it began at.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, scrape};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::program;
use crate::storm::all_connected;

/// Limit of the build of the wheel, and of the stream.
const TIME: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn the_readme_of_the_python_package_streams_tokens_and_survives_a_killed_router() -> Result<()> {
    let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") else {
        inflight_fixtures::skipped(
            "the Python package",
            "INFLIGHT_TEST_PYTHON names no Python with grpcio-tools and setuptools",
        );
        return Ok(());
    };
    let folder = TempDir::new("python-package")?;
    let key = folder.path().join("key");
    std::fs::write(&key, "a key of the cluster that all of its routers share\n")?;
    // 200 tokens take 4 seconds.
    let flags = ["--device=sim:flat,step=0.02".to_owned()];
    let worker = RoleProcess::start(program().to_owned(), "worker", &flags).await?;
    let mut routers = Vec::new();
    for _ in 0..2 {
        let flags = [format!("--workers={}", worker.address), format!("--resume-key-file={}", key.display())];
        routers.push(RoleProcess::start(program().to_owned(), "router", &flags).await?);
    }
    for router in &routers {
        all_connected(router).await?;
    }

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/python/package.py");
    let mut client = Command::new(python)
        .arg(script)
        .args(routers.iter().map(|router| router.address.to_string()))
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = BufReader::new(client.stdout.take().context("piped")?);
    let mut complete = String::new();
    timeout(TIME, output.read_line(&mut complete)).await.context("the package takes too long")??;
    let complete: String =
        serde_json::from_str(&complete).with_context(|| format!("it printed {complete:?}"))?;
    // The stream has begun, at the first router, and is far from its end.
    let mut text = vec![0];
    output.read_exact(&mut text).await?;
    let open = scrape(routers[0].metrics).await?.total("inflight_router_open_calls")?;
    ensure!(open == 1.0, "{open} calls are open at the first router");
    routers[0].signal(libc::SIGKILL)?;
    routers[0].wait().await?;
    timeout(TIME, output.read_to_end(&mut text)).await.context("the stream hangs")??;
    let status = client.wait().await?;
    let text = String::from_utf8(text)?;
    ensure!(status.success(), "{status}, after {text:?}");
    ensure!(text == complete, "{text:?} instead of {complete:?}");
    Ok(())
}
