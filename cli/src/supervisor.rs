//! Keeps a child process alive, and ends it.
//!
//! A child's standard input is a pipe that nothing is written to. Closing it asks the child to drain; the
//! operating system closes it too when this process dies, however that happens, so no child is left behind.
//! Each child is in a process group of its own, so that Ctrl-C reaches the parent alone, which knows the order.

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
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::sync::CancellationToken;

use crate::event::{Member, RoleEvent};
use crate::relay;

/// Lines of a child's log kept to explain its death.
const TAIL_LINES_MAX: usize = 20;
/// Longest line read from a child; the rest of a longer one is dropped.
const LINE_BYTES_MAX: usize = 64 * 1024;
/// Wait before the first restart; doubles with each further one.
const BACKOFF_FIRST: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A child that ran this long is healthy: the next wait is the first again.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);
/// What a child gets beyond its own drain timeout before it is killed.
const KILL_MARGIN: Duration = Duration::from_secs(5);

/// A child to run.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Its name in messages: `router`, `worker-0`, …
    pub name: String,
    /// The subcommand and its flags, but for the addresses.
    pub arguments: Vec<OsString>,
    /// Where it listens; a port of 0 becomes the one it got, so that a restart keeps it.
    pub listen: SocketAddr,
    /// Where its metrics are, likewise.
    pub metrics: SocketAddr,
    /// How long it may take to drain.
    pub drain_timeout: Duration,
}

/// What happened to a child.
#[derive(Debug)]
pub enum Event {
    /// Its model is being loaded.
    Loading {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// It runs; for the first time or again.
    Ready(Member),
    /// It could not be started at all; nothing is tried again.
    Failed {
        /// How it ended, and its last words.
        cause: String,
    },
    /// It died after it had been ready; it will be started again.
    Lost {
        /// How it ended.
        status: String,
        /// When it will be started again.
        retry_in: Duration,
    },
}

/// Shows a child's log line; `urgent` ones matter to everybody.
pub type Show = Arc<dyn Fn(&str, &relay::Line) + Send + Sync>;

/// A child that is kept running until told otherwise.
#[derive(Debug)]
pub struct Keeper {
    task: JoinHandle<()>,
    stop: CancellationToken,
}

impl Keeper {
    /// Starts the child. Its events go to `events` with `index`; `abort` kills it at once.
    pub fn start(
        index: usize,
        spec: Spec,
        events: mpsc::Sender<(usize, Event)>,
        show: Show,
        abort: CancellationToken,
    ) -> Self {
        let stop = CancellationToken::new();
        let told = Told { index, events };
        let task = tokio::spawn(keep(spec, told, show, stop.clone(), abort));
        Self { task, stop }
    }

    /// Lets the child drain and waits until it is gone.
    pub async fn stop(self) {
        self.stop.cancel();
        // The task does not panic; if it did, `kill_on_drop` has ended the child.
        let _ = self.task.await;
    }
}

struct Told {
    index: usize,
    events: mpsc::Sender<(usize, Event)>,
}

impl Told {
    async fn tell(&self, event: Event) {
        // The receiver leaves only when the cluster stops, and then nobody wants to know.
        let _ = self.events.send((self.index, event)).await;
    }
}

enum Outcome {
    Stopped,
    Died { status: String, was_ready: bool, tail: Vec<String> },
}

async fn keep(mut spec: Spec, told: Told, show: Show, stop: CancellationToken, abort: CancellationToken) {
    let mut ever_ready = false;
    let mut backoff = BACKOFF_FIRST;
    loop {
        let started = Instant::now();
        let outcome = match Running::start(&spec, &show) {
            Ok(running) => running.attend(&mut spec, &told, &stop, &abort).await,
            Err(error) => Outcome::Died { status: error.to_string(), was_ready: false, tail: Vec::new() },
        };
        let (status, was_ready, tail) = match outcome {
            Outcome::Stopped => return,
            Outcome::Died { status, was_ready, tail } => (status, was_ready, tail),
        };
        ever_ready |= was_ready;
        if !ever_ready {
            told.tell(Event::Failed { cause: describe_death(&spec.name, &status, &tail) }).await;
            return;
        }
        if started.elapsed() >= HEALTHY_AFTER {
            backoff = BACKOFF_FIRST;
        }
        // Half of the wait is random, so that workers killed together do not come back in step.
        let retry_in = backoff.mul_f64(rand::rng().random_range(0.5..1.0));
        backoff = (backoff * 2).min(BACKOFF_MAX);
        told.tell(Event::Lost { status, retry_in }).await;
        tokio::select! {
            () = tokio::time::sleep(retry_in) => {}
            () = stop.cancelled() => return,
            () = abort.cancelled() => return,
        }
    }
}

fn describe_death(name: &str, status: &str, tail: &[String]) -> String {
    let mut cause = format!("{name} ended before it was ready: {status}");
    if !tail.is_empty() {
        cause.push_str("; its last lines:");
        for line in tail {
            cause.push_str(&format!("\n  {name} │ {line}"));
        }
    }
    cause
}

/// How a process ended, in words.
pub fn describe_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(9)) => "killed by signal 9 (SIGKILL; out of memory is a usual cause)".to_owned(),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// This very program. After a rebuild its path names another version, or nothing: then the running one.
fn program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    Ok(if path.is_file() { path } else { PathBuf::from("/proc/self/exe") })
}

struct Running {
    child: Child,
    pid: u32,
    /// Held open: its end is what tells the child to drain.
    input: ChildStdin,
    output: FramedRead<tokio::process::ChildStdout, LinesCodec>,
    relay: JoinHandle<()>,
    tail: Arc<Mutex<VecDeque<String>>>,
}

impl Running {
    fn start(spec: &Spec, show: &Show) -> io::Result<Self> {
        let mut child = Command::new(program()?)
            .args(&spec.arguments)
            .arg(format!("--listen={}", spec.listen))
            .arg(format!("--metrics-listen={}", spec.metrics))
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
        let relay = tokio::spawn(relay_log(spec.name.clone(), log, Arc::clone(&tail), Arc::clone(show)));
        let output = FramedRead::new(output, LinesCodec::new_with_max_length(LINE_BYTES_MAX));
        Ok(Self { child, pid, input, output, relay, tail })
    }

    /// Stays with the child until it ends.
    async fn attend(
        mut self,
        spec: &mut Spec,
        told: &Told,
        stop: &CancellationToken,
        abort: &CancellationToken,
    ) -> Outcome {
        let mut was_ready = false;
        let mut talks = true;
        loop {
            tokio::select! {
                status = self.child.wait() => {
                    let status = status.map_or_else(|error| error.to_string(), describe_status);
                    // The pipe ends with the process, so this ends too, and the last words are in the tail.
                    let _ = tokio::time::timeout(Duration::from_secs(1), &mut self.relay).await;
                    let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
                    return Outcome::Died { status, was_ready, tail };
                }
                line = self.output.next(), if talks => match line {
                    Some(Ok(line)) => match serde_json::from_str(&line) {
                        Ok(RoleEvent::Ready { address, metrics }) => {
                            was_ready = true;
                            spec.listen = address;
                            if let Some(metrics) = metrics {
                                spec.metrics = metrics;
                            }
                            told.tell(Event::Ready(Member { name: spec.name.clone(), pid: self.pid, address, metrics })).await;
                        }
                        Ok(RoleEvent::Loading { done, total }) => told.tell(Event::Loading { done, total }).await,
                        Ok(RoleEvent::Listening { .. }) | Err(_) => {}
                    },
                    Some(Err(_)) => {}
                    None => talks = false,
                },
                () = stop.cancelled() => {
                    self.end(spec.drain_timeout, abort).await;
                    return Outcome::Stopped;
                }
                () = abort.cancelled() => {
                    let _ = self.child.kill().await;
                    return Outcome::Stopped;
                }
            }
        }
    }

    async fn end(mut self, drain_timeout: Duration, abort: &CancellationToken) {
        drop(self.input);
        tokio::select! {
            _ = self.child.wait() => {}
            () = tokio::time::sleep(drain_timeout + KILL_MARGIN) => {}
            () = abort.cancelled() => {}
        }
        // Does nothing if it has ended.
        let _ = self.child.kill().await;
        let _ = tokio::time::timeout(Duration::from_secs(1), self.relay).await;
    }
}

async fn relay_log(
    name: String,
    log: impl AsyncRead + Unpin,
    tail: Arc<Mutex<VecDeque<String>>>,
    show: Show,
) {
    let mut lines = FramedRead::new(log, LinesCodec::new_with_max_length(LINE_BYTES_MAX));
    // After an error (a line too long) the decoder ends its stream once, and goes on after that.
    let mut resumes = false;
    loop {
        match lines.next().await {
            Some(Ok(raw)) => {
                let line = relay::read(&raw);
                show(&name, &line);
                let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
                if tail.len() == TAIL_LINES_MAX {
                    tail.pop_front();
                }
                tail.push_back(line.text);
            }
            Some(Err(_)) => resumes = true,
            None if resumes => resumes = false,
            None => return,
        }
    }
}
