//! Synchronization of the hand-off to streams. `tests/loom` replaces this module by loom's types, to try all interleavings.

pub(crate) use std::sync::{Mutex, MutexGuard};
