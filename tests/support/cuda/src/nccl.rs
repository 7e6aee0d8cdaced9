//! Entry points of libnccl, for ranks in one process.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::HalfDtype;

use crate::device::SimulatedDevice;
use crate::driver::{check_ranges, stream};
use crate::handle_table::HandleTable;
use crate::stream::{POLL_INTERVAL, StreamWork};
use crate::{DriverResult, device, lock};

const SUCCESS: c_int = 0;
const UNHANDLED: c_int = 1;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

/// Collective operation.
#[derive(Clone, Copy, PartialEq)]
enum CollectiveOp {
    /// All-reduce (sum) of this many elements.
    AllReduce(usize, HalfDtype),
    /// All-gather of this many bytes per rank.
    AllGather(usize),
}

#[derive(Default)]
struct CollectiveRound {
    /// Source, target and operation of each rank that has arrived.
    parts: Vec<Option<(usize, usize, CollectiveOp)>>,
    number: u64,
    /// Ranks called different operations.
    mismatched: bool,
    /// Whether each rank's communicator was aborted; the other ranks keep waiting.
    aborted: Vec<bool>,
}

struct SimulatedGroup {
    round: Mutex<CollectiveRound>,
    round_done: Condvar,
}

struct SimulatedCommunicator {
    group: Arc<SimulatedGroup>,
    rank: usize,
    ordinal: usize,
    /// Cloned into all work that was enqueued or captured with it.
    uses: Arc<()>,
}

static COMMUNICATORS: HandleTable<SimulatedCommunicator> = HandleTable::new();

impl SimulatedGroup {
    /// Runs on each rank's stream: waits for the other ranks; the last to arrive performs the operation for
    /// all.
    fn run(&self, rank: usize, from: usize, to: usize, op: CollectiveOp) -> DriverResult {
        let mut round = lock(&self.round);
        if round.aborted[rank] {
            return Ok(());
        }
        let number = round.number;
        round.parts[rank] = Some((from, to, op));
        if round.parts.iter().all(Option::is_some) {
            let parts: Vec<_> = round.parts.iter_mut().filter_map(Option::take).collect();
            round.mismatched |= parts.iter().any(|part| part.2 != op);
            if !round.mismatched {
                perform(&parts, op);
            }
            round.number += 1;
            self.round_done.notify_all();
        }
        while round.number == number {
            if round.aborted[rank] {
                // Its memory is about to be freed.
                round.parts[rank] = None;
                return Ok(());
            }
            round = self.round_done.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
        // GPUs would hang or write to arbitrary addresses.
        check_ranges(!round.mismatched)
    }
}

/// Performs a collective. Each rank has checked that its source and target are allocated.
fn perform(parts: &[(usize, usize, CollectiveOp)], op: CollectiveOp) {
    // SAFETY: each rank has checked that its source range is allocated.
    let read = |at: usize, bytes: usize| unsafe {
        std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(at), bytes).to_vec()
    };
    let result: Vec<u8> = match op {
        CollectiveOp::AllGather(bytes) => parts.iter().flat_map(|(from, ..)| read(*from, bytes)).collect(),
        CollectiveOp::AllReduce(elements, half) => {
            let mut sums = vec![0.0f32; elements];
            for (from, ..) in parts {
                let bytes = read(*from, elements * 2);
                let values =
                    bytes.chunks_exact(2).map(|pair| half.widen(u16::from_ne_bytes([pair[0], pair[1]])));
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            sums.iter().flat_map(|sum| half.narrow(*sum).to_ne_bytes()).collect()
        }
    };
    for (_, to, _) in parts {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(*to);
        // SAFETY: each rank has checked that its target range is allocated.
        unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), to, result.len()) };
    }
}

/// Enqueues one rank's part of a collective.
fn enqueue(
    communicator: *mut c_void,
    on: CUstream,
    from: *const c_void,
    to: *mut c_void,
    op: CollectiveOp,
) -> c_int {
    let Some(communicator) = COMMUNICATORS.get(communicator) else { return INVALID_ARGUMENT };
    if lock(&communicator.group.round).aborted[communicator.rank] {
        return INVALID_USAGE;
    }
    let Ok(stream) = stream(on) else { return UNHANDLED };
    if stream.device.ordinal != communicator.ordinal {
        return INVALID_USAGE;
    }
    let (from, to) = (from.addr(), to.addr());
    let (group, rank) = (Arc::clone(&communicator.group), communicator.rank);
    let ranks = lock(&group.round).parts.len();
    let (source_bytes, target_bytes) = match op {
        CollectiveOp::AllReduce(elements, _) => (elements * 2, elements * 2),
        CollectiveOp::AllGather(bytes) => (bytes, bytes * ranks),
    };
    let valid_ranges = move |device: &SimulatedDevice| {
        device.holds(from as u64, source_bytes) && device.holds(to as u64, target_bytes)
    };
    if !valid_ranges(&stream.device) {
        return INVALID_ARGUMENT;
    }
    let held = Arc::clone(&communicator.uses);
    let work = move |device: &SimulatedDevice| {
        let _held = &held;
        check_ranges(valid_ranges(device))?;
        group.run(rank, from, to, op)
    };
    stream.enqueue(StreamWork::new(work)).map_or(UNHANDLED, |_| SUCCESS)
}

/// Removes a communicator; returns once all graphs captured with it are destroyed.
fn remove(communicator: *mut c_void) -> c_int {
    let Some(communicator) = COMMUNICATORS.remove(communicator) else { return INVALID_ARGUMENT };
    while Arc::strong_count(&communicator.uses) > 1 {
        std::thread::sleep(POLL_INTERVAL);
    }
    SUCCESS
}

/// `ncclGetVersion` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller guarantees that `version` is valid for writes.
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
    let round = CollectiveRound {
        parts: vec![None; ranks],
        aborted: vec![false; ranks],
        ..CollectiveRound::default()
    };
    let group = Arc::new(SimulatedGroup { round: Mutex::new(round), round_done: Condvar::new() });
    for rank in 0..ranks {
        // SAFETY: the caller guarantees `count` device ordinals.
        let ordinal = unsafe { *devices.add(rank) };
        let Some(ordinal) = usize::try_from(ordinal).ok().filter(|ordinal| *ordinal < device::all().len())
        else {
            return INVALID_ARGUMENT;
        };
        let (group, uses) = (Arc::clone(&group), Arc::new(()));
        let communicator = Arc::new(SimulatedCommunicator { group, rank, ordinal, uses });
        // SAFETY: the caller guarantees room for `count` communicators.
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
        6 => HalfDtype::F16,
        9 => HalfDtype::Bf16,
        _ => return INVALID_ARGUMENT,
    };
    if operation != 0 {
        return INVALID_ARGUMENT;
    }
    enqueue(communicator, stream, from, to, CollectiveOp::AllReduce(count, half))
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
    enqueue(communicator, stream, from, to, CollectiveOp::AllGather(count))
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
    // SAFETY: the caller guarantees that `error` is valid for writes.
    unsafe { error.write(SUCCESS) };
    SUCCESS
}

/// `ncclCommAbort` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(communicator: *mut c_void) -> c_int {
    if let Some(SimulatedCommunicator { group, rank, .. }) = COMMUNICATORS.get(communicator).as_deref() {
        lock(&group.round).aborted[*rank] = true;
        group.round_done.notify_all();
    }
    remove(communicator)
}

/// `ncclCommDestroy` of NCCL.
///
/// # Safety
/// As the library's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(communicator: *mut c_void) -> c_int {
    remove(communicator)
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
