use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};

use anyhow::{Context, Result, bail};
use inflight_proto::v1::inference_client::InferenceClient;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tonic::transport::{Channel, Endpoint};

use crate::DEADLINE;
use crate::process::{Mark, kill};

/// One router or worker that a test starts, stops and starts again by itself. Dropped, it is killed.
#[derive(Debug)]
pub struct Role {
    program: PathBuf,
    arguments: Vec<String>,
    /// Where it listens; the same after a restart.
    pub address: SocketAddr,
    /// Where its metrics are, likewise.
    pub metrics: SocketAddr,
    /// Its process.
    pub pid: u32,
    child: Child,
    log: Arc<StdMutex<String>>,
}

impl Role {
    /// Starts `program ROLE` with free ports and `flags`. A worker is ready when this returns; a router listens.
    ///
    /// # Errors
    /// It does not get so far; the error has what it wrote.
    pub async fn start(program: PathBuf, role: &str, flags: &[String]) -> Result<Self> {
        let mut arguments = vec![role.to_owned()];
        arguments.extend_from_slice(flags);
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::spawn(program, arguments, any, any).await
    }

    /// Starts it again, at its old addresses; it must have ended.
    ///
    /// # Errors
    /// As for the start.
    pub async fn restart(&mut self) -> Result<()> {
        let (program, arguments) = (self.program.clone(), self.arguments.clone());
        let log = self.log();
        let next = Self::spawn(program, arguments, self.address, self.metrics).await;
        *self = next.with_context(|| format!("before, it wrote:\n{log}"))?;
        Ok(())
    }

    async fn spawn(
        program: PathBuf,
        arguments: Vec<String>,
        listen: SocketAddr,
        metrics: SocketAddr,
    ) -> Result<Self> {
        let mark = Mark::new();
        let (name, value) = mark.variable();
        let mut child = Command::new(&program)
            .args(&arguments)
            .arg(format!("--listen={listen}"))
            .arg(format!("--metrics-listen={metrics}"))
            .env(name, value)
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
        let begun = async {
            loop {
                let line = events.next_line().await?.context("it ended")?;
                let event: Value = serde_json::from_str(&line)?;
                if ["listening", "ready"].contains(&event["event"].as_str().unwrap_or_default()) {
                    let text = |key: &str| event[key].as_str().context("no address in its event");
                    return anyhow::Ok((text("address")?.parse()?, text("metrics")?.parse()?));
                }
            }
        };
        let begun = tokio::time::timeout(DEADLINE, begun).await.context("it is not ready in time");
        let (address, metrics) = match begun.and_then(|begun| begun) {
            Ok(addresses) => addresses,
            Err(error) => {
                let log = log.lock().unwrap_or_else(PoisonError::into_inner).clone();
                bail!("{arguments:?} did not start: {error:#}; it wrote:\n{log}");
            }
        };
        // Whoever writes to a pipe that nobody reads waits.
        tokio::spawn(async move { while let Ok(Some(_)) = events.next_line().await {} });
        Ok(Self { program, arguments, address, metrics, pid, child, log })
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, signal: i32) -> Result<()> {
        kill(self.pid, signal)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        let ended = tokio::time::timeout(DEADLINE, self.child.wait()).await;
        Ok(ended.with_context(|| format!("it did not end; it wrote:\n{}", self.log()))??)
    }

    /// What it wrote to its standard error since it was started last.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A client of it, if it is a router, with a connection of its own that is made when it is needed.
    ///
    /// # Errors
    /// Its address makes no endpoint.
    pub fn client(&self) -> Result<InferenceClient<Channel>> {
        Ok(InferenceClient::new(Endpoint::from_shared(format!("http://{}", self.address))?.connect_lazy()))
    }
}
