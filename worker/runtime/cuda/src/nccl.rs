//! NCCL communicators for the GPUs of one process. The library is loaded when a group is created, so that
//! neither building nor starting needs it.
//!
//! One call creates all communicators, so that none waits for a rank that failed to start. Each then belongs
//! to its device thread; other threads only query its error and end it.
//!
//! **A group fails as one.** Work on a rank's stream waits for the other ranks, so a failure of any rank
//! aborts all communicators: running collectives end and later calls return an error. NCCL frees a
//! communicator only once the graphs captured with it are destroyed, which its device thread does; so each is
//! aborted on a thread of its own.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use inflight_kernels::cuda::{DeviceError, HalfDtype};
use inflight_runtime::collective::GroupFailed;

use super::gpu::DeviceCollective;
use super::gpu_info::Unavailable;

/// First release with bf16 reductions.
const VERSION_MIN: c_int = 21_000;
/// File names of the library: of its runtime package and of its development package.
const LIBRARY_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Maximum wait for an NCCL call in progress before its communicator is aborted regardless.
const CALL_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 5_000 });
/// Maximum wait for a communicator to end before it is leaked.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// `ncclComm_t`.
type CommHandle = *mut c_void;

// Constants of nccl.h.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const INT8: c_int = 0;
const FLOAT16: c_int = 6;
const BFLOAT16: c_int = 9;
const SUM: c_int = 0;

type ReduceFn = unsafe extern "C" fn(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    operation: c_int,
    communicator: CommHandle,
    stream: *mut c_void,
) -> c_int;
type GatherFn = unsafe extern "C" fn(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    communicator: CommHandle,
    stream: *mut c_void,
) -> c_int;

/// Entry points of libnccl.
struct NcclLibrary {
    init_all:
        unsafe extern "C" fn(communicators: *mut CommHandle, count: c_int, devices: *const c_int) -> c_int,
    all_reduce: ReduceFn,
    all_gather: GatherFn,
    async_error: unsafe extern "C" fn(communicator: CommHandle, error: *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(communicator: CommHandle) -> c_int,
    destroy: unsafe extern "C" fn(communicator: CommHandle) -> c_int,
    error_string: unsafe extern "C" fn(error: c_int) -> *const c_char,
    last_error: Option<unsafe extern "C" fn(communicator: CommHandle) -> *const c_char>,
    version: c_int,
}

impl NcclLibrary {
    /// Loads the first of these library names that exists.
    ///
    /// # Errors
    /// [`Unavailable::Collectives`], which says what to install.
    fn load(names: &[&str]) -> Result<Self, Unavailable> {
        let unavailable = |found: String| Unavailable::Collectives { found };
        let mut refused = Vec::new();
        let library = names.iter().find_map(|name| {
            // SAFETY: NCCL's static initializers only set up its own state.
            let loaded = unsafe { libloading::Library::new(*name) };
            loaded.map_err(|error| refused.push(loader_error(&error))).ok()
        });
        // Never unloaded: threads that called it, and its own, run its destructors when they end.
        let library = ManuallyDrop::new(library.ok_or_else(|| unavailable(refused.join("; ")))?);
        // SAFETY: the functions have these signatures in every NCCL 2 release.
        unsafe {
            let missing = |error: libloading::Error| unavailable(loader_error(&error));
            macro_rules! function {
                ($name:literal) => {
                    *library.get(concat!($name, "\0")).map_err(missing)?
                };
            }
            let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = function!("ncclGetVersion");
            let mut version = 0;
            get_version(&mut version);
            if version < VERSION_MIN {
                // Up to 2.8, version codes are major * 1000 + minor * 100.
                let unit = if version < 10_000 { 1_000 } else { 10_000 };
                let (major, minor) = (version / unit, version % unit / 100);
                return Err(unavailable(format!("release {major}.{minor} is installed")));
            }
            Ok(Self {
                init_all: function!("ncclCommInitAll"),
                all_reduce: function!("ncclAllReduce"),
                all_gather: function!("ncclAllGather"),
                async_error: function!("ncclCommGetAsyncError"),
                abort: function!("ncclCommAbort"),
                destroy: function!("ncclCommDestroy"),
                error_string: function!("ncclGetErrorString"),
                last_error: library.get("ncclGetLastError\0").map(|function| *function).ok(),
                version,
            })
        }
    }

    /// Returns NCCL's text of an error, with its last detailed message.
    fn error_message(&self, error: c_int) -> String {
        let text = |text: *const c_char| {
            // SAFETY: NCCL returns null or a static zero-terminated string.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        // SAFETY: both accept any error code, and a null communicator.
        let (kind, last) = unsafe {
            ((self.error_string)(error), self.last_error.map_or(std::ptr::null(), |last| last(null_mut())))
        };
        let kind = text(kind).unwrap_or_else(|| format!("NCCL error {error}"));
        match text(last).filter(|last| !last.trim().is_empty()) {
            Some(last) => format!("{kind}: {}", last.trim()),
            None => kind,
        }
    }
}

/// Returns the loader's error, which holds the system's message where there is one.
fn loader_error(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the version of the installed NCCL, for the numerics fingerprint.
///
/// # Errors
/// [`Unavailable::Collectives`], which says what to install.
pub(super) fn version() -> Result<String, Unavailable> {
    NcclLibrary::load(&LIBRARY_NAMES).map(|library| format!("nccl {}", library.version))
}

/// NCCL communicators of a tensor-parallel group, shared by its device threads.
pub(super) struct NcclGroup {
    library: NcclLibrary,
    communicators: Vec<RankCommunicator>,
    failure: OnceLock<GroupFailed>,
    barrier: Mutex<HostBarrier>,
    round_done: Condvar,
}

/// Host barrier that computes a minimum over the ranks.
#[derive(Default)]
struct HostBarrier {
    /// Number of completed rounds.
    round: u64,
    /// Values of the ranks that have arrived in this round.
    values: Vec<u32>,
    /// Minimum of the last completed round.
    min: u32,
}

/// One rank's communicator.
struct RankCommunicator {
    /// `ncclComm_t`; null once it is destroyed or aborted.
    handle: AtomicPtr<c_void>,
    /// Held during an NCCL call with the communicator.
    busy: Mutex<()>,
    /// Thread that aborts it.
    abort_thread: Mutex<Option<JoinHandle<()>>>,
}

impl NcclGroup {
    /// Creates a communicator for each of these GPUs, by rank.
    ///
    /// # Errors
    /// [`Unavailable::Collectives`] without NCCL, [`Unavailable::Group`] if NCCL refuses.
    pub(super) fn open(ordinals: &[usize]) -> Result<Arc<Self>, Unavailable> {
        Self::with_library(NcclLibrary::load(&LIBRARY_NAMES)?, ordinals)
    }

    fn with_library(library: NcclLibrary, ordinals: &[usize]) -> Result<Arc<Self>, Unavailable> {
        let devices: Vec<c_int> = ordinals.iter().map(|ordinal| *ordinal as c_int).collect();
        let mut handles = vec![null_mut(); devices.len()];
        // SAFETY: both arrays have `devices.len()` entries.
        let status =
            unsafe { (library.init_all)(handles.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        if status != SUCCESS {
            let gpus = ordinals.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            return Err(Unavailable::Group { gpus, reason: library.error_message(status) });
        }
        let communicator = |handle| RankCommunicator {
            handle: AtomicPtr::new(handle),
            busy: Mutex::new(()),
            abort_thread: Mutex::new(None),
        };
        let communicators = handles.into_iter().map(communicator).collect();
        let (barrier, round_done) = Default::default();
        Ok(Arc::new(Self { library, communicators, failure: OnceLock::new(), barrier, round_done }))
    }

    /// Returns a rank's handle, for its device thread; [`NcclRank::enqueue_on`] sets the stream.
    pub(super) fn rank(self: &Arc<Self>, rank: usize) -> NcclRank {
        NcclRank { group: Arc::clone(self), rank, stream: Cell::new(null_mut()), _one_thread: PhantomData }
    }

    /// Returns the group's failure, if any.
    pub(super) fn failure(&self) -> Option<&GroupFailed> {
        self.failure.get()
    }

    /// Fails the group because of `rank` and aborts all communicators. The first reason is kept.
    pub(super) fn fail(self: &Arc<Self>, rank: usize, reason: &str) {
        if self.failure.set(GroupFailed { rank, reason: reason.to_owned() }).is_err() {
            return; // later ones are mostly consequences of the first
        }
        tracing::error!(rank, reason, "tensor-parallel group failed");
        // A thread in `barrier_min` holds this lock from its check of `failure` until it waits.
        drop(lock(&self.barrier));
        self.round_done.notify_all();
        for (index, communicator) in self.communicators.iter().enumerate() {
            let group = Arc::clone(self);
            let work = move || group.abort(index);
            match std::thread::Builder::new().name(format!("abort-{index}")).spawn(work) {
                Ok(thread) => *lock(&communicator.abort_thread) = Some(thread),
                Err(error) => {
                    tracing::error!(rank = index, %error, "cannot start a thread to abort the NCCL communicator")
                }
            }
        }
    }

    /// Waits on the host until all ranks have arrived, and returns the minimum of their values.
    ///
    /// # Errors
    /// The group has failed.
    pub(super) fn barrier_min(&self, value: u32) -> Result<u32, GroupFailed> {
        let mut barrier = lock(&self.barrier);
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let round = barrier.round;
        barrier.values.push(value);
        if barrier.values.len() == self.communicators.len() {
            barrier.min = barrier.values.drain(..).min().unwrap_or(value);
            barrier.round += 1;
            self.round_done.notify_all();
        }
        while barrier.round == round {
            if let Some(failure) = self.failure.get() {
                return Err(failure.clone());
            }
            barrier = self.round_done.wait(barrier).unwrap_or_else(PoisonError::into_inner);
        }
        // The minimum stays until this rank arrives at the next round.
        Ok(barrier.min)
    }

    /// Aborts a rank's communicator, whatever runs on it. Returns once graphs captured with it are destroyed.
    fn abort(&self, rank: usize) {
        let communicator = &self.communicators[rank];
        let begun = Instant::now();
        // A call that waits for a dead rank holds the lock forever.
        let guard = loop {
            match communicator.busy.try_lock() {
                Ok(guard) => break Some(guard),
                Err(TryLockError::Poisoned(guard)) => break Some(guard.into_inner()),
                Err(TryLockError::WouldBlock) if begun.elapsed() > CALL_TIMEOUT => break None,
                Err(TryLockError::WouldBlock) => std::thread::yield_now(),
            }
        };
        let handle = communicator.handle.swap(null_mut(), Ordering::AcqRel);
        drop(guard);
        if !handle.is_null() {
            // SAFETY: `swap` gave out the handle once, so it is ended once and no new call gets it; aborting
            // a call in progress is what ncclCommAbort is for.
            unsafe { (self.library.abort)(handle) };
        }
    }

    /// Queries the communicators for asynchronous errors, and fails the group if there is one.
    pub(super) fn check(self: &Arc<Self>) {
        for (rank, communicator) in self.communicators.iter().enumerate() {
            // A call in progress reports its own error.
            let Ok(_guard) = communicator.busy.try_lock() else { continue };
            let handle = communicator.handle.load(Ordering::Acquire);
            let mut error = SUCCESS;
            // SAFETY: the communicator is not ended while its lock is held, and one `int` is written.
            if !handle.is_null() && unsafe { (self.library.async_error)(handle, &mut error) } != SUCCESS {
                continue;
            }
            if error != SUCCESS && error != IN_PROGRESS {
                self.fail(rank, &self.library.error_message(error));
            }
        }
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        for communicator in &self.communicators {
            let handle = communicator.handle.swap(null_mut(), Ordering::AcqRel);
            if !handle.is_null() {
                // SAFETY: no `NcclRank` took the handle, so nothing uses it; `swap` gave it out once.
                unsafe { (self.library.abort)(handle) };
            }
        }
    }
}

/// One rank's communicator, for its device thread. Must be dropped after all graphs captured with it;
/// destruction waits for the other ranks' unless the group has failed.
pub(super) struct NcclRank {
    group: Arc<NcclGroup>,
    rank: usize,
    stream: Cell<*mut c_void>,
    _one_thread: PhantomData<*const ()>,
}

impl NcclRank {
    /// Sets the stream for collectives.
    pub(super) fn enqueue_on(&self, stream: *mut c_void) {
        self.stream.set(stream);
    }

    fn call(
        &self,
        what: &str,
        work: impl FnOnce(&NcclLibrary, CommHandle) -> c_int,
    ) -> Result<(), DeviceError> {
        let failed = |reason: String| DeviceError::Failed { what: what.to_owned(), reason };
        let communicator = &self.group.communicators[self.rank];
        let _guard = lock(&communicator.busy);
        let handle = communicator.handle.load(Ordering::Acquire);
        if let Some(failure) = self.group.failure() {
            return Err(failed(failure.to_string()));
        }
        if handle.is_null() {
            return Err(failed("the communicator has ended".to_owned()));
        }
        match work(&self.group.library, handle) {
            SUCCESS => Ok(()),
            error => Err(failed(self.group.library.error_message(error))),
        }
    }
}

impl DeviceCollective for NcclRank {
    unsafe fn all_reduce(&self, half: HalfDtype, address: u64, elements: usize) -> Result<(), DeviceError> {
        let kind = match half {
            HalfDtype::Bf16 => BFLOAT16,
            HalfDtype::F16 => FLOAT16,
        };
        let (address, stream) = (address as *mut c_void, self.stream.get());
        self.call("ncclAllReduce", |library, handle| {
            // SAFETY: `call` holds the communicator's lock; the caller guarantees `elements` elements of this
            // device at `address`.
            unsafe { (library.all_reduce)(address, address, elements, kind, SUM, handle, stream) }
        })
    }

    unsafe fn all_gather(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        let own = (address as usize + self.rank * bytes) as *const c_void;
        let (address, stream) = (address as *mut c_void, self.stream.get());
        self.call("ncclAllGather", |library, handle| {
            // SAFETY: `call` holds the communicator's lock; the caller guarantees `bytes` bytes per rank at
            // `address`.
            unsafe { (library.all_gather)(own, address, bytes, INT8, handle, stream) }
        })
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        let communicator = &self.group.communicators[self.rank];
        let ending = match self.group.failure() {
            Some(_) => lock(&communicator.abort_thread).take(),
            None => {
                let handle = AtomicPtr::new(communicator.handle.swap(null_mut(), Ordering::AcqRel));
                let group = Arc::clone(&self.group);
                let destroy = move || {
                    let handle = handle.into_inner();
                    if !handle.is_null() {
                        // SAFETY: `swap` gave out the handle once, so it is destroyed once.
                        unsafe { (group.library.destroy)(handle) };
                    }
                };
                std::thread::Builder::new().name(format!("end-{}", self.rank)).spawn(destroy).ok()
            }
        };
        let Some(ending) = ending else { return };
        let begun = Instant::now();
        while !ending.is_finished() {
            if begun.elapsed() > END_TIMEOUT {
                tracing::warn!(
                    rank = self.rank,
                    "NCCL communicator did not abort in time; leaving it behind"
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = ending.join();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub(super) mod tests;
