//! Supervision of a child process: restart with exponential backoff and jitter, graceful shutdown.
//!
//! The standard input of a child is a pipe without data. Closing it asks the child to drain; the operating
//! system closes it when this process dies, so no child is orphaned. Each child has its own process group, so
//! that Ctrl-C reaches only the parent, which shuts the children down in order.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use rand::Rng as _;
use tokio::io::AsyncRead;
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::sync::CancellationToken;

use crate::child_log;
use crate::event::{ClusterMember, RoleEvent};
use crate::recording_dir::RecordingDir;

/// Number of last log lines of a child that are reported with its death.
const TAIL_LINES_MAX: usize = 20;
/// Maximum length of a line read from a child; longer lines are dropped.
const LINE_BYTES_MAX: usize = 64 * 1024;
/// Backoff before the first restart; doubles with each further one.
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
/// Maximum backoff before a restart.
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// Uptime after which a child counts as healthy, which resets the backoff.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);
/// Time in addition to the drain timeout before a child is killed.
const KILL_MARGIN: Duration = Duration::from_secs(5);

/// Command line of a child process.
#[derive(Debug, Clone)]
pub struct ChildSpec {
    /// Name in messages: `router`, `worker-0`, …
    pub name: String,
    /// Subcommand and flags except the addresses.
    pub arguments: Vec<OsString>,
    /// gRPC listen address; port 0 is replaced by the bound port, which restarts keep.
    pub listen: SocketAddr,
    /// Listen address of the Prometheus endpoint; port 0 is replaced by the bound port.
    pub metrics: SocketAddr,
    /// Listen address of the HTTP APIs, if served; port 0 is replaced by the bound port.
    pub http: Option<SocketAddr>,
    /// Drain timeout of the child.
    pub drain_timeout: Duration,
    /// Where the child records, if it does: each start in a file of its own.
    pub record: Option<RecordingDir>,
    /// Environment variables that the child does not inherit.
    pub unset: Vec<OsString>,
}

/// Lifecycle event of a child process.
#[derive(Debug)]
pub enum ChildEvent {
    /// The child is loading its model.
    Loading {
        /// Bytes loaded so far.
        done: u64,
        /// Bytes to load.
        total: u64,
    },
    /// The child is ready, after its first start or a restart.
    Ready(ClusterMember),
    /// The child ended before it was ever ready; it is not restarted.
    Failed {
        /// Exit status and last log lines.
        cause: String,
    },
    /// The child died after it had been ready; it will be restarted.
    Lost {
        /// Exit status, in words.
        status: String,
        /// Time until the restart.
        retry_in: Duration,
    },
}

/// Callback that receives the log lines of children with the child's name.
pub type LogSink = Arc<dyn Fn(&str, &child_log::LogLine) + Send + Sync>;

/// Kills a child, which its supervisor starts again. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Killer(mpsc::Sender<oneshot::Sender<bool>>);

impl Killer {
    /// Creates a killer and the receiver of its requests, each answered by whether the child ran.
    pub fn new() -> (Self, mpsc::Receiver<oneshot::Sender<bool>>) {
        let (sender, receiver) = mpsc::channel(1);
        (Self(sender), receiver)
    }

    /// Kills the child. Returns whether it ran.
    pub async fn kill(&self) -> bool {
        let (answer, killed) = oneshot::channel();
        self.0.send(answer).await.is_ok() && killed.await.unwrap_or(false)
    }
}

/// Handle to the task that runs and restarts a child process until it is stopped.
#[derive(Debug)]
pub struct ChildSupervisor {
    task: JoinHandle<()>,
    stop: CancellationToken,
    killer: Killer,
}

impl ChildSupervisor {
    /// Starts a child. Its events are sent to `events` with `index`; cancelling `abort` kills it immediately.
    pub fn start(
        index: usize,
        spec: ChildSpec,
        events: mpsc::Sender<(usize, ChildEvent)>,
        log_sink: LogSink,
        abort: CancellationToken,
    ) -> Self {
        let stop = CancellationToken::new();
        let sender = EventSender { index, events };
        let (killer, kills) = Killer::new();
        let task = tokio::spawn(supervise(spec, sender, log_sink, kills, stop.clone(), abort));
        Self { task, stop, killer }
    }

    /// Returns what kills the child.
    pub fn killer(&self) -> Killer {
        self.killer.clone()
    }

    /// Asks the child to drain and waits until it has exited.
    pub async fn stop(self) {
        self.stop.cancel();
        // The task does not panic; if it did, `kill_on_drop` would have killed the child.
        let _ = self.task.await;
    }
}

struct EventSender {
    index: usize,
    events: mpsc::Sender<(usize, ChildEvent)>,
}

impl EventSender {
    async fn send(&self, event: ChildEvent) {
        // The receiver is dropped only during the cluster's shutdown; events are irrelevant then.
        let _ = self.events.send((self.index, event)).await;
    }
}

enum ChildExit {
    Stopped,
    Died { status: String, was_ready: bool, tail: Vec<String> },
}

async fn supervise(
    mut spec: ChildSpec,
    sender: EventSender,
    log_sink: LogSink,
    mut kills: mpsc::Receiver<oneshot::Sender<bool>>,
    stop: CancellationToken,
    abort: CancellationToken,
) {
    let mut ever_ready = false;
    let mut backoff = BACKOFF_FIRST;
    let mut starts = 0u32;
    loop {
        let started = Instant::now();
        starts = starts.saturating_add(1);
        let outcome = match RunningChild::start(&spec, starts, &log_sink) {
            Ok(running) => running.wait(&mut spec, &sender, &mut kills, &stop, &abort).await,
            Err(error) => ChildExit::Died { status: error.to_string(), was_ready: false, tail: Vec::new() },
        };
        let (status, was_ready, tail) = match outcome {
            ChildExit::Stopped => return,
            ChildExit::Died { status, was_ready, tail } => (status, was_ready, tail),
        };
        ever_ready |= was_ready;
        if !ever_ready {
            sender.send(ChildEvent::Failed { cause: failure_message(&spec.name, &status, &tail) }).await;
            return;
        }
        if started.elapsed() >= HEALTHY_AFTER {
            backoff = BACKOFF_FIRST;
        }
        // Jitter of up to half of the backoff, so that workers killed together do not restart in lockstep.
        let retry_in = backoff.mul_f64(rand::rng().random_range(0.5..1.0));
        backoff = (backoff * 2).min(BACKOFF_MAX);
        sender.send(ChildEvent::Lost { status, retry_in }).await;
        let pause = tokio::time::sleep(retry_in);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                // Dead already.
                Some(answer) = kills.recv() => drop(answer.send(false)),
                () = stop.cancelled() => return,
                () = abort.cancelled() => return,
            }
        }
    }
}

fn failure_message(name: &str, status: &str, tail: &[String]) -> String {
    let mut cause = format!("{name} ended before it was ready: {status}");
    if !tail.is_empty() {
        cause.push_str("; its last lines:");
        for line in tail {
            cause.push_str(&format!("\n  {name} │ {line}"));
        }
    }
    cause
}

/// Describes an exit status in words.
pub fn describe_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(9)) => "killed by signal 9 (SIGKILL; out of memory is a usual cause)".to_owned(),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Returns the path of the running executable; `/proc/self/exe` if its file has been replaced or removed.
fn program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    Ok(if path.is_file() { path } else { PathBuf::from("/proc/self/exe") })
}

struct RunningChild {
    child: Child,
    pid: u32,
    /// Write end of the child's standard input; closing it asks the child to drain.
    input: ChildStdin,
    output: FramedRead<tokio::process::ChildStdout, LinesCodec>,
    log_task: JoinHandle<()>,
    tail: Arc<Mutex<VecDeque<String>>>,
}

impl RunningChild {
    /// Starts the child; `starts` counts the starts so far, this one included.
    fn start(spec: &ChildSpec, starts: u32, log_sink: &LogSink) -> io::Result<Self> {
        let mut command = Command::new(program()?);
        for variable in &spec.unset {
            command.env_remove(variable);
        }
        let mut child = command
            .args(&spec.arguments)
            .arg(format!("--listen={}", spec.listen))
            .arg(format!("--metrics-listen={}", spec.metrics))
            .args(spec.http.map(|http| format!("--http-listen={http}")))
            .args(spec.record.as_ref().map(|record| record.flag(&spec.name, starts)))
            .arg("--supervised")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .process_group(0)
            .spawn()?;
        let piped = |name: &str| io::Error::other(format!("{}: no {name}", spec.name));
        let pid = child.id().ok_or_else(|| piped("process id"))?;
        let input = child.stdin.take().ok_or_else(|| piped("standard input"))?;
        let output = child.stdout.take().ok_or_else(|| piped("standard output"))?;
        let log = child.stderr.take().ok_or_else(|| piped("standard error"))?;
        let tail = Arc::new(Mutex::new(VecDeque::with_capacity(TAIL_LINES_MAX)));
        let log_task =
            tokio::spawn(forward_log(spec.name.clone(), log, Arc::clone(&tail), Arc::clone(log_sink)));
        let output = FramedRead::new(output, LinesCodec::new_with_max_length(LINE_BYTES_MAX));
        Ok(Self { child, pid, input, output, log_task, tail })
    }

    /// Forwards the child's events until it exits, or shuts it down when `stop` or `abort` is cancelled.
    async fn wait(
        mut self,
        spec: &mut ChildSpec,
        sender: &EventSender,
        kills: &mut mpsc::Receiver<oneshot::Sender<bool>>,
        stop: &CancellationToken,
        abort: &CancellationToken,
    ) -> ChildExit {
        let mut was_ready = false;
        let mut stdout_open = true;
        let mut killed = false;
        loop {
            tokio::select! {
                status = self.child.wait() => {
                    let status = match status {
                        Ok(_) if killed => "killed as asked".to_owned(),
                        Ok(status) => describe_status(status),
                        Err(error) => error.to_string(),
                    };
                    // The pipe closes with the process; wait until its last lines are in the tail.
                    let _ = tokio::time::timeout(Duration::from_secs(1), &mut self.log_task).await;
                    let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
                    return ChildExit::Died { status, was_ready, tail };
                }
                line = self.output.next(), if stdout_open => match line {
                    Some(Ok(line)) => match serde_json::from_str(&line) {
                        Ok(RoleEvent::Ready { address, metrics, http }) => {
                            was_ready = true;
                            spec.listen = address;
                            if let Some(metrics) = metrics {
                                spec.metrics = metrics;
                            }
                            spec.http = http.or(spec.http);
                            sender.send(ChildEvent::Ready(ClusterMember { name: spec.name.clone(), pid: self.pid, address, metrics, http })).await;
                        }
                        Ok(RoleEvent::Loading { done, total }) => sender.send(ChildEvent::Loading { done, total }).await,
                        Ok(RoleEvent::Listening { .. }) | Err(_) => {}
                    },
                    Some(Err(_)) => {}
                    None => stdout_open = false,
                },
                // The next turn finds it dead.
                Some(answer) = kills.recv() => {
                    killed = self.child.start_kill().is_ok();
                    let _ = answer.send(killed);
                }
                () = stop.cancelled() => {
                    self.shut_down(spec.drain_timeout, abort).await;
                    return ChildExit::Stopped;
                }
                () = abort.cancelled() => {
                    let _ = self.child.kill().await;
                    return ChildExit::Stopped;
                }
            }
        }
    }

    async fn shut_down(mut self, drain_timeout: Duration, abort: &CancellationToken) {
        drop(self.input);
        tokio::select! {
            _ = self.child.wait() => {}
            () = tokio::time::sleep(drain_timeout + KILL_MARGIN) => {}
            () = abort.cancelled() => {}
        }
        // No effect if the child has exited.
        let _ = self.child.kill().await;
        let _ = tokio::time::timeout(Duration::from_secs(1), self.log_task).await;
    }
}

async fn forward_log(
    name: String,
    log: impl AsyncRead + Unpin,
    tail: Arc<Mutex<VecDeque<String>>>,
    log_sink: LogSink,
) {
    let mut lines = FramedRead::new(log, LinesCodec::new_with_max_length(LINE_BYTES_MAX));
    // After an error (a line too long) the decoder ends its stream once and then continues.
    let mut ends_once = false;
    loop {
        match lines.next().await {
            Some(Ok(raw)) => {
                let line = child_log::parse(&raw);
                log_sink(&name, &line);
                let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
                if tail.len() == TAIL_LINES_MAX {
                    tail.pop_front();
                }
                tail.push_back(line.text);
            }
            Some(Err(_)) => ends_once = true,
            None if ends_once => ends_once = false,
            None => return,
        }
    }
}
