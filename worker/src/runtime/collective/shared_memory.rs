//! Ranks that are threads of one process.
//!
//! A call has two barriers. Before the first, each rank says what it calls and where its numbers lie; between the two,
//! each does its share of the work on the numbers of all. So nobody's numbers are touched outside of its own call.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::{Collective, GroupFailed};

/// Rounds of `spin_loop` before the first yield: some 50 us, more than ranks of equal work are apart.
const SPINS: u32 = 1 << 12;
/// Yields before a rank goes to sleep. Ranks may share cores, so waiting must let others run.
const YIELDS: u32 = 64;
/// Numbers summed at a time: the sums stay in the first-level cache.
const BLOCK: usize = 1024;
/// Numbers of a cache line: no two ranks write to one.
const LINE: usize = 16;

/// One rank's end of a group of threads.
pub struct SharedMemory {
    rank: usize,
    group: Arc<Group>,
    /// A rank makes one call at a time: not `Sync`.
    _one_thread: PhantomData<Cell<()>>,
}

struct Group {
    posts: Vec<Post>,
    barrier: Barrier,
    failed: AtomicBool,
    failure: OnceLock<GroupFailed>,
}

/// What a rank calls, and where its numbers lie meanwhile.
#[repr(align(64))]
struct Post {
    call: AtomicUsize,
    numbers: AtomicPtr<f32>,
    len: AtomicUsize,
    whole: AtomicPtr<f32>,
    whole_len: AtomicUsize,
}

/// What is called; of a gathering, the rows.
#[derive(Clone, Copy)]
enum Call {
    Barrier,
    AllReduce,
    Gather(usize),
}

impl Call {
    fn code(self) -> usize {
        match self {
            Self::Barrier => 0,
            Self::AllReduce => 1,
            Self::Gather(rows) => rows.saturating_add(2),
        }
    }
}

struct Barrier {
    arrived: AtomicUsize,
    /// How often all have arrived.
    round: AtomicUsize,
    asleep: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl SharedMemory {
    /// The ends of a group of `world` ranks, by rank. Each may be moved to a thread of its own.
    pub fn group(world: usize) -> Vec<Self> {
        let post = || Post {
            call: AtomicUsize::new(0),
            numbers: AtomicPtr::default(),
            len: AtomicUsize::new(0),
            whole: AtomicPtr::default(),
            whole_len: AtomicUsize::new(0),
        };
        let group = Arc::new(Group {
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

    fn posts(&self) -> &[Post] {
        &self.group.posts
    }

    /// Waits until all ranks are here. Once all have come, every one of them gets `Ok`: what a failure ends is a wait that
    /// would have no end, as a rank that failed or was told so never comes again.
    fn wait(&self) -> Result<(), GroupFailed> {
        let Group { posts, barrier, failed, .. } = &*self.group;
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
        if !patiently(&over) {
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

    /// Wakes those who sleep in the barrier, now that what they wait for is true.
    fn wake(&self) {
        let barrier = &self.group.barrier;
        if barrier.asleep.load(Ordering::SeqCst) > 0 {
            // Whoever is about to sleep holds the lock from its last look until it sleeps.
            drop(barrier.lock.lock().unwrap_or_else(PoisonError::into_inner));
            barrier.wake.notify_all();
        }
    }

    fn failed(&self) -> GroupFailed {
        let unknown = || GroupFailed { rank: self.rank, reason: "it does not say why".to_owned() };
        self.failure().unwrap_or_else(unknown)
    }

    /// Makes a call: says what and where, waits until all have, does this rank's part of the `work`, waits for that of the
    /// others. An error of `work` must be found by every rank alike.
    fn call(
        &self,
        call: Call,
        (numbers, len): (*mut f32, usize),
        (whole, whole_len): (*mut f32, usize),
        work: impl FnOnce(&[Post]) -> Result<(), String>,
    ) -> Result<(), GroupFailed> {
        let posts = self.posts();
        let post = &posts[self.rank];
        // The barrier publishes them.
        post.call.store(call.code(), Ordering::Relaxed);
        post.numbers.store(numbers, Ordering::Relaxed);
        post.len.store(len, Ordering::Relaxed);
        post.whole.store(whole, Ordering::Relaxed);
        post.whole_len.store(whole_len, Ordering::Relaxed);
        self.wait()?;
        let same = |post: &Post| post.call.load(Ordering::Relaxed) == posts[0].call.load(Ordering::Relaxed);
        let worked = match posts.iter().position(|post| !same(post)) {
            Some(rank) => Err(format!("rank {rank} makes another call than rank 0")),
            None => work(posts),
        };
        self.wait()?;
        worked.map_err(|reason| {
            self.fail(&reason);
            self.failed()
        })
    }

    /// This rank's share of `len` numbers, in whole cache lines.
    fn share(&self, len: usize) -> Range<usize> {
        let (lines, world) = (len.div_ceil(LINE), self.posts().len());
        let at = |rank: usize| (lines * rank / world * LINE).min(len);
        at(self.rank)..at(self.rank + 1)
    }
}

/// Spins, then yields until `done`; false if it is time to sleep.
fn patiently(done: &dyn Fn() -> bool) -> bool {
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

impl Post {
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

    fn all_reduce(&self, numbers: &mut [f32]) -> Result<(), GroupFailed> {
        let len = numbers.len();
        self.call(Call::AllReduce, (numbers.as_mut_ptr(), len), (std::ptr::null_mut(), 0), |posts| {
            if let Some(rank) = posts.iter().position(|post| post.len() != posts[0].len()) {
                let (first, other) = (posts[0].len(), posts[rank].len());
                return Err(format!("rank {rank} adds {other} numbers where rank 0 adds {first}"));
            }
            let mut sums = [0.0f32; BLOCK];
            let share = self.share(len);
            for first in share.clone().step_by(BLOCK) {
                let sums = &mut sums[..BLOCK.min(share.end - first)];
                for (rank, post) in posts.iter().enumerate() {
                    // SAFETY: every rank is between its two barriers, so what it posted is borrowed by its call; this
                    // rank alone touches this share of it.
                    let theirs = unsafe {
                        let from = post.numbers.load(Ordering::Relaxed).add(first);
                        std::slice::from_raw_parts(from, sums.len())
                    };
                    match rank {
                        0 => sums.copy_from_slice(theirs),
                        _ => sums.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x),
                    }
                }
                for post in posts {
                    // SAFETY: as above, and `sums` is nobody's but this call's.
                    unsafe {
                        let to = post.numbers.load(Ordering::Relaxed).add(first);
                        std::ptr::copy_nonoverlapping(sums.as_ptr(), to, sums.len());
                    }
                }
            }
            Ok(())
        })
    }

    fn gather(&self, part: &[f32], rows: usize, whole: Option<&mut [f32]>) -> Result<(), GroupFailed> {
        let to = whole.map_or((std::ptr::null_mut(), 0), |whole| (whole.as_mut_ptr(), whole.len()));
        self.call(Call::Gather(rows), (part.as_ptr().cast_mut(), part.len()), to, |posts| {
            let total: usize = posts.iter().map(Post::len).sum();
            let fits = |post: &Post| {
                let whole = post.whole.load(Ordering::Relaxed);
                whole.is_null() || post.whole_len.load(Ordering::Relaxed) == total
            };
            let even = |post: &Post| rows > 0 && post.len().is_multiple_of(rows);
            if let Some(rank) = posts.iter().position(|post| !even(post) || !fits(post)) {
                return Err(format!("rank {rank} gathers shapes that do not match, {rows} rows of {total}"));
            }
            let before: usize = posts[..self.rank].iter().map(Post::len).sum();
            let (columns, width, first) = (part.len() / rows, total / rows, before / rows);
            for post in posts {
                let to = post.whole.load(Ordering::Relaxed);
                if to.is_null() {
                    continue;
                }
                for (row, part) in part.chunks_exact(columns.max(1)).enumerate() {
                    // SAFETY: every rank is between its two barriers, so what it posted is borrowed by its call; this
                    // rank alone writes these columns.
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
        self.call(Call::Barrier, nothing, nothing, |_| Ok(()))
    }

    fn fail(&self, reason: &str) {
        // Later ones are mostly consequences of the first.
        let _ = self.group.failure.set(GroupFailed { rank: self.rank, reason: reason.to_owned() });
        self.group.failed.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn failure(&self) -> Option<GroupFailed> {
        self.group.failure.get().cloned()
    }
}
