//! Synchronization of wake-ups. `tests/loom` replaces this module by loom's types, to try all interleavings.

pub(crate) use std::sync::atomic::AtomicBool;
pub(crate) use std::sync::{Mutex, MutexGuard};
pub(crate) use std::thread_local;
