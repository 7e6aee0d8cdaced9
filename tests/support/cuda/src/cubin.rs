//! Reader of machine code from nvcc, an ELF file: its kernels and the architecture that it was compiled for.

use std::ffi::CStr;

/// First bytes of an ELF file.
pub(crate) const MAGIC: [u8; 4] = *b"\x7fELF";

/// Byte offsets in the header of a 64-bit ELF file, and in a section header.
const ABI_VERSION: usize = 8;
const FLAGS: usize = 48;
const SECTIONS: usize = 40;
const SECTION_BYTES: usize = 58;
const SECTION_COUNT: usize = 60;
const NAMES_SECTION: usize = 62;
const SECTION_OFFSET: usize = 24;

/// Returns the names of the kernels, from sections `.text.NAME`, and the architecture, such as 80 for sm_80;
/// `None` without either, or if the file is newer than the driver of CUDA version `driver`.
///
/// # Safety
/// `file` points to a whole 64-bit ELF file.
pub(crate) unsafe fn read(file: *const u8, driver: (i32, i32)) -> Option<(Vec<String>, i32)> {
    // SAFETY: the offsets are of fields in the file, by its own headers.
    let half = |at: usize| unsafe { file.add(at).cast::<u16>().read_unaligned() } as usize;
    // SAFETY: as above.
    let word = |at: usize| unsafe { file.add(at).cast::<u32>().read_unaligned() } as usize;
    // SAFETY: as above.
    let long = |at: usize| unsafe { file.add(at).cast::<u64>().read_unaligned() } as usize;
    let section = |index: usize| long(SECTIONS) + index * half(SECTION_BYTES);
    let names = long(section(half(NAMES_SECTION)) + SECTION_OFFSET);
    let kernels: Vec<String> = (0..half(SECTION_COUNT))
        .filter_map(|index| {
            // SAFETY: a section's name is a zero-terminated string in the section of names.
            let name = unsafe { CStr::from_ptr(file.add(names + word(section(index))).cast()) };
            Some(name.to_str().ok()?.strip_prefix(".text.")?.to_owned())
        })
        .collect();
    // The lowest byte up to CUDA 12, the next one since CUDA 13, whose files have version 8 of the ABI.
    let version = half(ABI_VERSION) & 0xff;
    if version >= 8 && driver.0 < 13 {
        return None;
    }
    let target = (word(FLAGS) >> if version < 8 { 0 } else { 8 }) & 0xff;
    (!kernels.is_empty() && target > 0).then_some((kernels, target as i32))
}
