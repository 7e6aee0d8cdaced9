//! Weight matrices packed for GEMM: layout, quantisation and repacking from checkpoint encodings.

use std::fmt;
use std::io;

use half::f16;

use super::buffer::{Buffer, Pages};
use super::isa::{Isa, IsaKind};
use super::pool::Pool;
use super::simd::{self, Kernel, Simd};
use crate::dtype::{Dtype, bf16_bits};
use crate::encoding::Encoding;

/// Words of a column packed at a time, so that written data stays in the first-level cache.
const PACK_WORDS: usize = 64;
/// Maximum elements of a quantization group.
pub const GROUP_MAX: usize = 256;
/// Granularity of group sizes: one word of 4-bit integers.
pub const GROUP_STEP: usize = 8;

/// Consecutive rows of a weight matrix in a checkpoint's encoding.
#[derive(Debug, Clone, Copy)]
pub struct WeightRows<'a> {
    /// Encoding of the elements.
    pub encoding: Encoding,
    /// Encoded rows [rows, k], row-major, little-endian, at any alignment.
    pub bytes: &'a [u8],
    /// Number of rows.
    pub rows: usize,
    /// Head dimension whose two halves are interleaved row by row, as in some files' query and key
    /// projections; packing de-interleaves them.
    pub interleaved: Option<usize>,
}

impl WeightRows<'_> {
    /// Returns the index in `bytes` of logical row `row`.
    pub fn row(&self, row: usize) -> usize {
        self.interleaved.map_or(row, |head| {
            let (first, within) = (row / head * head, row % head);
            first + within % (head / 2) * 2 + within / (head / 2)
        })
    }
}

/// Element format of a packed matrix.
///
/// Integers are quantised in groups of neighbouring k with an f16 scale each. Activations are quantised to 8
/// bits in the same groups, per row, so that rows do not affect each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// IEEE single precision.
    F32,
    /// bfloat16; activations are rounded to it, too.
    Bf16,
    /// IEEE half precision; activations stay f32.
    F16,
    /// Integers from -128 to 127.
    Int8 {
        /// Elements per scale: a multiple of [`GROUP_STEP`] up to [`GROUP_MAX`].
        group: usize,
    },
    /// Integers from -8 to 7.
    Int4 {
        /// Elements per scale: a multiple of [`GROUP_STEP`] up to [`GROUP_MAX`].
        group: usize,
    },
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::Bf16 => f.write_str("bf16"),
            Self::F16 => f.write_str("f16"),
            Self::Int8 { group } => write!(f, "int8:{group}"),
            Self::Int4 { group } => write!(f, "int4:{group}"),
        }
    }
}

impl WeightFormat {
    /// Returns the format that loses least: unquantised sources of one dtype keep it; `q4_0` keeps every bit in 4-bit integers, and `q8_0`,
    /// `q5_0`, `iq4_nl` and `mxfp4` in 8-bit ones, which other quantised sources are rounded to; mixtures with unquantised ones become f32.
    pub fn of(sources: &[WeightRows<'_>]) -> Self {
        let all = |encoding| sources.iter().all(|source| source.encoding == encoding);
        let plain = |source: &WeightRows<'_>| matches!(source.encoding, Encoding::Plain(_));
        match sources.first().map(|source| source.encoding) {
            Some(first @ Encoding::Plain(dtype)) if all(first) => dtype.into(),
            Some(Encoding::Q4_0) if all(Encoding::Q4_0) => Self::Int4 { group: 32 },
            _ if sources.iter().any(plain) => Self::F32,
            _ => Self::Int8 { group: 32 },
        }
    }

    /// Returns the elements per scale of integer formats.
    pub(crate) fn group(self) -> Option<usize> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Int8 { group } | Self::Int4 { group } => Some(group),
        }
    }

    /// Returns the steps per panel and the bytes of one column in one step, see [`PackedMatrix`].
    fn step_shape(self, k: usize) -> (usize, usize) {
        match self {
            Self::F32 => (k, 4),
            Self::Bf16 => (k.div_ceil(2), 4),
            Self::F16 => (k, 2),
            Self::Int8 { group } => (k.div_ceil(group), 2 + group),
            Self::Int4 { group } => (k.div_ceil(group), 2 + group / 2),
        }
    }

    /// Returns the bytes of a packed matrix [n, k] of this format.
    pub fn packed_bytes(self, isa: Isa, n: usize, k: usize) -> usize {
        let (steps, bytes) = self.step_shape(k);
        n.next_multiple_of(panel_columns(isa)) * steps * bytes
    }
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
        }
    }
}

/// Weight matrix W[n, k] in the order in which [`super::gemm`] reads it.
///
/// Output columns are grouped in **panels** of two vectors. A panel holds, step by step, its columns'
/// elements for that step, so that GEMMs stream memory linearly. A step is one k; for bf16 a pair of
/// neighbouring k; for integers a group: the columns' scales, then four k (eight for 4-bit integers) at a
/// time. Missing columns of the last panel and missing k of the last step are 0.
pub struct PackedMatrix {
    pub(crate) isa: Isa,
    pub(crate) format: WeightFormat,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) steps: usize,
    pub(crate) panel_bytes: usize,
    pub(crate) data: Buffer,
}

impl PackedMatrix {
    /// Packs the rows of `sources`, concatenated, each of `k` elements, as `format`.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    ///
    /// # Panics
    /// If bytes do not match the shape, there are no rows or columns, or the group size is out of range.
    pub fn pack(
        pool: &Pool,
        isa: Isa,
        k: usize,
        sources: &[WeightRows<'_>],
        format: WeightFormat,
    ) -> io::Result<Self> {
        for source in sources {
            assert!(k.is_multiple_of(source.encoding.block()), "rows are not whole blocks");
            assert_eq!(
                source.bytes.len(),
                source.encoding.bytes(source.rows * k),
                "bytes do not match the shape"
            );
        }
        if let Some(group) = format.group() {
            let fits = group.is_multiple_of(GROUP_STEP) && (GROUP_STEP..=GROUP_MAX).contains(&group);
            assert!(fits, "the group size is out of its range");
        }
        let n: usize = sources.iter().map(|source| source.rows).sum();
        assert!(n > 0 && k > 0, "a matrix needs rows and columns");
        let width = panel_columns(isa);
        let (steps, step_bytes) = format.step_shape(k);
        let panel_bytes = steps * step_bytes * width;
        let mut data = Buffer::zeroed(n.div_ceil(width) * panel_bytes, Pages::Huge)?;
        let start = SharedPtr(data.as_mut_ptr());
        pool.split(n.div_ceil(width), 1, &|panels| {
            for panel in panels {
                // SAFETY: panels are disjoint ranges within the buffer, and each belongs to one task.
                let out = unsafe {
                    std::slice::from_raw_parts_mut(start.get().add(panel * panel_bytes), panel_bytes)
                };
                simd::run(isa, PackPanel { format, k, sources, column: panel * width, width, out });
            }
        });
        Ok(Self { isa, format, n, k, steps, panel_bytes, data })
    }

    /// Returns the number of output columns: rows of the matrix in checkpoints.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Returns the reduction length.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns the element format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Returns the packed size in bytes.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }
}

/// Returns the columns per panel: two vectors.
pub(crate) fn panel_columns(isa: Isa) -> usize {
    match isa.0 {
        IsaKind::Portable => 16,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx2 => 16,
        #[cfg(target_arch = "x86_64")]
        IsaKind::Avx512 | IsaKind::Avx512Vnni | IsaKind::Avx512Bf16 => 32,
    }
}

/// Pointer that threads share to write disjoint ranges.
#[derive(Clone, Copy)]
pub(crate) struct SharedPtr<T>(pub(crate) *mut T);

// SAFETY: the pointer is only dereferenced in `unsafe` code, which keeps the threads' ranges disjoint.
unsafe impl<T> Send for SharedPtr<T> {}
// SAFETY: `&SharedPtr` only yields the pointer, whose users keep the threads' ranges disjoint.
unsafe impl<T> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    /// Returns the pointer; a method, so that closures capture the wrapper and not the pointer in it.
    #[inline(always)]
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

/// Kernel that packs one panel, compiled for the machine's vectors.
struct PackPanel<'a> {
    format: WeightFormat,
    k: usize,
    sources: &'a [WeightRows<'a>],
    /// First column of the panel.
    column: usize,
    width: usize,
    /// Zeroed output, one panel.
    out: &'a mut [u8],
}

impl Kernel for PackPanel<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        match self.format {
            WeightFormat::F32 => self.plain(Dtype::F32),
            WeightFormat::Bf16 => self.plain(Dtype::Bf16),
            WeightFormat::F16 => self.plain(Dtype::F16),
            WeightFormat::Int8 { group } => self.groups(group, false),
            WeightFormat::Int4 { group } => self.groups(group, true),
        }
    }
}

impl PackPanel<'_> {
    /// Packs unquantised elements, for bf16 in pairs.
    #[inline(always)]
    fn plain(self, dtype: Dtype) {
        let Self { k, sources, column, width, out, .. } = self;
        let size = dtype.bytes();
        // A word is 4 bytes, except for f16.
        let per_word = if dtype == Dtype::Bf16 { 2 } else { 1 };
        let chunk = PACK_WORDS * per_word;
        let mut wide = [0.0f32; 2 * PACK_WORDS];
        for first in (0..k).step_by(chunk) {
            let count = chunk.min(k - first);
            let words = count.div_ceil(per_word);
            for j in 0..width {
                let Some((source, row)) = locate(sources, column + j) else { break };
                let mut raw = [0u8; 4 * PACK_WORDS];
                let raw = &mut raw[..words * size * per_word];
                if source.encoding == Encoding::Plain(dtype) {
                    let at = (row * k + first) * size;
                    raw[..count * size].copy_from_slice(&source.bytes[at..at + count * size]);
                } else {
                    widen_row(source, row, k, first, &mut wide[..count]);
                    for (x, raw) in wide[..count].iter().zip(raw.chunks_exact_mut(size)) {
                        match dtype {
                            Dtype::F32 => raw.copy_from_slice(&x.to_ne_bytes()),
                            Dtype::Bf16 => raw.copy_from_slice(&bf16_bits(*x).to_ne_bytes()),
                            Dtype::F16 => raw.copy_from_slice(&f16::from_f32(*x).to_ne_bytes()),
                        }
                    }
                }
                let at = first / per_word * width + j;
                match dtype {
                    Dtype::F16 => scatter::<2>(raw, &mut out[at * 2..], width),
                    Dtype::F32 | Dtype::Bf16 => scatter::<4>(raw, &mut out[at * 4..], width),
                }
            }
        }
    }

    /// Packs quantised elements by group.
    #[inline(always)]
    fn groups(self, group: usize, four_bits: bool) {
        let Self { k, sources, column, width, out, .. } = self;
        let bytes = if four_bits { group / 2 } else { group };
        let record = (2 + bytes) * width;
        let mut wide = [0.0f32; GROUP_MAX];
        let mut quants = [0u8; GROUP_MAX];
        for (index, out) in out.chunks_exact_mut(record).enumerate() {
            let first = index * group;
            let count = group.min(k - first);
            let (scales, words) = out.split_at_mut(2 * width);
            for j in 0..width {
                let Some((source, row)) = locate(sources, column + j) else { break };
                let quants = &mut quants[..group];
                let scale = match stored_group(source, row, k, first, four_bits, quants) {
                    Some(scale) => scale,
                    None => {
                        wide[..group].fill(0.0);
                        widen_row(source, row, k, first, &mut wide[..count]);
                        let wide = &wide[..group];
                        if four_bits { quantize_4(wide, quants) } else { quantize_8(wide, quants) }
                    }
                };
                scales[2 * j..2 * j + 2].copy_from_slice(&scale.to_ne_bytes());
                if four_bits {
                    // A byte holds elements four apart: a word's nibbles are two runs of four neighbours.
                    let mut packed = [0u8; GROUP_MAX / 2];
                    for (packed, chunk) in packed.chunks_exact_mut(4).zip(quants.chunks_exact(8)) {
                        for i in 0..4 {
                            packed[i] = chunk[i] | chunk[i + 4] << 4;
                        }
                    }
                    scatter::<4>(&packed[..bytes], &mut words[4 * j..], width);
                } else {
                    scatter::<4>(quants, &mut words[4 * j..], width);
                }
            }
        }
    }
}

/// Writes words of `N` bytes at a stride of `width` words.
#[inline(always)]
fn scatter<const N: usize>(from: &[u8], to: &mut [u8], width: usize) {
    for (word, to) in from.chunks_exact(N).zip(to.chunks_mut(N * width)) {
        to[..N].copy_from_slice(word);
    }
}

/// Widens elements `first..` of a row to f32.
#[inline(always)]
fn widen_row(source: &WeightRows<'_>, row: usize, k: usize, first: usize, out: &mut [f32]) {
    let encoding = source.encoding;
    let (block, start) = (encoding.block(), encoding.bytes(row * k));
    if first.is_multiple_of(block) && out.len().is_multiple_of(block) {
        let at = start + encoding.bytes(first);
        return encoding.widen(&source.bytes[at..at + encoding.bytes(out.len())], out);
    }
    let mut whole = [0.0f32; 256];
    let mut done = 0;
    while done < out.len() {
        let at = first + done;
        let bytes = &source.bytes[start + encoding.bytes(at / block * block)..][..encoding.block_bytes()];
        encoding.widen(bytes, &mut whole[..block]);
        let count = (block - at % block).min(out.len() - done);
        out[done..done + count].copy_from_slice(&whole[at % block..at % block + count]);
        done += count;
    }
}

/// Returns a group's stored scale and quants if the file's blocks are of its size; avoids double rounding.
#[inline(always)]
fn stored_group(
    source: &WeightRows<'_>,
    row: usize,
    k: usize,
    first: usize,
    four_bits: bool,
    quants: &mut [u8],
) -> Option<f16> {
    let encoding = source.encoding;
    let quants: &mut [u8; 32] = quants.try_into().ok()?;
    if encoding.block() != quants.len() || four_bits != (encoding == Encoding::Q4_0) {
        return None;
    }
    let raw = &source.bytes[encoding.bytes(row * k + first)..][..encoding.block_bytes()];
    let mut integers = [0i8; 32];
    let scale = encoding.stored_integers(raw, &mut integers)?;
    let offset = if four_bits { 8 } else { 128 };
    *quants = integers.map(|quant| (i32::from(quant) + offset) as u8);
    Some(scale)
}

/// Rounds to `scale * (quant - 128)` and returns the scale.
#[inline(always)]
fn quantize_8(x: &[f32], quants: &mut [u8]) -> f16 {
    let (low, high) = range(x);
    let (scale, inverse) = round_scale(high.max(-low) / 127.0);
    for (x, quant) in x.iter().zip(quants) {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose low byte is that of the bits.
        *quant = ((x * inverse).clamp(-127.0, 127.0) + 12_582_912.0).to_bits() as u8 ^ 0x80;
    }
    scale
}

/// Rounds to `scale * (quant - 8)` and returns the scale: the candidate with the least squared error.
///
/// The element of largest magnitude maps near -8, the longer end of the range, whatever its sign.
#[inline(always)]
fn quantize_4(x: &[f32], quants: &mut [u8]) -> f16 {
    let (low, high) = range(x);
    let extreme = if high >= -low { high } else { low };
    let mut best = (f32::INFINITY, 0.0);
    for steps in [8.0f32, 7.4, 8.6, 6.9, 8.3, 7.7] {
        let (scale, inverse) = round_scale(extreme / -steps);
        let scale = scale.to_f32();
        let mut error = [0.0f32; 8];
        for chunk in x.chunks_exact(8) {
            for i in 0..8 {
                let quant = (chunk[i] * inverse).round_ties_even().clamp(-8.0, 7.0);
                let off = chunk[i] - quant * scale;
                error[i] += off * off;
            }
        }
        let error = error.iter().sum();
        if error < best.0 {
            best = (error, extreme / -steps);
        }
    }
    let (scale, inverse) = round_scale(best.1);
    for (x, quant) in x.iter().zip(quants) {
        *quant = ((x * inverse).round_ties_even().clamp(-8.0, 7.0) as i32 + 8) as u8;
    }
    scale
}

/// Returns the minimum and maximum of `x`, whose length is a multiple of 8, and of 0.
#[inline(always)]
fn range(x: &[f32]) -> (f32, f32) {
    // Eight independent chains, so that it vectorises.
    let (mut low, mut high) = ([0.0f32; 8], [0.0f32; 8]);
    for chunk in x.chunks_exact(8) {
        for i in 0..8 {
            low[i] = if chunk[i] < low[i] { chunk[i] } else { low[i] };
            high[i] = if chunk[i] > high[i] { chunk[i] } else { high[i] };
        }
    }
    (low.into_iter().fold(0.0, f32::min), high.into_iter().fold(0.0, f32::max))
}

/// Rounds a scale to f16 and returns it with its inverse, 0 for a scale of 0.
#[inline(always)]
fn round_scale(scale: f32) -> (f16, f32) {
    // Saturates at the range of f16: elements are then clamped rather than lost.
    let scale = f16::from_f32_const(scale.clamp(-65504.0, 65504.0));
    let value = scale.to_f32_const();
    (scale, if value == 0.0 { 0.0 } else { 1.0 / value })
}

/// Returns the source and the row within it that hold row `row` of the concatenation.
fn locate<'a, 'b>(sources: &'b [WeightRows<'a>], mut row: usize) -> Option<(&'b WeightRows<'a>, usize)> {
    for source in sources {
        if row < source.rows {
            return Some((source, source.row(row)));
        }
        row -= source.rows;
    }
    None
}
