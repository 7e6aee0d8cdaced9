//! Blocks of 32 elements.

use super::{BLOCK, Encoding, half_at};

/// What the 4-bit indices of `iq4_nl` and `iq4_xs` stand for.
pub(super) const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of E2M1, by their bits.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns the scale of the integers of a block.
#[inline(always)]
pub(super) fn scale(encoding: Encoding, raw: &[u8]) -> f32 {
    match encoding {
        // Half of 2^(exponent - 127), since the integers are twice the elements.
        Encoding::Mxfp4 => match raw[0] {
            exponent @ 0..=1 => f32::from_bits(0x0020_0000 << exponent),
            exponent => f32::from_bits(u32::from(exponent - 1) << 23),
        },
        _ => half_at(raw, 0),
    }
}

/// Writes the integers of a block, one per element; an element is its integer times the block's [`scale`].
#[inline(always)]
pub(super) fn integers(encoding: Encoding, raw: &[u8], out: &mut [i8; BLOCK]) {
    let mut nibbles = |from: &[u8], of: &dyn Fn(u8, usize) -> i8| {
        for (i, byte) in from.iter().enumerate() {
            out[i] = of(byte & 15, i);
            out[i + BLOCK / 2] = of(byte >> 4, i + BLOCK / 2);
        }
    };
    match encoding {
        Encoding::Q4_0 => nibbles(&raw[2..18], &|quant, _| quant as i8 - 8),
        Encoding::Q5_0 => {
            let high = u32_at(raw, 2);
            nibbles(&raw[6..22], &|quant, at| (quant | fifth_bit(high, at)) as i8 - 16);
        }
        Encoding::Iq4Nl => nibbles(&raw[2..18], &|quant, _| IQ4[usize::from(quant)]),
        Encoding::Mxfp4 => nibbles(&raw[1..17], &|quant, _| E2M1_DOUBLED[usize::from(quant)]),
        _ => out.iter_mut().zip(&raw[2..]).for_each(|(q, byte)| *q = *byte as i8),
    }
}

/// Widens a block of `q4_1` or `q5_1`.
#[inline(always)]
pub(super) fn widen_affine(encoding: Encoding, raw: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(raw, 0), half_at(raw, 2));
    let (high, quants) = match encoding {
        Encoding::Q5_1 => (u32_at(raw, 4), &raw[8..24]),
        _ => (0, &raw[4..20]),
    };
    for (i, byte) in quants.iter().enumerate() {
        for (at, quant) in [(i, byte & 15), (i + BLOCK / 2, byte >> 4)] {
            out[at] = scale * f32::from(quant | fifth_bit(high, at)) + minimum;
        }
    }
}

#[inline(always)]
fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}

/// Returns the highest bit of a 5-bit integer at its place.
#[inline(always)]
fn fifth_bit(high: u32, at: usize) -> u8 {
    ((high >> at & 1) << 4) as u8
}
