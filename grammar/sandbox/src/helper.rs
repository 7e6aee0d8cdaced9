//! Owner's side: starts the helper, restarts it when it dies, and hands it requests.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions};
use tokio::sync::{Semaphore, oneshot};

use crate::child::{ENDS, End};
use crate::frame::{Frame, Kind};
use crate::{Limits, StateError};

/// Maximum time to prepare a state; a helper that takes longer is started again.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval at which a helper is asked whether it runs while a request waits for it, and the time without any message from it after
/// which it is started again: it was stopped, or it hangs.
const PING_INTERVAL: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Pauses before a helper that died is started again: the first, and the longest, which doubling leads to.
const RESTART_FIRST: Duration = Duration::from_millis(50);
const RESTART_LONGEST: Duration = Duration::from_secs(5);
/// Capacity of the queue of messages to the helper. A running helper reads each at once, so a full queue means that it is stopped.
const QUEUED_MAX: usize = 64;
/// Times that a request is run again after its helper has died.
const RETRIES: usize = 3;
/// Consecutive helpers without confinement after which the host counts as unable to confine. A single one may have met a limit of
/// processes or of memory that others had reached. At most [`RETRIES`], so that a waiting request fails with the reason.
const UNCONFINED_MAX: u32 = 3;

/// Program of a helper, whose `main` calls [`crate::serve`] for these arguments.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its file.
    pub path: PathBuf,
    /// Its name in lists of processes.
    pub name: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// Options of a [`Helper`].
#[derive(Debug, Clone)]
pub struct HelperOptions {
    /// What it is for, as in "helper process for grammars", in logs.
    pub purpose: &'static str,
    /// Program of the helper.
    pub program: Program,
    /// Limits of each request's process.
    pub limits: Limits,
    /// Maximum requests at once.
    pub slots: usize,
}

/// Answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// What the work returned.
    pub bytes: Vec<u8>,
    /// Processor time that it used.
    pub cpu: Duration,
}

/// Reason for which a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelperError {
    /// The work needs more processor time than allowed.
    #[error("it takes more than {:.1} s of processor time", .0.as_secs_f64())]
    CpuTime(Duration),
    /// The work needs more memory or stack than allowed.
    #[error("it takes more than {} MiB of memory, or nests too deep", .0 >> 20)]
    Memory(u64),
    /// The work panicked.
    #[error("it failed: {0}")]
    Panic(String),
    /// The state cannot be prepared: no request can be answered.
    #[error("{0}")]
    State(String),
    /// This machine cannot confine the work: no request can be answered until that changes.
    #[error("{0}")]
    Host(String),
    /// No process is available for now; says nothing about the request.
    #[error("{0}")]
    Unavailable(String),
}

/// Process of this program that does untrusted work, one fork for each request. Ends when it is dropped.
pub struct Helper {
    owner: Arc<Owner>,
}

/// Source of the bytes of the state that a helper prepares.
type State = Box<dyn Fn() -> Result<Vec<u8>, StateError> + Send + Sync>;

struct Owner {
    options: HelperOptions,
    state: State,
    /// One permit for each slot.
    slots: Semaphore,
    live: Mutex<Live>,
    /// Signals that `live` has been stopped.
    stopped: Condvar,
}

#[derive(Default)]
struct Live {
    /// Whether the thread that owns the process was started.
    started: bool,
    stopped: bool,
    /// The process, while it runs and has not been waited for.
    process: Option<Pid>,
    /// Messages to the process, from when it is ready to when it ends.
    requests: Option<mpsc::SyncSender<Frame>>,
    /// Whether the process of the last start was ready.
    was_ready: bool,
    /// Requests that wait for the process to be ready.
    unready: Vec<oneshot::Sender<Result<(), HelperError>>>,
    /// Requests that were sent to it.
    sent: HashMap<u64, oneshot::Sender<Result<Answer, HelperError>>>,
    /// Time of its last message, or of the first request that waits for one.
    heard: Option<Instant>,
    /// Why requests are refused at once: the state is unusable, which ends all attempts, or the last helpers could confine nothing.
    failed: Option<HelperError>,
    /// Consecutive helpers that could confine nothing.
    unconfined: u32,
    /// Why the last start failed.
    last_failure: Option<String>,
    next_request: u64,
}

/// Request that was sent; cancelled on drop.
struct Sent<'a> {
    owner: &'a Owner,
    request: u64,
}

impl Live {
    /// Records that a helper process failed. Returns the error with which the requests that waited for it end.
    fn record_failure(&mut self, ended: HelperError) -> HelperError {
        match ended {
            HelperError::Host(reason) => {
                self.unconfined = self.unconfined.saturating_add(1);
                if self.unconfined < UNCONFINED_MAX {
                    return HelperError::Unavailable(reason);
                }
                self.failed = Some(HelperError::Host(reason.clone()));
                HelperError::Host(reason)
            }
            HelperError::State(reason) => {
                self.failed = Some(HelperError::State(reason.clone()));
                HelperError::State(reason)
            }
            other => {
                (self.unconfined, self.failed) = (0, None);
                other
            }
        }
    }
}

impl Helper {
    /// Creates a helper that is started by its first request or by [`Helper::start`]. `state` gives the bytes that it prepares.
    pub fn new(
        options: HelperOptions,
        state: impl Fn() -> Result<Vec<u8>, StateError> + Send + Sync + 'static,
    ) -> Self {
        let slots = Semaphore::new(options.slots.max(1));
        let live = Mutex::default();
        Self {
            owner: Arc::new(Owner { options, state: Box::new(state), slots, live, stopped: Condvar::new() }),
        }
    }

    /// Starts the process, so that the first request does not wait for its state. Returns at once.
    pub fn start(&self) {
        let _ = self.owner.start();
    }

    /// Maximum requests at once.
    pub fn slots(&self) -> usize {
        self.owner.options.slots.max(1)
    }

    /// Number of the process, while it runs.
    pub fn process(&self) -> Option<u32> {
        self.owner.lock().process.map(|process| process.as_raw_nonzero().get().cast_unsigned())
    }

    /// Runs a request in a process of its own; waits for a slot if all are taken. Dropping the future ends the process.
    ///
    /// Must be called within a Tokio runtime that has a clock.
    ///
    /// # Errors
    /// [`HelperError`].
    pub async fn run(&self, request: &[u8]) -> Result<Answer, HelperError> {
        // The semaphore is never closed.
        let _slot = self.owner.slots.acquire().await;
        let mut tries = 0;
        loop {
            let answer = self.owner.try_run(request.to_vec()).await;
            match answer {
                Err(HelperError::Unavailable(reason)) if tries < RETRIES => {
                    tracing::debug!(reason, "a request is run again after its helper process failed");
                    tries += 1;
                }
                answer => return answer,
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let mut live = self.owner.lock();
        live.stopped = true;
        kill(&live);
        self.owner.stopped.notify_all();
    }
}

impl std::fmt::Debug for Helper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Helper").field("options", &self.owner.options).finish_non_exhaustive()
    }
}

fn kill(live: &Live) {
    if let Some(process) = live.process {
        // It has not been waited for, so the number is its own. With its forks, which are in its group: one that is left, perhaps stopped,
        // would keep the pipes open.
        let _ = rustix::process::kill_process_group(process, Signal::KILL);
    }
}

fn gone(reason: &str) -> HelperError {
    HelperError::Unavailable(format!("the helper process {reason}"))
}

impl Owner {
    fn lock(&self) -> MutexGuard<'_, Live> {
        // Consistent at every call that could panic.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that owns the process, once.
    fn start(self: &Arc<Self>) -> Result<(), HelperError> {
        let mut live = self.lock();
        if live.started {
            return Ok(());
        }
        // The helper ends with the thread that has started it, by the kernel.
        let thread = std::thread::Builder::new().name("helper-owner".to_owned());
        let owner = Arc::clone(self);
        let spawned = thread.spawn(move || owner.keep());
        spawned.map_err(|error| HelperError::Unavailable(format!("no thread can be started: {error}")))?;
        live.started = true;
        Ok(())
    }

    async fn try_run(self: &Arc<Self>, request: Vec<u8>) -> Result<Answer, HelperError> {
        self.start()?;
        self.ready().await?;
        let (answered, mut answer) = oneshot::channel();
        let sent = {
            let mut live = self.lock();
            let number = live.next_request;
            live.next_request += 1;
            let frame = Frame::new(Kind::Run, number, request);
            let requests = live.requests.as_ref().ok_or_else(|| gone("has ended"))?;
            match requests.try_send(frame) {
                Ok(()) => {}
                Err(mpsc::TrySendError::Full(_)) => return Err(gone("does not read")),
                Err(mpsc::TrySendError::Disconnected(_)) => {
                    // The next try waits for the next process.
                    live.requests = None;
                    return Err(gone("has ended"));
                }
            }
            if live.sent.is_empty() {
                live.heard = Some(Instant::now());
            }
            live.sent.insert(number, answered);
            Sent { owner: self, request: number }
        };
        let answer = loop {
            match tokio::time::timeout(PING_INTERVAL, &mut answer).await {
                // Without an answer, its sender was dropped with the process.
                Ok(answer) => break answer.unwrap_or_else(|_| Err(gone("has ended"))),
                Err(_) => self.ping(),
            }
        };
        drop(sent);
        answer
    }

    /// Asks the process whether it runs, and ends it if it has been silent for too long, which fails its requests.
    fn ping(&self) {
        let live = self.lock();
        if live.heard.is_some_and(|heard| heard.elapsed() > SILENCE_MAX) {
            tracing::warn!("the helper process for {} does not answer; it is ended", self.options.purpose);
            kill(&live);
        } else if let Some(requests) = &live.requests {
            // Its end fails the request.
            let _ = requests.try_send(Frame::new(Kind::Ping, 0, Vec::new()));
        }
    }

    /// Waits until the process has prepared its state.
    async fn ready(&self) -> Result<(), HelperError> {
        let wait = {
            let mut live = self.lock();
            match &*live {
                Live { failed: Some(error), .. } => return Err(error.clone()),
                Live { requests: Some(_), .. } => return Ok(()),
                _ => {}
            }
            let (readied, ready) = oneshot::channel();
            live.unready.push(readied);
            ready
        };
        // Its thread answers after each attempt, and each has a limit.
        wait.await.unwrap_or_else(|_| Err(gone("has ended")))
    }

    /// Keeps a process running until the helper is dropped or its state cannot be prepared. The body of its thread.
    fn keep(&self) {
        let mut pause = RESTART_FIRST;
        loop {
            let begun = Instant::now();
            let ended = match (self.state)() {
                Ok(state) => self.attempt(state),
                Err(StateError::Unusable(reason)) => Err(HelperError::State(reason)),
                Err(StateError::Unavailable(reason)) => Err(HelperError::Unavailable(reason)),
            };
            let mut live = self.lock();
            (live.process, live.requests) = (None, None);
            live.sent.clear();
            // Who waits since the end of a process that was ready waits for the next one.
            let was_ready = std::mem::take(&mut live.was_ready);
            let waits = was_ready && !live.stopped;
            let unready = if waits { Vec::new() } else { std::mem::take(&mut live.unready) };
            let error = live.record_failure(ended.err().unwrap_or_else(|| gone("has ended")));
            let purpose = self.options.purpose;
            unready.into_iter().for_each(|waiting| drop(waiting.send(Err(error.clone()))));
            if let HelperError::State(reason) = &error {
                tracing::warn!(
                    reason,
                    "the helper process for {purpose} cannot work, so {purpose} are refused"
                );
                return;
            }
            if live.stopped {
                return;
            }
            // Once for each reason: a machine without processes fails every time.
            let reason = error.to_string();
            if live.last_failure.replace(reason.clone()).as_ref() != Some(&reason) {
                match was_ready {
                    true => {
                        tracing::warn!(reason, "the helper process for {purpose} ended; it is started again")
                    }
                    false => tracing::warn!(
                        reason,
                        "the helper process for {purpose} cannot be started, so {purpose} are refused; it is tried again"
                    ),
                }
            }
            pause = if begun.elapsed() > RESTART_LONGEST {
                RESTART_FIRST
            } else {
                RESTART_LONGEST.min(2 * pause)
            };
            let stopped = self.stopped.wait_timeout_while(live, pause, |live| !live.stopped);
            if stopped.unwrap_or_else(PoisonError::into_inner).0.stopped {
                return;
            }
        }
    }

    /// Starts a process and serves requests until it ends.
    fn attempt(&self, state: Vec<u8>) -> Result<(), HelperError> {
        let mut process = self.spawn()?;
        let pipes = (process.stdin.take(), process.stdout.take());
        let ended = match pipes {
            (Some(input), Some(output)) => self.serve(state, input, output),
            _ => Err(gone("has no pipes")),
        };
        {
            let mut live = self.lock();
            kill(&live);
            // From here on its number may be another one's.
            live.process = None;
        }
        let _ = process.wait();
        // The kernel kills its forks with it (PR_SET_PDEATHSIG). As PID 1 of a container, this process becomes their parent and reaps them.
        let group = Pid::from_raw(process.id().cast_signed());
        while let Some(group) = group
            && let Ok(Some(_)) = rustix::process::waitpgid(group, WaitOptions::empty())
        {}
        ended
    }

    fn spawn(&self) -> Result<Child, HelperError> {
        let Program { path, name, arguments } = &self.options.program;
        let mut command = Command::new(path);
        command.arg0(name).args(arguments).current_dir("/").env_clear().process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let spawned = command.spawn().map_err(|error| {
            HelperError::Unavailable(format!("the process {} cannot be started: {error}", path.display()))
        });
        let process = spawned?;
        let mut live = self.lock();
        live.process = Pid::from_raw(process.id().cast_signed());
        if live.stopped {
            kill(&live);
        }
        drop(live);
        Ok(process)
    }

    fn serve(&self, state: Vec<u8>, mut input: ChildStdin, output: ChildStdout) -> Result<(), HelperError> {
        let (requests, queued) = mpsc::sync_channel::<Frame>(QUEUED_MAX);
        let mut output = BufReader::new(output);
        std::thread::scope(|scope| {
            let payload = [&self.options.limits.to_bytes()[..], &state].concat();
            drop(state);
            // Writing may wait for a process that does not read: on a thread of its own, which ends with the process or its messages.
            let writer = std::thread::Builder::new().name("helper-writer".to_owned());
            let writing = writer.spawn_scoped(scope, move || {
                let mut written = Frame::new(Kind::Prepare, 0, payload).write(&mut input);
                while written.is_ok()
                    && let Ok(frame) = queued.recv()
                {
                    written = frame.write(&mut input);
                }
            });
            writing
                .map_err(|error| HelperError::Unavailable(format!("no thread can be started: {error}")))?;
            let ended = self.prepare(&mut output).and_then(|()| {
                let unready = {
                    let mut live = self.lock();
                    (live.requests, live.was_ready) = (Some(requests), true);
                    (live.last_failure, live.failed, live.unconfined) = (None, None, 0);
                    std::mem::take(&mut live.unready)
                };
                unready.into_iter().for_each(|waiting| drop(waiting.send(Ok(()))));
                self.receive(&mut output)
            });
            // Ends the writer: no process reads, and no request is queued.
            let mut live = self.lock();
            kill(&live);
            live.requests = None;
            ended
        })
    }

    /// Waits until the process has prepared its state.
    fn prepare(&self, output: &mut BufReader<ChildStdout>) -> Result<(), HelperError> {
        let begun = Instant::now();
        let (prepared, ends) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let watch = std::thread::Builder::new().name("helper-watch".to_owned());
            let watching = watch.spawn_scoped(scope, move || {
                if ends.recv_timeout(PREPARE_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
                    kill(&self.lock());
                }
            });
            watching
                .map_err(|error| HelperError::Unavailable(format!("no thread can be started: {error}")))?;
            let first = Frame::read(output);
            drop(prepared);
            match first {
                Ok(Some(Frame { kind: Kind::Ready, payload, .. })) => {
                    if !payload.is_empty() {
                        let what = String::from_utf8_lossy(&payload);
                        tracing::warn!(%what, "the kernel does not confine the processes of the helper in full");
                    }
                    let purpose = self.options.purpose;
                    tracing::info!(
                        seconds = begun.elapsed().as_secs_f64(),
                        "helper process for {purpose} is ready"
                    );
                    Ok(())
                }
                Ok(Some(Frame { kind: Kind::Unusable, payload, .. })) => {
                    Err(HelperError::State(String::from_utf8_lossy(&payload).into_owned()))
                }
                Ok(Some(Frame { kind: Kind::Failed, payload, .. })) => {
                    Err(HelperError::Unavailable(String::from_utf8_lossy(&payload).into_owned()))
                }
                Ok(Some(Frame { kind: Kind::Unconfined, payload, .. })) => {
                    Err(HelperError::Host(String::from_utf8_lossy(&payload).into_owned()))
                }
                Ok(Some(_)) => Err(gone("sent a message that no helper sends")),
                Ok(None) | Err(_) => Err(gone("ended while it prepared its state")),
            }
        })
    }

    /// Receives answers until the process ends.
    fn receive(&self, output: &mut BufReader<ChildStdout>) -> Result<(), HelperError> {
        loop {
            let frame = Frame::read(output).map_err(|error: io::Error| gone(&error.to_string()))?;
            let Some(frame) = frame else { return Err(gone("has ended")) };
            let mut live = self.lock();
            live.heard = Some(Instant::now());
            let Some(answered) = live.sent.remove(&frame.request) else { continue };
            drop(live);
            // Nobody waits for it if it was cancelled meanwhile.
            let _ = answered.send(self.answer(frame));
        }
    }

    fn answer(&self, Frame { kind, payload, .. }: Frame) -> Result<Answer, HelperError> {
        let limits = self.options.limits;
        match kind {
            Kind::Answer => match payload.split_first_chunk::<8>() {
                Some((cpu, bytes)) => {
                    let cpu = Duration::from_micros(u64::from_le_bytes(*cpu));
                    Ok(Answer { bytes: bytes.to_vec(), cpu })
                }
                None => Err(gone("sent an answer that is too short")),
            },
            Kind::Panicked => Err(HelperError::Panic(String::from_utf8_lossy(&payload).into_owned())),
            Kind::Failed => Err(HelperError::Unavailable(String::from_utf8_lossy(&payload).into_owned())),
            Kind::Ended => Err(match payload.first().and_then(|number| ENDS.get(usize::from(*number))) {
                Some(End::CpuTime) => HelperError::CpuTime(limits.cpu),
                Some(End::Memory) => HelperError::Memory(limits.memory_bytes),
                Some(End::WallTime) => gone("had no processor for its work"),
                Some(End::Killed) => gone("lost the process of a request"),
                Some(End::Unconfined) | None => gone("could not confine the process of a request"),
            }),
            Kind::Prepare
            | Kind::Run
            | Kind::Cancel
            | Kind::Ping
            | Kind::Pong
            | Kind::Ready
            | Kind::Unusable
            | Kind::Unconfined => Err(gone("sent a message that no helper sends")),
        }
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        let mut live = self.owner.lock();
        // Its answer has removed it; otherwise its caller has gone.
        if live.sent.remove(&self.request).is_some()
            && let Some(requests) = &live.requests
        {
            // One that does not fit ends by its limits.
            let _ = requests.try_send(Frame::new(Kind::Cancel, self.request, Vec::new()));
        }
    }
}
