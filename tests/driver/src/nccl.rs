//! The calls of NCCL, for ranks in one process.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::Half;

use crate::device::Device;
use crate::driver::{still, stream};
use crate::handles::Handles;
use crate::stream::{POLL, Work};
use crate::{Outcome, device, locked};

const SUCCESS: c_int = 0;
const UNHANDLED: c_int = 1;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

/// What a rank has all do.
#[derive(Clone, Copy, PartialEq)]
enum Task {
    /// Sums so many numbers.
    Reduce(usize, Half),
    /// Gathers parts of so many bytes.
    Gather(usize),
}

#[derive(Default)]
struct Meeting {
    /// Of each rank that has come: from where, to where, and what.
    parts: Vec<Option<(usize, usize, Task)>>,
    round: u64,
    /// Ranks asked for different things.
    odd: bool,
    /// Ranks whose communicators were aborted: those of the others wait on.
    aborted: Vec<bool>,
}

struct Group {
    meeting: Mutex<Meeting>,
    met: Condvar,
}

struct Communicator {
    group: Arc<Group>,
    rank: usize,
    ordinal: usize,
    /// Held by everything that was enqueued or captured with it.
    uses: Arc<()>,
}

static COMMUNICATORS: Handles<Communicator> = Handles::new();

impl Group {
    /// On each rank's stream: waits for the others, and the last does it for all.
    fn meet(&self, rank: usize, from: usize, to: usize, task: Task) -> Outcome {
        let mut meeting = locked(&self.meeting);
        if meeting.aborted[rank] {
            return Ok(());
        }
        let round = meeting.round;
        meeting.parts[rank] = Some((from, to, task));
        if meeting.parts.iter().all(Option::is_some) {
            let parts: Vec<_> = meeting.parts.iter_mut().filter_map(Option::take).collect();
            meeting.odd |= parts.iter().any(|part| part.2 != task);
            if !meeting.odd {
                work(&parts, task);
            }
            meeting.round += 1;
            self.met.notify_all();
        }
        while meeting.round == round {
            if meeting.aborted[rank] {
                // What it brought is freed before long.
                meeting.parts[rank] = None;
                return Ok(());
            }
            meeting = self.met.wait(meeting).unwrap_or_else(PoisonError::into_inner);
        }
        // GPUs would wait for ever or write anything anywhere.
        still(!meeting.odd)
    }
}

/// Every rank's part and result is there: each has looked.
fn work(parts: &[(usize, usize, Task)], task: Task) {
    // SAFETY: of the ranges that the ranks have looked at.
    let read = |at: usize, bytes: usize| unsafe {
        std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(at), bytes).to_vec()
    };
    let result: Vec<u8> = match task {
        Task::Gather(bytes) => parts.iter().flat_map(|(from, ..)| read(*from, bytes)).collect(),
        Task::Reduce(numbers, half) => {
            let mut sums = vec![0.0f32; numbers];
            for (from, ..) in parts {
                let bytes = read(*from, numbers * 2);
                let values =
                    bytes.chunks_exact(2).map(|pair| half.widen(u16::from_ne_bytes([pair[0], pair[1]])));
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            sums.iter().flat_map(|sum| half.narrow(*sum).to_ne_bytes()).collect()
        }
    };
    for (_, to, _) in parts {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(*to);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), to, result.len()) };
    }
}

/// Enqueues a rank's end of a task.
fn ask(communicator: *mut c_void, on: CUstream, from: *const c_void, to: *mut c_void, task: Task) -> c_int {
    let Some(communicator) = COMMUNICATORS.get(communicator) else { return INVALID_ARGUMENT };
    if locked(&communicator.group.meeting).aborted[communicator.rank] {
        return INVALID_USAGE;
    }
    let Ok(stream) = stream(on) else { return UNHANDLED };
    if stream.device.ordinal != communicator.ordinal {
        return INVALID_USAGE;
    }
    let (from, to) = (from.addr(), to.addr());
    let (group, rank) = (Arc::clone(&communicator.group), communicator.rank);
    let ranks = locked(&group.meeting).parts.len();
    let (part, whole) = match task {
        Task::Reduce(numbers, _) => (numbers * 2, numbers * 2),
        Task::Gather(bytes) => (bytes, bytes * ranks),
    };
    let there = move |device: &Device| device.holds(from as u64, part) && device.holds(to as u64, whole);
    if !there(&stream.device) {
        return INVALID_ARGUMENT;
    }
    let held = Arc::clone(&communicator.uses);
    let work = move |device: &Device| {
        let _held = &held;
        still(there(device))?;
        group.meet(rank, from, to, task)
    };
    stream.enqueue(Work::new(work)).map_or(UNHANDLED, |_| SUCCESS)
}

/// Takes a communicator away; returns once nothing that was captured with it is left.
fn end(communicator: *mut c_void) -> c_int {
    let Some(communicator) = COMMUNICATORS.remove(communicator) else { return INVALID_ARGUMENT };
    while Arc::strong_count(&communicator.uses) > 1 {
        std::thread::sleep(POLL);
    }
    SUCCESS
}

/// `ncclGetVersion` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: passed on to the caller.
    unsafe { version.write(22_700) };
    SUCCESS
}

/// `ncclCommInitAll` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(
    out: *mut *mut c_void,
    count: c_int,
    devices: *const c_int,
) -> c_int {
    let Some(ranks) = usize::try_from(count).ok().filter(|ranks| *ranks > 0) else { return INVALID_ARGUMENT };
    let meeting = Meeting { parts: vec![None; ranks], aborted: vec![false; ranks], ..Meeting::default() };
    let group = Arc::new(Group { meeting: Mutex::new(meeting), met: Condvar::new() });
    for rank in 0..ranks {
        // SAFETY: as many as said.
        let ordinal = unsafe { *devices.add(rank) };
        let Some(ordinal) = usize::try_from(ordinal).ok().filter(|ordinal| *ordinal < device::all().len())
        else {
            return INVALID_ARGUMENT;
        };
        let (group, uses) = (Arc::clone(&group), Arc::new(()));
        let communicator = Arc::new(Communicator { group, rank, ordinal, uses });
        // SAFETY: as above.
        unsafe { out.add(rank).write(COMMUNICATORS.add(communicator)) };
    }
    SUCCESS
}

/// `ncclAllReduce` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    operation: c_int,
    communicator: *mut c_void,
    stream: CUstream,
) -> c_int {
    // ncclFloat16 and ncclBfloat16; ncclSum.
    let half = match kind {
        6 => Half::F16,
        9 => Half::Bf16,
        _ => return INVALID_ARGUMENT,
    };
    if operation != 0 {
        return INVALID_ARGUMENT;
    }
    ask(communicator, stream, from, to, Task::Reduce(count, half))
}

/// `ncclAllGather` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    communicator: *mut c_void,
    stream: CUstream,
) -> c_int {
    // ncclInt8.
    if kind != 0 {
        return INVALID_ARGUMENT;
    }
    ask(communicator, stream, from, to, Task::Gather(count))
}

/// `ncclCommGetAsyncError` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(communicator: *mut c_void, error: *mut c_int) -> c_int {
    if COMMUNICATORS.get(communicator).is_none() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: passed on to the caller.
    unsafe { error.write(SUCCESS) };
    SUCCESS
}

/// `ncclCommAbort` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(communicator: *mut c_void) -> c_int {
    if let Some(Communicator { group, rank, .. }) = COMMUNICATORS.get(communicator).as_deref() {
        locked(&group.meeting).aborted[*rank] = true;
        group.met.notify_all();
    }
    end(communicator)
}

/// `ncclCommDestroy` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(communicator: *mut c_void) -> c_int {
    end(communicator)
}

/// `ncclGetErrorString` of NCCL.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(error: c_int) -> *const c_char {
    match error {
        SUCCESS => c"no error",
        UNHANDLED => c"unhandled cuda error",
        INVALID_ARGUMENT => c"invalid argument",
        _ => c"invalid usage",
    }
    .as_ptr()
}

/// `ncclGetLastError` of NCCL.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    c"".as_ptr()
}
