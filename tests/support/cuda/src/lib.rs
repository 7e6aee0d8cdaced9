//! Simulated `libcuda.so`, `libcublasLt.so` and `libnccl.so.2`: every call that the CUDA runtime makes, as
//! their documentation specifies. So the runtime's own calls, from driver detection to captured graphs and
//! the end of a group, run on any machine: the device is simulated, the worker is not.
//!
//! Kernels run on the CPU harness ([`inflight_kernel_harness::Harness`]), from the same sources. Streams are
//! threads that start work as late as possible: when it is waited for, or after a random delay. Data used
//! before it is there reads as NaN, as does memory that was never written.
//!
//! It is stricter than a driver: every memory range is checked when a copy is enqueued and again when it
//! runs; asynchronous copies take pinned memory only; destroyed handles are refused. Calls that the runtime
//! does not make are missing, so looking them up fails.
//!
//! Not covered: whether a compiled kernel matches its source, speed, and how a real driver differs from its
//! documentation.
//!
//! A process uses it when this library's file lies under those three names in a folder of `LD_LIBRARY_PATH`;
//! see [`settings`] for its configuration.

mod cubin;
mod cublaslt;
mod device;
mod driver;
mod error_names;
mod event;
mod handle_table;
mod lie;
mod module;
mod nccl;
mod pinned;
pub mod settings;
mod stream;

use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_kernel_harness::Harness;

use cudarc::driver::sys::CUresult;

/// Whether kernels are available: without a C++ compiler at build time there are none.
pub const AVAILABLE: bool = Harness::AVAILABLE;

/// Result of a driver call.
type DriverResult<T = ()> = Result<T, CUresult>;

/// Locks a mutex, ignoring poisoning.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
