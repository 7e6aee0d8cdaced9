//! Work on untrusted input, in turns between tenants: tokenizing of large texts, piece by piece on blocking threads, and compiling of
//! grammars in the processes of a helper.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use inflight_contract::{Priority, Weight};
use inflight_router_core::{
    TokenizeArrival, TokenizeJobId, TokenizePiece, TokenizeQueue, TokenizeQueueOptions,
};
use tokio::sync::oneshot;

use crate::clock;
use crate::layers::admission::RequestTerms;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};

/// Maximum idle tenants whose service the queue remembers.
const IDLE_TENANTS_MAX: usize = 10_000;

/// Tenant of tokenizing work, and the deadline of the call that waits for it.
#[derive(Debug, Clone)]
pub(crate) struct TokenizeTerms {
    pub(crate) tenant: String,
    pub(crate) weight: Weight,
    pub(crate) priority: Priority,
    pub(crate) deadline: Option<Instant>,
}

impl TokenizeTerms {
    /// Returns the terms of the texts of a request.
    pub(crate) fn new(terms: &RequestTerms, deadline: Option<Instant>) -> Self {
        let RequestTerms { tenant, weight, priority, .. } = terms;
        Self { tenant: tenant.clone(), weight: *weight, priority: *priority, deadline }
    }
}

/// Work that waits for its tenant's turn, and how it is metered.
#[derive(Debug, Clone, Copy)]
struct Work {
    /// Label of a rejection.
    limit: &'static str,
    /// What waits, in the text of a rejection.
    what: &'static str,
    waiting: &'static str,
    seconds: &'static str,
    cancelled: &'static str,
}

/// Texts to tokenize; their unit of work is a byte.
const TEXTS: Work = Work {
    limit: "tokenize_queue",
    what: "requests with large prompts are being tokenized or wait for it",
    waiting: names::TOKENIZE_WAITING,
    seconds: names::TOKENIZE_SECONDS,
    cancelled: names::TOKENIZE_CANCELLED,
};

/// Grammars to compile; their unit of work is a microsecond of processor time.
const GRAMMARS: Work = Work {
    limit: "grammar_queue",
    what: "requests with a new grammar are being compiled or wait for it",
    waiting: names::GRAMMAR_WAITING,
    seconds: names::GRAMMAR_QUEUE_SECONDS,
    cancelled: names::GRAMMAR_CANCELLED,
};

/// Processor time of compiling a usual grammar, charged before it is known, in microseconds.
const GRAMMAR_MICROS: u64 = 1_000;

/// Maximum charge of a compilation whose processor time is unknown: the limit of that time. Its wall time would include waits for other
/// processes and for the restart of its own.
pub(crate) const CHARGE_MAX: Duration = Duration::from_secs(1);

/// Queue of work and the threads or processes that it may use.
#[derive(Clone)]
pub(crate) struct Tokenizing {
    state: Arc<Mutex<State>>,
    retry_delay: Duration,
    work: Work,
}

/// Turn of a tenant's grammar. Charges the tenant for the time that it was held, unless it is finished.
pub(crate) struct Turn {
    slot: Slot,
    job: Job,
    tenant: String,
    begun: Instant,
    finished: bool,
}

struct State {
    queue: TokenizeQueue,
    /// Receivers of the next slot of each job that waits.
    waiting: BTreeMap<TokenizeJobId, oneshot::Sender<Slot>>,
}

/// Slot of one piece. Returned on drop, if not by [`Slot::finish`].
struct Slot {
    tokenizing: Tokenizing,
    job: TokenizeJobId,
    returned: bool,
}

/// Job of a text. Leaves the queue when dropped: what has not started never runs.
struct Job {
    tokenizing: Tokenizing,
    id: TokenizeJobId,
    /// Whether all of its pieces have run.
    done: bool,
}

impl Tokenizing {
    pub(crate) fn new(options: &Options) -> Self {
        let slots = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_slots(slots, slots, TEXTS, options)
    }

    /// Returns the queue of grammars, which has slots of its own.
    pub(crate) fn of_grammars(options: &Options) -> Self {
        let slots = options.grammar_confinement.as_ref().map_or(1, |confinement| confinement.slots);
        // A compilation is not interrupted for another tenant's: one slot stays free for that.
        Self::with_slots(slots, slots.saturating_sub(1), GRAMMARS, options)
    }

    fn with_slots(slots: usize, tenant_slots: usize, work: Work, options: &Options) -> Self {
        let jobs_max = options.tokenize_queue_max;
        let (slots, idle_tenants_max) = (slots.max(1), IDLE_TENANTS_MAX);
        let queue = TokenizeQueueOptions { slots, tenant_slots, jobs_max, idle_tenants_max };
        let state = State { queue: TokenizeQueue::new(queue), waiting: BTreeMap::new() };
        Self { state: Arc::new(Mutex::new(state)), retry_delay: options.retry_delay, work }
    }

    /// Waits for the turn of a tenant's grammar.
    ///
    /// # Errors
    /// The queue is full, the job was displaced, or the deadline has passed.
    pub(crate) async fn turn(&self, terms: &TokenizeTerms) -> Result<Turn, Outcome> {
        let (job, turn) = self.enter(terms, TokenizePiece { bytes: GRAMMAR_MICROS, last: true })?;
        let slot = self.wait(turn, terms.deadline).await?;
        Ok(Turn { slot, job, tenant: terms.tenant.clone(), begun: clock::now(), finished: false })
    }

    /// Runs the steps of a job on blocking threads, each when its tenant has its turn, and returns the job's state.
    /// `step` returns the next step. Nothing runs after an error, after the deadline, or after the future was
    /// dropped.
    pub(crate) async fn run<S: Send + 'static>(
        &self,
        terms: &TokenizeTerms,
        first: TokenizePiece,
        mut state: S,
        step: fn(&mut S) -> Result<Option<TokenizePiece>, Outcome>,
    ) -> Result<S, Outcome> {
        let (mut job, mut turn) = self.enter(terms, first)?;
        loop {
            let slot = self.wait(turn, terms.deadline).await?;
            let run = move || {
                let ran = step(&mut state);
                let turn = slot.finish(ran.as_ref().ok().copied().flatten());
                (state, ran, turn)
            };
            let ran;
            (state, ran, turn) = tokio::task::spawn_blocking(run).await.map_err(|_| {
                let what = "tokenizing failed on a fault of the tokenizer library".to_owned();
                Outcome::Internal(what)
            })?;
            if ran?.is_none() {
                job.done = true;
                return Ok(state);
            }
        }
    }

    /// Queues a job with its first piece. Returns it with the receiver of its first slot.
    fn enter(
        &self,
        terms: &TokenizeTerms,
        piece: TokenizePiece,
    ) -> Result<(Job, oneshot::Receiver<Slot>), Outcome> {
        let (sender, turn) = oneshot::channel();
        let arrival = TokenizeArrival {
            tenant: &terms.tenant,
            weight: terms.weight,
            priority: terms.priority.get(),
            piece,
        };
        let mut state = self.lock();
        let admitted = state.queue.enter(arrival).map_err(|full| {
            let Work { what, limit, .. } = self.work;
            let what =
                format!("{} {what}, the limit of --tokenize-queue-max; try again later", full.jobs_max);
            Outcome::Full(Box::new(Overload::of_router(what, limit, self.retry_delay)))
        })?;
        // A displaced job's receiver fails when its sender is dropped.
        let displaced = admitted.displaced.and_then(|job| state.waiting.remove(&job));
        state.waiting.insert(admitted.job, sender);
        self.grant(state);
        drop(displaced);
        Ok((Job { tokenizing: self.clone(), id: admitted.job, done: false }, turn))
    }

    /// Waits for the next slot of a job.
    async fn wait(&self, turn: oneshot::Receiver<Slot>, deadline: Option<Instant>) -> Result<Slot, Outcome> {
        let since = clock::now();
        if deadline.is_some_and(|deadline| deadline <= since) {
            return Err(Outcome::DeadlineExceeded);
        }
        let slot = match deadline {
            None => turn.await,
            Some(deadline) => {
                let turn = tokio::time::timeout_at(deadline.into(), turn).await;
                turn.map_err(|_| Outcome::DeadlineExceeded)?
            }
        };
        let waited = clock::now().saturating_duration_since(since);
        metrics::histogram!(self.work.seconds).record(waited.as_secs_f64());
        slot.map_err(|_| Outcome::Displaced { retry: self.retry_delay })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every call that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands free slots to the jobs that go first.
    fn grant(&self, mut state: MutexGuard<'_, State>) {
        let mut granted = Vec::new();
        while let Some(job) = state.queue.grant() {
            let slot = Slot { tokenizing: self.clone(), job, returned: false };
            granted.push((state.waiting.remove(&job), slot));
        }
        metrics::gauge!(self.work.waiting).set(state.queue.waiting() as f64);
        // Outside the lock: a slot whose receiver is gone is returned at once.
        drop(state);
        for (sender, slot) in granted {
            if let Some(sender) = sender {
                drop(sender.send(slot));
            }
        }
    }
}

impl Slot {
    /// Returns the slot and asks for one for the next piece. Returns its receiver, which fails at once without a
    /// next piece.
    fn finish(mut self, next: Option<TokenizePiece>) -> oneshot::Receiver<Slot> {
        self.returned = true;
        let (sender, turn) = oneshot::channel();
        let mut state = self.tokenizing.lock();
        state.queue.finish(self.job, next);
        // The job may have left, and a job without a next piece waits for nothing.
        if next.is_some() && state.queue.is_waiting(self.job) {
            state.waiting.insert(self.job, sender);
        }
        self.tokenizing.grant(state);
        turn
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.returned {
            let mut state = self.tokenizing.lock();
            state.queue.finish(self.job, None);
            self.tokenizing.grant(state);
        }
    }
}

impl Turn {
    /// Ends the turn, for which the tenant is charged this processor time.
    pub(crate) fn finish(mut self, cpu: Duration) {
        self.charge(cpu);
        self.job.done = true;
    }

    fn charge(&mut self, cpu: Duration) {
        let micros = u64::try_from(cpu.as_micros()).unwrap_or(u64::MAX);
        self.slot.tokenizing.lock().queue.charge(&self.tenant, micros.saturating_sub(GRAMMAR_MICROS));
        self.finished = true;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A client that leaves pays for what was done until then, or leaving would be free.
        if !self.finished {
            self.charge(clock::now().saturating_duration_since(self.begun).min(CHARGE_MAX));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let mut state = self.tokenizing.lock();
        state.queue.leave(self.id);
        let unused = state.waiting.remove(&self.id);
        self.tokenizing.grant(state);
        drop(unused);
        if !self.done {
            metrics::counter!(self.tokenizing.work.cancelled).increment(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, mpsc};

    use super::*;

    fn terms(tenant: &str) -> TokenizeTerms {
        let (weight, priority) = (Weight::default(), Priority::default());
        TokenizeTerms { tenant: tenant.to_owned(), weight, priority, deadline: None }
    }

    fn with_slots(slots: usize, jobs_max: usize) -> Tokenizing {
        let options = TokenizeQueueOptions { slots, tenant_slots: slots, jobs_max, idle_tenants_max: 10 };
        let state = State { queue: TokenizeQueue::new(options), waiting: BTreeMap::new() };
        Tokenizing { state: Arc::new(Mutex::new(state)), retry_delay: Duration::from_secs(1), work: TEXTS }
    }

    const PIECE: TokenizePiece = TokenizePiece { bytes: 1, last: false };

    /// Job whose steps report their tenant when they run, and wait until they may end.
    struct Steps {
        tenant: &'static str,
        left: usize,
        ran: mpsc::Sender<&'static str>,
        gate: Option<Arc<Barrier>>,
    }

    impl Steps {
        fn step(&mut self) -> Result<Option<TokenizePiece>, Outcome> {
            let _ = self.ran.send(self.tenant);
            if let Some(gate) = &self.gate {
                gate.wait();
            }
            self.left -= 1;
            Ok((self.left > 0).then_some(TokenizePiece { bytes: 1, last: self.left == 1 }))
        }
    }

    /// Starts a job and polls it until it waits.
    fn start(
        tokenizing: &Tokenizing,
        tenant: &'static str,
        left: usize,
        ran: &mpsc::Sender<&'static str>,
        gate: Option<&Arc<Barrier>>,
    ) -> tokio::task::JoinHandle<Result<(), Outcome>> {
        let steps = Steps { tenant, left, ran: ran.clone(), gate: gate.cloned() };
        let tokenizing = tokenizing.clone();
        tokio::spawn(async move {
            let run = tokenizing.run(&terms(tenant), PIECE, steps, Steps::step).await;
            run.map(drop)
        })
    }

    /// Waits until so many jobs wait for a slot.
    async fn waiting(tokenizing: &Tokenizing, jobs: usize) {
        while tokenizing.lock().queue.waiting() != jobs {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_tenants_prompt_waits_for_one_step_of_another_ones_and_dropped_work_never_runs() {
        let tokenizing = with_slots(1, 10);
        let (ran, seen) = mpsc::channel();
        let gate = Arc::new(Barrier::new(2));
        let flood = start(&tokenizing, "flood", 3, &ran, Some(&gate));
        while tokenizing.lock().queue.busy() == 0 {
            tokio::task::yield_now().await;
        }
        let gone = start(&tokenizing, "flood", 1, &ran, None);
        let dropped = start(&tokenizing, "gone", 1, &ran, None);
        waiting(&tokenizing, 2).await;
        let other = start(&tokenizing, "other", 1, &ran, None);
        waiting(&tokenizing, 3).await;
        for job in [gone, dropped] {
            job.abort();
            assert!(job.await.unwrap_err().is_cancelled());
        }
        assert_eq!(tokenizing.lock().queue.waiting(), 1, "the work of dropped calls has left the queue");
        gate.wait();
        other.await.unwrap().unwrap();
        gate.wait();
        gate.wait();
        flood.await.unwrap().unwrap();
        drop(ran);
        assert_eq!(seen.iter().collect::<Vec<_>>(), ["flood", "other", "flood", "flood"]);
        let state = tokenizing.lock();
        assert_eq!((state.queue.busy(), state.queue.waiting(), state.waiting.len()), (0, 0, 0));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_job_whose_caller_leaves_during_a_step_runs_no_further_one() {
        let tokenizing = with_slots(1, 10);
        let (ran, seen) = mpsc::channel();
        let gate = Arc::new(Barrier::new(2));
        let job = start(&tokenizing, "gone", 5, &ran, Some(&gate));
        while tokenizing.lock().queue.busy() == 0 {
            tokio::task::yield_now().await;
        }
        job.abort();
        assert!(job.await.unwrap_err().is_cancelled());
        gate.wait();
        start(&tokenizing, "next", 1, &ran, None).await.unwrap().unwrap();
        drop(ran);
        assert_eq!(seen.iter().collect::<Vec<_>>(), ["gone", "next"]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_full_queue_names_its_option_and_a_passed_deadline_runs_nothing() {
        static RAN: AtomicUsize = AtomicUsize::new(0);
        let tokenizing = with_slots(1, 1);
        let count = |_: &mut ()| {
            RAN.fetch_add(1, Ordering::Relaxed);
            Ok(None)
        };
        let late = TokenizeTerms { deadline: Some(clock::now()), ..terms("late") };
        let failed = tokenizing.run(&late, PIECE, (), count).await.unwrap_err();
        assert_eq!((failed, RAN.load(Ordering::Relaxed)), (Outcome::DeadlineExceeded, 0));
        let (ran, _seen) = mpsc::channel();
        let gate = Arc::new(Barrier::new(2));
        let running = start(&tokenizing, "a", 1, &ran, Some(&gate));
        while tokenizing.lock().queue.busy() == 0 {
            tokio::task::yield_now().await;
        }
        let failed = tokenizing.run(&terms("a"), PIECE, (), count).await.unwrap_err();
        assert!(matches!(failed, Outcome::Full(_)));
        assert!(failed.message().contains("--tokenize-queue-max"), "{}", failed.message());
        gate.wait();
        running.await.unwrap().unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_panic_in_a_step_returns_its_slot() {
        let tokenizing = with_slots(1, 10);
        let failed = tokenizing.run(&terms("a"), PIECE, (), |()| panic!("scripted")).await.unwrap_err();
        assert!(matches!(failed, Outcome::Internal(_)));
        tokenizing.run(&terms("a"), PIECE, (), |()| Ok(None)).await.unwrap();
    }
}
