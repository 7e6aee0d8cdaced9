//! Synchronization of the thread pool. `tests/loom` replaces this module by loom's types, to try all interleavings.

pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize};
pub(super) use std::sync::{Mutex, MutexGuard};
pub(super) use std::thread::{self, JoinHandle, Thread};

/// Rounds of `spin_loop` before the first yield: some 50 us, more than the gaps between most steps.
pub(super) const SPINS: u32 = 1 << 12;
/// Yields before a thread sleeps. Workers may share cores, so waiting must let others run.
pub(super) const YIELDS: u32 = 64;

/// `UnsafeCell` with the interface of loom's, which detects data races.
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Calls `read` with a pointer for reading.
    #[inline(always)]
    pub(super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    /// Calls `write` with a pointer for writing.
    #[inline(always)]
    pub(super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}
