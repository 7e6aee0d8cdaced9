use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;

const HUGE_PAGE: usize = 2 << 20;
const CACHE_LINE: usize = 64;

/// Uninitialised bytes at a cache line's or, where large, a huge page's boundary. Whoever makes one writes every
/// byte before any is read.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a buffer owns its memory as a `Vec<u8>` does.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `bytes` of memory, at least one.
    pub(crate) fn new(bytes: usize) -> Self {
        let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let Ok(layout) = Layout::from_size_align(bytes.max(1), align) else {
            panic!("a buffer of {bytes} bytes exceeds the address space")
        };
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        if align == HUGE_PAGE {
            // SAFETY: the range was just allocated and is ours. A refusal only means small pages.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Self { start, layout }
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
