//! A single router or worker process that a test can restart.

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
use crate::process::{HOST_CACHE_BYTES, ProcessTag, kill};

/// Function that runs in the new process before its program does; only async-signal-safe calls are allowed in it.
pub type Confine = fn() -> std::io::Result<()>;

/// Router or worker process that a test starts, signals and restarts. The drop kills it.
#[derive(Debug)]
pub struct RoleProcess {
    program: PathBuf,
    arguments: Vec<String>,
    variables: Vec<(String, String)>,
    confine: Option<Confine>,
    /// gRPC address; the same after a restart.
    pub address: SocketAddr,
    /// Address of the metrics endpoint; the same after a restart.
    pub metrics: SocketAddr,
    /// Process id.
    pub pid: u32,
    child: Child,
    log: Arc<StdMutex<String>>,
}

impl RoleProcess {
    /// Starts `program ROLE` on free ports with `flags`; waits until a worker is ready or a router listens.
    ///
    /// # Errors
    /// The process does not get ready; the error contains its standard error.
    pub async fn start(program: PathBuf, role: &str, flags: &[String]) -> Result<Self> {
        Self::start_with_env(program, role, flags, &[]).await
    }

    /// [`RoleProcess::start`] with environment variables, which the process has after a restart, too.
    ///
    /// # Errors
    /// The process does not get ready; the error contains its standard error.
    pub async fn start_with_env(
        program: PathBuf,
        role: &str,
        flags: &[String],
        variables: &[(String, String)],
    ) -> Result<Self> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::spawn(program, with_role(role, flags), variables.to_vec(), None, any, any).await
    }

    /// [`RoleProcess::start`] in a process that `confine` has changed.
    ///
    /// # Errors
    /// `confine` fails, or the process does not get ready; the error contains its standard error.
    pub async fn start_confined(
        program: PathBuf,
        role: &str,
        flags: &[String],
        confine: Confine,
    ) -> Result<Self> {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::spawn(program, with_role(role, flags), Vec::new(), Some(confine), any, any).await
    }

    /// Starts the process again on its previous addresses; it must have exited.
    ///
    /// # Errors
    /// The process does not get ready; the error contains its standard error.
    pub async fn restart(&mut self) -> Result<()> {
        let (program, arguments) = (self.program.clone(), self.arguments.clone());
        let log = self.log();
        let next =
            Self::spawn(program, arguments, self.variables.clone(), self.confine, self.address, self.metrics)
                .await;
        *self = next.with_context(|| format!("before, it wrote:\n{log}"))?;
        Ok(())
    }

    /// Replaces this process, which must have exited, by one of another binary with other flags on the same addresses.
    ///
    /// # Errors
    /// The process does not get ready; the error contains its standard error.
    pub async fn restart_as(&mut self, program: PathBuf, flags: &[String]) -> Result<()> {
        self.program = program;
        self.arguments.truncate(1);
        self.arguments.extend_from_slice(flags);
        self.restart().await
    }

    /// Returns the flags that the process was started with.
    pub fn flags(&self) -> &[String] {
        // The first argument is the role.
        &self.arguments[1..]
    }

    async fn spawn(
        program: PathBuf,
        arguments: Vec<String>,
        variables: Vec<(String, String)>,
        confine: Option<Confine>,
        listen: SocketAddr,
        metrics: SocketAddr,
    ) -> Result<Self> {
        let tag = ProcessTag::new();
        let (name, value) = tag.variable();
        let mut command = Command::new(&program);
        if let Some(confine) = confine {
            // SAFETY: the caller promises that `confine` makes only async-signal-safe calls.
            unsafe { command.pre_exec(confine) };
        }
        let mut child = command
            .args(&arguments)
            .arg(format!("--listen={listen}"))
            .arg(format!("--metrics-listen={metrics}"))
            .env(name, value)
            .envs(variables.iter().cloned())
            .env(HOST_CACHE_BYTES.0, HOST_CACHE_BYTES.1)
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
        let ready = async {
            loop {
                let line = events.next_line().await?.context("it ended")?;
                let event: Value = serde_json::from_str(&line)?;
                if ["listening", "ready"].contains(&event["event"].as_str().unwrap_or_default()) {
                    let text = |key: &str| event[key].as_str().context("no address in its event");
                    return anyhow::Ok((text("address")?.parse()?, text("metrics")?.parse()?));
                }
            }
        };
        let ready = tokio::time::timeout(DEADLINE, ready).await.context("it is not ready in time");
        let (address, metrics) = match ready.and_then(|ready| ready) {
            Ok(addresses) => addresses,
            Err(error) => {
                let log = log.lock().unwrap_or_else(PoisonError::into_inner).clone();
                bail!("{arguments:?} did not start: {error:#}; it wrote:\n{log}");
            }
        };
        // Drains the pipe: the process would block once it is full.
        tokio::spawn(async move { while let Ok(Some(_)) = events.next_line().await {} });
        Ok(Self { program, arguments, variables, confine, address, metrics, pid, child, log })
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// The process does not exist.
    pub fn signal(&self, signal: i32) -> Result<()> {
        kill(self.pid, signal)
    }

    /// Waits until the process exits.
    ///
    /// # Errors
    /// It does not exit within [`DEADLINE`].
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        let ended = tokio::time::timeout(DEADLINE, self.child.wait()).await;
        Ok(ended.with_context(|| format!("it did not end; it wrote:\n{}", self.log()))??)
    }

    /// Returns the standard error since the last start.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a client of this router on a new connection, which is opened at the first call.
    ///
    /// # Errors
    /// The address is no valid endpoint.
    pub fn client(&self) -> Result<InferenceClient<Channel>> {
        Ok(InferenceClient::new(Endpoint::from_shared(format!("http://{}", self.address))?.connect_lazy()))
    }
}

fn with_role(role: &str, flags: &[String]) -> Vec<String> {
    let mut arguments = vec![role.to_owned()];
    arguments.extend_from_slice(flags);
    arguments
}
