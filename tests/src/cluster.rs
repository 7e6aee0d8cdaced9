use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};

use anyhow::{Context, Result, bail};
use inflight_proto::v1::inference_client::InferenceClient;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use tonic::transport::Channel;

use crate::DEADLINE;
use crate::process::{Mark, kill};

/// Clusters run side by side, as many as the test runner starts; a test that measures excludes all others.
static CLUSTERS: RwLock<()> = RwLock::const_new(());

/// Waits until no other cluster of this process runs, and keeps it so while the guard lives. For tests that measure; under
/// nextest, where each test is a process of its own, `.config/nextest.toml` does the same by their names.
pub async fn alone() -> RwLockWriteGuard<'static, ()> {
    CLUSTERS.write().await
}

/// A process of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// `router`, `worker-0`, …
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Where it listens for gRPC.
    pub address: SocketAddr,
    /// Where its metrics are.
    pub metrics: SocketAddr,
}

/// A running `inflight up`. Dropped, it is killed.
#[derive(Debug)]
pub struct Cluster {
    child: Child,
    /// The process of `up`.
    pub pid: u32,
    /// What clients call, as `http://HOST:PORT`.
    pub endpoint: String,
    /// The router.
    pub router: Member,
    /// The workers.
    pub workers: Vec<Member>,
    /// What all its processes are marked with.
    pub mark: Mark,
    events: tokio::io::Lines<BufReader<ChildStdout>>,
    log: Arc<StdMutex<String>>,
    _shared: RwLockReadGuard<'static, ()>,
}

impl Cluster {
    /// Starts `program up` with free ports and `flags`, and waits until it is ready.
    ///
    /// # Errors
    /// It does not become ready; the error has what it wrote.
    pub async fn start(program: &Path, flags: &[&str]) -> Result<Self> {
        Self::start_in(program, flags, &[]).await
    }

    /// The same, with these variables in its environment.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn start_in(program: &Path, flags: &[&str], environment: &[(&str, OsString)]) -> Result<Self> {
        let shared = CLUSTERS.read().await;
        let mark = Mark::new();
        let (name, value) = mark.variable();
        let threads =
            if flags.iter().any(|flag| flag.starts_with("--threads")) { &[][..] } else { &["--threads=1"] };
        let mut child = Command::new(program)
            .args(["up", "--json", "--port=0", "--kv-cache-bytes=64MiB"])
            .args(threads)
            .args(flags)
            .env(name, value)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = child.id().context("no process id")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let stderr = child.stderr.take().context("no standard error")?;
        let log = Arc::new(StdMutex::new(String::new()));
        let kept = Arc::clone(&log);
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let mut log = kept.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        let mut events = BufReader::new(stdout).lines();
        let ready = match next_event(&mut events, "ready").await {
            Ok(ready) => ready,
            Err(error) => {
                let log = log.lock().unwrap_or_else(PoisonError::into_inner).clone();
                bail!("the cluster did not get ready: {error:#}; it wrote:\n{log}");
            }
        };
        let endpoint = ready["endpoint"].as_str().context("no endpoint")?.to_owned();
        let router = member(&ready["router"])?;
        let workers =
            ready["workers"].as_array().context("no workers")?.iter().map(member).collect::<Result<_>>()?;
        Ok(Self { child, pid, endpoint, router, workers, mark, events, log, _shared: shared })
    }

    /// The next event of this name; others before it are skipped.
    ///
    /// # Errors
    /// None comes.
    pub async fn event(&mut self, name: &str) -> Result<Value> {
        next_event(&mut self.events, name).await.with_context(|| format!("it wrote:\n{}", self.log()))
    }

    /// A client with a connection of its own.
    ///
    /// # Errors
    /// The router does not answer.
    pub async fn client(&self) -> Result<InferenceClient<Channel>> {
        Ok(InferenceClient::connect(self.endpoint.clone()).await?)
    }

    /// What it wrote to its standard error so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends `up` a signal.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, signal: i32) -> Result<()> {
        kill(self.pid, signal)
    }

    /// Waits for the end of `up`.
    ///
    /// # Errors
    /// It does not end.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        let ended = tokio::time::timeout(DEADLINE, self.child.wait()).await;
        Ok(ended.with_context(|| format!("`up` did not end; it wrote:\n{}", self.log()))??)
    }
}

async fn next_event(events: &mut tokio::io::Lines<BufReader<ChildStdout>>, name: &str) -> Result<Value> {
    let wanted = async {
        loop {
            let line = events.next_line().await?.context("its output ended")?;
            let event: Value =
                serde_json::from_str(&line).with_context(|| format!("not an event: {line}"))?;
            if event["event"] == name {
                return Ok(event);
            }
        }
    };
    tokio::time::timeout(DEADLINE, wanted).await.with_context(|| format!("no event {name}"))?
}

fn member(value: &Value) -> Result<Member> {
    let text = |key: &str| value[key].as_str().with_context(|| format!("no {key} in {value}"));
    Ok(Member {
        name: text("name")?.to_owned(),
        pid: value["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).context("no pid")?,
        address: text("address")?.parse()?,
        metrics: text("metrics")?.parse()?,
    })
}
