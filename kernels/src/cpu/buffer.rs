use std::io;
use std::ptr::NonNull;

const HUGE_PAGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;

/// What memory is made of. Reading with small pages is bound by the look-up of addresses: half as fast on many
/// machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Huge ones where the operating system grants them and the size is worth it.
    Huge,
    /// Small ones only.
    Small,
}

/// Zeroed bytes at a cache line's or, where large, a huge page's boundary. Pages never touched cost no memory.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    /// What was mapped, around it.
    mapped: (*mut libc::c_void, usize),
}

// SAFETY: a buffer owns its memory as a `Vec<u8>` does.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `bytes` of memory, at least one.
    ///
    /// # Errors
    /// The operating system has no such amount of address space.
    pub(crate) fn zeroed(bytes: usize, pages: Pages) -> io::Result<Self> {
        let bytes = bytes.max(1);
        let huge = pages == Pages::Huge && bytes >= 2 * HUGE_PAGE;
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let (align, size) = match huge {
            true => {
                (HUGE_PAGE, bytes.checked_next_multiple_of(HUGE_PAGE).and_then(|n| n.checked_add(HUGE_PAGE)))
            }
            false => (CACHE_LINE, Some(bytes)),
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
        let offset = mapping.cast::<u8>().align_offset(align);
        // SAFETY: the mapping is larger than `bytes` by at least `align` where it is not aligned by itself.
        let start = unsafe { mapping.cast::<u8>().add(offset) };
        #[cfg(target_os = "linux")]
        {
            let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
            if huge || pages == Pages::Small {
                // SAFETY: the range was just mapped and is ours. A refusal only means other pages.
                unsafe { libc::madvise(start.cast(), bytes.next_multiple_of(align), advice) };
            }
        }
        let Some(start) = NonNull::new(start) else { return Err(refused()) };
        Ok(Self { start, bytes, mapped: (mapping, size) })
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

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped in `zeroed`, and nobody else unmaps it. It can't fail for a whole mapping.
        unsafe { libc::munmap(self.mapped.0, self.mapped.1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_refused_beyond_the_address_space() {
        for (bytes, pages) in
            [(0, Pages::Huge), (100, Pages::Huge), (9 << 20, Pages::Huge), (9 << 20, Pages::Small)]
        {
            let mut buffer = Buffer::zeroed(bytes, pages).unwrap();
            let align = if pages == Pages::Huge && bytes > 4 << 20 { HUGE_PAGE } else { CACHE_LINE };
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
}
