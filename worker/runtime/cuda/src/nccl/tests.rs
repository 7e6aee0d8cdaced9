//! Tests against a fake libnccl whose communicators record the calls made with them.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize};

use super::*;

/// Arguments of a collective call.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CollectiveCall {
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    stream: usize,
}

#[derive(Default)]
struct FakeCommunicator {
    calls: Mutex<Vec<CollectiveCall>>,
    /// Calls block until the communicator is aborted.
    hangs: AtomicBool,
    error: AtomicI32,
    aborted: AtomicUsize,
    destroyed: AtomicUsize,
}

/// Returns the communicator of a handle. Never freed, so that late calls are detected.
fn fake(handle: CommHandle) -> &'static FakeCommunicator {
    // SAFETY: `init_all` leaked it, so it lives forever.
    unsafe { &*handle.cast::<FakeCommunicator>() }
}

unsafe extern "C" fn init_all(handles: *mut CommHandle, count: c_int, devices: *const c_int) -> c_int {
    for rank in 0..count as usize {
        // SAFETY: the caller passes arrays of `count` entries.
        unsafe {
            if *devices.add(rank) == 13 {
                return 1;
            }
            *handles.add(rank) = Box::into_raw(Box::<FakeCommunicator>::default()).cast();
        }
    }
    SUCCESS
}

fn record_call(handle: CommHandle, call: CollectiveCall) -> c_int {
    let communicator = fake(handle);
    communicator.calls.lock().unwrap().push(call);
    while communicator.hangs.load(Ordering::Acquire) {
        if communicator.aborted.load(Ordering::Acquire) > 0 {
            return 2;
        }
        std::thread::yield_now();
    }
    SUCCESS
}

unsafe extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    operation: c_int,
    handle: CommHandle,
    stream: *mut c_void,
) -> c_int {
    assert_eq!(operation, SUM);
    record_call(
        handle,
        CollectiveCall { from: from as usize, to: to as usize, count, kind, stream: stream as usize },
    )
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    handle: CommHandle,
    stream: *mut c_void,
) -> c_int {
    record_call(
        handle,
        CollectiveCall { from: from as usize, to: to as usize, count, kind, stream: stream as usize },
    )
}

unsafe extern "C" fn async_error(handle: CommHandle, error: *mut c_int) -> c_int {
    // SAFETY: the caller passes a pointer to one `int`.
    unsafe { *error = fake(handle).error.load(Ordering::Acquire) };
    SUCCESS
}

unsafe extern "C" fn abort(handle: CommHandle) -> c_int {
    fake(handle).aborted.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn destroy(handle: CommHandle) -> c_int {
    fake(handle).destroyed.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn error_string(_: c_int) -> *const c_char {
    c"unhandled system error".as_ptr()
}

unsafe extern "C" fn last_error(_: CommHandle) -> *const c_char {
    c"no route to GPU\n".as_ptr()
}

fn library() -> NcclLibrary {
    NcclLibrary {
        init_all,
        all_reduce,
        all_gather,
        async_error,
        abort,
        destroy,
        error_string,
        last_error: Some(last_error),
        version: 23_007,
    }
}

/// Returns a group of `world` ranks whose collectives do nothing.
pub(crate) fn fake_group(world: usize) -> Arc<NcclGroup> {
    NcclGroup::with_library(library(), &(0..world).collect::<Vec<_>>()).unwrap()
}

fn communicators(group: &NcclGroup) -> Vec<&'static FakeCommunicator> {
    group.communicators.iter().map(|communicator| fake(communicator.handle.load(Ordering::Acquire))).collect()
}

/// Returns how often each communicator was aborted and destroyed.
fn end_counts(communicators: &[&FakeCommunicator]) -> Vec<(usize, usize)> {
    let counts = |one: &&FakeCommunicator| {
        (one.aborted.load(Ordering::Acquire), one.destroyed.load(Ordering::Acquire))
    };
    communicators.iter().map(counts).collect()
}

#[test]
fn collectives_run_in_place_on_the_stream_and_in_the_requested_type() {
    let group = fake_group(2);
    let all = communicators(&group);
    for rank in 0..2usize {
        let nccl = group.rank(rank);
        let stream = 0x70 + rank;
        nccl.enqueue_on(stream as *mut c_void);
        // SAFETY: the fake library never dereferences the addresses.
        unsafe {
            nccl.all_reduce(HalfDtype::Bf16, 0x1000, 24).unwrap();
            nccl.all_reduce(HalfDtype::F16, 0x2000, 8).unwrap();
            nccl.all_gather(0x3000, 0x100).unwrap();
        }
        let sum = |at, count, kind| CollectiveCall { from: at, to: at, count, kind, stream };
        let own = 0x3000 + rank * 0x100;
        assert_eq!(
            *all[rank].calls.lock().unwrap(),
            [
                sum(0x1000, 24, BFLOAT16),
                sum(0x2000, 8, FLOAT16),
                CollectiveCall { from: own, to: 0x3000, count: 0x100, kind: INT8, stream }
            ]
        );
    }
    drop(group);
    // Each rank destroyed its own communicator.
    assert_eq!(end_counts(&all), [(0, 1), (0, 1)]);
}

#[test]
fn a_failure_aborts_every_communicator_once_and_later_calls_are_refused() {
    let group = fake_group(3);
    let all = communicators(&group);
    let ranks: Vec<NcclRank> = (0..2).map(|rank| group.rank(rank)).collect();
    group.fail(1, "it fell off the bus");
    group.fail(2, "it waited for rank 1");
    for rank in &ranks {
        // SAFETY: the fake library never dereferences the address.
        let refused = unsafe { rank.all_reduce(HalfDtype::F16, 0x10, 1) }.unwrap_err().to_string();
        assert!(refused.contains("rank 1") && refused.contains("fell off the bus"), "{refused}");
    }
    assert_eq!(group.failure().unwrap().rank, 1);
    drop(ranks);
    // The third rank was never started.
    drop(group.rank(2));
    assert_eq!(end_counts(&all), [(1, 0), (1, 0), (1, 0)]);
    assert!(all.iter().all(|communicator| communicator.calls.lock().unwrap().is_empty()));
    drop(group);
    assert_eq!(end_counts(&all), [(1, 0), (1, 0), (1, 0)]);
}

#[test]
fn a_rank_that_blocks_in_the_library_on_a_dead_rank_is_released() {
    let group = fake_group(2);
    let all = communicators(&group);
    all[0].hangs.store(true, Ordering::Release);
    let waiting = {
        let group = Arc::clone(&group);
        std::thread::spawn(move || {
            let rank = group.rank(0);
            // SAFETY: the fake library never dereferences the address.
            unsafe { rank.all_reduce(HalfDtype::F16, 0x10, 1) }.unwrap_err().to_string()
        })
    };
    while all[0].calls.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    group.check(); // which does not wait for the call
    group.fail(1, "it panicked");
    let refused = waiting.join().unwrap();
    assert!(refused.contains("unhandled system error: no route to GPU"), "{refused}");
    drop(group.rank(1));
    assert_eq!(end_counts(&all), [(1, 0), (1, 0)]);
}

#[test]
fn asynchronous_errors_fail_the_group_and_in_progress_is_no_error() {
    let group = fake_group(2);
    let all = communicators(&group);
    all[0].error.store(IN_PROGRESS, Ordering::Release);
    group.check();
    assert_eq!(group.failure(), None);
    all[1].error.store(3, Ordering::Release);
    group.check();
    let failure = group.failure().unwrap().clone();
    assert_eq!((failure.rank, failure.reason.as_str()), (1, "unhandled system error: no route to GPU"));
    (0..2).for_each(|rank| drop(group.rank(rank)));
    assert_eq!(end_counts(&all), [(1, 0), (1, 0)]);
}

#[test]
fn communicators_of_ranks_that_never_started_end_with_the_group() {
    let group = fake_group(2);
    let all = communicators(&group);
    drop(group.rank(0));
    drop(group);
    assert_eq!(end_counts(&all), [(0, 1), (1, 0)]);
}

#[test]
fn refused_gpus_and_a_missing_library_are_named_in_the_error() {
    let refused = NcclGroup::with_library(library(), &[4, 13]).err().unwrap().to_string();
    for clue in ["GPUs 4, 13", "unhandled system error: no route to GPU"] {
        assert!(refused.contains(clue), "{refused}");
    }
    let missing = NcclLibrary::load(&["libnccl-of-nowhere.so.2"]).err().unwrap().to_string();
    for clue in ["NCCL 2.10", "libnccl-of-nowhere.so.2", "install", "nvidia-nccl-cu13", "LD_LIBRARY_PATH"] {
        assert!(missing.contains(clue), "{missing}");
    }
    // An installed NCCL must have every function.
    match NcclLibrary::load(&LIBRARY_NAMES) {
        Ok(real) => assert!(real.version >= VERSION_MIN),
        Err(missing) => assert!(missing.to_string().contains("libnccl.so.2"), "{missing}"),
    }
}

#[test]
fn the_barrier_returns_the_minimum_each_round_until_a_rank_fails() {
    let group = fake_group(3);
    let rounds = 50u32;
    let value = |rank: u32, round: u32| (rank * 7 + round * 5) % 11 + round;
    let outcomes: Vec<Result<u32, GroupFailed>> = std::thread::scope(|scope| {
        let work = |rank: u32| {
            let group = &group;
            scope.spawn(move || {
                for round in 0..rounds {
                    let min = (0..3).map(|rank| value(rank, round)).min().unwrap();
                    assert_eq!(group.barrier_min(value(rank, round)), Ok(min), "rank {rank}, round {round}");
                }
                if rank == 1 {
                    group.fail(1, "it has no memory left");
                }
                group.barrier_min(0)
            })
        };
        let threads: Vec<_> = (0..3).map(work).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for outcome in outcomes {
        assert_eq!(outcome, Err(GroupFailed { rank: 1, reason: "it has no memory left".to_owned() }));
    }
}
