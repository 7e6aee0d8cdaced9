//! CPU emulation of a CUDA device: runs the kernels' own sources over fibers and checks their accesses.
//!
//! A fiber per thread, the exact fragment layouts of matrix instructions, asynchronous copies that read as
//! NaN until waited for. The compiler turns every load and store into a call (those of its thread sanitizer),
//! which checks address space, alignment, constness, and races of two threads on a byte of shared memory
//! without a barrier between. Faulty kernels (`faulty.cu`) and mutants (`MUTANT(…)` in the sources) show that
//! such faults are found. Races in global memory are not checked.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inflight_kernels::cuda::{Device, DeviceError, HalfDtype, Launch, Profile};

#[cfg(harness)]
mod foreign {
    use super::{c_char, c_void};

    unsafe extern "C" {
        pub fn inflight_harness_launch(
            name: *const c_char,
            blocks_x: u32,
            blocks_y: u32,
            threads: u32,
            shared_bytes: u32,
            params: *const c_void,
            bytes: usize,
            global: *const super::Range,
            count: usize,
            backwards: u32,
            overlapping: u32,
        ) -> *const c_char;
        pub fn inflight_harness_parameter_bytes(name: *const c_char) -> usize;
        pub fn inflight_harness_mutate(which: u32);
        pub fn inflight_harness_check(on: u32);
        pub fn inflight_harness_narrow(x: f32, brain: u32) -> u32;
        pub fn inflight_harness_widen(bits: u32, brain: u32) -> f32;
        pub fn inflight_harness_to_e4m3(x: f32) -> u32;
        pub fn inflight_harness_from_e4m3(byte: u32) -> f32;
    }
}

/// Stubs for builds without a C++ compiler; every launch fails.
#[cfg(not(harness))]
mod foreign {
    use super::{c_char, c_void};

    pub unsafe fn inflight_harness_launch(
        _: *const c_char,
        _: u32,
        _: u32,
        _: u32,
        _: u32,
        _: *const c_void,
        _: usize,
        _: *const super::Range,
        _: usize,
        _: u32,
        _: u32,
    ) -> *const c_char {
        c"there was no C++ compiler to build the harness with".as_ptr()
    }
    pub unsafe fn inflight_harness_parameter_bytes(_: *const c_char) -> usize {
        0
    }
    pub unsafe fn inflight_harness_mutate(_: u32) {}
    pub unsafe fn inflight_harness_check(_: u32) {}
    pub unsafe fn inflight_harness_narrow(_: f32, _: u32) -> u32 {
        0
    }
    pub unsafe fn inflight_harness_widen(_: u32, _: u32) -> f32 {
        0.0
    }
    pub unsafe fn inflight_harness_to_e4m3(_: f32) -> u32 {
        0
    }
    pub unsafe fn inflight_harness_from_e4m3(_: u32) -> f32 {
        0.0
    }
}

use foreign::{
    inflight_harness_check, inflight_harness_from_e4m3, inflight_harness_launch, inflight_harness_mutate,
    inflight_harness_narrow, inflight_harness_parameter_bytes, inflight_harness_to_e4m3,
    inflight_harness_widen,
};

/// Faults injected into the kernels, for tests that prove that other tests detect them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Mutant {
    /// Asynchronously copied data is read without a wait.
    MissingWait = 1,
    /// The last token of a KV block is looked up in the next block.
    BlockEdge,
    /// The sliding window is one position short.
    WindowEdge,
    /// The causal mask excludes the token itself.
    CausalEdge,
    /// The merge of splits uses a split's own maximum instead of the overall one.
    MergeMaximum,
    /// Splits are merged from last to first.
    MergeOrder,
    /// An FP8 element is scaled with the neighbouring token's scale.
    ScaleLine,
    /// Sampling uses the random number of the next position.
    DrawPosition,
    /// A kernel does not wait for its predecessor.
    NoKernelWait,
    /// `skinny_gemm` reads activations before the kernel that writes them is complete.
    EarlyRead,
    /// `skinny_gemm` omits the partial sums of its last warp.
    LastWarp,
    /// `skinny_gemm` omits the last eight elements of the reduction.
    LastChunk,
    /// All threads skip the second barrier of a block; detected only by instrumented loads and stores.
    MissedBarrier,
    /// Penalties of a drafted row omit the drafts before it.
    DraftPenalty,
    /// Bad words of a drafted row do not end in the drafts before it.
    DraftWord,
    /// Tokens behind a draft that does not stand enter the slot's history and output.
    RejectedCounts,
    /// `min_tokens` of a drafted row omits the drafts before it.
    DraftMinimum,
    /// The best token of a row that is split is not looked for in its last part.
    SplitParts,
    /// Half of each bin of a part is missing in the histogram of its row.
    SplitBins,
    /// Split sampling without top-k and top-p halves the softmax mass of each part.
    SplitMasses,
    /// A key or value that is not finite leaves the rest of its head as it is.
    InfiniteKeys,
    /// Logits that are not finite are sampled from.
    NonFiniteLogits,
    /// A recurrent state is made of drafts, too, before they are accepted.
    DraftState,
    /// Decays of the log of a recurrent state are read as if it had no room for drafts.
    LogSlot,
    /// A sequence that resumes from a recurrent state does not keep the inputs of the convolution before it.
    ResumedInputs,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Self; 25] = [
        Self::MissingWait,
        Self::BlockEdge,
        Self::WindowEdge,
        Self::CausalEdge,
        Self::MergeMaximum,
        Self::MergeOrder,
        Self::ScaleLine,
        Self::DrawPosition,
        Self::NoKernelWait,
        Self::EarlyRead,
        Self::LastWarp,
        Self::LastChunk,
        Self::MissedBarrier,
        Self::DraftPenalty,
        Self::DraftWord,
        Self::RejectedCounts,
        Self::DraftMinimum,
        Self::SplitParts,
        Self::SplitBins,
        Self::SplitMasses,
        Self::InfiniteKeys,
        Self::NonFiniteLogits,
        Self::DraftState,
        Self::LogSlot,
        Self::ResumedInputs,
    ];

    /// Runs `work` with the fault active in all kernels that this thread launches on a [`Harness`].
    pub fn within<T>(self, work: impl FnOnce() -> T) -> T {
        struct ClearMutant;
        impl Drop for ClearMutant {
            fn drop(&mut self) {
                // SAFETY: writes a thread-local integer; any value is accepted.
                unsafe { inflight_harness_mutate(0) };
            }
        }
        let _clear = ClearMutant;
        // SAFETY: writes a thread-local integer; any value is accepted.
        unsafe { inflight_harness_mutate(self as u32) };
        work()
    }
}

/// Turns off this process's checks of addresses and races in kernels. Call it before the first launch. Kernels
/// then run several times as fast, with equal results.
pub fn run_harness_unchecked() {
    // SAFETY: writes an atomic.
    unsafe { inflight_harness_check(0) };
}

/// Rounds `x` to `half` with the kernels' conversion code and returns the bits.
pub fn narrow_on_harness(half: HalfDtype, x: f32) -> u16 {
    // SAFETY: a pure function of integers and floats.
    unsafe { inflight_harness_narrow(x, u32::from(half == HalfDtype::Bf16)) as u16 }
}

/// Converts `bits` of type `half` to f32 with the kernels' conversion code.
pub fn widen_on_harness(half: HalfDtype, bits: u16) -> f32 {
    // SAFETY: a pure function of integers and floats.
    unsafe { inflight_harness_widen(bits.into(), u32::from(half == HalfDtype::Bf16)) }
}

/// Rounds `x` to E4M3 with the kernels' conversion code and returns the bits.
pub fn to_e4m3_on_harness(x: f32) -> u8 {
    // SAFETY: a pure function of integers and floats.
    unsafe { inflight_harness_to_e4m3(x) as u8 }
}

/// Converts E4M3 bits to f32 with the kernels' conversion code.
pub fn from_e4m3_on_harness(byte: u8) -> f32 {
    // SAFETY: a pure function of integers and floats.
    unsafe { inflight_harness_from_e4m3(byte.into()) }
}

/// Guard bytes before and after each allocation, which must stay unwritten.
const GUARD: usize = 256;
/// Fill byte of fresh and guard memory; all ones is NaN in every type.
const PATTERN: u8 = 0xff;

/// Device that runs the kernels' own sources: each thread of a block is a fiber, blocks run one after the
/// other. It checks what hardware does not check, and is slow.
#[derive(Default)]
pub struct Harness {
    memory: Memory,
    launches: RefCell<u32>,
    overlapping: bool,
}

/// Table of all live allocations.
type Memory = Arc<Mutex<Vec<Range>>>;

/// Address range of an allocation, in the layout of the C++ harness.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Range {
    from: usize,
    to: usize,
    /// 1 if kernels must not write to it.
    constant: u64,
}

fn lock(memory: &Memory) -> MutexGuard<'_, Vec<Range>> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Alignment of allocations in bytes, as on a device.
const ALIGNMENT: usize = 256;

/// Memory of a [`Harness`], filled with NaN until written.
pub struct HostMemory {
    words: Box<[u128]>,
    /// Guard and alignment bytes of `words` before the first usable byte.
    before: usize,
    bytes: usize,
    all: Memory,
}

impl HostMemory {
    /// Returns the device address; a multiple of 256.
    pub fn address(&self) -> u64 {
        (self.words.as_ptr() as usize + self.before) as u64
    }

    /// Returns the usable size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `count` elements from the start.
    ///
    /// # Panics
    /// If the allocation holds fewer.
    pub fn read<T: Copy>(&self, count: usize) -> Vec<T> {
        assert!(count * size_of::<T>() <= self.bytes, "more is read than there is");
        // SAFETY: the assertion bounds the read, the address is 256-aligned; callers read plain types.
        unsafe { std::slice::from_raw_parts(self.address() as *const T, count) }.to_vec()
    }

    /// Copies `values` to byte offset `byte`.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write<T: Copy>(&mut self, byte: usize, values: &[T]) {
        assert!(byte + size_of_val(values) <= self.bytes, "more is written than there is room for");
        // SAFETY: the assertion above bounds the write to this allocation.
        unsafe {
            let to = self.words.as_mut_ptr().cast::<u8>().add(self.before + byte);
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values));
        }
    }

    /// Returns whether the guard bytes are unwritten.
    pub fn is_intact(&self) -> bool {
        // SAFETY: covers exactly the boxed slice, which is initialised.
        let all = unsafe {
            std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), size_of_val(&*self.words))
        };
        all[..self.before].iter().chain(&all[self.before + self.bytes..]).all(|byte| *byte == PATTERN)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let from = self.address() as usize;
        lock(&self.all).retain(|range| range.from != from);
        assert!(std::thread::panicking() || self.is_intact(), "a kernel wrote beside a buffer");
    }
}

impl Harness {
    /// Whether the harness was built: without a C++ compiler, every launch fails.
    pub const AVAILABLE: bool = cfg!(harness);

    /// Whether every load and store of the kernels is checked, which needs compiler instrumentation.
    pub const CHECKED: bool = cfg!(harness_checked);

    /// Creates a device without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a device that emulates programmatic dependent launch: for launches that may overlap, the
    /// predecessor completes only when waited for; until then all writable memory holds NaN and must not be
    /// written to.
    pub fn overlapping() -> Self {
        Self { overlapping: true, ..Self::default() }
    }

    /// Returns the size of a kernel's parameter block, or `None` if there is no such kernel.
    pub fn parameter_bytes(kernel: &str) -> Option<usize> {
        let name = CString::new(kernel).ok()?;
        // SAFETY: `name` is a NUL-terminated string that outlives the call.
        let bytes = unsafe { inflight_harness_parameter_bytes(name.as_ptr()) };
        (bytes > 0).then_some(bytes)
    }

    /// Allocates memory that kernels may read and write.
    pub fn alloc(&self, bytes: usize) -> HostMemory {
        self.allocate(bytes, 0)
    }

    fn allocate(&self, bytes: usize, constant: u64) -> HostMemory {
        let words: Box<[u128]> = vec![u128::MAX; (bytes + 2 * GUARD + ALIGNMENT).div_ceil(16)].into();
        let before = (words.as_ptr() as usize + GUARD).next_multiple_of(ALIGNMENT) - words.as_ptr() as usize;
        let memory = HostMemory { words, before, bytes, all: Arc::clone(&self.memory) };
        let from = memory.address() as usize;
        lock(&self.memory).push(Range { from, to: from + bytes, constant });
        memory
    }

    /// Marks all current allocations as read-only for kernels.
    pub fn freeze(&self) {
        lock(&self.memory).iter_mut().for_each(|range| range.constant = 1);
    }

    /// Marks an allocation as read-only for kernels.
    pub fn keep(&self, memory: &HostMemory) {
        let from = memory.address() as usize;
        lock(&self.memory).iter_mut().filter(|range| range.from == from).for_each(|range| range.constant = 1);
    }

    /// Allocates memory that holds `values` and is read-only for kernels.
    pub fn upload_constant<T: Copy>(&self, values: &[T]) -> HostMemory {
        let mut memory = self.allocate(size_of_val(values), 1);
        memory.write(0, values);
        memory
    }

    /// Allocates memory that holds `values`.
    pub fn upload<T: Copy>(&self, values: &[T]) -> HostMemory {
        let mut memory = self.alloc(size_of_val(values));
        memory.write(0, values);
        memory
    }
}

impl Device for Harness {
    fn profile(&self) -> Profile {
        Profile { multiprocessors: 4, shared_bytes: 232_448, multiprocessor_shared_bytes: 233_472 }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let failed = |reason: &str| DeviceError::Failed {
            what: format!("launching {}", launch.kernel),
            reason: reason.to_owned(),
        };
        let name = CString::new(launch.kernel).map_err(|_| failed("the name has a zero byte"))?;
        let global = lock(&self.memory).clone();
        // The block is copied to 8-byte alignment, at which the kernel reads it.
        let mut params = vec![0u64; launch.params.len().div_ceil(8)];
        let backwards = self.launches.replace_with(|count| count.wrapping_add(1));
        // SAFETY: `params` holds `launch.params.len()` bytes and `global` lists all live memory of this
        // device; the caller guarantees that the addresses within the block are valid for the kernel.
        let error = unsafe {
            std::ptr::copy_nonoverlapping(
                launch.params.as_ptr(),
                params.as_mut_ptr().cast(),
                launch.params.len(),
            );
            let error = inflight_harness_launch(
                name.as_ptr(),
                launch.grid.0,
                launch.grid.1,
                launch.threads,
                launch.shared_bytes,
                params.as_ptr().cast(),
                launch.params.len(),
                global.as_ptr(),
                global.len(),
                backwards,
                u32::from(self.overlapping && launch.overlaps),
            );
            (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
        };
        error.map_or(Ok(()), |reason| Err(failed(&reason)))
    }
}
