//! Simulated pinned host memory.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::driver::sys::CUresult;

use crate::{DriverResult, lock};

struct PinnedAllocation {
    _words: Box<[u128]>,
    bytes: usize,
}

/// Pinned allocations by address.
static PINNED: Mutex<BTreeMap<usize, PinnedAllocation>> = Mutex::new(BTreeMap::new());

/// Allocates pinned memory filled with NaN.
pub(crate) fn alloc(bytes: usize) -> *mut c_void {
    let mut words = vec![u128::MAX; bytes.div_ceil(16)].into_boxed_slice();
    let at = words.as_mut_ptr();
    lock(&PINNED).insert(at.addr(), PinnedAllocation { _words: words, bytes });
    at.cast()
}

/// Frees an allocation at once; copies that still use it then fail.
pub(crate) fn free(at: *mut c_void) -> DriverResult {
    let freed = lock(&PINNED).remove(&at.addr());
    freed.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// Returns whether a range lies within one pinned allocation.
pub(crate) fn holds(at: usize, bytes: usize) -> bool {
    let pinned = lock(&PINNED);
    let below = pinned.range(..=at).next_back();
    below.is_some_and(|(from, memory)| at + bytes <= from + memory.bytes)
}
