//! Synchronization of the watchdog. `tests/loom` replaces this module by loom's types, to try all interleavings.

pub(crate) use std::sync::atomic::AtomicU64;
