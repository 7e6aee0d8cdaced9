use std::cell::RefCell;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

const HUGE_PAGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;

/// From this size on a buffer has huge pages.
const LEAST_HUGE: usize = 64 << 10;
/// Up to this size it shares them with others of its thread: a page of its own at its end would be mostly empty.
const MOST_SHARED: usize = 32 << 20;
/// Address space that such buffers share. What of it is never touched costs no memory.
const SHARED_BYTES: usize = 128 << 20;

/// What memory is made of. Reading with small pages is bound by the look-up of addresses: half as fast on many
/// machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Huge ones where the operating system grants them and the size is worth it.
    Huge,
    /// Small ones only.
    Small,
}

/// Zeroed bytes at a cache line's boundary. Pages never touched cost no memory.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps them mapped.
    _mapping: Arc<Mapping>,
}

// SAFETY: a buffer owns its memory as a `Vec<u8>` does.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}

/// Address space with zeroed pages behind it.
struct Mapping {
    start: *mut libc::c_void,
    bytes: usize,
    /// Where what it is for begins.
    first: *mut u8,
}

// SAFETY: a mapping belongs to no thread; what lies in it is handed out as buffers, each byte once.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Where the next buffer of a thread goes.
struct Open {
    mapping: Weak<Mapping>,
    /// Bytes of it that are taken.
    used: usize,
}

thread_local! {
    /// A thread's own, so that ranks that pack their weights on different memories do not share pages.
    static OPEN: RefCell<Open> = const { RefCell::new(Open { mapping: Weak::new(), used: 0 }) };
}

impl Buffer {
    /// `bytes` of memory, at least one.
    ///
    /// # Errors
    /// The operating system has no such amount of address space.
    pub(crate) fn zeroed(bytes: usize, pages: Pages) -> io::Result<Self> {
        let bytes = bytes.max(1);
        if pages == Pages::Huge && (LEAST_HUGE..=MOST_SHARED).contains(&bytes) {
            return OPEN.with_borrow_mut(|open| open.take(bytes));
        }
        let huge = pages == Pages::Huge && bytes > MOST_SHARED;
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

    /// A pointer to write through, for those that share the buffer and see to it that no two use one place.
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

impl Open {
    /// The next `bytes`, at most [`MOST_SHARED`], of what is open, or of something new where they do not fit.
    fn take(&mut self, bytes: usize) -> io::Result<Buffer> {
        let open = self.mapping.upgrade().filter(|_| self.used + bytes <= SHARED_BYTES);
        let mapping = match open {
            Some(mapping) => mapping,
            None => {
                let mapping = Arc::new(Mapping::new(SHARED_BYTES, Pages::Huge)?);
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
    /// Address space for `bytes`.
    fn new(bytes: usize, pages: Pages) -> io::Result<Self> {
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let size = match pages {
            Pages::Huge => {
                bytes.checked_next_multiple_of(HUGE_PAGE).and_then(|bytes| bytes.checked_add(HUGE_PAGE))
            }
            Pages::Small => Some(bytes),
        };
        let size = size.filter(|size| isize::try_from(*size).is_ok()).ok_or_else(refused)?;
        // SAFETY: a fresh private mapping touches nobody's memory.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
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
        #[cfg(target_os = "linux")]
        {
            let (bytes, advice) = match pages {
                Pages::Huge => (bytes.next_multiple_of(HUGE_PAGE), libc::MADV_HUGEPAGE),
                Pages::Small => (bytes, libc::MADV_NOHUGEPAGE),
            };
            // SAFETY: the range was just mapped and is ours. A refusal only means other pages.
            unsafe { libc::madvise(first.cast(), bytes, advice) };
        }
        Ok(Self { start: mapping, bytes: size, first })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and no buffer in it is left. It can't fail for a whole mapping.
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
            let align = if pages == Pages::Huge && bytes > MOST_SHARED { HUGE_PAGE } else { CACHE_LINE };
            assert!(buffer.as_ptr().addr().is_multiple_of(align) && buffer.len() == bytes.max(1));
            let places = [0, buffer.len() / 2, buffer.len() - 1];
            // SAFETY: within the buffer.
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
    fn buffers_of_one_mapping_are_apart_and_outlive_each_other() {
        let sizes = [
            LEAST_HUGE,
            LEAST_HUGE + 1,
            3 << 20,
            MOST_SHARED,
            MOST_SHARED,
            MOST_SHARED,
            MOST_SHARED,
            5 << 20,
        ];
        let mut buffers: Vec<(u8, Buffer)> = Vec::new();
        for (tag, bytes) in (1u8..).zip(sizes.into_iter().cycle().take(3 * sizes.len())) {
            let mut buffer = Buffer::zeroed(bytes, Pages::Huge).unwrap();
            // SAFETY: within the buffer, of its first and last bytes.
            unsafe {
                for at in [0, bytes - 1] {
                    assert_eq!(buffer.as_ptr().add(at).read(), 0, "not zeroed");
                    buffer.as_mut_ptr().add(at).write(tag);
                }
            }
            buffers.push((tag, buffer));
            // Each third one goes, and what was beside it stays.
            if tag.is_multiple_of(3) {
                buffers.remove(usize::from(tag) / 3);
            }
        }
        for (tag, buffer) in &buffers {
            // SAFETY: as above.
            let ends = unsafe { [buffer.as_ptr().read(), buffer.as_ptr().add(buffer.len() - 1).read()] };
            assert_eq!(ends, [*tag; 2]);
        }
        let mut spans: Vec<_> = buffers.iter().map(|(_, b)| (b.as_ptr().addr(), b.len())).collect();
        spans.sort_unstable();
        assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "buffers overlap");
    }
}
