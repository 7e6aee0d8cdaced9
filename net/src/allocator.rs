//! What the C library's allocator keeps of freed memory.

/// Bytes from which on a buffer is a mapping of its own, whose memory the system gets back when it is freed.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: i32 = 256 << 10;

/// Bounds what the allocator keeps after a peak: one arena for each processor instead of eight, and buffers of 256 KiB and more returned at once.
/// By default, glibc raises that threshold to 32 MiB by what is freed, and a flood of large messages left hundreds of MiB in its arenas. To be
/// called before threads start.
pub fn bound_free_memory() {
    #[cfg(target_env = "gnu")]
    {
        let arenas = std::thread::available_parallelism().map_or(4, |cpus| cpus.get().max(2));
        // SAFETY: mallopt has no preconditions; a value that it does not accept changes nothing.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
            libc::mallopt(libc::M_ARENA_MAX, i32::try_from(arenas).unwrap_or(i32::MAX));
        }
    }
}
