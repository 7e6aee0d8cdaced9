//! Models by their names, from a stand-in of the Hub.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir};
use inflight_harness::{LocalCluster, eventually, run_with_env};
use inflight_hub_stand_in::{Fault, StandIn};
use tokio::process::Command;

use crate::program;
use crate::requests::{generate, model, sampled};

/// Environment of a command that finds a Hub and a cache.
pub(crate) fn environment(endpoint: &str, cache: &Path) -> Vec<(&'static str, OsString)> {
    vec![
        ("HF_ENDPOINT", endpoint.into()),
        ("HF_HUB_CACHE", cache.into()),
        ("HF_TOKEN", "".into()),
        ("HF_HOME", cache.into()),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_served_by_its_name_and_without_a_network_from_then_on() -> Result<()> {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub")?);
    let folder = Checkpoint::new(Arch::Qwen3, Dtype::Bf16).sharded(2).write_temp()?;
    hub.add_directory("org/tiny", folder.path());
    let served = async |environment: &[(&str, OsString)]| -> Result<Vec<u32>> {
        let flags = ["--workers=2", "--model=org/tiny"];
        let cluster = LocalCluster::start_with_env(program(), &flags, environment).await?;
        let mut client = cluster.client().await?;
        let served = model(&mut client).await?;
        ensure!(served.name == "org/tiny" && served.workers == 2, "{served:?}");
        Ok(generate(&mut client, sampled("Hello", 12, 3)).await?.tokens)
    };
    let mut variables = environment(&hub.endpoint(), cache.path());
    let tokens = served(&variables).await?;
    let seen = hub.seen();
    let weights = |seen: &&inflight_hub_stand_in::Seen| seen.elsewhere;
    ensure!(seen.iter().filter(weights).count() > 1, "{seen:?}");
    // Offline, from the cache.
    drop(hub);
    variables.push(("HF_HUB_OFFLINE", "1".into()));
    ensure!(served(&variables).await? == tokens);
    let listed = run_with_env(program(), &["models"], "", &variables).await?;
    ensure!(listed.stdout.contains("org/tiny") && listed.stdout.contains("Qwen3ForCausalLM"), "{listed:?}");
    let removed = run_with_env(program(), &["rm", "org/tiny"], "", &variables).await?;
    ensure!(removed.stdout.starts_with("removed org/tiny, "), "{removed:?}");
    let missing = run_with_env(program(), &["up", "--model", "org/tiny"], "", &variables).await?;
    ensure!(
        missing.stderr.contains("HF_HUB_OFFLINE forbids downloads; fetch it with `inflight pull org/tiny`"),
        "{missing:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_download_continues_where_it_ended() -> Result<()> {
    const BYTES: usize = 40 << 20;
    let (hub, cache) = (StandIn::start(), TempDir::new("hub")?);
    let weights: Vec<u8> = (0..BYTES).map(|at| ((at * at) >> 7) as u8).collect();
    hub.add("org/g", "main", &[("m.gguf", weights.clone())]);
    // One of its three parts arrives.
    hub.fault("signature", Fault::Stall, 2);
    let variables = environment(&hub.endpoint(), cache.path());
    let mut pull = Command::new(program());
    pull.args(["pull", "org/g"])
        .envs(variables.clone())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut pull = pull.kill_on_drop(true).spawn()?;
    let blobs = cache.path().join("models--org--g/blobs");
    eventually("one part arrives", || async {
        let files = std::fs::read_dir(&blobs).context("no blobs yet")?.flatten();
        let journal = files
            .map(|file| file.path())
            .find(|path| path.extension().is_some_and(|kind| kind == "parts-present"));
        let text = std::fs::read_to_string(journal.context("no journal yet")?)?;
        ensure!(text.lines().count() == 2, "{text}");
        Ok(())
    })
    .await?;
    pull.kill().await?;
    hub.seen();
    let again = run_with_env(program(), &["pull", "org/g"], "", &variables).await?;
    ensure!(again.code == Some(0), "{again:?}");
    ensure!(std::fs::read(again.stdout.trim())? == weights, "{again:?}");
    let parts = hub.seen().into_iter().filter(|seen| seen.elsewhere).count();
    ensure!(parts == 2, "{parts} parts were fetched again");
    Ok(())
}
