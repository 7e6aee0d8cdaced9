//! Memory of the host that copies may run from and to by themselves.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::driver::sys::CUresult;

use crate::{Outcome, locked};

struct Memory {
    _words: Box<[u128]>,
    bytes: usize,
}

/// By address.
static PINNED: Mutex<BTreeMap<usize, Memory>> = Mutex::new(BTreeMap::new());

/// Memory that holds NaN.
pub(crate) fn alloc(bytes: usize) -> *mut c_void {
    let mut words = vec![u128::MAX; bytes.div_ceil(16)].into_boxed_slice();
    let at = words.as_mut_ptr();
    locked(&PINNED).insert(at.addr(), Memory { _words: words, bytes });
    at.cast()
}

/// Frees it at once, whatever copies still run: these then fail.
pub(crate) fn free(at: *mut c_void) -> Outcome {
    let freed = locked(&PINNED).remove(&at.addr());
    freed.map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// Whether a range is pinned.
pub(crate) fn holds(at: usize, bytes: usize) -> bool {
    let pinned = locked(&PINNED);
    let below = pinned.range(..=at).next_back();
    below.is_some_and(|(from, memory)| at + bytes <= from + memory.bytes)
}
