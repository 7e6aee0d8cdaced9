//! The pages `/ui` and `/chat` in a headless browser, used as a viewer does.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_harness::LocalCluster;
use serde_json::Value;
use tokio::process::Command;

use crate::program;

/// Time for everything that a script does; it says itself which of its steps takes too long.
const LIMIT: Duration = Duration::from_secs(240);

/// Starts a cluster and uses a page of it by a script; without a browser it does nothing.
async fn browse(page: &str, script: &str) -> Result<()> {
    let (Some(modules), Some(browser)) =
        (std::env::var_os("INFLIGHT_TEST_NODE_MODULES"), std::env::var_os("INFLIGHT_TEST_BROWSER"))
    else {
        let reason = "INFLIGHT_TEST_NODE_MODULES and INFLIGHT_TEST_BROWSER name no folder with puppeteer-core \
                      and no Chromium";
        inflight_fixtures::skipped(&format!("the page {page} in a browser"), reason);
        return Ok(());
    };
    // Slow enough for a stream to be there when its worker is killed, on any machine.
    let flags = [
        "--device=sim:flat,step=0.02,prompt_token=0.0002",
        "--max-sequences=16",
        "--max-context-tokens=65536",
    ];
    let cluster = LocalCluster::start(program(), &flags).await?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/node/page").join(script);
    let mut node = Command::new("node");
    node.arg(script).arg(&cluster.http).env("NODE_PATH", modules).env("INFLIGHT_TEST_BROWSER", browser);
    // Standard error is inherited, so that the test's output names the last step that ended.
    let child = node.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let finished = tokio::time::timeout(LIMIT, child.wait_with_output()).await??;
    let output = String::from_utf8_lossy(&finished.stdout).into_owned();
    ensure!(finished.status.success(), "{output}\n{}", cluster.log());
    let checked: Value = serde_json::from_str(&output).with_context(|| output.clone())?;
    ensure!(checked["jump"]["from"] != checked["jump"]["to"], "{checked}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_a_load_and_a_killed_worker_and_is_usable_by_keyboard() -> Result<()> {
    browse("/ui", "page_test.cjs").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_shows_where_its_answer_is_computed_and_outlives_a_killed_worker() -> Result<()> {
    browse("/chat", "chat.cjs").await
}
