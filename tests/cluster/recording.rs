//! `inflight up --record`, and `inflight replay` of what it recorded.

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_fixtures::TempDir;
use inflight_harness::{LocalCluster, kill, run};

use crate::program;
use crate::requests::{generate, sampled};

/// Generates for some clients at once, so that batches change.
async fn load(cluster: &LocalCluster) -> Result<()> {
    let client = cluster.client().await?;
    let calls = (0..12u32).map(|at| {
        let mut client = client.clone();
        async move {
            let prompt = "Once upon a time there was a cat. ".repeat(1 + at as usize % 4);
            generate(&mut client, sampled(&prompt, 4 + 3 * at, at.into())).await
        }
    });
    try_join_all(calls).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_up_records_replays_without_divergence_over_restarts() -> Result<()> {
    let directory = TempDir::new("up-record")?;
    let path = directory.path().join("recordings");
    let record = format!("--record={}", path.display());
    let mut cluster = LocalCluster::start(program(), &["--workers=2", &record]).await?;
    load(&cluster).await?;
    let victim = cluster.workers.first().context("no worker")?;
    let name = victim.name.clone();
    kill(victim.pid, libc::SIGKILL)?;
    cluster.event("restarted").await?;
    load(&cluster).await?;
    cluster.signal(libc::SIGTERM)?;
    let status = cluster.wait().await?;
    ensure!(status.success(), "{status}; it wrote:\n{}", cluster.log());

    let mut files: Vec<String> = std::fs::read_dir(&path)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    files.sort_unstable();
    ensure!(name == "worker-0", "{name}");
    ensure!(files == ["router.rec", "worker-0.2.rec", "worker-0.rec", "worker-1.rec"], "{files:?}");
    for file in &files {
        let file = path.join(file).display().to_string();
        let replayed = run(program(), &["replay", &file, "--plans"], "").await?;
        ensure!(replayed.code == Some(0), "{file}: {replayed:?}");
        let last = replayed.stdout.lines().last().unwrap_or_default();
        let count = last.split(' ').next().unwrap_or_default().parse::<u64>();
        // The first recording of the killed worker may end before its first plan was written.
        ensure!(count.is_ok_and(|count| count > 0 || file.ends_with("worker-0.rec")), "{file}: {last}");
        ensure!(last.contains("replayed, each"), "{file}: {last}");
    }

    // The worker that lived ran requests that joined, were admitted, continued and ended.
    let file = path.join("worker-1.rec").display().to_string();
    let plans = run(program(), &["replay", &file, "--plans"], "").await?.stdout;
    for change in ["joined     s1 (tenant ", "admitted   s1 (slot ", "continued  s1", "ended      s"] {
        ensure!(plans.contains(change), "no {change:?} in\n{plans}");
    }
    let chart =
        run(program(), &["replay", &file, "--slots", "--from=1", "--to=40", "--width=60"], "").await?;
    let rows: Vec<&str> = chart.stdout.lines().filter(|line| line.starts_with("slot ")).collect();
    let letters =
        |wanted: fn(&char) -> bool| rows.iter().flat_map(|row| row[4..].chars()).filter(wanted).count();
    ensure!(chart.code == Some(0) && rows.iter().all(|row| row.len() <= 60), "{chart:?}");
    ensure!(
        letters(char::is_ascii_uppercase) > 0 && letters(char::is_ascii_lowercase) > 0,
        "{}",
        chart.stdout
    );

    // What is there is not overwritten, and `--slots` is for workers.
    let again = run(program(), &["up", "--port=0", &record], "").await?;
    ensure!(again.code == Some(2) && again.stderr.contains(".rec"), "{again:?}");
    let router = path.join("router.rec").display().to_string();
    let refused = run(program(), &["replay", &router, "--slots"], "").await?;
    ensure!(refused.code == Some(2) && refused.stderr.contains("--slots is for"), "{refused:?}");
    let refused = run(program(), &["replay", &file, "--slots", "--from=9", "--to=3"], "").await?;
    ensure!(refused.code == Some(2) && refused.stderr.contains("--to 3 is before"), "{refused:?}");
    Ok(())
}
