//! Storage types of elements and their conversions to and from f32.

use half::{bf16, f16};

/// Storage type of an element. Arithmetic is in f32 throughout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// Returns the bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns a number rounded to the type, to nearest and ties to even.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 => bf16_value(bf16_bits(x)),
            Self::F16 => half::f16::from_f32(x).to_f32(),
        }
    }

    /// Returns the stable, lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// Widens little-endian elements of `dtype` to f32, which is exact. `bytes` may be unaligned.
///
/// # Panics
/// If `bytes` does not hold exactly `out.len()` elements.
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.bytes(), "bytes to widen do not match the output");
    match dtype {
        Dtype::F32 => {
            for (value, raw) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
            }
        }
        Dtype::Bf16 => {
            for (value, raw) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = bf16::from_le_bytes([raw[0], raw[1]]).to_f32();
            }
        }
        Dtype::F16 => {
            for (value, raw) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = f16::from_le_bytes([raw[0], raw[1]]).to_f32();
            }
        }
    }
}

/// Rounds to bf16, to nearest with ties to even, and returns the bits.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    // Computes both candidates and selects one, so that it vectorises.
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

/// Converts bf16 bits to f32.
#[inline(always)]
pub(crate) fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Converts f16 bits to f32, without branches so that it vectorises.
#[inline(always)]
pub(crate) fn f16_value(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = (bits & 0x7fff) << 13;
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals, all exactly.
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = if magnitude >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | ((bits & 0x8000) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_the_half_crate_on_every_16_bit_value() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_value(bits), f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "f16 {bits:#x}");
            let (ours, theirs) = (bf16_value(bits), bf16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "bf16 {bits:#x}");
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(bits) << 16 | low);
                let (ours, theirs) = (bf16_bits(x), bf16::from_f32(x).to_bits());
                assert!(ours == theirs || x.is_nan(), "rounding {x:e}");
                assert!(!x.is_nan() || bf16_value(ours).is_nan(), "NaN must stay NaN");
            }
        }
    }
}
