//! Helper's side: prepares a state, and forks for each request.
//!
//! Only one thread of the helper runs: it has a large stack, which the forks inherit, and the main thread waits for its end from the
//! first line on. So no lock is held by another thread when it forks.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Signal, getrlimit};

use crate::child::{Child, Confinement, ENDS, End, Outcome, check_memory};
use crate::frame::{Frame, Frames, Kind};
use crate::{Limits, StateError, filter};

/// Stack of the work, which takes memory only as it is used.
const STACK_BYTES: usize = 128 << 20;

/// Bytes of the limits at the begin of a state.
pub(crate) const LIMITS_BYTES: usize = 24;

impl Limits {
    pub(crate) fn to_bytes(self) -> [u8; LIMITS_BYTES] {
        let numbers = [self.memory_bytes, self.cpu.as_micros() as u64, self.wall.as_micros() as u64];
        let mut bytes = [0; LIMITS_BYTES];
        bytes
            .chunks_exact_mut(8)
            .zip(numbers)
            .for_each(|(to, number)| to.copy_from_slice(&number.to_le_bytes()));
        bytes
    }

    fn of_bytes(bytes: &[u8; LIMITS_BYTES]) -> Self {
        let number = |at: usize| bytes[at * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let (cpu, wall) = (Duration::from_micros(number(1)), Duration::from_micros(number(2)));
        Self { memory_bytes: number(0), cpu, wall }
    }
}

/// Runs this process as a helper of the process that started it: prepares a state from the bytes that it sends first, and does `work`
/// with it for each of its requests, in processes of their own. Returns when the owner closes the connection, which is standard
/// input and output.
pub fn serve<S: 'static>(
    prepare: fn(&[u8]) -> Result<S, StateError>,
    work: fn(&S, &[u8]) -> Vec<u8>,
) -> ExitCode {
    let thread = std::thread::Builder::new().name("helper".to_owned()).stack_size(STACK_BYTES);
    let served = thread.spawn(move || run(prepare, work)).map(std::thread::JoinHandle::join);
    match served {
        Ok(Ok(Ok(()))) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn run<S>(prepare: fn(&[u8]) -> Result<S, StateError>, work: fn(&S, &[u8]) -> Vec<u8>) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let Some(Frame { kind: Kind::Prepare, payload, .. }) = Frame::read(&mut input)? else {
        return Err(io::Error::other("a helper is started by its owner, which sends it a state first"));
    };
    // Without what the standard library may have read ahead: the owner sends nothing more until this process is ready.
    drop(input);
    let Some((limits, state)) = payload.split_first_chunk::<LIMITS_BYTES>() else {
        return Err(io::Error::other("the owner sent no limits"));
    };
    let mut fail = |kind, reason: String| Frame::new(kind, 0, reason.into_bytes()).write(&mut output);
    // Before the state, which takes seconds: where nothing can be confined, it is tried again and again.
    let (confinement, unconfined) = match confinement(Limits::of_bytes(limits)) {
        Ok(confined) => confined,
        Err(reason) => return fail(Kind::Unconfined, reason),
    };
    let state = match prepare(state) {
        Ok(state) => state,
        Err(StateError::Unusable(reason)) => return fail(Kind::Unusable, reason),
        Err(StateError::Unavailable(reason)) => return fail(Kind::Failed, reason),
    };
    drop(payload);
    Frame::new(Kind::Ready, 0, unconfined.into_bytes()).write(&mut output)?;
    let space_max = getrlimit(Resource::As).maximum;
    Server { confinement, space_max, children: Vec::new() }.serve(&state, work, &mut output)
}

/// Attempts to start a process without work, and the pause between them: one may be killed from outside, or meet a limit of processes or of
/// memory that others have reached for now.
const TRIES: usize = 5;
const TRY_PAUSE: Duration = Duration::from_millis(100);

/// Tries a process without work. Returns what confines those of requests, and what does not: the filter of system calls is left out only
/// where a process with it could not be confined, and never since one was killed.
fn confinement(limits: Limits) -> Result<(Confinement, String), String> {
    let unmeasured = |error: io::Error| format!("its processes could not be limited: {error}");
    check_memory().map_err(unmeasured)?;
    let mut failed = "its processes could not be limited".to_owned();
    for filter in [filter::program(), None] {
        let confinement = Confinement { limits, filter };
        let mut unconfined = false;
        for attempt in 0..TRIES {
            if attempt > 0 {
                std::thread::sleep(TRY_PAUSE);
            }
            let mut child = match Child::fork(&confinement, Vec::new) {
                Ok(child) => child,
                Err(error) => {
                    failed = format!("no process can be started (fork): {error}");
                    continue;
                }
            };
            while !child.read().map_err(unmeasured)? {}
            match child.outcome().map_err(unmeasured)? {
                Outcome::Answer { .. } => {
                    let without = if confinement.filter.is_some() { "" } else { "system calls (seccomp)" };
                    return Ok((confinement, without.to_owned()));
                }
                Outcome::Ended(End::Unconfined) => {
                    unconfined = true;
                    break;
                }
                Outcome::Ended(end) => {
                    failed = format!(
                        "its processes could not be limited: one without work ended without an answer ({end:?})"
                    )
                }
                Outcome::Panic(reason) => {
                    failed =
                        format!("its processes could not be limited: one without work panicked: {reason}")
                }
            }
        }
        if !unconfined {
            return Err(failed);
        }
    }
    Err(failed)
}

struct Server {
    confinement: Confinement,
    /// Limit of this process's address space when it was ready, in bytes.
    space_max: Option<u64>,
    children: Vec<(u64, Child)>,
}

impl Server {
    fn serve<S>(
        mut self,
        state: &S,
        work: fn(&S, &[u8]) -> Vec<u8>,
        output: &mut impl Write,
    ) -> io::Result<()> {
        let stdin = io::stdin();
        let mut frames = Frames::default();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let (input, ready) = self.wait(&stdin)?;
            if input {
                let bytes = rustix::io::retry_on_intr(|| rustix::io::read(&stdin, &mut buffer))?;
                if bytes == 0 {
                    // The owner is gone, and with it every caller.
                    self.children.iter_mut().for_each(|(_, child)| child.kill(End::Killed));
                    return Ok(());
                }
                frames.push(&buffer[..bytes]);
            }
            self.collect(&ready, output)?;
            while let Some(frame) = frames.next()? {
                self.handle(frame, state, work, output)?;
            }
        }
    }

    /// Waits for a message, for an output, or until a process is slow or its time is over. Returns whether there is a message, and whose output.
    fn wait(&mut self, stdin: &io::Stdin) -> io::Result<(bool, Vec<bool>)> {
        let limits = self.confinement.limits;
        let deadline = self.children.iter().map(|(_, child)| child.next_change(&limits)).min();
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let outputs = self.children.iter().map(|(_, child)| PollFd::new(child.output(), PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> =
            std::iter::once(PollFd::new(stdin, PollFlags::IN)).chain(outputs).collect();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
        let input = ready.next().unwrap_or(false);
        let outputs = ready.collect();
        let now = Instant::now();
        for (_, child) in &mut self.children {
            child.change(&limits, now);
        }
        Ok((input, outputs))
    }

    /// Reads the outputs that are ready, and answers for the processes that have ended.
    fn collect(&mut self, ready: &[bool], output: &mut impl Write) -> io::Result<()> {
        let mut ended = Vec::new();
        for (at, _) in ready.iter().enumerate().filter(|(_, ready)| **ready) {
            if self.children[at].1.read()? {
                ended.push(at);
            }
        }
        for at in ended.into_iter().rev() {
            let (request, child) = self.children.swap_remove(at);
            let outcome = child.outcome()?;
            reply(request, outcome).write(output)?;
        }
        Ok(())
    }

    fn handle<S>(
        &mut self,
        frame: Frame,
        state: &S,
        work: fn(&S, &[u8]) -> Vec<u8>,
        output: &mut impl Write,
    ) -> io::Result<()> {
        let request = frame.request;
        match frame.kind {
            // Its processes would run out of memory before their own limit, which would look like their work's fault.
            Kind::Run if getrlimit(Resource::As).maximum != self.space_max => {
                return Err(io::Error::other("another process has limited the memory of this one"));
            }
            Kind::Run => match Child::fork(&self.confinement, || work(state, &frame.payload)) {
                Ok(child) => self.children.push((request, child)),
                Err(error) => {
                    Frame::new(
                        Kind::Failed,
                        request,
                        format!("no process can be started (fork): {error}").into_bytes(),
                    )
                    .write(output)?;
                }
            },
            Kind::Cancel => {
                if let Some((_, child)) = self.children.iter_mut().find(|(running, _)| *running == request) {
                    child.kill(End::Killed);
                }
            }
            // With the number of no request.
            Kind::Ping => Frame::new(Kind::Pong, u64::MAX, Vec::new()).write(output)?,
            _ => return Err(io::Error::other("a message that no owner sends")),
        }
        Ok(())
    }
}

fn reply(request: u64, outcome: Outcome) -> Frame {
    match outcome {
        Outcome::Answer { answer, cpu } => {
            Frame::new(Kind::Answer, request, [&(cpu.as_micros() as u64).to_le_bytes()[..], &answer].concat())
        }
        Outcome::Panic(text) => Frame::new(Kind::Panicked, request, text.into_bytes()),
        Outcome::Ended(end) => {
            let number = ENDS.iter().position(|known| *known == end).unwrap_or_default();
            Frame::new(Kind::Ended, request, vec![number as u8])
        }
    }
}
