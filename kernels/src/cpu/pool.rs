use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};

/// Rounds of `spin_loop` before the first yield: some 20 us, a little more than the gaps between kernels.
const SPINS: u32 = 1 << 11;
/// Yields before a thread goes to sleep. Workers may share cores, so waiting must let others run.
const YIELDS: u32 = 16;

type Job = *const (dyn Fn(usize) + Sync);

/// A fixed set of threads that run one job at a time together with the caller.
///
/// Which thread does what is decided by the job from the thread's index; no answer may depend on it.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    running: Mutex<()>,
}

struct Shared {
    /// Raised for every job; a change tells threads that `job` is new.
    epoch: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    /// Threads that have not finished the job.
    pending: AtomicUsize,
    /// Per thread: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    caller: Mutex<Option<Thread>>,
    caller_asleep: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `job` is written only by the caller that holds `running`, while no thread runs (`pending` is 0), and
// read by threads only after they saw `epoch` rise, which happens after the write.
unsafe impl Sync for Shared {}
// SAFETY: the job behind the pointer is `Sync` and outlives its run, see `Pool::run`.
unsafe impl Send for Shared {}

impl Pool {
    /// `threads` threads, the caller of [`Pool::run`] being one of them; at least one.
    ///
    /// # Errors
    /// The operating system refused a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let others = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            pending: AtomicUsize::new(0),
            asleep: (0..others).map(|_| AtomicBool::new(false)).collect(),
            caller: Mutex::new(None),
            caller_asleep: AtomicBool::new(false),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, handles: Vec::with_capacity(others), running: Mutex::new(()) };
        for index in 0..others {
            let shared = Arc::clone(&pool.shared);
            let body = move || shared.work(index);
            pool.handles.push(thread::Builder::new().name(format!("kernels-{}", index + 1)).spawn(body)?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Calls `job` once with every thread index, and returns when all calls have. A call from within a job, or
    /// from a second thread meanwhile, runs all of them on the spot.
    ///
    /// # Panics
    /// If the job panicked on any thread.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        let guard = match self.running.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..self.threads()).for_each(job),
        };
        if self.handles.is_empty() {
            drop(guard);
            return job(0);
        }
        self.run_on_all(job, guard);
    }

    fn run_on_all(&self, job: &(dyn Fn(usize) + Sync), guard: MutexGuard<'_, ()>) {
        let shared = &*self.shared;
        *lock(&shared.caller) = Some(thread::current());
        // SAFETY: only the lifetime is erased. This function returns only after every thread has finished with
        // the job (`pending` is 0), also when the job panics.
        let erased: Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job) };
        // SAFETY: `running` is held and no thread runs, so nobody else touches `job`.
        unsafe { *shared.job.get() = Some(erased) };
        shared.pending.store(self.handles.len(), Ordering::SeqCst);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (asleep, handle) in shared.asleep.iter().zip(&self.handles) {
            if asleep.swap(false, Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        wait(&shared.caller_asleep, || shared.pending.load(Ordering::SeqCst) == 0);
        let theirs = lock(&shared.panic).take();
        drop(guard);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = theirs {
            resume_unwind(panic);
        }
    }

    /// Splits `0..items` into one contiguous range per thread, each a multiple of `grain` but the last, and runs
    /// `job` on those that are not empty.
    pub fn split(&self, items: usize, grain: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
        let grains = items.div_ceil(grain.max(1));
        if grains <= 1 || self.handles.is_empty() {
            if items > 0 {
                job(0..items);
            }
            return;
        }
        let threads = self.threads();
        self.run(&|index| {
            let start = grains * index / threads * grain;
            let end = (grains * (index + 1) / threads * grain).min(items);
            if start < end {
                job(start..end);
            }
        });
    }

    /// Runs `job` on every index below `items`, each once, on whichever thread is free.
    pub fn each(&self, items: usize, job: &(dyn Fn(usize) + Sync)) {
        if items <= 1 || self.handles.is_empty() {
            return (0..items).for_each(job);
        }
        let next = AtomicUsize::new(0);
        self.run(&|_| {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                job(item);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for handle in self.handles.drain(..) {
            handle.thread().unpark();
            // A thread catches its job's panics, so joining can't fail.
            let _ = handle.join();
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            wait(&self.asleep[index], || self.epoch.load(Ordering::SeqCst) != seen);
            seen = self.epoch.load(Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: `epoch` rose, so `job` was written before and is not written again until `pending` is 0.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                // SAFETY: the caller keeps the job alive until `pending` is 0.
                let job = unsafe { &*job };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index + 1))) {
                    *lock(&self.panic) = Some(panic);
                }
            }
            if self.pending.fetch_sub(1, Ordering::SeqCst) == 1
                && self.caller_asleep.swap(false, Ordering::SeqCst)
                && let Some(caller) = &*lock(&self.caller)
            {
                caller.unpark();
            }
        }
    }
}

/// Spins, then yields, then sleeps until `done`. Whoever makes it true swaps `asleep` and unparks if it was set.
fn wait(asleep: &AtomicBool, done: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    for _ in 0..YIELDS {
        if done() {
            return;
        }
        thread::yield_now();
    }
    loop {
        asleep.store(true, Ordering::SeqCst);
        if done() {
            asleep.store(false, Ordering::SeqCst);
            return;
        }
        thread::park();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_exactly_once_by_any_number_of_threads() {
        for threads in 1..=5 {
            let pool = Pool::new(threads).unwrap();
            for items in [0, 1, 2, 7, 64, 1000] {
                for grain in [1, 3, 64] {
                    let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                    pool.split(items, grain, &|range| {
                        assert!(range.start % grain == 0);
                        range.for_each(|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
                    });
                    pool.each(items, &|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for culprit in 0..3 {
            let run =
                AssertUnwindSafe(|| pool.run(&|index| assert!(index != culprit, "thread {index} fails")));
            assert!(catch_unwind(run).is_err());
            let count = AtomicUsize::new(0);
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
                // A nested run must neither deadlock nor skip an index.
                pool.run(&|_| _ = count.fetch_add(1, Ordering::Relaxed));
            });
            assert_eq!(count.load(Ordering::Relaxed), 3 + 9);
        }
    }
}
