//! Shared-memory collectives between ranks that are threads of one process.
//!
//! A collective has two barriers. Before the first, each rank posts its operation and buffers; between the
//! two, each does its share of the work on the buffers of all ranks. So no buffer is accessed outside of its
//! owner's call.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::{Collective, GroupFailed};

/// Rounds of `spin_loop` before the first yield: some 50 us, more than the skew between ranks of equal work.
const SPINS: u32 = 1 << 12;
/// Yields before a rank sleeps. Ranks may share cores, so waiting must let others run.
const YIELDS: u32 = 64;
/// Elements summed at a time, so that the sums stay in the L1 cache.
const BLOCK: usize = 1024;
/// Elements per cache line; no two ranks write to the same line.
const LINE: usize = 16;

/// Handle of one rank to a group of threads.
pub struct SharedMemory {
    rank: usize,
    group: Arc<SharedGroup>,
    /// Makes the type `!Sync`: a rank makes one call at a time.
    _one_thread: PhantomData<Cell<()>>,
}

struct SharedGroup {
    posts: Vec<RankPost>,
    barrier: Barrier,
    failed: AtomicBool,
    failure: OnceLock<GroupFailed>,
}

/// Operation and buffers of a rank during a collective.
#[repr(align(64))]
struct RankPost {
    call: AtomicUsize,
    elements: AtomicPtr<f32>,
    len: AtomicUsize,
    whole: AtomicPtr<f32>,
    whole_len: AtomicUsize,
}

/// Collective operation, compared across ranks; a gather with its rows.
#[derive(Clone, Copy)]
enum Operation {
    Barrier,
    AllReduce,
    Gather(usize),
}

impl Operation {
    fn code(self) -> usize {
        match self {
            Self::Barrier => 0,
            Self::AllReduce => 1,
            Self::Gather(rows) => rows.saturating_add(2),
        }
    }
}

/// Reusable barrier that spins, yields, then sleeps.
struct Barrier {
    arrived: AtomicUsize,
    /// Number of times that all ranks have arrived.
    round: AtomicUsize,
    asleep: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl SharedMemory {
    /// Returns the handles of a group of `world` ranks, by rank. Each may be moved to its own thread.
    pub fn group(world: usize) -> Vec<Self> {
        let post = || RankPost {
            call: AtomicUsize::new(0),
            elements: AtomicPtr::default(),
            len: AtomicUsize::new(0),
            whole: AtomicPtr::default(),
            whole_len: AtomicUsize::new(0),
        };
        let group = Arc::new(SharedGroup {
            posts: (0..world).map(|_| post()).collect(),
            barrier: Barrier {
                arrived: AtomicUsize::new(0),
                round: AtomicUsize::new(0),
                asleep: AtomicUsize::new(0),
                lock: Mutex::new(()),
                wake: Condvar::new(),
            },
            failed: AtomicBool::new(false),
            failure: OnceLock::new(),
        });
        (0..world).map(|rank| Self { rank, group: Arc::clone(&group), _one_thread: PhantomData }).collect()
    }

    fn posts(&self) -> &[RankPost] {
        &self.group.posts
    }

    /// Waits until all ranks have arrived. Once all have, each of them returns `Ok`, even if the group fails
    /// meanwhile: a failure ends only waits that would never end, as a rank that has seen the failure does
    /// not arrive again.
    fn wait(&self) -> Result<(), GroupFailed> {
        let SharedGroup { posts, barrier, failed, .. } = &*self.group;
        if failed.load(Ordering::SeqCst) {
            return Err(self.failed());
        }
        let round = barrier.round.load(Ordering::SeqCst);
        if barrier.arrived.fetch_add(1, Ordering::SeqCst) + 1 == posts.len() {
            barrier.arrived.store(0, Ordering::SeqCst);
            barrier.round.fetch_add(1, Ordering::SeqCst);
            self.wake();
            return Ok(());
        }
        let arrived = || barrier.round.load(Ordering::SeqCst) != round;
        let over = || arrived() || failed.load(Ordering::SeqCst);
        if !spin_until(&over) {
            barrier.asleep.fetch_add(1, Ordering::SeqCst);
            let mut held = barrier.lock.lock().unwrap_or_else(PoisonError::into_inner);
            while !over() {
                held = barrier.wake.wait(held).unwrap_or_else(PoisonError::into_inner);
            }
            drop(held);
            barrier.asleep.fetch_sub(1, Ordering::SeqCst);
        }
        if arrived() { Ok(()) } else { Err(self.failed()) }
    }

    /// Wakes the ranks asleep in the barrier after their condition has become true.
    fn wake(&self) {
        let barrier = &self.group.barrier;
        if barrier.asleep.load(Ordering::SeqCst) > 0 {
            // A rank holds the lock between its last check and its sleep, so no wake-up is lost.
            drop(barrier.lock.lock().unwrap_or_else(PoisonError::into_inner));
            barrier.wake.notify_all();
        }
    }

    fn failed(&self) -> GroupFailed {
        let unknown = || GroupFailed { rank: self.rank, reason: "it does not say why".to_owned() };
        self.failure().unwrap_or_else(unknown)
    }

    /// Runs a collective: posts operation and buffers, waits for all posts, does this rank's share of `work`,
    /// waits for the others' shares. Every rank must find the same errors in `work`.
    fn call(
        &self,
        call: Operation,
        (elements, len): (*mut f32, usize),
        (whole, whole_len): (*mut f32, usize),
        work: impl FnOnce(&[RankPost]) -> Result<(), String>,
    ) -> Result<(), GroupFailed> {
        let posts = self.posts();
        let post = &posts[self.rank];
        // Relaxed: the barrier publishes the post.
        post.call.store(call.code(), Ordering::Relaxed);
        post.elements.store(elements, Ordering::Relaxed);
        post.len.store(len, Ordering::Relaxed);
        post.whole.store(whole, Ordering::Relaxed);
        post.whole_len.store(whole_len, Ordering::Relaxed);
        self.wait()?;
        let between_barriers = AbortOnUnwind;
        let same =
            |post: &RankPost| post.call.load(Ordering::Relaxed) == posts[0].call.load(Ordering::Relaxed);
        let worked = match posts.iter().position(|post| !same(post)) {
            Some(rank) => Err(format!("rank {rank} makes another call than rank 0")),
            None => work(posts),
        };
        std::mem::forget(between_barriers);
        self.wait()?;
        worked.map_err(|reason| {
            self.fail(&reason);
            self.failed()
        })
    }

    /// Returns this rank's share of `len` elements, in whole cache lines.
    fn share(&self, len: usize) -> Range<usize> {
        let (lines, world) = (len.div_ceil(LINE), self.posts().len());
        let at = |rank: usize| (lines * rank / world * LINE).min(len);
        at(self.rank)..at(self.rank + 1)
    }
}

/// Ends the process if a rank panics between two barriers: its unwinding would end its call, and with it the borrow of a buffer that
/// other ranks still read or write.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        // Dropped by unwinding only; the panic hook has logged the message.
        std::process::abort();
    }
}

/// Spins, then yields until `done`; returns false if the caller should sleep.
fn spin_until(done: &dyn Fn() -> bool) -> bool {
    for _ in 0..SPINS {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    for _ in 0..YIELDS {
        if done() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

impl RankPost {
    fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }
}

impl Collective for SharedMemory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.posts().len()
    }

    fn all_reduce(&self, elements: &mut [f32]) -> Result<(), GroupFailed> {
        let len = elements.len();
        self.call(Operation::AllReduce, (elements.as_mut_ptr(), len), (std::ptr::null_mut(), 0), |posts| {
            if let Some(rank) = posts.iter().position(|post| post.len() != posts[0].len()) {
                let (first, other) = (posts[0].len(), posts[rank].len());
                return Err(format!("rank {rank} adds {other} elements where rank 0 adds {first}"));
            }
            let mut sums = [0.0f32; BLOCK];
            let share = self.share(len);
            for first in share.clone().step_by(BLOCK) {
                let sums = &mut sums[..BLOCK.min(share.end - first)];
                for (rank, post) in posts.iter().enumerate() {
                    // SAFETY: every rank is between its two barriers, so its posted buffer is mutably
                    // borrowed by its call and `len` long, as checked above; this rank alone accesses this
                    // share of all buffers.
                    let theirs = unsafe {
                        let from = post.elements.load(Ordering::Relaxed).add(first);
                        std::slice::from_raw_parts(from, sums.len())
                    };
                    match rank {
                        0 => sums.copy_from_slice(theirs),
                        _ => sums.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x),
                    }
                }
                for post in posts {
                    // SAFETY: the buffer is borrowed by its rank's call, `len` long, and this share is
                    // accessed by this rank alone; `sums` is local, so the ranges do not overlap.
                    unsafe {
                        let to = post.elements.load(Ordering::Relaxed).add(first);
                        std::ptr::copy_nonoverlapping(sums.as_ptr(), to, sums.len());
                    }
                }
            }
            Ok(())
        })
    }

    fn gather(&self, part: &[f32], rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed> {
        let to = whole.map_or((std::ptr::null_mut(), 0), |whole| (whole.as_mut_ptr(), whole.len()));
        self.call(Operation::Gather(rows), (part.as_ptr().cast_mut(), part.len()), to, |posts| {
            let total: usize = posts.iter().map(RankPost::len).sum();
            let fits = |post: &RankPost| {
                let whole = post.whole.load(Ordering::Relaxed);
                whole.is_null() || post.whole_len.load(Ordering::Relaxed) == total
            };
            let even = |post: &RankPost| rows > 0 && post.len().is_multiple_of(rows);
            if let Some(rank) = posts.iter().position(|post| !even(post) || !fits(post)) {
                return Err(format!("rank {rank} gathers shapes that do not match, {rows} rows of {total}"));
            }
            let before: usize = posts[..self.rank].iter().map(RankPost::len).sum();
            let (columns, width, first) = (part.len() / rows, total / rows, before / rows);
            for post in posts {
                let to = post.whole.load(Ordering::Relaxed);
                if to.is_null() {
                    continue;
                }
                for (row, part) in part.chunks_exact(columns.max(1)).enumerate() {
                    // SAFETY: every rank is between its two barriers, so its `whole` is mutably borrowed by
                    // its call and `total` = rows * width long, as checked above; this rank alone writes
                    // these columns.
                    unsafe {
                        std::ptr::copy_nonoverlapping(part.as_ptr(), to.add(row * width + first), columns);
                    }
                }
            }
            Ok(())
        })
    }

    fn barrier(&self) -> Result<(), GroupFailed> {
        let nothing = (std::ptr::null_mut(), 0);
        self.call(Operation::Barrier, nothing, nothing, |_| Ok(()))
    }

    fn fail(&self, reason: &str) {
        // Later failures are mostly consequences of the first.
        let _ = self.group.failure.set(GroupFailed { rank: self.rank, reason: reason.to_owned() });
        self.group.failed.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn failure(&self) -> Option<GroupFailed> {
        self.group.failure.get().cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    /// Set in the process that is to abort.
    const CHILD: &str = "INFLIGHT_TEST_COLLECTIVE_PANICS";
    const SIGABRT: i32 = 6;

    #[test]
    fn a_panic_between_two_barriers_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            let nothing = (std::ptr::null_mut(), 0);
            let group = SharedMemory::group(1);
            let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                group[0].call(Operation::Barrier, nothing, nothing, |_| panic!("a rank panics"))
            }));
            panic!("unwound: {}", unwound.is_err());
        }
        let name = "collective::shared_memory::tests::a_panic_between_two_barriers_ends_the_process";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.signal(), Some(SIGABRT), "{log}");
        assert!(log.contains("a rank panics"), "{log}");
    }
}
