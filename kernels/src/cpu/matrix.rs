use std::fmt;
use std::io;

use half::f16;

use super::buffer::{Buffer, Pages};
use super::isa::{Isa, Path};
use super::pool::Pool;
use super::simd::{self, Kernel, Simd};
use crate::dtype::{Dtype, bf16_bits};
use crate::encoding::Encoding;

/// Words of a column packed at a time, so that what is written stays in the first-level cache.
const PACK_WORDS: usize = 64;
/// Most numbers of a group that share a scale.
pub const GROUP_MAX: usize = 256;
/// Groups are whole words of 4-bit integers.
pub const GROUP_STEP: usize = 8;

/// Some rows of a weight matrix as a file stores them.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// How the numbers are stored.
    pub encoding: Encoding,
    /// Rows [rows, k], row-major, little-endian, at any alignment.
    pub bytes: &'a [u8],
    /// Number of rows.
    pub rows: usize,
    /// Numbers of a head whose two halves lie interleaved, row by row, as some files have those of queries and keys:
    /// they are brought apart.
    pub interleaved: Option<usize>,
}

impl Rows<'_> {
    /// Where a row lies in the file: its index there.
    pub fn row(&self, row: usize) -> usize {
        self.interleaved.map_or(row, |head| {
            let (first, within) = (row / head * head, row % head);
            first + within % (head / 2) * 2 + within / (head / 2)
        })
    }
}

/// How a packed matrix stores its numbers.
///
/// Integers go in groups of neighbouring k that share an f16 scale. What they are multiplied with is quantised to
/// 8 bits by the same groups, row by row, so that a row never sees its neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32; activations are rounded to it.
    Bf16,
    /// IEEE half precision; activations stay f32.
    F16,
    /// Integers from -128 to 127.
    Int8 {
        /// Numbers that share a scale: a multiple of [`GROUP_STEP`] up to [`GROUP_MAX`].
        group: usize,
    },
    /// Integers from -8 to 7.
    Int4 {
        /// As above.
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
    /// The format that loses least of what the sources hold: plain numbers of one type stay what they are, `q8_0` and
    /// `q4_0` keep every bit, other quantised ones become 8-bit integers, and mixtures with plain numbers f32.
    pub fn of(sources: &[Rows<'_>]) -> Self {
        let all = |encoding| sources.iter().all(|source| source.encoding == encoding);
        let plain = |source: &Rows<'_>| matches!(source.encoding, Encoding::Plain(_));
        match sources.first().map(|source| source.encoding) {
            Some(first @ Encoding::Plain(dtype)) if all(first) => dtype.into(),
            Some(Encoding::Q4_0) if all(Encoding::Q4_0) => Self::Int4 { group: 32 },
            _ if sources.iter().any(plain) => Self::F32,
            _ => Self::Int8 { group: 32 },
        }
    }

    /// Numbers that share a scale, of integers.
    pub(crate) fn group(self) -> Option<usize> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Int8 { group } | Self::Int4 { group } => Some(group),
        }
    }

    /// What `Shape` needs to know: records of a column, bytes of one per column.
    fn records(self, k: usize) -> (usize, usize) {
        match self {
            Self::F32 => (k, 4),
            Self::Bf16 => (k.div_ceil(2), 4),
            Self::F16 => (k, 2),
            Self::Int8 { group } => (k.div_ceil(group), 2 + group),
            Self::Int4 { group } => (k.div_ceil(group), 2 + group / 2),
        }
    }

    /// Bytes of a packed matrix [n, k] of this format.
    pub fn packed_bytes(self, isa: Isa, n: usize, k: usize) -> usize {
        let (records, bytes) = self.records(k);
        n.next_multiple_of(panel_columns(isa)) * records * bytes
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

/// A weight matrix W[n, k] in the order in which products read it, see [`super::gemm`].
///
/// Output columns are grouped in **panels** of two vectors. A panel holds, step after step, the numbers of its
/// columns for that step, so that products stream through memory linearly. A step is one k; for bf16 a pair of
/// neighbouring k; for integers a group: the columns' scales, then four (or of 4-bit integers eight) k at a time.
/// Missing columns of the last panel and missing k of the last step are 0.
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
    /// Packs the rows of `sources`, one after the other, each of `k` numbers, as `format`.
    ///
    /// # Errors
    /// There is no memory for it.
    ///
    /// # Panics
    /// If a source's bytes do not match its shape, there are no rows or columns, or a group is out of its range.
    pub fn pack(
        pool: &Pool,
        isa: Isa,
        k: usize,
        sources: &[Rows<'_>],
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
        let (steps, step_bytes) = format.records(k);
        let panel_bytes = steps * step_bytes * width;
        let mut data = Buffer::zeroed(n.div_ceil(width) * panel_bytes, Pages::Huge)?;
        let start = Shared(data.as_mut_ptr());
        pool.split(n.div_ceil(width), 1, &|panels| {
            for panel in panels {
                // SAFETY: panels are disjoint ranges of the buffer, and each is given to one thread.
                let out = unsafe {
                    std::slice::from_raw_parts_mut(start.get().add(panel * panel_bytes), panel_bytes)
                };
                simd::run(isa, PackPanel { format, k, sources, column: panel * width, width, out });
            }
        });
        Ok(Self { isa, format, n, k, steps, panel_bytes, data })
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
    pub fn format(&self) -> WeightFormat {
        self.format
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
        Path::Avx512 | Path::Avx512Vnni | Path::Avx512Bf16 => 32,
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

/// Packs one panel. A kernel, so that it is compiled with the machine's vectors.
struct PackPanel<'a> {
    format: WeightFormat,
    k: usize,
    sources: &'a [Rows<'a>],
    /// First column of the panel.
    column: usize,
    width: usize,
    /// Zeroed.
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
    /// Numbers one by one, for bf16 in pairs.
    #[inline(always)]
    fn plain(self, dtype: Dtype) {
        let Self { k, sources, column, width, out, .. } = self;
        let size = dtype.bytes();
        // Words of 4 bytes, but for f16.
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
                    numbers(source, row, k, first, &mut wide[..count]);
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
                    Dtype::F16 => spread::<2>(raw, &mut out[at * 2..], width),
                    Dtype::F32 | Dtype::Bf16 => spread::<4>(raw, &mut out[at * 4..], width),
                }
            }
        }
    }

    /// Integers by group.
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
                let scale = match stored(source, row, k, first, four_bits, quants) {
                    Some(scale) => scale,
                    None => {
                        wide[..group].fill(0.0);
                        numbers(source, row, k, first, &mut wide[..count]);
                        let wide = &wide[..group];
                        if four_bits { quantize_4(wide, quants) } else { quantize_8(wide, quants) }
                    }
                };
                scales[2 * j..2 * j + 2].copy_from_slice(&scale.to_ne_bytes());
                if four_bits {
                    // A byte holds numbers four apart, so that each half of a word is four neighbours.
                    let mut packed = [0u8; GROUP_MAX / 2];
                    for (packed, eight) in packed.chunks_exact_mut(4).zip(quants.chunks_exact(8)) {
                        for i in 0..4 {
                            packed[i] = eight[i] | eight[i + 4] << 4;
                        }
                    }
                    spread::<4>(&packed[..bytes], &mut words[4 * j..], width);
                } else {
                    spread::<4>(quants, &mut words[4 * j..], width);
                }
            }
        }
    }
}

/// Writes words of `N` bytes `width` words apart.
#[inline(always)]
fn spread<const N: usize>(from: &[u8], to: &mut [u8], width: usize) {
    for (word, to) in from.chunks_exact(N).zip(to.chunks_mut(N * width)) {
        to[..N].copy_from_slice(word);
    }
}

/// Numbers `first..` of a row as f32.
#[inline(always)]
fn numbers(source: &Rows<'_>, row: usize, k: usize, first: usize, out: &mut [f32]) {
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

/// The group as it lies in the file, where the file's blocks are our groups: nothing is rounded twice.
#[inline(always)]
fn stored(
    source: &Rows<'_>,
    row: usize,
    k: usize,
    first: usize,
    four_bits: bool,
    quants: &mut [u8],
) -> Option<f16> {
    let encoding = source.encoding;
    let same = if four_bits { Encoding::Q4_0 } else { Encoding::Q8_0 };
    if encoding != same || quants.len() != encoding.block() {
        return None;
    }
    let raw = &source.bytes[encoding.bytes(row * k + first)..][..encoding.block_bytes()];
    if four_bits {
        for (i, byte) in raw[2..].iter().enumerate() {
            quants[i] = byte & 15;
            quants[i + 16] = byte >> 4;
        }
    } else {
        quants.iter_mut().zip(&raw[2..]).for_each(|(quant, byte)| *quant = byte ^ 0x80);
    }
    Some(f16::from_le_bytes([raw[0], raw[1]]))
}

/// Rounds to `scale * (quant - 128)` and returns the scale.
#[inline(always)]
fn quantize_8(x: &[f32], quants: &mut [u8]) -> f16 {
    let (least, most) = range(x);
    let (scale, inverse) = rounded(most.max(-least) / 127.0);
    for (x, quant) in x.iter().zip(quants) {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves its lowest byte in that of the bits.
        *quant = ((x * inverse).clamp(-127.0, 127.0) + 12_582_912.0).to_bits() as u8 ^ 0x80;
    }
    scale
}

/// Rounds to `scale * (quant - 8)` and returns the scale: of some candidates, that with the least squared error.
///
/// The number of the largest magnitude takes the end of the range that reaches further, -8, whatever its sign.
#[inline(always)]
fn quantize_4(x: &[f32], quants: &mut [u8]) -> f16 {
    let (least, most) = range(x);
    let extreme = if most >= -least { most } else { least };
    let mut best = (f32::INFINITY, 0.0);
    for steps in [8.0f32, 7.4, 8.6, 6.9, 8.3, 7.7] {
        let (scale, inverse) = rounded(extreme / -steps);
        let scale = scale.to_f32();
        let mut error = [0.0f32; 8];
        for eight in x.chunks_exact(8) {
            for i in 0..8 {
                let quant = (eight[i] * inverse).round_ties_even().clamp(-8.0, 7.0);
                let off = eight[i] - quant * scale;
                error[i] += off * off;
            }
        }
        let error = error.iter().sum();
        if error < best.0 {
            best = (error, extreme / -steps);
        }
    }
    let (scale, inverse) = rounded(best.1);
    for (x, quant) in x.iter().zip(quants) {
        *quant = ((x * inverse).round_ties_even().clamp(-8.0, 7.0) as i32 + 8) as u8;
    }
    scale
}

/// The least and the largest of some numbers, whole eights of them, and of 0.
#[inline(always)]
fn range(x: &[f32]) -> (f32, f32) {
    // Side by side, so that it vectorises.
    let (mut least, mut most) = ([0.0f32; 8], [0.0f32; 8]);
    for eight in x.chunks_exact(8) {
        for i in 0..8 {
            least[i] = if eight[i] < least[i] { eight[i] } else { least[i] };
            most[i] = if eight[i] > most[i] { eight[i] } else { most[i] };
        }
    }
    (least.into_iter().fold(0.0, f32::min), most.into_iter().fold(0.0, f32::max))
}

/// A scale as it is stored, and what numbers are multiplied with to get their quants.
#[inline(always)]
fn rounded(scale: f32) -> (f16, f32) {
    // Beyond f16 nothing sensible is left; held at its end, numbers are cut off rather than lost.
    let scale = f16::from_f32_const(scale.clamp(-65504.0, 65504.0));
    let value = scale.to_f32_const();
    (scale, if value == 0.0 { 0.0 } else { 1.0 / value })
}

fn locate<'a, 'b>(sources: &'b [Rows<'a>], mut row: usize) -> Option<(&'b Rows<'a>, usize)> {
    for source in sources {
        if row < source.rows {
            return Some((source, source.row(row)));
        }
        row -= source.rows;
    }
    None
}
