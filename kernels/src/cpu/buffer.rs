//! Zeroed, cache-line-aligned memory in huge pages where the operating system grants them.

use std::cell::RefCell;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

const HUGE_PAGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;

/// Minimum size of a buffer with huge pages, in bytes.
const HUGE_BYTES_MIN: usize = 64 << 10;
/// Maximum size of a buffer that shares a mapping with others of its thread, in bytes; with a mapping of its
/// own, its last huge page would be mostly empty.
const SHARED_BUFFER_MAX: usize = 32 << 20;
/// Address space of a shared mapping, in bytes. Untouched pages cost no memory.
const SHARED_MAPPING_BYTES: usize = 128 << 20;

/// Page size of a buffer. Reads from small pages are bound by TLB misses: half as fast on many machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Huge pages where the operating system grants them and the size is worth it.
    Huge,
    /// Small pages only.
    Small,
}

/// Zeroed bytes, aligned to a cache line. Untouched pages cost no memory.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the memory mapped.
    _mapping: Arc<Mapping>,
}

// SAFETY: a buffer owns its bytes exclusively, as a `Vec<u8>` does.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` allows reads only, except through `as_shared_ptr`, whose users synchronise.
unsafe impl Sync for Buffer {}

/// Anonymous memory mapping.
struct Mapping {
    start: *mut libc::c_void,
    bytes: usize,
    /// First usable byte, aligned to a huge page where those are used.
    first: *mut u8,
}

// SAFETY: a mapping is not tied to a thread, and its bytes are handed out as disjoint buffers.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives access to no bytes; only disjoint buffers do.
unsafe impl Sync for Mapping {}

/// Partially used mapping from which a thread takes its next buffers.
struct OpenMapping {
    mapping: Weak<Mapping>,
    /// Bytes already handed out.
    used: usize,
}

thread_local! {
    /// Per thread, so that ranks that pack their weights on different NUMA nodes do not share pages.
    static OPEN_MAPPING: RefCell<OpenMapping> = const { RefCell::new(OpenMapping { mapping: Weak::new(), used: 0 }) };
}

impl Buffer {
    /// Allocates `bytes` bytes, at least one.
    ///
    /// # Errors
    /// If the operating system has not enough address space.
    pub(crate) fn zeroed(bytes: usize, pages: Pages) -> io::Result<Self> {
        let bytes = bytes.max(1);
        if pages == Pages::Huge && (HUGE_BYTES_MIN..=SHARED_BUFFER_MAX).contains(&bytes) {
            return OPEN_MAPPING.with_borrow_mut(|open| open.take(bytes));
        }
        let huge = pages == Pages::Huge && bytes > SHARED_BUFFER_MAX;
        let mapping = Mapping::new(bytes, if huge { Pages::Huge } else { Pages::Small })?;
        Self::within(Arc::new(mapping), 0, bytes)
    }

    fn within(mapping: Arc<Mapping>, at: usize, bytes: usize) -> io::Result<Self> {
        let start = NonNull::new(mapping.first.wrapping_add(at));
        let start = start.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, bytes, _mapping: mapping })
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Returns a pointer for writes by users that share the buffer and keep their ranges disjoint.
    pub(crate) fn as_shared_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }
}

impl OpenMapping {
    /// Takes `bytes`, at most [`SHARED_BUFFER_MAX`], from the open mapping or a new one.
    fn take(&mut self, bytes: usize) -> io::Result<Buffer> {
        let open = self.mapping.upgrade().filter(|_| self.used + bytes <= SHARED_MAPPING_BYTES);
        let mapping = match open {
            Some(mapping) => mapping,
            None => {
                let mapping = Arc::new(Mapping::new(SHARED_MAPPING_BYTES, Pages::Huge)?);
                *self = Self { mapping: Arc::downgrade(&mapping), used: 0 };
                mapping
            }
        };
        let at = self.used;
        self.used = (at + bytes).next_multiple_of(CACHE_LINE);
        Buffer::within(mapping, at, bytes)
    }
}

impl Mapping {
    /// Maps address space for `bytes`.
    fn new(bytes: usize, pages: Pages) -> io::Result<Self> {
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let size = match pages {
            Pages::Huge => {
                bytes.checked_next_multiple_of(HUGE_PAGE).and_then(|bytes| bytes.checked_add(HUGE_PAGE))
            }
            Pages::Small => Some(bytes),
        };
        let size = size.filter(|size| isize::try_from(*size).is_ok()).ok_or_else(refused)?;
        // Miri's emulation of `mmap` supports no other flags.
        let reserve = if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };
        // SAFETY: a fresh anonymous private mapping aliases no existing memory.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | reserve,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = mapping.cast::<u8>();
        let first = match pages {
            Pages::Huge => start.wrapping_add(start.align_offset(HUGE_PAGE)),
            Pages::Small => start,
        };
        #[cfg(all(target_os = "linux", not(miri)))]
        {
            let (bytes, advice) = match pages {
                Pages::Huge => (bytes.next_multiple_of(HUGE_PAGE), libc::MADV_HUGEPAGE),
                Pages::Small => (bytes, libc::MADV_NOHUGEPAGE),
            };
            // SAFETY: the range lies within the new mapping. Failure only affects the page size.
            unsafe { libc::madvise(first.cast(), bytes, advice) };
        }
        Ok(Self { start: mapping, bytes: size, first })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `bytes` come from `mmap`, and buffers hold an `Arc`, so none is left.
        unsafe { libc::munmap(self.start, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_refused_beyond_the_address_space() {
        for (bytes, pages) in [
            (0, Pages::Huge),
            (100, Pages::Huge),
            (9 << 20, Pages::Huge),
            (33 << 20, Pages::Huge),
            (9 << 20, Pages::Small),
        ] {
            let mut buffer = Buffer::zeroed(bytes, pages).unwrap();
            let align =
                if pages == Pages::Huge && bytes > SHARED_BUFFER_MAX { HUGE_PAGE } else { CACHE_LINE };
            assert!(buffer.as_ptr().addr().is_multiple_of(align) && buffer.len() == bytes.max(1));
            let places = [0, buffer.len() / 2, buffer.len() - 1];
            // SAFETY: all offsets are below the buffer's length.
            unsafe {
                assert!(places.iter().all(|at| buffer.as_ptr().add(*at).read() == 0));
                places.iter().for_each(|at| buffer.as_mut_ptr().add(*at).write(1));
            }
        }
        for bytes in [usize::MAX, usize::MAX - HUGE_PAGE, isize::MAX as usize, 1 << 60] {
            assert!(Buffer::zeroed(bytes, Pages::Huge).is_err(), "{bytes}");
        }
    }

    #[test]
    fn buffers_of_one_mapping_are_disjoint_and_outlive_each_other() {
        let sizes = [
            HUGE_BYTES_MIN,
            HUGE_BYTES_MIN + 1,
            3 << 20,
            SHARED_BUFFER_MAX,
            SHARED_BUFFER_MAX,
            SHARED_BUFFER_MAX,
            SHARED_BUFFER_MAX,
            5 << 20,
        ];
        let mut buffers: Vec<(u8, Buffer)> = Vec::new();
        for (tag, bytes) in (1u8..).zip(sizes.into_iter().cycle().take(3 * sizes.len())) {
            let mut buffer = Buffer::zeroed(bytes, Pages::Huge).unwrap();
            // SAFETY: offsets 0 and `bytes - 1` are within the buffer.
            unsafe {
                for at in [0, bytes - 1] {
                    assert_eq!(buffer.as_ptr().add(at).read(), 0, "not zeroed");
                    buffer.as_mut_ptr().add(at).write(tag);
                }
            }
            buffers.push((tag, buffer));
            // Drops every third buffer; its neighbours stay valid.
            if tag.is_multiple_of(3) {
                buffers.remove(usize::from(tag) / 3);
            }
        }
        for (tag, buffer) in &buffers {
            // SAFETY: offsets 0 and `len - 1` are within the buffer.
            let ends = unsafe { [buffer.as_ptr().read(), buffer.as_ptr().add(buffer.len() - 1).read()] };
            assert_eq!(ends, [*tag; 2]);
        }
        let mut spans: Vec<_> = buffers.iter().map(|(_, b)| (b.as_ptr().addr(), b.len())).collect();
        spans.sort_unstable();
        assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "buffers overlap");
    }
}
