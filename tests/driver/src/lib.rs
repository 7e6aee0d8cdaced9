//! What `libcuda.so`, `libcublasLt.so` and `libnccl.so.2` are to a worker, without a GPU: everything of them that the CUDA
//! runtime calls, by the rules in their documentation. So the runtime's own calls, from the first look for a driver to captured
//! graphs and the end of a group, run on any machine: what is simulated is the device, and not the worker.
//!
//! Kernels run on the harness ([`inflight_kernels::cuda::Harness`]), from the same sources. Streams are threads that begin as
//! late as they may: until somebody waits for their work, or for a while, they do nothing, so that what is used before it
//! is there holds NaN. Memory that was never written does, too.
//!
//! It is stricter than a driver where a driver lets mistakes pass: every range of memory is checked when a copy is enqueued
//! and once more when it runs; asynchronous copies take pinned memory only; handles that were destroyed are refused.
//! A call that the runtime does not make is not here, and looking it up fails.
//!
//! What it can't show: whether a compiled kernel does what its source says, speed, and how a real driver differs from its
//! documentation.
//!
//! The file of this library, under those three names in a folder of `LD_LIBRARY_PATH`, is all that a process needs; see
//! [`settings`] for what can be set.

mod cublaslt;
mod device;
mod driver;
mod event;
mod handles;
mod module;
mod nccl;
mod pinned;
pub mod settings;
mod stream;

use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_kernels::cuda::Harness;

use cudarc::driver::sys::CUresult;

/// Whether it has kernels: where there is no C++ compiler to build them with, none is found.
pub const AVAILABLE: bool = Harness::AVAILABLE;

/// What a call of the driver comes to.
type Outcome<T = ()> = Result<T, CUresult>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
