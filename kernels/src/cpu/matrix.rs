use super::buffer::Buffer;
use super::isa::{Isa, Path};
use super::pool::Pool;
use crate::dtype::{Dtype, widen};

/// Steps packed at a time, so that what is written stays in the first-level cache.
const PACK_STEPS: usize = 64;

/// Some rows of a weight matrix as a checkpoint stores them.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// How the numbers are stored.
    pub dtype: Dtype,
    /// Little-endian numbers [rows, k], row-major, at any alignment.
    pub bytes: &'a [u8],
    /// Number of rows.
    pub rows: usize,
}

/// A weight matrix W[n, k] in the order in which products read it, see [`super::gemm`].
///
/// Output columns are grouped in **panels** of two vectors. A panel holds, step after step, the numbers of its
/// columns for that step, so that products stream through memory linearly. A step is one k, or for bf16 a pair of
/// neighbouring k. Missing columns of the last panel and the missing second half of an odd k are 0.
pub struct PackedMatrix {
    pub(crate) isa: Isa,
    pub(crate) dtype: Dtype,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) steps: usize,
    pub(crate) panel_bytes: usize,
    pub(crate) data: Buffer,
}

impl PackedMatrix {
    /// Packs the rows of `sources`, one after the other, each of `k` numbers. Sources of one dtype keep it,
    /// others become f32.
    ///
    /// # Panics
    /// If a source's bytes do not match its shape, or there are no rows or columns.
    pub fn pack(pool: &Pool, isa: Isa, k: usize, sources: &[Rows<'_>]) -> Self {
        for source in sources {
            assert_eq!(
                source.bytes.len(),
                source.rows * k * source.dtype.bytes(),
                "bytes do not match the shape"
            );
        }
        let n: usize = sources.iter().map(|source| source.rows).sum();
        assert!(n > 0 && k > 0, "a matrix needs rows and columns");
        let first = sources[0].dtype;
        let dtype = if sources.iter().all(|source| source.dtype == first) { first } else { Dtype::F32 };
        let width = panel_columns(isa);
        let (steps, step_bytes) = match dtype {
            Dtype::F32 => (k, 4),
            Dtype::Bf16 => (k.div_ceil(2), 4),
            Dtype::F16 => (k, 2),
        };
        let panel_bytes = steps * step_bytes * width;
        let mut data = Buffer::new(n.div_ceil(width) * panel_bytes);
        let start = Shared(data.as_mut_ptr());
        pool.split(n.div_ceil(width), 1, &|panels| {
            for panel in panels {
                // SAFETY: panels are disjoint ranges of the buffer, and each is given to one thread.
                let bytes = unsafe {
                    std::slice::from_raw_parts_mut(start.get().add(panel * panel_bytes), panel_bytes)
                };
                pack_panel(dtype, k, sources, panel * width, width, bytes);
            }
        });
        Self { isa, dtype, n, k, steps, panel_bytes, data }
    }

    /// Output columns: rows of the matrix as stored in checkpoints.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How the numbers are stored.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }
}

/// Columns of a panel: two vectors.
pub(crate) fn panel_columns(isa: Isa) -> usize {
    match isa.0 {
        Path::Portable => 16,
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => 16,
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 | Path::Avx512Bf16 => 32,
    }
}

/// A pointer that threads share to write disjoint places.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(pub(crate) *mut T);

// SAFETY: whoever dereferences it guarantees that threads write disjoint places.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// By method, so that closures capture the wrapper and not the pointer in it.
    #[inline(always)]
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

fn pack_panel(dtype: Dtype, k: usize, sources: &[Rows<'_>], column: usize, width: usize, out: &mut [u8]) {
    let pair = if dtype == Dtype::Bf16 { 2 } else { 1 };
    let size = dtype.bytes();
    let padded = k.next_multiple_of(pair);
    let chunk = PACK_STEPS * pair;
    let mut wide = [0.0f32; PACK_STEPS * 2];
    let mut narrow = [0u8; PACK_STEPS * 2 * 4];
    for first in (0..padded).step_by(chunk) {
        let count = chunk.min(k - first);
        let steps = count.div_ceil(pair);
        for j in 0..width {
            narrow.fill(0);
            if let Some((source, row)) = locate(sources, column + j) {
                let at = (row * k + first) * source.dtype.bytes();
                let raw = &source.bytes[at..at + count * source.dtype.bytes()];
                if source.dtype == dtype {
                    narrow[..raw.len()].copy_from_slice(raw);
                } else {
                    widen(source.dtype, raw, &mut wide[..count]);
                    for (value, bytes) in wide[..count].iter().zip(narrow.chunks_exact_mut(4)) {
                        bytes.copy_from_slice(&value.to_ne_bytes());
                    }
                }
            }
            let unit = size * pair;
            for (s, bytes) in narrow[..steps * unit].chunks_exact(unit).enumerate() {
                let at = ((first / pair + s) * width + j) * unit;
                out[at..at + unit].copy_from_slice(bytes);
            }
        }
    }
}

fn locate<'a, 'b>(sources: &'b [Rows<'a>], mut row: usize) -> Option<(&'b Rows<'a>, usize)> {
    for source in sources {
        if row < source.rows {
            return Some((source, row));
        }
        row -= source.rows;
    }
    None
}
