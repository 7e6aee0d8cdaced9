//! Blocks of 256 elements in sub-blocks.

use super::blocks::IQ4;
use super::{BLOCK, Encoding, SUPER_BLOCK, half_at};

#[inline(always)]
pub(super) fn widen_q2k(raw: &[u8], out: &mut [f32]) {
    let (scales, quants) = (&raw[..16], &raw[16..80]);
    let (scale, minimum) = (half_at(raw, 80), half_at(raw, 82));
    for i in 0..SUPER_BLOCK {
        // Each half of 128 has four quarters of 32, in two bits of the same bytes.
        let (half, quarter, at) = (i / 128, i % 128 / 32, i % 32);
        let packed = scales[i / 16];
        let quant = quants[half * 32 + at] >> (2 * quarter) & 3;
        out[i] = scale * f32::from(packed & 15) * f32::from(quant) - minimum * f32::from(packed >> 4);
    }
}

#[inline(always)]
pub(super) fn widen_q3k(raw: &[u8], out: &mut [f32]) {
    let (high, quants, packed) = (&raw[..32], &raw[32..96], &raw[96..108]);
    let scale = half_at(raw, 108);
    for i in 0..SUPER_BLOCK {
        let (half, quarter, at) = (i / 128, i % 128 / 32, i % 32);
        // Six bits: four in the first eight bytes, two in the last four.
        let sub_block = i / 16;
        let low = packed[sub_block % 8] >> (4 * (sub_block / 8)) & 15;
        let two = packed[8 + sub_block % 4] >> (2 * (sub_block / 4)) & 3;
        let sub_scale = scale * f32::from((low | two << 4) as i8 - 32);
        let third = high[at] >> (4 * half + quarter) & 1;
        let quant = (quants[half * 32 + at] >> (2 * quarter) & 3) | third << 2;
        out[i] = sub_scale * f32::from(quant as i8 - 4);
    }
}

/// Widens a block of `q4_k` or `q5_k`.
#[inline(always)]
pub(super) fn widen_q4k(encoding: Encoding, raw: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(raw, 0), half_at(raw, 2));
    let (packed, rest) = raw[4..].split_at(12);
    // The highest bits of 5-bit integers, a bit of each byte for a sub-block.
    let (high, quants) = match encoding {
        Encoding::Q5K => rest.split_at(BLOCK),
        _ => (&[0u8; BLOCK][..], rest),
    };
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
            let four = if sub_block % 2 == 0 { byte & 15 } else { byte >> 4 };
            let quant = four | (high[i] >> sub_block & 1) << 4;
            out[sub_block * BLOCK + i] = s * f32::from(quant) - m;
        }
    }
}

#[inline(always)]
pub(super) fn widen_q6k(raw: &[u8], out: &mut [f32]) {
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

#[inline(always)]
pub(super) fn widen_iq4_xs(raw: &[u8], out: &mut [f32]) {
    let (scale, high) = (half_at(raw, 0), u16::from_le_bytes([raw[2], raw[3]]));
    let (low, quants) = (&raw[4..8], &raw[8..136]);
    for (sub_block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let four = low[sub_block / 2] >> (4 * (sub_block % 2)) & 15;
        let two = (high >> (2 * sub_block) & 3) as u8;
        let sub_scale = scale * f32::from((four | two << 4) as i8 - 32);
        for (i, byte) in quants[sub_block * BLOCK / 2..][..BLOCK / 2].iter().enumerate() {
            out[i] = sub_scale * f32::from(IQ4[usize::from(byte & 15)]);
            out[i + BLOCK / 2] = sub_scale * f32::from(IQ4[usize::from(byte >> 4)]);
        }
    }
}
