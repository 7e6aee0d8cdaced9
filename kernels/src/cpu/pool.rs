use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};

mod cpus;

use cpus::Claim;

/// Rounds of `spin_loop` before the first yield: some 50 us, more than the gaps between kernels and
/// between most steps.
const SPINS: u32 = 1 << 12;
/// Yields before a thread goes to sleep. Workers may share cores, so waiting must let others run.
const YIELDS: u32 = 64;
/// Units per thread that [`Pool::split`] aims for: enough to take over the share of a thread that is late.
const UNITS_PER_THREAD: usize = 4;

/// A fixed set of threads that help the caller with one job at a time.
///
/// A job is a number of units. Each thread has a share of them, the same ones for equal jobs, so that what they read
/// stays in its cache; whoever is done takes from the others' shares. So the caller never waits for a thread
/// that has not begun, as happens where cores are shared: it does that thread's units itself. Which thread does
/// what must not matter to any answer.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    running: Mutex<()>,
    claim: Option<Arc<Claim>>,
}

#[derive(Clone, Copy)]
struct Job {
    unit: *const (dyn Fn(usize) + Sync),
    units: usize,
}

struct Shared {
    job: UnsafeCell<Option<Job>>,
    /// Per thread, how many units of its share nobody has claimed yet.
    unclaimed: Vec<Counter>,
    /// Units not finished yet.
    unfinished: AtomicUsize,
    /// Raised for every job, to wake threads.
    epoch: AtomicUsize,
    /// Per thread: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    caller: Mutex<Option<Thread>>,
    caller_asleep: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

/// On a cache line of its own.
#[repr(align(64))]
struct Counter(AtomicUsize);

// SAFETY: `job` is written only by the caller that holds `running`, while no unit is unclaimed or unfinished. It is
// read only by who has claimed a unit and not finished it, and claiming synchronises with the write.
unsafe impl Sync for Shared {}
// SAFETY: what the job points to is `Sync` and lives until all units are finished, see `Pool::each`.
unsafe impl Send for Shared {}

impl Pool {
    /// `threads` threads, the caller of a job being one of them; at least one.
    ///
    /// # Errors
    /// The operating system refused a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::start(threads, None)
    }

    /// The same with each thread of the pool on a CPU of its own, which no other pinned pool of this machine uses. One
    /// more is kept for the caller, who is not pinned: whatever it starts would be, too. Where so many CPUs are not
    /// left, as beside another worker, threads go where the operating system puts them.
    ///
    /// # Errors
    /// As [`Pool::new`].
    pub fn pinned(threads: usize) -> std::io::Result<Self> {
        Self::start(threads, Claim::new(threads.max(1)).map(Arc::new))
    }

    /// Whether threads have CPUs of their own.
    pub fn is_pinned(&self) -> bool {
        self.claim.is_some()
    }

    fn start(threads: usize, claim: Option<Arc<Claim>>) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            unclaimed: (0..threads).map(|_| Counter(AtomicUsize::new(0))).collect(),
            unfinished: AtomicUsize::new(0),
            epoch: AtomicUsize::new(0),
            asleep: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            caller: Mutex::new(None),
            caller_asleep: AtomicBool::new(false),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let handles = Vec::with_capacity(threads - 1);
        let mut pool = Self { shared, handles, running: Mutex::new(()), claim };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let claim = pool.claim.clone();
            let body = move || {
                if let Some(claim) = claim {
                    claim.pin(index);
                }
                shared.help(index);
            };
            pool.handles.push(thread::Builder::new().name(format!("kernels-{index}")).spawn(body)?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs `unit` on every index below `units`, each once, and returns when all are done. A call from within a
    /// unit, or from a second thread meanwhile, does all of them itself.
    ///
    /// # Panics
    /// If a unit panicked.
    pub fn each(&self, units: usize, unit: &(dyn Fn(usize) + Sync)) {
        if units <= 1 || self.handles.is_empty() {
            return (0..units).for_each(unit);
        }
        let guard = match self.running.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..units).for_each(unit),
        };
        let shared = &*self.shared;
        *lock(&shared.caller) = Some(thread::current());
        // SAFETY: only the lifetime is erased. This function returns only when every unit is finished, also when
        // one panics, and nobody uses the pointer without a claimed unit.
        let unit = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(unit)
        };
        // SAFETY: `running` is held and every unit of earlier jobs is finished, so nobody reads `job`.
        unsafe { *shared.job.get() = Some(Job { unit, units }) };
        shared.unfinished.store(units, Ordering::SeqCst);
        for thread in 0..self.threads() {
            shared.unclaimed[thread].0.store(shared.share(thread, units).len(), Ordering::SeqCst);
        }
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (handle, asleep) in self.handles.iter().zip(&shared.asleep[1..]) {
            if asleep.swap(false, Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        shared.work(0);
        wait(&shared.caller_asleep, || shared.unfinished.load(Ordering::SeqCst) == 0);
        let panic = lock(&shared.panic).take();
        drop(guard);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Splits `0..items` into contiguous ranges of at least `grain` items, but for the last, and runs `job` on each.
    pub fn split(&self, items: usize, grain: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
        let grain = grain.max(1);
        let grains = items.div_ceil(grain);
        let units = grains.min(self.threads() * UNITS_PER_THREAD);
        self.each(units, &|unit| {
            let start = grains * unit / units * grain;
            let end = (grains * (unit + 1) / units * grain).min(items);
            job(start..end);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for handle in self.handles.drain(..) {
            handle.thread().unpark();
            // A thread catches the panics of units, so joining can't fail.
            let _ = handle.join();
        }
    }
}

impl Shared {
    fn share(&self, thread: usize, units: usize) -> Range<usize> {
        let threads = self.unclaimed.len();
        units * thread / threads..units * (thread + 1) / threads
    }

    fn help(&self, thread: usize) {
        let mut seen = 0;
        while !self.stop.load(Ordering::SeqCst) {
            self.work(thread);
            wait(&self.asleep[thread], || self.epoch.load(Ordering::SeqCst) != seen);
            seen = self.epoch.load(Ordering::SeqCst);
        }
    }

    /// Does what is left of the thread's own share, then what is left of the others'.
    fn work(&self, thread: usize) {
        let threads = self.unclaimed.len();
        for i in 0..threads {
            let owner = (thread + i) % threads;
            while let Some(left) = claim(&self.unclaimed[owner].0) {
                // SAFETY: a unit is claimed and not finished, so `job` is set and stays.
                let job = unsafe { *self.job.get() };
                if let Some(Job { unit, units }) = job {
                    // First to last, so that memory is read in one direction.
                    let index = self.share(owner, units).end - left;
                    // SAFETY: as above, what it points to lives until the unit is finished.
                    let unit = unsafe { &*unit };
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| unit(index))) {
                        *lock(&self.panic) = Some(panic);
                    }
                }
                if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
                    && self.caller_asleep.swap(false, Ordering::SeqCst)
                    && let Some(caller) = &*lock(&self.caller)
                {
                    caller.unpark();
                }
            }
        }
    }
}

/// Takes one of what is unclaimed; how many there were.
fn claim(unclaimed: &AtomicUsize) -> Option<usize> {
    let mut left = unclaimed.load(Ordering::SeqCst);
    while left > 0 {
        match unclaimed.compare_exchange_weak(left, left - 1, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return Some(left),
            Err(now) => left = now,
        }
    }
    None
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
                        assert!(range.start % grain == 0 && !range.is_empty());
                        range.for_each(|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
                    });
                    pool.each(items, &|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2));
                }
            }
        }
    }

    #[test]
    fn no_two_pinned_pools_share_a_cpu_and_one_that_finds_none_still_works() {
        let mut pools = Vec::new();
        // However many CPUs there are, they end.
        while pools.last().is_none_or(Pool::is_pinned) {
            pools.push(Pool::pinned(1).unwrap());
        }
        for pool in &pools {
            let count = AtomicUsize::new(0);
            pool.split(100, 7, &|range| _ = count.fetch_add(range.len(), Ordering::Relaxed));
            assert_eq!(count.into_inner(), 100);
        }
    }

    #[test]
    fn many_short_jobs_in_a_row_lose_and_repeat_nothing() {
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        for round in 0..50_000 {
            let own = AtomicUsize::new(0);
            pool.each(2 + round % 5, &|i| {
                own.fetch_add(i + 1, Ordering::Relaxed);
                total.fetch_add(1, Ordering::Relaxed);
            });
            let units = 2 + round % 5;
            assert_eq!(own.into_inner(), units * (units + 1) / 2, "round {round}");
        }
        assert_eq!(total.into_inner(), 50_000 / 5 * (2 + 3 + 4 + 5 + 6));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for culprit in 0..9 {
            let run = AssertUnwindSafe(|| pool.each(9, &|i| assert!(i != culprit, "unit {i} fails")));
            assert!(catch_unwind(run).is_err());
            let count = AtomicUsize::new(0);
            pool.each(9, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
                // A job within a job must neither deadlock nor skip a unit.
                pool.each(4, &|_| _ = count.fetch_add(1, Ordering::Relaxed));
            });
            assert_eq!(count.into_inner(), 9 + 9 * 4);
        }
    }
}
