//! The library in miniature: communicators that remember what was done to them.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize};

use super::*;

/// What a call was made with.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Call {
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    stream: usize,
}

#[derive(Default)]
struct Communicator {
    calls: Mutex<Vec<Call>>,
    /// A call returns only once it is aborted.
    hangs: AtomicBool,
    error: AtomicI32,
    aborted: AtomicUsize,
    destroyed: AtomicUsize,
}

/// The communicator behind a handle. They are never freed, so that what comes too late shows.
fn of(handle: Handle) -> &'static Communicator {
    // SAFETY: made by `init_all`, and never freed.
    unsafe { &*handle.cast::<Communicator>() }
}

unsafe extern "C" fn init_all(handles: *mut Handle, count: c_int, devices: *const c_int) -> c_int {
    for rank in 0..count as usize {
        // SAFETY: both lists are as long as said.
        unsafe {
            if *devices.add(rank) == 13 {
                return 1;
            }
            *handles.add(rank) = Box::into_raw(Box::<Communicator>::default()).cast();
        }
    }
    SUCCESS
}

fn called(handle: Handle, call: Call) -> c_int {
    let communicator = of(handle);
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
    handle: Handle,
    stream: *mut c_void,
) -> c_int {
    assert_eq!(operation, SUM);
    called(handle, Call { from: from as usize, to: to as usize, count, kind, stream: stream as usize })
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    handle: Handle,
    stream: *mut c_void,
) -> c_int {
    called(handle, Call { from: from as usize, to: to as usize, count, kind, stream: stream as usize })
}

unsafe extern "C" fn async_error(handle: Handle, error: *mut c_int) -> c_int {
    // SAFETY: writes one number.
    unsafe { *error = of(handle).error.load(Ordering::Acquire) };
    SUCCESS
}

unsafe extern "C" fn abort(handle: Handle) -> c_int {
    of(handle).aborted.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn destroy(handle: Handle) -> c_int {
    of(handle).destroyed.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn error_string(_: c_int) -> *const c_char {
    c"unhandled system error".as_ptr()
}

unsafe extern "C" fn last_error(_: Handle) -> *const c_char {
    c"no route to GPU\n".as_ptr()
}

fn library() -> Library {
    Library {
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

/// A group of so many ranks whose communicators do nothing.
pub(in crate::runtime::cuda) fn fake_group(world: usize) -> Arc<Group> {
    Group::over(library(), &(0..world).collect::<Vec<_>>()).unwrap()
}

fn communicators(group: &Group) -> Vec<&'static Communicator> {
    group.links.iter().map(|link| of(link.communicator.load(Ordering::Acquire))).collect()
}

fn ends_of(communicators: &[&Communicator]) -> Vec<(usize, usize)> {
    let ends =
        |one: &&Communicator| (one.aborted.load(Ordering::Acquire), one.destroyed.load(Ordering::Acquire));
    communicators.iter().map(ends).collect()
}

#[test]
fn sums_and_gatherings_are_made_in_place_on_the_stream_and_with_the_type_that_is_asked_for() {
    let group = fake_group(2);
    let all = communicators(&group);
    for rank in 0..2usize {
        let end = group.end(rank);
        let stream = 0x70 + rank;
        end.enqueue_on(stream as *mut c_void);
        // SAFETY: nothing looks at the addresses.
        unsafe {
            end.all_reduce(Half::Bf16, 0x1000, 24).unwrap();
            end.all_reduce(Half::F16, 0x2000, 8).unwrap();
            end.all_gather(0x3000, 0x100).unwrap();
        }
        let sum = |at, count, kind| Call { from: at, to: at, count, kind, stream };
        let own = 0x3000 + rank * 0x100;
        assert_eq!(
            *all[rank].calls.lock().unwrap(),
            [
                sum(0x1000, 24, BFLOAT16),
                sum(0x2000, 8, FLOAT16),
                Call { from: own, to: 0x3000, count: 0x100, kind: INT8, stream }
            ]
        );
    }
    drop(group);
    // Each was ended by its rank, in good order.
    assert_eq!(ends_of(&all), [(0, 1), (0, 1)]);
}

#[test]
fn a_failure_aborts_every_communicator_once_and_refuses_what_comes_after() {
    let group = fake_group(3);
    let all = communicators(&group);
    let ends: Vec<End> = (0..2).map(|rank| group.end(rank)).collect();
    group.fail(1, "it fell off the bus");
    group.fail(2, "it waited for rank 1");
    for end in &ends {
        // SAFETY: nothing looks at the address.
        let refused = unsafe { end.all_reduce(Half::F16, 0x10, 1) }.unwrap_err().to_string();
        assert!(refused.contains("rank 1") && refused.contains("fell off the bus"), "{refused}");
    }
    assert_eq!(group.failure().unwrap().rank, 1);
    drop(ends);
    // The third rank never began.
    drop(group.end(2));
    assert_eq!(ends_of(&all), [(1, 0), (1, 0), (1, 0)]);
    assert!(all.iter().all(|communicator| communicator.calls.lock().unwrap().is_empty()));
    drop(group);
    assert_eq!(ends_of(&all), [(1, 0), (1, 0), (1, 0)]);
}

#[test]
fn a_rank_that_waits_within_the_library_for_one_that_is_gone_is_freed() {
    let group = fake_group(2);
    let all = communicators(&group);
    all[0].hangs.store(true, Ordering::Release);
    let waiting = {
        let group = Arc::clone(&group);
        std::thread::spawn(move || {
            let end = group.end(0);
            // SAFETY: nothing looks at the address.
            unsafe { end.all_reduce(Half::F16, 0x10, 1) }.unwrap_err().to_string()
        })
    };
    while all[0].calls.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    group.check(); // which does not wait for the call
    group.fail(1, "it panicked");
    let refused = waiting.join().unwrap();
    assert!(refused.contains("unhandled system error: no route to GPU"), "{refused}");
    drop(group.end(1));
    assert_eq!(ends_of(&all), [(1, 0), (1, 0)]);
}

#[test]
fn what_goes_wrong_on_the_way_is_found_by_asking_and_what_is_in_progress_is_no_error() {
    let group = fake_group(2);
    let all = communicators(&group);
    all[0].error.store(IN_PROGRESS, Ordering::Release);
    group.check();
    assert_eq!(group.failure(), None);
    all[1].error.store(3, Ordering::Release);
    group.check();
    let failure = group.failure().unwrap().clone();
    assert_eq!((failure.rank, failure.reason.as_str()), (1, "unhandled system error: no route to GPU"));
    (0..2).for_each(|rank| drop(group.end(rank)));
    assert_eq!(ends_of(&all), [(1, 0), (1, 0)]);
}

#[test]
fn communicators_of_ranks_that_never_began_end_with_the_group() {
    let group = fake_group(2);
    let all = communicators(&group);
    drop(group.end(0));
    drop(group);
    assert_eq!(ends_of(&all), [(0, 1), (1, 0)]);
}

#[test]
fn gpus_that_nccl_refuses_and_a_library_that_is_not_there_are_named() {
    let refused = Group::over(library(), &[4, 13]).err().unwrap().to_string();
    for clue in ["GPUs 4, 13", "unhandled system error: no route to GPU"] {
        assert!(refused.contains(clue), "{refused}");
    }
    let missing = Library::load(&["libnccl-of-nowhere.so.2"]).err().unwrap().to_string();
    for clue in ["NCCL 2.10", "libnccl-of-nowhere.so.2", "install", "nvidia-nccl-cu13", "LD_LIBRARY_PATH"] {
        assert!(missing.contains(clue), "{missing}");
    }
    // Where the real one is installed, it has every function.
    match Library::load(&NAMES) {
        Ok(real) => assert!(real.version >= VERSION_MIN),
        Err(missing) => assert!(missing.to_string().contains("libnccl.so.2"), "{missing}"),
    }
}

#[test]
fn ranks_meet_time_after_time_and_learn_the_least_until_one_fails() {
    let group = fake_group(3);
    let rounds = 50u32;
    let brings = |rank: u32, round: u32| (rank * 7 + round * 5) % 11 + round;
    let outcomes: Vec<Result<u32, GroupFailed>> = std::thread::scope(|scope| {
        let meets = |rank: u32| {
            let group = &group;
            scope.spawn(move || {
                for round in 0..rounds {
                    let least = (0..3).map(|rank| brings(rank, round)).min().unwrap();
                    assert_eq!(group.meet(brings(rank, round)), Ok(least), "rank {rank}, round {round}");
                }
                if rank == 1 {
                    group.fail(1, "it has no memory left");
                }
                group.meet(0)
            })
        };
        let threads: Vec<_> = (0..3).map(meets).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for outcome in outcomes {
        assert_eq!(outcome, Err(GroupFailed { rank: 1, reason: "it has no memory left".to_owned() }));
    }
}
