//! Untrusted work in processes of its own, which may abort, hang or run out of memory without harm to anything else.
//!
//! A [`Helper`] is a process of the same program that prepares a state once, for instance a vocabulary, and then forks for each request:
//! the fork shares the state by copy on write, has fresh [`Limits`] of memory and processor time, may make no system call but those of
//! memory and of its answer (seccomp), and ends with its answer. A fork costs about a millisecond. The process that owns the
//! helper restarts it when it dies, and gives up on a request when its future is dropped.
//!
//! - [`serve`] is the helper's side: the loop that forks.
//! - [`Helper`] is the owner's side.

mod child;
mod filter;
mod frame;
mod helper;
mod server;

pub use helper::{Answer, Helper, HelperError, HelperOptions, Program};
pub use server::serve;

use std::time::Duration;

/// Reason for which a state cannot be prepared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The state is not usable; every attempt would fail.
    #[error("{0}")]
    Unusable(String),
    /// The machine cannot prepare it for now, for instance because it is short of memory or threads; says nothing about the state.
    #[error("{0}")]
    Unavailable(String),
}

/// Limits of a request's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of memory beside what it shares with the helper.
    pub memory_bytes: u64,
    /// Maximum processor time; the kernel enforces whole seconds.
    pub cpu: Duration,
    /// Maximum time from the fork to the answer, for a process that is suspended or starved.
    pub wall: Duration,
}

impl Limits {
    fn cpu_seconds(&self) -> u64 {
        self.cpu.as_secs_f64().ceil().max(1.0) as u64
    }
}
