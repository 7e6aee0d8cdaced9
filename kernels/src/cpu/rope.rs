//! Rotary position embedding (RoPE), QK norms and the write of keys and values to the KV pool.

use std::ops::Range;
use std::sync::Arc;

use super::attention::HEAD_DIM_MAX;
use super::gemm::scale;
use super::isa::Isa;
use super::kv::{Bf16, F16, Int8, KvDtype, KvElement, KvLayout, KvPool, KvSlot};
use super::matrix::SharedPtr;
use super::pool::Pool;
use super::rows::{grain, rms_scale};
use super::simd::{self, Kernel, Simd};
use crate::dtype::Dtype;

/// Scaling of rotary frequencies beyond the training context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Unscaled.
    None,
    /// All frequencies divided by one factor.
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths are scaled, short ones are not, those between are interpolated.
    Llama3 {
        /// Divisor of the frequencies of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length of the original training, in tokens.
        original_context: f64,
    },
    /// Each frequency divided by a number of its own, as GGUF files have them in `rope_freqs.weight`; [head_dim / 2].
    Divisors(Arc<[f32]>),
}

/// Returns the rotary frequencies of a head in radians per token; [head_dim / 2]. Rounded to f32 at the same
/// places as in training frameworks, because models were trained with those roundings.
pub fn inverse_frequencies(head_dim: usize, theta: f64, scaling: &RopeScaling) -> Vec<f32> {
    let plain = (0..head_dim / 2).map(|i| {
        let exponent = (2 * i) as f32 / head_dim as f32;
        1.0 / libm::pow(theta, f64::from(exponent)) as f32
    });
    match *scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor as f32).collect(),
        RopeScaling::Divisors(ref divisors) => plain.zip(divisors.iter()).map(|(f, d)| f / d).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => plain
            .map(|f| {
                let wavelength = 2.0 * std::f64::consts::PI / f64::from(f);
                if wavelength > original_context / low_freq_factor {
                    return f / factor as f32;
                }
                if wavelength < original_context / high_freq_factor {
                    return f;
                }
                let smooth =
                    (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32
            })
            .collect(),
    }
}

/// Table of cosines and sines per position; grows with the longest sequence.
pub struct RopeTable {
    frequencies: Vec<f32>,
    /// [positions, head_dim / 2, (cos, sin)]
    entries: Vec<(f32, f32)>,
}

impl RopeTable {
    /// Creates an empty table for `frequencies`.
    pub fn new(frequencies: Vec<f32>) -> Self {
        Self { frequencies, entries: Vec::new() }
    }

    /// Computes entries for all positions below `positions`. Grows by doubling, so it rarely allocates.
    pub fn ensure(&mut self, positions: usize) {
        let have = self.entries.len() / self.frequencies.len().max(1);
        if positions <= have {
            return;
        }
        let target = positions.next_power_of_two().max(256);
        self.entries.reserve_exact((target - have) * self.frequencies.len());
        for position in have..target {
            // The angle is rounded to f32 as in training; cosine and sine are computed in f64 by libm.
            self.entries.extend(self.frequencies.iter().map(|f| {
                let angle = f64::from(position as f32 * f);
                (libm::cos(angle) as f32, libm::sin(angle) as f32)
            }));
        }
    }

    #[inline(always)]
    fn at(&self, position: u32) -> &[(f32, f32)] {
        let half = self.frequencies.len();
        &self.entries[position as usize * half..][..half]
    }
}

/// Shape of a row of the QKV projection: queries, then keys, then values, head by head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QkvShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
}

impl QkvShape {
    /// Returns the elements per row.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Finishes rows of the QKV projection: normalises queries and keys per head where `norms` (weights for
/// queries and keys, and epsilon) are given, applies RoPE to the first elements of both, two for
/// each frequency of the table, and writes keys and values to the pool,
/// rounded to its dtype. `places` must be distinct.
///
/// # Panics
/// If shapes do not match, a place exceeds the pool, or the table lacks a position.
pub fn finish_qkv(
    pool: &Pool,
    isa: Isa,
    shape: QkvShape,
    qkv: &mut [f32],
    norms: Option<(&[f32], &[f32], f32)>,
    rope: &RopeTable,
    positions: &[u32],
    places: &[KvSlot],
    kv: &mut KvPool,
    layout: &KvLayout,
) {
    let rows = positions.len();
    layout.check(kv);
    let layout = *layout;
    assert!(qkv.len() == rows * shape.width() && places.len() == rows, "qkv is not [rows, width]");
    assert!(
        (layout.kv_heads, layout.head_dim) == (shape.kv_heads, shape.head_dim),
        "the layer's KV differs in shape"
    );
    assert!(shape.head_dim <= HEAD_DIM_MAX, "head_dim exceeds {HEAD_DIM_MAX}");
    assert!(rope.frequencies.len() * 2 <= shape.head_dim, "the rope table is wider than a head");
    if let Some((q, k, _)) = norms {
        assert!(q.len() == shape.head_dim && k.len() == shape.head_dim, "norm weights are not [head_dim]");
    }
    let in_pool = |place: &KvSlot| {
        (place.block as usize) < kv.blocks() && (place.offset as usize) < layout.block_tokens
    };
    assert!(places.iter().all(in_pool), "a place is out of the KV pool");
    let qkv = SharedPtr(qkv.as_mut_ptr());
    let kv = SharedPtr(kv.as_mut_ptr());
    pool.split(rows, grain(rows, shape.width() * 4), &|rows| {
        let job =
            FinishQkv { shape, qkv: qkv.get(), norms, rope, positions, places, kv: kv.get(), layout, rows };
        simd::run(isa, job);
    });
}

struct FinishQkv<'a> {
    shape: QkvShape,
    qkv: *mut f32,
    norms: Option<(&'a [f32], &'a [f32], f32)>,
    rope: &'a RopeTable,
    positions: &'a [u32],
    places: &'a [KvSlot],
    kv: *mut u8,
    layout: KvLayout,
    rows: Range<usize>,
}

impl Kernel for FinishQkv<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let QkvShape { heads, kv_heads, head_dim } = self.shape;
        for row in self.rows.clone() {
            // SAFETY: row indices are below the asserted number of rows and each row belongs to one thread.
            let qkv = unsafe {
                std::slice::from_raw_parts_mut(self.qkv.add(row * self.shape.width()), self.shape.width())
            };
            let angles = self.rope.at(self.positions[row]);
            let (rotated, values) = qkv.split_at_mut((heads + kv_heads) * head_dim);
            for (head, x) in rotated.chunks_exact_mut(head_dim).enumerate() {
                if let Some((q, k, eps)) = self.norms {
                    let weight = if head < heads { q } else { k };
                    // SAFETY: the caller guarantees `S`'s instruction set.
                    let scale = unsafe { rms_scale::<S>(x, eps) };
                    for i in 0..head_dim {
                        x[i] = x[i] * scale * weight[i];
                    }
                }
                // A part of the head, the first elements, if the table has fewer frequencies.
                let (low, high) = x.split_at_mut(angles.len());
                for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
                    let (a, b) = (*low, *high);
                    *low = a * cos - b * sin;
                    *high = b * cos + a * sin;
                }
            }
            let keys = &rotated[heads * head_dim..];
            // SAFETY: `finish_qkv` checked that the place is in the pool; places are distinct by contract.
            unsafe {
                match self.layout.dtype {
                    KvDtype::Plain(Dtype::F32) => self.write::<f32>(row, keys, values),
                    KvDtype::Plain(Dtype::Bf16) => self.write::<Bf16>(row, keys, values),
                    KvDtype::Plain(Dtype::F16) => self.write::<F16>(row, keys, values),
                    KvDtype::Int8 => self.write::<Int8>(row, keys, values),
                }
            }
        }
    }
}

impl FinishQkv<'_> {
    #[inline(always)]
    unsafe fn write<N: KvElement>(&self, row: usize, keys: &[f32], values: &[f32]) {
        let KvSlot { block, offset } = self.places[row];
        let (offset, layout) = (offset as usize, &self.layout);
        let head_dim = layout.head_dim;
        for head in 0..layout.kv_heads {
            let keys = sound(&keys[head * head_dim..][..head_dim]);
            let values = sound(&values[head * head_dim..][..head_dim]);
            // SAFETY: block, head and offset are within the pool by the checks in `finish_qkv`.
            unsafe {
                let k = self.kv.add(layout.keys(block, head)).cast::<N>();
                let v = k.add(layout.values_after_keys() + offset * layout.value_stride());
                let (mut key_factor, mut value_factor) = (1.0, 1.0);
                if N::SCALED {
                    let scales = k.add(layout.scales_after_keys()).cast::<f32>();
                    let (scale_value, inverse) = scale(largest(keys));
                    scales.add(offset).write(scale_value);
                    key_factor = inverse;
                    let (scale_value, inverse) = scale(largest(values));
                    scales.add(layout.block_tokens + offset).write(scale_value);
                    value_factor = inverse;
                }
                for (i, key) in keys.iter().enumerate() {
                    let key = if N::SCALED { key * key_factor } else { *key };
                    k.add(i * layout.block_tokens + offset).write(N::round(key));
                }
                // A loop of its own, as values are contiguous.
                for (i, value) in values.iter().enumerate() {
                    v.add(i).write(N::round(if N::SCALED { value * value_factor } else { *value }));
                }
            }
        }
    }
}

/// Returns the elements, or NaN in the place of all of them if one is infinite or NaN: an infinite component of a key could make its score
/// negative infinity, and attention would leave the position out.
#[inline(always)]
fn sound(elements: &[f32]) -> &[f32] {
    static BROKEN: [f32; HEAD_DIM_MAX] = [f32::NAN; HEAD_DIM_MAX];
    if largest(elements) < f32::INFINITY { elements } else { &BROKEN[..elements.len()] }
}

/// Returns the largest magnitude; NaN if an element is NaN.
#[inline(always)]
fn largest(elements: &[f32]) -> f32 {
    // The bits of magnitudes are ordered as the magnitudes, and those of NaN come last.
    f32::from_bits(elements.iter().fold(0, |most, x| most.max(x.abs().to_bits())))
}
