//! Mask pool: threads that compute token masks while the device runs the forward pass.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use inflight_grammar::{MaskOutcome, MatchError, Matcher};

/// Mask to compute.
pub(super) struct MaskJob {
    /// Number of the job; its result has the same.
    pub(super) ticket: u64,
    /// State of the choice's grammar; comes back with the result.
    pub(super) matcher: Box<Matcher>,
    /// Whether end tokens do not end the choice, so that the mask leaves them out.
    pub(super) ignore_eos: bool,
    /// Drafted tokens, which the grammar allows in this order: a mask is computed behind each of them, too.
    pub(super) drafts: Vec<u32>,
    /// Words of a mask.
    pub(super) words: usize,
    /// Buffer of the masks.
    pub(super) masks: Vec<u32>,
}

/// Computed masks.
pub(super) struct MaskResult {
    pub(super) ticket: u64,
    /// State before the drafts.
    pub(super) matcher: Box<Matcher>,
    /// Masks of the rows, one behind the other.
    pub(super) masks: Vec<u32>,
    /// Buffer of the drafts.
    pub(super) drafts: Vec<u32>,
    /// Rows that have a mask, fewer than asked for if the output ends before.
    pub(super) rows: usize,
    /// End of the output before the token of row `rows`; `None` also if the token before completes it.
    pub(super) end: Option<Result<MaskOutcome, MatchError>>,
    /// Duration of the computation.
    pub(super) took: Duration,
}

/// Threads that compute masks. The queue holds at most one job for each masked row of a step.
pub(super) struct MaskPool {
    jobs: Option<Sender<MaskJob>>,
    results: Receiver<MaskResult>,
    threads: Vec<JoinHandle<()>>,
}

/// Maximum threads: a mask takes a small part of a step, and kernels want the other CPUs.
const THREADS_MAX: usize = 4;
/// CPUs for each thread.
const CPUS_PER_THREAD: usize = 4;

impl MaskPool {
    /// Starts the threads.
    pub(super) fn start() -> std::io::Result<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
        let (jobs, queue) = channel::<MaskJob>();
        let (done, results) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let start = |at: usize| {
            let (queue, done) = (Arc::clone(&queue), done.clone());
            std::thread::Builder::new().name(format!("masks-{at}")).spawn(move || serve(&queue, &done))
        };
        let count = (cpus / CPUS_PER_THREAD).clamp(1, THREADS_MAX);
        let threads = (0..count).map(start).collect::<Result<_, _>>()?;
        Ok(Self { jobs: Some(jobs), results, threads })
    }

    /// Queues a job. Returns it if the threads have ended.
    pub(super) fn submit(&self, job: MaskJob) -> Result<(), MaskJob> {
        match &self.jobs {
            Some(jobs) => jobs.send(job).map_err(|refused| refused.0),
            None => Err(job),
        }
    }

    /// Waits for a result; `None` if the threads have ended.
    pub(super) fn receive(&self) -> Option<MaskResult> {
        self.results.recv().ok()
    }
}

impl Drop for MaskPool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
    }
}

fn serve(queue: &Mutex<Receiver<MaskJob>>, done: &Sender<MaskResult>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        if done.send(compute(job)).is_err() {
            return;
        }
    }
}

/// Computes masks. Panics of the grammar library are errors of the matcher.
pub(super) fn compute(job: MaskJob) -> MaskResult {
    let MaskJob { ticket, mut matcher, ignore_eos, drafts, words, mut masks } = job;
    let begun = Instant::now();
    masks.resize((1 + drafts.len()) * words, 0);
    let (mut rows, mut consumed, mut end) = (0, 0, None);
    for mask in masks.chunks_exact_mut(words) {
        match matcher.write_mask(mask) {
            Ok(MaskOutcome::Masked) => {}
            ended => {
                end = Some(ended);
                break;
            }
        }
        if ignore_eos {
            matcher.clear_end_tokens(mask);
        }
        rows += 1;
        let Some(draft) = drafts.get(consumed) else { break };
        if let Err(error) = matcher.consume(*draft) {
            end = Some(Err(error));
            break;
        }
        consumed += 1;
        if matcher.is_complete() {
            break; // no row behind it counts
        }
    }
    // A matcher that cannot go back is refused when it consumes the first token.
    let _ = matcher.rollback(consumed);
    MaskResult { ticket, matcher, masks, drafts, rows, end, took: begun.elapsed() }
}
