//! Process of one request: forked, confined, and ended with its answer.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus};
use rustix::time::{ClockId, clock_gettime};
use seccompiler::BpfProgram;

use crate::Limits;

/// Exit status of a process that could not be confined.
const UNCONFINED: i32 = 3;
/// Exit status of a process that could not write its answer.
const UNANSWERED: i32 = 4;
/// First byte of a process's output: an answer, or the text of a panic.
const ANSWER: u8 = 0;
const PANIC: u8 = 1;
/// Time after which a process goes behind the others of the machine, and its niceness then: usual work is done before.
const SLOW: Duration = Duration::from_millis(100);
const SLOW_NICENESS: i32 = 15;
/// Bytes of address space beside the memory: what an allocator reserves and does not use.
const RESERVED_BYTES: u64 = 192 << 20;

/// End of a process without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// It used more processor time than it may.
    CpuTime,
    /// It was not done in time, by the clock.
    WallTime,
    /// It ran out of memory or of stack.
    Memory,
    /// Its request was cancelled, or another process killed it.
    Killed,
    /// It could not be confined, or not be started; or what confines it forbids what any process does.
    Unconfined,
}

pub(crate) const ENDS: [End; 5] = [End::CpuTime, End::WallTime, End::Memory, End::Killed, End::Unconfined];

/// What a process leaves.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answer { answer: Vec<u8>, cpu: Duration },
    Panic(String),
    Ended(End),
}

/// Running process of a request.
pub(crate) struct Child {
    pid: Pid,
    /// Its output, until it ends.
    output: OwnedFd,
    read: Vec<u8>,
    begun: Instant,
    /// Whether it has the lower priority of those that take long.
    is_slow: bool,
    killed: Option<End>,
}

/// What confines a process.
pub(crate) struct Confinement {
    pub(crate) limits: Limits,
    pub(crate) filter: Option<BpfProgram>,
}

impl Child {
    /// Forks a process that does `work` and answers what it returns.
    ///
    /// # Errors
    /// No process can be started.
    pub(crate) fn fork(confinement: &Confinement, work: impl FnOnce() -> Vec<u8>) -> io::Result<Self> {
        let (output, answer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let helper = rustix::process::getpid();
        // SAFETY: no other thread of this process runs or holds a lock (see `server`), so the child may do all that this thread may.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let status = run(helper, confinement, answer, work);
                // SAFETY: ends the process, without the destructors and exit handlers that belong to the helper.
                unsafe { libc::_exit(status) }
            }
            pid => {
                let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process"))?;
                Ok(Self {
                    pid,
                    output,
                    read: Vec::new(),
                    begun: Instant::now(),
                    is_slow: false,
                    killed: None,
                })
            }
        }
    }

    /// Its output, readable when there is some or when it has ended.
    pub(crate) fn output(&self) -> &OwnedFd {
        &self.output
    }

    /// Time of its next change: it becomes slow, or its time is over.
    pub(crate) fn next_change(&self, limits: &Limits) -> Instant {
        self.begun + if self.is_slow { limits.wall } else { SLOW }
    }

    /// Makes it slow, or ends it, as it is time.
    pub(crate) fn change(&mut self, limits: &Limits, now: Instant) {
        if now < self.next_change(limits) {
            return;
        }
        if self.is_slow {
            return self.kill(End::WallTime);
        }
        self.is_slow = true;
        // Without it, its share of the processor is that of the others.
        let _ = rustix::process::setpriority_process(Some(self.pid), SLOW_NICENESS);
    }

    pub(crate) fn kill(&mut self, end: End) {
        self.killed.get_or_insert(end);
        // It is not waited for yet, so its number is its own.
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
    }

    /// Reads what it has written. Returns whether it has closed its output.
    pub(crate) fn read(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 16 << 10];
        let bytes = rustix::io::retry_on_intr(|| rustix::io::read(&self.output, &mut buffer))?;
        self.read.extend_from_slice(&buffer[..bytes]);
        Ok(bytes == 0)
    }

    /// Waits for the end of a process that has closed its output, and returns what it left.
    pub(crate) fn outcome(self) -> io::Result<Outcome> {
        let wait = || rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
        let status = rustix::io::retry_on_intr(wait)?.map(|(_, status)| status);
        if let Some(end) = self.killed {
            return Ok(Outcome::Ended(end));
        }
        if status.and_then(WaitStatus::exit_status) == Some(0)
            && let [kind, cpu @ ..] = &self.read[..]
            && let Some((cpu, answer)) = cpu.split_first_chunk::<8>()
        {
            return Ok(match *kind {
                ANSWER => Outcome::Answer {
                    answer: answer.to_vec(),
                    cpu: Duration::from_micros(u64::from_le_bytes(*cpu)),
                },
                _ => Outcome::Panic(String::from_utf8_lossy(answer).into_owned()),
            });
        }
        let signal = status.and_then(WaitStatus::terminating_signal);
        let is = |of: Signal| signal == Some(of.as_raw());
        // SIGKILL may come from elsewhere, such as the out-of-memory killer: it says nothing about the work.
        let end = if is(Signal::XCPU) {
            End::CpuTime
        } else if is(Signal::ABORT) || is(Signal::SEGV) || is(Signal::BUS) {
            // A failed allocation and an overflow of the stack both abort.
            End::Memory
        } else if signal.is_some() && !is(Signal::SYS) {
            End::Killed
        } else {
            End::Unconfined
        };
        Ok(Outcome::Ended(end))
    }
}

/// Body of the process. Returns its exit status.
fn run(helper: Pid, confinement: &Confinement, answer: OwnedFd, work: impl FnOnce() -> Vec<u8>) -> i32 {
    let Ok(mut output) = confine(helper, confinement, &answer) else { return UNCONFINED };
    drop(answer);
    let worked = catch_unwind(AssertUnwindSafe(work));
    let used = clock_gettime(ClockId::ProcessCPUTime);
    let micros = used.tv_sec as u64 * 1_000_000 + used.tv_nsec as u64 / 1_000;
    let (kind, text) = match worked {
        Ok(answer) => (ANSWER, answer),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            (PANIC, text.unwrap_or_default().into_bytes())
        }
    };
    let message = [&[kind][..], &micros.to_le_bytes(), &text].concat();
    let written = output.write_all(&message).and_then(|()| output.flush());
    if written.is_ok() { 0 } else { UNANSWERED }
}

/// Takes from this process all that its work does not need. Returns its output.
fn confine(helper: Pid, confinement: &Confinement, answer: &OwnedFd) -> io::Result<impl Write + use<>> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The signal is not sent if the helper ended before this process asked for it.
    if rustix::process::getppid() != Some(helper) {
        return Err(io::Error::other("the helper has ended"));
    }
    // Its input and its output are not the helper's, or it could answer other requests, but /dev/null, as the standard error.
    rustix::stdio::dup2_stdin(rustix::stdio::stderr())?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    let Limits { memory_bytes, .. } = confinement.limits;
    let cpu = confinement.limits.cpu_seconds();
    let (data, space) = memory()?;
    limit(Resource::Core, 0, 0)?;
    limit(Resource::Fsize, 0, 0)?;
    limit(Resource::Cpu, cpu, cpu + 1)?;
    limit(Resource::Data, data + memory_bytes, data + memory_bytes)?;
    limit(Resource::As, space + memory_bytes + RESERVED_BYTES, space + memory_bytes + RESERVED_BYTES)?;
    let output = std::fs::File::from(answer.as_fd().try_clone_to_owned()?);
    if let Some(filter) = &confinement.filter {
        seccompiler::apply_filter(filter).map_err(io::Error::other)?;
    }
    Ok(output)
}

fn limit(resource: Resource, soft: u64, hard: u64) -> io::Result<()> {
    // A lower limit of the machine stays.
    let hard = rustix::process::getrlimit(resource).maximum.map_or(hard, |most| most.min(hard));
    let limits = Rlimit { current: Some(soft.min(hard)), maximum: Some(hard) };
    Ok(rustix::process::setrlimit(resource, limits)?)
}

/// Bytes of this process: of private data, and of its whole address space.
fn memory() -> io::Result<(u64, u64)> {
    let pages = std::fs::read_to_string("/proc/self/statm").map_err(|error| {
        io::Error::new(error.kind(), format!("/proc/self/statm, which says how much memory it has: {error}"))
    })?;
    let pages: Vec<u64> = pages.split(' ').map_while(|field| field.trim().parse().ok()).collect();
    let [space, _, _, _, _, data, ..] = pages[..] else {
        return Err(io::Error::other("/proc/self/statm has another format than that of Linux"));
    };
    let page = rustix::param::page_size() as u64;
    Ok((data * page, space * page))
}

/// Checks that this process can be measured.
///
/// # Errors
/// What keeps it from that.
pub(crate) fn check_memory() -> io::Result<()> {
    memory().map(drop)
}
