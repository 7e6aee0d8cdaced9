//! loom's types under the names of the `sync` modules of the crates whose code is modelled.

pub(crate) use loom::cell::UnsafeCell;
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
pub(crate) use loom::sync::{Mutex, MutexGuard};
pub(crate) use loom::thread::{self, JoinHandle, Thread};

/// A thread that waits sleeps at once: spinning adds interleavings, but no states.
pub(crate) const SPINS: u32 = 0;
/// See [`SPINS`].
pub(crate) const YIELDS: u32 = 0;

/// loom's `thread_local!`, which knows no `const` initializers.
macro_rules! loom_thread_local {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = const { $value:expr };) => {
        loom::thread_local! { $(#[$attribute])* static $name: $type = $value; }
    };
}
pub(crate) use loom_thread_local as thread_local;
