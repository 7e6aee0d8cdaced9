//! A cluster started by `inflight up`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
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
use crate::process::{HOST_CACHE_BYTES, ProcessTag, kill};

/// Held shared by every cluster and exclusively by a test that measures.
static CLUSTERS: RwLock<()> = RwLock::const_new(());

/// Waits until no other cluster of this process runs, and excludes new ones while the guard lives. For tests
/// that measure; under nextest, with one process per test, `.config/nextest.toml` does the same by name. The
/// holder starts a [`LocalCluster`] by [`LocalCluster::start_exclusive`] only.
pub async fn exclusive() -> RwLockWriteGuard<'static, ()> {
    CLUSTERS.write().await
}

/// Router or worker process of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterMember {
    /// `router`, `worker-0`, …
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// gRPC address.
    pub address: SocketAddr,
    /// Address of the metrics endpoint.
    pub metrics: SocketAddr,
}

/// Cluster of a running `inflight up`. The drop kills it.
#[derive(Debug)]
pub struct LocalCluster {
    child: Child,
    /// Process id of `inflight up`.
    pub pid: u32,
    /// Endpoint of the router, as `http://HOST:PORT`.
    pub endpoint: String,
    /// URL of the router's HTTP APIs.
    pub http: String,
    /// Router process.
    pub router: ClusterMember,
    /// Worker processes.
    pub workers: Vec<ClusterMember>,
    /// File with the secret of the workers.
    pub worker_secret_file: PathBuf,
    /// Tag of all processes of the cluster.
    pub tag: ProcessTag,
    events: tokio::io::Lines<BufReader<ChildStdout>>,
    log: Arc<StdMutex<String>>,
    _lock: ClusterLock,
}

/// How a cluster shares the machine with the other clusters of the test process.
#[derive(Debug)]
enum ClusterLock {
    Shared {
        _guard: RwLockReadGuard<'static, ()>,
    },
    Exclusive {
        _guard: RwLockWriteGuard<'static, ()>,
    },
    /// Under the lock of another cluster of the same test.
    Beside,
}

impl LocalCluster {
    /// Starts `program up` on free ports with `flags`, and waits until it is ready.
    ///
    /// # Errors
    /// The cluster does not become ready; the error contains its standard error.
    pub async fn start(program: &Path, flags: &[&str]) -> Result<Self> {
        Self::start_with_env(program, flags, &[]).await
    }

    /// Starts `program up` on free ports with `flags` and added `environment`, and waits until it is ready.
    ///
    /// # Errors
    /// The cluster does not become ready; the error contains its standard error.
    pub async fn start_with_env(
        program: &Path,
        flags: &[&str],
        environment: &[(&str, OsString)],
    ) -> Result<Self> {
        let lock = ClusterLock::Shared { _guard: CLUSTERS.read().await };
        Self::start_locked(program, flags, environment, lock).await
    }

    /// Starts `program up` as [`LocalCluster::start_with_env`] does, without any other cluster of this process
    /// beside it. It takes the guard of [`exclusive`], under which `start` would wait for ever.
    ///
    /// # Errors
    /// The cluster does not become ready; the error contains its standard error.
    pub async fn start_exclusive(
        program: &Path,
        flags: &[&str],
        environment: &[(&str, OsString)],
        guard: RwLockWriteGuard<'static, ()>,
    ) -> Result<Self> {
        Self::start_locked(program, flags, environment, ClusterLock::Exclusive { _guard: guard }).await
    }

    /// Starts `program up` as [`LocalCluster::start`] does, beside another cluster of the same test, under whose lock it
    /// runs: two locks of one test, with a test between them that waits to be alone, would wait for ever.
    ///
    /// # Errors
    /// The cluster does not become ready; the error contains its standard error.
    pub async fn start_beside(&self, program: &Path, flags: &[&str]) -> Result<Self> {
        Self::start_locked(program, flags, &[], ClusterLock::Beside).await
    }

    async fn start_locked(
        program: &Path,
        flags: &[&str],
        environment: &[(&str, OsString)],
        lock: ClusterLock,
    ) -> Result<Self> {
        let tag = ProcessTag::new();
        let (name, value) = tag.variable();
        let threads =
            if flags.iter().any(|flag| flag.starts_with("--threads")) { &[][..] } else { &["--threads=1"] };
        let mut child = Command::new(program)
            .args(["up", "--json", "--port=0", "--kv-cache-bytes=64MiB"])
            .args(threads)
            .args(flags)
            .env(name, value)
            .env(HOST_CACHE_BYTES.0, HOST_CACHE_BYTES.1)
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
        let log_writer = Arc::clone(&log);
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let mut log = log_writer.lock().unwrap_or_else(PoisonError::into_inner);
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
        let http = ready["http"].as_str().context("no http")?.to_owned();
        let router = member(&ready["router"])?;
        let workers =
            ready["workers"].as_array().context("no workers")?.iter().map(member).collect::<Result<_>>()?;
        let secret = ready["worker_secret_file"].as_str().context("no worker_secret_file")?;
        let worker_secret_file = PathBuf::from(secret);
        Ok(Self {
            child,
            pid,
            endpoint,
            http,
            router,
            workers,
            worker_secret_file,
            tag,
            events,
            log,
            _lock: lock,
        })
    }

    /// Waits for the next event of this name on the JSON output; other events are skipped.
    ///
    /// # Errors
    /// No such event arrives within [`DEADLINE`].
    pub async fn event(&mut self, name: &str) -> Result<Value> {
        next_event(&mut self.events, name).await.with_context(|| format!("it wrote:\n{}", self.log()))
    }

    /// Connects a new client to the router.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn client(&self) -> Result<InferenceClient<Channel>> {
        Ok(InferenceClient::connect(self.endpoint.clone()).await?)
    }

    /// Returns the standard error of `inflight up` so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a signal to `inflight up`.
    ///
    /// # Errors
    /// The process does not exist.
    pub fn signal(&self, signal: i32) -> Result<()> {
        kill(self.pid, signal)
    }

    /// Waits until `inflight up` exits.
    ///
    /// # Errors
    /// It does not exit within [`DEADLINE`].
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

fn member(value: &Value) -> Result<ClusterMember> {
    let text = |key: &str| value[key].as_str().with_context(|| format!("no {key} in {value}"));
    Ok(ClusterMember {
        name: text("name")?.to_owned(),
        pid: value["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).context("no pid")?,
        address: text("address")?.parse()?,
        metrics: text("metrics")?.parse()?,
    })
}
