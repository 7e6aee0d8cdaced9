use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::{Device, DeviceError, Half, Launch, Profile};

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
        pub fn inflight_harness_narrow(x: f32, brain: u32) -> u32;
        pub fn inflight_harness_widen(bits: u32, brain: u32) -> f32;
        pub fn inflight_harness_to_e4m3(x: f32) -> u32;
        pub fn inflight_harness_from_e4m3(byte: u32) -> f32;
    }
}

/// Where no C++ compiler was found.
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
    inflight_harness_from_e4m3, inflight_harness_launch, inflight_harness_mutate, inflight_harness_narrow,
    inflight_harness_parameter_bytes, inflight_harness_to_e4m3, inflight_harness_widen,
};

/// Faults that a test can put into the kernels, to see that other tests find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Mutant {
    /// What was copied is read before it was waited for.
    MissingWait = 1,
    /// The last token of a block is looked up in the next one.
    BlockEdge,
    /// The window is one position short.
    WindowEdge,
    /// A token does not see itself.
    CausalEdge,
    /// A split is merged as if it had the largest score of all.
    MergeMaximum,
    /// Splits are merged from the last to the first.
    MergeOrder,
    /// A number in 8 bits is taken times the scale of the token beside it.
    ScaleLine,
    /// A token is drawn with the random number of the next position.
    DrawPosition,
    /// A kernel does not wait for the one before it.
    NoKernelWait,
    /// A skinny product reads its rows before the kernel that makes them is complete.
    EarlyRead,
    /// Of a skinny product, what the last warp has is left out.
    LastWarp,
    /// Of a skinny product, the last eight numbers are left out.
    LastChunk,
    /// All threads go past the second barrier of a block; found where loads and stores are looked at.
    MissedBarrier,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 13] = [
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
    ];

    /// Runs `work` with the fault in all kernels that this thread launches on a [`Harness`].
    pub fn within<T>(self, work: impl FnOnce() -> T) -> T {
        struct Healed;
        impl Drop for Healed {
            fn drop(&mut self) {
                // SAFETY: sets a number of this thread.
                unsafe { inflight_harness_mutate(0) };
            }
        }
        let _healed = Healed;
        // SAFETY: as above.
        unsafe { inflight_harness_mutate(self as u32) };
        work()
    }
}

/// What the harness rounds a number to.
pub fn narrow_on_harness(half: Half, x: f32) -> u16 {
    // SAFETY: a pure function.
    unsafe { inflight_harness_narrow(x, u32::from(half == Half::Bf16)) as u16 }
}

/// What the harness takes bits for.
pub fn widen_on_harness(half: Half, bits: u16) -> f32 {
    // SAFETY: a pure function.
    unsafe { inflight_harness_widen(bits.into(), u32::from(half == Half::Bf16)) }
}

/// What the harness stores a number in 8 bits as.
pub fn to_e4m3_on_harness(x: f32) -> u8 {
    // SAFETY: a pure function.
    unsafe { inflight_harness_to_e4m3(x) as u8 }
}

/// What the harness takes 8 bits for.
pub fn from_e4m3_on_harness(byte: u8) -> f32 {
    // SAFETY: a pure function.
    unsafe { inflight_harness_from_e4m3(byte.into()) }
}

/// Bytes before and after each allocation that nobody may write.
const GUARD: usize = 256;
/// All ones: NaN in every type.
const PATTERN: u8 = 0xff;

/// A device made of fibers: each thread of a block is one, blocks run one after the other. It runs the very sources of
/// the kernels, checks what a device does not check, and is slow.
#[derive(Default)]
pub struct Harness {
    memory: Memory,
    launches: RefCell<u32>,
    overlapping: bool,
}

/// All memory there is.
type Memory = Arc<Mutex<Vec<Range>>>;

/// Where memory lies, as the harness wants it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Range {
    from: usize,
    to: usize,
    /// 1: no kernel writes to it.
    constant: u64,
}

fn locked(memory: &Memory) -> MutexGuard<'_, Vec<Range>> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What addresses of allocations are multiples of, as a device's are.
const ALIGNMENT: usize = 256;

/// Memory of a [`Harness`], poisoned with NaN until written.
pub struct HostMemory {
    words: Box<[u128]>,
    /// Bytes of `words` before it.
    before: usize,
    bytes: usize,
    all: Memory,
}

impl HostMemory {
    /// Where it begins; a multiple of 256.
    pub fn address(&self) -> u64 {
        (self.words.as_ptr() as usize + self.before) as u64
    }

    /// Bytes of it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads numbers from it.
    ///
    /// # Panics
    /// If it holds fewer.
    pub fn read<T: Copy>(&self, count: usize) -> Vec<T> {
        assert!(count * size_of::<T>() <= self.bytes, "more is read than there is");
        // SAFETY: within the allocation, aligned to 16; callers read plain numbers.
        unsafe { std::slice::from_raw_parts(self.address() as *const T, count) }.to_vec()
    }

    /// Writes numbers to it, from `byte` on.
    ///
    /// # Panics
    /// If it has no room for them.
    pub fn write<T: Copy>(&mut self, byte: usize, values: &[T]) {
        assert!(byte + size_of_val(values) <= self.bytes, "more is written than there is room for");
        // SAFETY: within the allocation.
        unsafe {
            let to = self.words.as_mut_ptr().cast::<u8>().add(self.before + byte);
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values));
        }
    }

    /// Whether nobody wrote beside it.
    pub fn is_intact(&self) -> bool {
        // SAFETY: the whole allocation.
        let all = unsafe {
            std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), size_of_val(&*self.words))
        };
        all[..self.before].iter().chain(&all[self.before + self.bytes..]).all(|byte| *byte == PATTERN)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let from = self.address() as usize;
        locked(&self.all).retain(|range| range.from != from);
        assert!(std::thread::panicking() || self.is_intact(), "a kernel wrote beside a buffer");
    }
}

impl Harness {
    /// Whether it was built: where there is no C++ compiler, every launch fails.
    pub const AVAILABLE: bool = cfg!(harness);

    /// Whether every load and store of the kernels is looked at: the compiler could instrument them.
    pub const CHECKED: bool = cfg!(harness_checked);

    /// A device without memory so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// A device where, for launches that may overlap, the kernel before is not complete until a kernel waits for it: until then, all memory that kernels write
    /// holds NaN, and must not be written to.
    pub fn overlapping() -> Self {
        Self { overlapping: true, ..Self::default() }
    }

    /// Bytes of a kernel's parameter block; `None`: there is no such kernel.
    pub fn parameter_bytes(kernel: &str) -> Option<usize> {
        let name = CString::new(kernel).ok()?;
        // SAFETY: a text that ends with a zero byte.
        let bytes = unsafe { inflight_harness_parameter_bytes(name.as_ptr()) };
        (bytes > 0).then_some(bytes)
    }

    /// Memory that its kernels may use.
    pub fn alloc(&self, bytes: usize) -> HostMemory {
        self.hold(bytes, 0)
    }

    fn hold(&self, bytes: usize, constant: u64) -> HostMemory {
        let words: Box<[u128]> = vec![u128::MAX; (bytes + 2 * GUARD + ALIGNMENT).div_ceil(16)].into();
        let before = (words.as_ptr() as usize + GUARD).next_multiple_of(ALIGNMENT) - words.as_ptr() as usize;
        let memory = HostMemory { words, before, bytes, all: Arc::clone(&self.memory) };
        let from = memory.address() as usize;
        locked(&self.memory).push(Range { from, to: from + bytes, constant });
        memory
    }

    /// No kernel writes to any of the memory that there is now.
    pub fn freeze(&self) {
        locked(&self.memory).iter_mut().for_each(|range| range.constant = 1);
    }

    /// No kernel writes to this memory.
    pub fn keep(&self, memory: &HostMemory) {
        let from = memory.address() as usize;
        locked(&self.memory)
            .iter_mut()
            .filter(|range| range.from == from)
            .for_each(|range| range.constant = 1);
    }

    /// Memory that holds these numbers, which no kernel writes to.
    pub fn upload_constant<T: Copy>(&self, values: &[T]) -> HostMemory {
        let mut memory = self.hold(size_of_val(values), 1);
        memory.write(0, values);
        memory
    }

    /// Memory that holds these numbers.
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
        let global = locked(&self.memory).clone();
        // The block is copied, for the kernel reads it with its own alignment.
        let mut params = vec![0u64; launch.params.len().div_ceil(8)];
        let backwards = self.launches.replace_with(|count| count.wrapping_add(1));
        // SAFETY: the parameters are as long as said; the rest is passed on to the caller.
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
