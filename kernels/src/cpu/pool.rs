//! Thread pool for kernels: fork-join jobs with static shares and work stealing.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, TryLockError};

use super::cpu_claim::CpuClaim;
use super::sync::{
    AtomicBool, AtomicUsize, JoinHandle, Mutex, MutexGuard, SPINS, Thread, UnsafeCell, YIELDS, thread,
};

/// Units per thread that [`Pool::split`] aims for: enough to steal the share of a late thread.
const UNITS_PER_THREAD: usize = 4;

/// Fixed set of threads that help the caller with one job at a time.
///
/// A job is a number of units. Each thread owns a share of them, the same for equal jobs, so that the data it
/// reads stays in its cache; a thread that is done steals from other shares. The caller therefore never waits
/// for a thread that has not started, as happens where cores are shared: it runs that thread's units itself.
/// Results must not depend on which thread runs a unit.
pub struct Pool {
    shared: Arc<PoolState>,
    handles: Vec<JoinHandle<()>>,
    running: Mutex<()>,
    claim: Option<Arc<CpuClaim>>,
}

#[derive(Clone, Copy)]
struct PoolJob {
    unit: *const (dyn Fn(usize) + Sync),
    units: usize,
}

struct PoolState {
    job: UnsafeCell<Option<PoolJob>>,
    /// Per thread, the number of unclaimed units of its share.
    unclaimed: Vec<PaddedCounter>,
    /// Units not finished yet.
    unfinished: AtomicUsize,
    /// Incremented for every job, to wake threads.
    epoch: AtomicUsize,
    /// Per thread, whether it sleeps or is about to.
    asleep: Vec<AtomicBool>,
    caller: Mutex<Option<Thread>>,
    caller_asleep: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

/// Counter on a cache line of its own.
#[repr(align(64))]
struct PaddedCounter(AtomicUsize);

// SAFETY: `job` is written only by the caller that holds `running`, while no unit is unclaimed or unfinished.
// It is read only by threads with a claimed, unfinished unit, and claiming synchronises with the write.
unsafe impl Sync for PoolState {}
// SAFETY: the closure behind the job pointer is `Sync` and outlives all units, see `Pool::each`.
unsafe impl Send for PoolState {}

impl Pool {
    /// Creates a pool of `threads` threads including the caller of a job; at least one.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::start(threads, None)
    }

    /// Creates a pool whose threads are pinned, each to a CPU that no other pinned pool of this machine uses.
    /// One more CPU is reserved for the caller, which is not pinned because threads that it starts would
    /// inherit that. Without enough free CPUs, as beside another worker, threads are not pinned.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn pinned(threads: usize) -> std::io::Result<Self> {
        Self::start(threads, CpuClaim::new(threads.max(1)).map(Arc::new))
    }

    /// Returns whether threads are pinned to CPUs.
    pub fn is_pinned(&self) -> bool {
        self.claim.is_some()
    }

    fn start(threads: usize, claim: Option<Arc<CpuClaim>>) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(PoolState {
            job: UnsafeCell::new(None),
            unclaimed: (0..threads).map(|_| PaddedCounter(AtomicUsize::new(0))).collect(),
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

    /// Returns the number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs `unit` once for every index below `units` and returns when all are done. A nested call, or a
    /// concurrent call from another thread, runs all units itself.
    ///
    /// # Panics
    /// If a unit panics.
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
        // SAFETY: only the lifetime is erased. This function returns only when every unit is finished, even
        // if one panics, and the pointer is used only by threads with a claimed, unfinished unit.
        let unit = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(unit)
        };
        // SAFETY: `running` is held and every unit of earlier jobs is finished, so no thread reads `job`.
        shared.job.with_mut(|job| unsafe { *job = Some(PoolJob { unit, units }) });
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

    /// Runs `job` on contiguous ranges of `0..items`, each of at least `grain` items except the last.
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
            // Threads catch the panics of units, so joining cannot fail.
            let _ = handle.join();
        }
    }
}

impl PoolState {
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

    /// Runs the remaining units of the thread's own share, then those of the others.
    fn work(&self, thread: usize) {
        let threads = self.unclaimed.len();
        for i in 0..threads {
            let owner = (thread + i) % threads;
            while let Some(left) = claim(&self.unclaimed[owner].0) {
                // SAFETY: this thread has a claimed, unfinished unit, so `job` is set and not written.
                let job = self.job.with(|job| unsafe { *job });
                if let Some(PoolJob { unit, units }) = job {
                    // In ascending order, so that memory is read in one direction.
                    let index = self.share(owner, units).end - left;
                    // SAFETY: `Pool::each` keeps the closure alive until this unit is finished.
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

/// Claims one unit and returns the number that was unclaimed before, or `None` if there was none.
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

/// Spins, then yields, then sleeps until `done`. The thread that completes it swaps `asleep` and unparks.
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
    use crate::test_size::size;

    #[test]
    fn every_item_runs_exactly_once_with_any_number_of_threads() {
        for threads in 1..=size(5, 3) {
            let pool = Pool::new(threads).unwrap();
            for items in [0, 1, 2, 7, 64, size(1000, 65)] {
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
    fn pinned_pools_share_no_cpu_and_an_unpinned_one_still_works() {
        let mut pools = Vec::new();
        // Ends when no CPU is left.
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
        const ROUNDS: usize = size(50_000, 100);
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        for round in 0..ROUNDS {
            let own = AtomicUsize::new(0);
            pool.each(2 + round % 5, &|i| {
                own.fetch_add(i + 1, Ordering::Relaxed);
                total.fetch_add(1, Ordering::Relaxed);
            });
            let units = 2 + round % 5;
            assert_eq!(own.into_inner(), units * (units + 1) / 2, "round {round}");
        }
        assert_eq!(total.into_inner(), ROUNDS / 5 * (2 + 3 + 4 + 5 + 6));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
        let pool = Pool::new(3).unwrap();
        for culprit in 0..9 {
            let run = AssertUnwindSafe(|| pool.each(9, &|i| assert!(i != culprit, "unit {i} fails")));
            assert!(catch_unwind(run).is_err());
            let count = AtomicUsize::new(0);
            pool.each(9, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
                // A nested job must neither deadlock nor skip a unit.
                pool.each(4, &|_| _ = count.fetch_add(1, Ordering::Relaxed));
            });
            assert_eq!(count.into_inner(), 9 + 9 * 4);
        }
    }
}
