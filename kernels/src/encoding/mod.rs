//! Encodings of weights in checkpoint files: plain dtypes and GGUF block quantisation.

mod blocks;
mod super_blocks;
#[cfg(test)]
mod tests;

use std::fmt;

use half::f16;

use crate::dtype::{Dtype, widen};

/// Weights per block of the smaller kind.
const BLOCK: usize = 32;
/// Weights per super-block.
const SUPER_BLOCK: usize = 256;

/// Encoding of a weight row in a file: plain elements, or blocks of neighbouring elements that share a scale.
///
/// The blocks are those of GGUF files as ggml defines them; f16 scales and minima, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// One element after the other, unquantised.
    Plain(Dtype),
    /// Blocks of 32: a scale, then 4-bit integers with an offset of 8; low nibbles first.
    Q4_0,
    /// Blocks of 32: a scale and a minimum, then 4-bit integers.
    Q4_1,
    /// Blocks of 32: a scale, then 5-bit integers with an offset of 16, their highest bits first.
    Q5_0,
    /// Blocks of 32: a scale and a minimum, then 5-bit integers, their highest bits first.
    Q5_1,
    /// Blocks of 32: a scale, then 8-bit integers.
    Q8_0,
    /// Blocks of 256 in sixteen sub-blocks, each with a 4-bit scale and a 4-bit minimum; 2-bit integers.
    Q2K,
    /// Blocks of 256 in sixteen sub-blocks, each with a 6-bit scale; 3-bit integers with an offset of 4.
    Q3K,
    /// Blocks of 256 in eight sub-blocks, each with a 6-bit scale and a 6-bit minimum; 4-bit integers.
    Q4K,
    /// Blocks of 256 in eight sub-blocks, each with a 6-bit scale and a 6-bit minimum; 5-bit integers.
    Q5K,
    /// Blocks of 256 in sixteen sub-blocks, each with an 8-bit scale; 6-bit integers with an offset of 32.
    Q6K,
    /// Blocks of 32: a scale, then 4-bit indices of a table of 8-bit integers.
    Iq4Nl,
    /// Blocks of 256 in eight sub-blocks, each with a 6-bit scale; 4-bit indices of the same table.
    Iq4Xs,
    /// Blocks of 32: an exponent of two, then elements of 4 bits (E2M1).
    Mxfp4,
}

/// Sizes and names of a block encoding.
struct BlockSpec {
    encoding: Encoding,
    /// ggml's name, and its id of the type in files.
    name: &'static str,
    ggml_type: u32,
    /// Elements and bytes of a block.
    elements: usize,
    bytes: usize,
    /// Where its f16 scales and minima are.
    halves: &'static [usize],
}

/// Block encodings by ggml's types.
const BLOCKS: [BlockSpec; 13] = {
    const fn block(
        encoding: Encoding,
        name: &'static str,
        ggml_type: u32,
        (elements, bytes): (usize, usize),
        halves: &'static [usize],
    ) -> BlockSpec {
        BlockSpec { encoding, name, ggml_type, elements, bytes, halves }
    }
    [
        block(Encoding::Q4_0, "q4_0", 2, (BLOCK, 18), &[0]),
        block(Encoding::Q4_1, "q4_1", 3, (BLOCK, 20), &[0, 2]),
        block(Encoding::Q5_0, "q5_0", 6, (BLOCK, 22), &[0]),
        block(Encoding::Q5_1, "q5_1", 7, (BLOCK, 24), &[0, 2]),
        block(Encoding::Q8_0, "q8_0", 8, (BLOCK, 34), &[0]),
        block(Encoding::Q2K, "q2_k", 10, (SUPER_BLOCK, 84), &[80, 82]),
        block(Encoding::Q3K, "q3_k", 11, (SUPER_BLOCK, 110), &[108]),
        block(Encoding::Q4K, "q4_k", 12, (SUPER_BLOCK, 144), &[0, 2]),
        block(Encoding::Q5K, "q5_k", 13, (SUPER_BLOCK, 176), &[0, 2]),
        block(Encoding::Q6K, "q6_k", 14, (SUPER_BLOCK, 210), &[208]),
        block(Encoding::Iq4Nl, "iq4_nl", 20, (BLOCK, 18), &[0]),
        block(Encoding::Iq4Xs, "iq4_xs", 23, (SUPER_BLOCK, 136), &[0]),
        block(Encoding::Mxfp4, "mxfp4", 39, (BLOCK, 17), &[]),
    ]
};

impl From<Dtype> for Encoding {
    fn from(dtype: Dtype) -> Self {
        Self::Plain(dtype)
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(dtype) => dtype.name(),
            _ => self.spec().map_or("", |spec| spec.name),
        })
    }
}

impl Encoding {
    /// Returns all block encodings.
    pub fn blocks() -> impl Iterator<Item = Self> {
        BLOCKS.iter().map(|spec| spec.encoding)
    }

    /// Returns the names of all block encodings, for messages.
    pub fn block_names() -> String {
        BLOCKS.map(|spec| spec.name).join(", ")
    }

    /// Returns the encoding of a type of ggml, by its id in files; `None` if it is not supported.
    pub fn of_ggml(id: u32) -> Option<Self> {
        match id {
            0 => Some(Self::Plain(Dtype::F32)),
            1 => Some(Self::Plain(Dtype::F16)),
            30 => Some(Self::Plain(Dtype::Bf16)),
            _ => BLOCKS.iter().find(|spec| spec.ggml_type == id).map(|spec| spec.encoding),
        }
    }

    /// Returns ggml's id of the type.
    pub fn ggml_type(self) -> u32 {
        match self {
            Self::Plain(Dtype::F32) => 0,
            Self::Plain(Dtype::F16) => 1,
            Self::Plain(Dtype::Bf16) => 30,
            _ => self.spec().map_or(0, |spec| spec.ggml_type),
        }
    }

    /// Returns sizes and names; `None` of plain elements.
    #[inline(always)]
    fn spec(self) -> Option<&'static BlockSpec> {
        BLOCKS.iter().find(|spec| spec.encoding == self)
    }

    /// Returns the elements per block; a row holds a whole number of blocks.
    pub fn block(self) -> usize {
        self.spec().map_or(1, |spec| spec.elements)
    }

    /// Returns the bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.bytes(),
            _ => self.spec().map_or(1, |spec| spec.bytes),
        }
    }

    /// Returns the bytes of `elements` elements, which must be whole blocks.
    pub fn bytes(self, elements: usize) -> usize {
        elements / self.block() * self.block_bytes()
    }

    /// Returns the index of the first element that is infinite or NaN, or whose block has such a scale or minimum; `None` if there is
    /// none. `bytes` are whole blocks.
    pub fn first_non_finite(self, bytes: &[u8]) -> Option<usize> {
        /// Bytes that are examined without a branch.
        const CHUNK: usize = 4096;
        let elements = |mask: u32, width: usize| {
            let broken = |bits: u32| bits & mask == mask;
            let of =
                move |raw: &[u8]| broken(raw.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte)));
            let chunk = |(nth, chunk): (usize, &[u8])| {
                // Without an early end, so that it is vectorised; then the place.
                let any = chunk.chunks_exact(width).fold(false, |any, raw| any | of(raw));
                let first = || chunk.chunks_exact(width).position(of);
                any.then(first).flatten().map(|at| nth * CHUNK / width + at)
            };
            bytes.chunks(CHUNK).enumerate().find_map(chunk)
        };
        match self {
            Self::Plain(Dtype::F32) => elements(0x7f80_0000, 4),
            Self::Plain(Dtype::Bf16) => elements(0x7f80, 2),
            Self::Plain(Dtype::F16) => elements(0x7c00, 2),
            // The exponent that stands for NaN, and those with which the largest elements are beyond the range of f32.
            Self::Mxfp4 => bytes.chunks_exact(17).position(|raw| raw[0] > 252).map(|block| block * BLOCK),
            _ => {
                let BlockSpec { bytes: size, elements, halves, .. } = self.spec()?;
                let broken = |raw: &[u8]| halves.iter().any(|at| !half_at(raw, *at).is_finite());
                bytes.chunks_exact(*size).position(broken).map(|block| block * elements)
            }
        }
    }

    /// Widens whole blocks to f32: exactly for plain elements, else by the encoding's formula in f32.
    ///
    /// # Panics
    /// If `bytes` does not hold exactly `out.len()` elements.
    pub fn widen(self, bytes: &[u8], out: &mut [f32]) {
        if let Self::Plain(dtype) = self {
            return widen(dtype, bytes, out);
        }
        assert!(
            out.len().is_multiple_of(self.block()) && bytes.len() == self.bytes(out.len()),
            "bytes to widen do not match the output"
        );
        let blocks = bytes.chunks_exact(self.block_bytes());
        for (raw, out) in blocks.zip(out.chunks_exact_mut(self.block())) {
            match self {
                Self::Plain(_) => {}
                Self::Q8_0 | Self::Q4_0 | Self::Q5_0 | Self::Iq4Nl | Self::Mxfp4 => {
                    let mut integers = [0i8; BLOCK];
                    blocks::integers(self, raw, &mut integers);
                    let scale = blocks::scale(self, raw);
                    out.iter_mut().zip(integers).for_each(|(x, q)| *x = scale * f32::from(q));
                }
                Self::Q4_1 | Self::Q5_1 => blocks::widen_affine(self, raw, out),
                Self::Q2K => super_blocks::widen_q2k(raw, out),
                Self::Q3K => super_blocks::widen_q3k(raw, out),
                Self::Q4K | Self::Q5K => super_blocks::widen_q4k(self, raw, out),
                Self::Q6K => super_blocks::widen_q6k(raw, out),
                Self::Iq4Xs => super_blocks::widen_iq4_xs(raw, out),
            }
        }
    }

    /// Returns the integers of a block and their scale, which give its elements exactly; `None` if the block is not stored that way, or if
    /// the scale is out of the range of f16.
    #[inline(always)]
    pub(crate) fn stored_integers(self, raw: &[u8], integers: &mut [i8; BLOCK]) -> Option<f16> {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q5_0 | Self::Iq4Nl => {
                blocks::integers(self, raw, integers);
                Some(f16::from_le_bytes([raw[0], raw[1]]))
            }
            Self::Mxfp4 => {
                let scale = f16::from_f32(blocks::scale(self, raw));
                blocks::integers(self, raw, integers);
                (scale.to_f32() == blocks::scale(self, raw)).then_some(scale)
            }
            _ => None,
        }
    }
}

#[inline(always)]
fn half_at(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}
