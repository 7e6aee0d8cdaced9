//! GPUs of one process that share a model, through NCCL. The library is loaded when a group is made and never before, so
//! that nothing needs it to build or to start.
//!
//! All communicators are made by one call of one thread, so that none of them waits for a rank that failed to come. Each
//! then belongs to the thread that owns its GPU, but for the questions whether it has failed and for its end.
//!
//! **A group fails as one.** What a rank waits for on its stream comes from the others, so whoever learns of a failure
//! aborts the communicators of all: what runs then ends, and every later call is refused. NCCL frees a communicator only
//! once the graphs that were captured with it are gone, which its rank's thread sees to; so each is aborted on a thread of its
//! own.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use inflight_kernels::cuda::{DeviceError, Half};

use super::found::Unavailable;
use super::gpu::Peers;
use crate::runtime::collective::GroupFailed;

/// The first release that knows bf16.
const VERSION_MIN: c_int = 21_000;
/// Names that the library goes by: that of its packages, and that of its development files.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// How long a call that is under way may take before its communicator is aborted all the same.
const CALL_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 5_000 });
/// How long the end of a communicator may take before the process goes on without it.
const END_PATIENCE: Duration = Duration::from_secs(20);

type Handle = *mut c_void;

// Of nccl.h.
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
    communicator: Handle,
    stream: *mut c_void,
) -> c_int;
type GatherFn = unsafe extern "C" fn(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    kind: c_int,
    communicator: Handle,
    stream: *mut c_void,
) -> c_int;

/// The functions of the library that are used.
struct Library {
    init_all: unsafe extern "C" fn(communicators: *mut Handle, count: c_int, devices: *const c_int) -> c_int,
    all_reduce: ReduceFn,
    all_gather: GatherFn,
    async_error: unsafe extern "C" fn(communicator: Handle, error: *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(communicator: Handle) -> c_int,
    destroy: unsafe extern "C" fn(communicator: Handle) -> c_int,
    error_string: unsafe extern "C" fn(error: c_int) -> *const c_char,
    last_error: Option<unsafe extern "C" fn(communicator: Handle) -> *const c_char>,
    version: c_int,
}

impl Library {
    /// Loads the library by the first of these names that there is.
    ///
    /// # Errors
    /// [`Unavailable::Collectives`], saying what to install.
    fn load(names: &[&str]) -> Result<Self, Unavailable> {
        let unavailable = |found: String| Unavailable::Collectives { found };
        let mut refused = Vec::new();
        let library = names.iter().find_map(|name| {
            // SAFETY: NCCL's initialisers only set up its own state.
            let loaded = unsafe { libloading::Library::new(*name) };
            loaded.map_err(|error| refused.push(words(&error))).ok()
        });
        // It stays loaded: threads that called it, and its own, have destructors in it that run when they end.
        let library = ManuallyDrop::new(library.ok_or_else(|| unavailable(refused.join("; ")))?);
        // SAFETY: the functions have these types in every release of NCCL 2.
        unsafe {
            let missing = |error: libloading::Error| unavailable(words(&error));
            macro_rules! function {
                ($name:literal) => {
                    *library.get(concat!($name, "\0")).map_err(missing)?
                };
            }
            let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = function!("ncclGetVersion");
            let mut version = 0;
            get_version(&mut version);
            if version < VERSION_MIN {
                // Until 2.8 the major release counted thousands.
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

    /// What an error means, in the library's words.
    fn explain(&self, error: c_int) -> String {
        let text = |text: *const c_char| {
            // SAFETY: the library returns texts that end with a zero byte, or null.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        // SAFETY: takes any number, or any communicator and none.
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

/// What the loader says, and below it the system.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Which release of the library would be used, for the numerics fingerprint.
///
/// # Errors
/// [`Unavailable::Collectives`], saying what to install.
pub(super) fn release() -> Result<String, Unavailable> {
    Library::load(&NAMES).map(|library| format!("nccl {}", library.version))
}

/// The communicators of a group of GPUs.
pub(super) struct Group {
    library: Library,
    links: Vec<Link>,
    failure: OnceLock<GroupFailed>,
    meeting: Mutex<Meeting>,
    met: Condvar,
}

/// Where ranks wait for each other on the host.
#[derive(Default)]
struct Meeting {
    /// How often all have met.
    round: u64,
    /// What those brought who came to this round.
    brought: Vec<u32>,
    /// The least of what the last round brought.
    least: u32,
}

/// A rank's communicator.
struct Link {
    /// Null once somebody ends it.
    communicator: AtomicPtr<c_void>,
    /// Held during a call with it.
    busy: Mutex<()>,
    /// What aborts it.
    aborting: Mutex<Option<JoinHandle<()>>>,
}

impl Group {
    /// Makes a communicator for each of these GPUs.
    ///
    /// # Errors
    /// [`Unavailable::Collectives`] without the library, [`Unavailable::Group`] if it refuses.
    pub(super) fn open(ordinals: &[usize]) -> Result<Arc<Self>, Unavailable> {
        Self::over(Library::load(&NAMES)?, ordinals)
    }

    fn over(library: Library, ordinals: &[usize]) -> Result<Arc<Self>, Unavailable> {
        let devices: Vec<c_int> = ordinals.iter().map(|ordinal| *ordinal as c_int).collect();
        let mut handles = vec![null_mut(); devices.len()];
        // SAFETY: both lists are as long as said.
        let made =
            unsafe { (library.init_all)(handles.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        if made != SUCCESS {
            let gpus = ordinals.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            return Err(Unavailable::Group { gpus, reason: library.explain(made) });
        }
        let link = |handle| Link {
            communicator: AtomicPtr::new(handle),
            busy: Mutex::new(()),
            aborting: Mutex::new(None),
        };
        let links = handles.into_iter().map(link).collect();
        let (meeting, met) = Default::default();
        Ok(Arc::new(Self { library, links, failure: OnceLock::new(), meeting, met }))
    }

    /// The end of a rank, for the thread that owns its GPU; `stream` is the one that it computes on.
    pub(super) fn end(self: &Arc<Self>, rank: usize) -> End {
        End { group: Arc::clone(self), rank, stream: Cell::new(null_mut()), _one_thread: PhantomData }
    }

    /// Why the group failed, if it has.
    pub(super) fn failure(&self) -> Option<&GroupFailed> {
        self.failure.get()
    }

    /// Fails the group on behalf of a rank, and aborts what it has under way. The first reason stays.
    pub(super) fn fail(self: &Arc<Self>, rank: usize, reason: &str) {
        if self.failure.set(GroupFailed { rank, reason: reason.to_owned() }).is_err() {
            return; // later ones are mostly consequences of the first
        }
        tracing::error!(rank, reason, "tensor-parallel group failed");
        // Whoever is about to wait holds the lock from its last look until it does.
        drop(lock(&self.meeting));
        self.met.notify_all();
        for (index, link) in self.links.iter().enumerate() {
            let group = Arc::clone(self);
            let work = move || group.abort(index);
            match std::thread::Builder::new().name(format!("abort-{index}")).spawn(work) {
                Ok(thread) => *lock(&link.aborting) = Some(thread),
                Err(error) => {
                    tracing::error!(rank = index, %error, "cannot start a thread to abort the NCCL communicator")
                }
            }
        }
    }

    /// Waits on the host until every rank has come, and returns the least of what they bring.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn meet(&self, brings: u32) -> Result<u32, GroupFailed> {
        let mut meeting = lock(&self.meeting);
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        let round = meeting.round;
        meeting.brought.push(brings);
        if meeting.brought.len() == self.links.len() {
            meeting.least = meeting.brought.drain(..).min().unwrap_or(brings);
            meeting.round += 1;
            self.met.notify_all();
        }
        while meeting.round == round {
            if let Some(failure) = self.failure.get() {
                return Err(failure.clone());
            }
            meeting = self.met.wait(meeting).unwrap_or_else(PoisonError::into_inner);
        }
        // The next round ends only once this rank has come to it.
        Ok(meeting.least)
    }

    /// Ends a rank's communicator, whatever runs on it. Returns once its graphs are gone.
    fn abort(&self, rank: usize) {
        let link = &self.links[rank];
        let begun = Instant::now();
        // One that waits inside a call for a rank which is gone holds the lock for ever.
        let turn = loop {
            match link.busy.try_lock() {
                Ok(turn) => break Some(turn),
                Err(TryLockError::Poisoned(turn)) => break Some(turn.into_inner()),
                Err(TryLockError::WouldBlock) if begun.elapsed() > CALL_PATIENCE => break None,
                Err(TryLockError::WouldBlock) => std::thread::yield_now(),
            }
        };
        let handle = link.communicator.swap(null_mut(), Ordering::AcqRel);
        drop(turn);
        if !handle.is_null() {
            // SAFETY: whoever takes the handle ends it, once; nobody begins a call with it any more, and to end one that
            // is under way is what this is for.
            unsafe { (self.library.abort)(handle) };
        }
    }

    /// Asks the communicators whether something went wrong on the way, and fails the group if so.
    pub(super) fn check(self: &Arc<Self>) {
        for (rank, link) in self.links.iter().enumerate() {
            // A call under way tells by itself.
            let Ok(_turn) = link.busy.try_lock() else { continue };
            let handle = link.communicator.load(Ordering::Acquire);
            let mut error = SUCCESS;
            // SAFETY: it is alive for as long as the lock is held.
            if !handle.is_null() && unsafe { (self.library.async_error)(handle, &mut error) } != SUCCESS {
                continue;
            }
            if error != SUCCESS && error != IN_PROGRESS {
                self.fail(rank, &self.library.explain(error));
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for link in &self.links {
            let handle = link.communicator.swap(null_mut(), Ordering::AcqRel);
            if !handle.is_null() {
                // SAFETY: its rank never began, so nothing uses it.
                unsafe { (self.library.abort)(handle) };
            }
        }
    }
}

/// A rank's end of a group. Dropped after all graphs that were captured with it; every rank drops its own at about the same
/// time, unless the group has failed.
pub(super) struct End {
    group: Arc<Group>,
    rank: usize,
    stream: Cell<*mut c_void>,
    _one_thread: PhantomData<*const ()>,
}

impl End {
    /// Sets the stream that everything is enqueued on.
    pub(super) fn enqueue_on(&self, stream: *mut c_void) {
        self.stream.set(stream);
    }

    fn call(&self, what: &str, work: impl FnOnce(&Library, Handle) -> c_int) -> Result<(), DeviceError> {
        let failed = |reason: String| DeviceError::Failed { what: what.to_owned(), reason };
        let _turn = lock(&self.group.links[self.rank].busy);
        let handle = self.group.links[self.rank].communicator.load(Ordering::Acquire);
        if let Some(failure) = self.group.failure() {
            return Err(failed(failure.to_string()));
        }
        if handle.is_null() {
            return Err(failed("the communicator has ended".to_owned()));
        }
        match work(&self.group.library, handle) {
            SUCCESS => Ok(()),
            error => Err(failed(self.group.library.explain(error))),
        }
    }
}

impl Peers for End {
    unsafe fn all_reduce(&self, half: Half, at: u64, numbers: usize) -> Result<(), DeviceError> {
        let kind = match half {
            Half::Bf16 => BFLOAT16,
            Half::F16 => FLOAT16,
        };
        let (at, stream) = (at as *mut c_void, self.stream.get());
        self.call("adding up what the ranks have", |library, handle| {
            // SAFETY: the communicator is alive; the rest is passed on to the caller.
            unsafe { (library.all_reduce)(at, at, numbers, kind, SUM, handle, stream) }
        })
    }

    unsafe fn all_gather(&self, at: u64, bytes: usize) -> Result<(), DeviceError> {
        let own = (at as usize + self.rank * bytes) as *const c_void;
        let (at, stream) = (at as *mut c_void, self.stream.get());
        self.call("gathering what the ranks have", |library, handle| {
            // SAFETY: as above.
            unsafe { (library.all_gather)(own, at, bytes, INT8, handle, stream) }
        })
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let link = &self.group.links[self.rank];
        let aborting = match self.group.failure() {
            Some(_) => lock(&link.aborting).take(),
            None => {
                let handle = AtomicPtr::new(link.communicator.swap(null_mut(), Ordering::AcqRel));
                let group = Arc::clone(&self.group);
                let destroy = move || {
                    let handle = handle.into_inner();
                    if !handle.is_null() {
                        // SAFETY: whoever takes the handle ends it, once.
                        unsafe { (group.library.destroy)(handle) };
                    }
                };
                std::thread::Builder::new().name(format!("end-{}", self.rank)).spawn(destroy).ok()
            }
        };
        let Some(ending) = aborting else { return };
        let begun = Instant::now();
        while !ending.is_finished() {
            if begun.elapsed() > END_PATIENCE {
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
