//! Encodings of weights in checkpoint files: plain dtypes and GGUF block quantisation.

use std::fmt;

use half::f16;

use crate::dtype::{Dtype, widen};

/// Weights per block of `q8_0` and `q4_0`.
const BLOCK: usize = 32;
/// Weights per super-block of `q4_k` and `q6_k`.
const SUPER_BLOCK: usize = 256;

/// Encoding of a weight row in a file: plain elements, or blocks of neighbouring elements that share a scale.
///
/// The blocks are those of GGUF files as ggml defines them: f16 scales, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// One element after the other, unquantised.
    Plain(Dtype),
    /// Blocks of 32: an f16 scale, then 8-bit integers.
    Q8_0,
    /// Blocks of 32: an f16 scale, then 4-bit integers with an offset of 8; low nibbles first.
    Q4_0,
    /// Blocks of 256 in eight sub-blocks, each with a 6-bit scale and a 6-bit minimum; 4-bit integers.
    Q4K,
    /// Blocks of 256 in sixteen sub-blocks, each with an 8-bit scale; 6-bit integers with an offset of 32.
    Q6K,
}

impl From<Dtype> for Encoding {
    fn from(dtype: Dtype) -> Self {
        Self::Plain(dtype)
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
            Self::Q6K => "q6_k",
        })
    }
}

impl Encoding {
    /// Returns the elements per block; a row holds a whole number of blocks.
    pub fn block(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Q8_0 | Self::Q4_0 => BLOCK,
            Self::Q4K | Self::Q6K => SUPER_BLOCK,
        }
    }

    /// Returns the bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.bytes(),
            Self::Q8_0 => 2 + BLOCK,
            Self::Q4_0 => 2 + BLOCK / 2,
            Self::Q4K => 2 + 2 + 12 + SUPER_BLOCK / 2,
            Self::Q6K => SUPER_BLOCK / 2 + SUPER_BLOCK / 4 + SUPER_BLOCK / 16 + 2,
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
            Self::Q8_0 | Self::Q4_0 | Self::Q4K | Self::Q6K => {
                let end = self.block_bytes() - 2;
                let scales: &[usize] = match self {
                    Self::Q4K => &[0, 2],
                    Self::Q6K => &[end],
                    _ => &[0],
                };
                let broken = |raw: &[u8]| scales.iter().any(|at| !half_at(raw, *at).is_finite());
                bytes.chunks_exact(self.block_bytes()).position(broken).map(|block| block * self.block())
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
                Self::Q8_0 => {
                    let scale = half_at(raw, 0);
                    out.iter_mut().zip(&raw[2..]).for_each(|(x, q)| *x = scale * f32::from(*q as i8));
                }
                Self::Q4_0 => {
                    let scale = half_at(raw, 0);
                    for (i, byte) in raw[2..].iter().enumerate() {
                        out[i] = scale * (f32::from(byte & 15) - 8.0);
                        out[i + BLOCK / 2] = scale * (f32::from(byte >> 4) - 8.0);
                    }
                }
                Self::Q4K => widen_q4k(raw, out),
                Self::Q6K => widen_q6k(raw, out),
            }
        }
    }
}

fn half_at(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}

fn widen_q4k(raw: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(raw, 0), half_at(raw, 2));
    let (packed, quants) = raw[4..].split_at(12);
    for sub_block in 0..8 {
        // Six bits each: contiguous for the first four sub-blocks, split into 4 + 2 bits for the others.
        let (s, m) = match sub_block {
            0..4 => (packed[sub_block] & 63, packed[sub_block + 4] & 63),
            _ => (
                (packed[sub_block + 4] & 15) | (packed[sub_block - 4] >> 6) << 4,
                (packed[sub_block + 4] >> 4) | (packed[sub_block] >> 6) << 4,
            ),
        };
        let (s, m) = (scale * f32::from(s), minimum * f32::from(m));
        for i in 0..BLOCK {
            let byte = quants[sub_block / 2 * BLOCK + i];
            let quant = if sub_block % 2 == 0 { byte & 15 } else { byte >> 4 };
            out[sub_block * BLOCK + i] = s * f32::from(quant) - m;
        }
    }
}

fn widen_q6k(raw: &[u8], out: &mut [f32]) {
    let (low, rest) = raw.split_at(SUPER_BLOCK / 2);
    let (high, rest) = rest.split_at(SUPER_BLOCK / 4);
    let (scales, scale) = rest.split_at(SUPER_BLOCK / 16);
    let scale = half_at(scale, 0);
    for i in 0..SUPER_BLOCK {
        // Each half of 128 has four quarters of 32: their low bits in 64 bytes, their high bits in 32.
        let (half, quarter, at) = (i / 128, i % 128 / 32, i % 32);
        let four = low[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        let two = high[half * 32 + at] >> (quarter * 2) & 3;
        let quant = i32::from(four | two << 4) - 32;
        out[i] = scale * f32::from(scales[i / 16] as i8) * quant as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values come from ggml's Python package on bytes by formula: some elements, and the sum of all
    /// elements weighted 2, 3, 4, 5, 6, 7, 1, 2 and so on.
    #[test]
    fn blocks_are_widened_as_ggml_does() {
        type Values = &'static [(usize, f32)];
        let cases: [(Encoding, Values, Values, f64); 4] = [
            (Encoding::Q8_0, &[(0, 0.25)], &[(0, 30.75), (17, -23.75), (31, -25.75)], 493.5),
            (Encoding::Q4_0, &[(0, 0.25)], &[(0, 0.75), (15, -2.0), (16, -0.25), (31, -1.25)], -11.25),
            (
                Encoding::Q4K,
                &[(0, 0.25), (2, 0.125)],
                &[(0, 20.875), (17, 31.375), (127, 19.375), (128, 56.125), (197, 80.25), (255, 0.875)],
                57_222.875,
            ),
            (
                Encoding::Q6K,
                &[(208, 0.125)],
                &[(0, 49.5), (17, -62.0), (127, 66.625), (128, 15.375), (197, -108.75), (255, 296.875)],
                3_278.125,
            ),
        ];
        for (encoding, scales, expected, total) in cases {
            let byte = |i: usize| ((i * 37 + i * i * 11 + 5) % 251) as u8;
            let mut raw: Vec<u8> = (0..encoding.block_bytes()).map(byte).collect();
            for (at, scale) in scales {
                raw[*at..at + 2].copy_from_slice(&f16::from_f32(*scale).to_le_bytes());
            }
            let mut out = vec![0.0; encoding.block()];
            encoding.widen(&raw, &mut out);
            assert!(expected.iter().all(|(at, value)| out[*at] == *value), "{encoding}: {out:?}");
            let sum: f64 =
                out.iter().enumerate().map(|(i, x)| f64::from(*x) * ((i + 1) % 7 + 1) as f64).sum();
            assert_eq!(sum, total, "{encoding}");
        }
    }
}
