//! Conversion of KV tiles to bf16 pairs, the operands of bf16 dot products: two components for sixteen
//! positions (keys), or two positions for sixteen components (values).

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::super::kv::{Bf16, Int8, KvElement, KvLayout, TILE};
use super::super::{HEAD_DIM_MAX, KvTile};

/// Pairs per vector, and positions per tile.
const PAIRS: usize = TILE;
/// Components accumulated together: two vectors of pairs.
pub(super) const COMPONENTS: usize = 2 * PAIRS;

/// Access to keys and values as bf16 pairs.
///
/// # Safety
/// Tiles are readable and buffers writable; the machine supports AVX-512 with BF16.
pub(in super::super) trait KvSource {
    /// Element type of the pool.
    type Stored: KvElement;
    /// Buffer for a tile that is not read in place.
    type Buffer;

    /// Prepares a tile for reading, in place or converted into `buffer` (may be uninitialised). Neither may
    /// change while the result is read.
    unsafe fn prepare(
        tile: &KvTile<Self::Stored>,
        layout: &KvLayout,
        buffer: *mut Self::Buffer,
    ) -> PairedTile;

    /// Returns components `2 * step` and `2 * step + 1` of the keys.
    unsafe fn keys(tile: &PairedTile, step: usize) -> __m512i;

    /// Returns [`COMPONENTS`] components from `d` on of the values at positions `2 * pair` and `2 * pair +
    /// 1`, in the order of `unpacklo` and `unpackhi`; 0 beyond the stride of values.
    unsafe fn values(tile: &PairedTile, d: usize, pair: usize) -> (__m512i, __m512i);
}

/// Tile prepared for reading as bf16 pairs.
#[derive(Clone, Copy)]
pub(in super::super) struct PairedTile {
    keys: *const Bf16,
    key_stride: usize,
    values: *const Bf16,
    value_stride: usize,
    /// Scales per position, see [`KvTile`].
    pub key_scales: *const f32,
    pub value_scales: *const f32,
}

/// bf16 elements read in place and paired on every read: for few queries.
pub(in super::super) struct InPlace;

impl KvSource for InPlace {
    type Stored = Bf16;
    type Buffer = ();

    #[inline(always)]
    unsafe fn prepare(tile: &KvTile<Bf16>, layout: &KvLayout, _buffer: *mut ()) -> PairedTile {
        let KvTile { keys, key_stride, values, key_scales, value_scales } = *tile;
        PairedTile { keys, key_stride, values, value_stride: layout.value_stride(), key_scales, value_scales }
    }

    #[inline(always)]
    unsafe fn keys(tile: &PairedTile, step: usize) -> __m512i {
        // SAFETY: the caller guarantees a tile from `prepare`: `head_dim` rows of 16 keys.
        unsafe { pair_keys(tile.keys.add(2 * step * tile.key_stride), tile.key_stride) }
    }

    #[inline(always)]
    unsafe fn values(tile: &PairedTile, d: usize, pair: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller guarantees a tile from `prepare`: 16 rows of `value_stride` values.
        unsafe { pair_values(tile.values, tile.value_stride, d, pair) }
    }
}

/// Pairs two rows of 16 keys, `stride` apart.
///
/// # Safety
/// Both rows are readable, and the machine supports AVX-512.
#[inline(always)]
unsafe fn pair_keys(from: *const Bf16, stride: usize) -> __m512i {
    // SAFETY: the caller guarantees AVX-512 and two readable rows.
    unsafe {
        // Interleaves the words of two rows.
        let pairs = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
            18, 2, 17, 1, 16, 0,
        );
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(from.cast()));
        let high = _mm256_loadu_si256(from.add(stride).cast());
        _mm512_permutexvar_epi16(pairs, _mm512_inserti64x4::<1>(low, high))
    }
}

/// Pairs two rows of bf16 values, see [`KvSource::values`]; rows are `stride` apart.
///
/// # Safety
/// Rows are readable multiples of 16 elements, `d` is below their length, and the machine supports AVX-512.
#[inline(always)]
unsafe fn pair_values(values: *const Bf16, stride: usize, d: usize, pair: usize) -> (__m512i, __m512i) {
    // SAFETY: the caller guarantees AVX-512 and readable rows; the mask excludes elements beyond the row.
    unsafe {
        let present: __mmask32 = if d + COMPONENTS <= stride { u32::MAX } else { 0xffff };
        let at = values.add(2 * pair * stride + d).cast::<i16>();
        let even = _mm512_maskz_loadu_epi16(present, at);
        let odd = _mm512_maskz_loadu_epi16(present, at.add(stride));
        (_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd))
    }
}

/// Elements converted to bf16 pairs once per block of queries.
pub(in super::super) struct PairedOnce<N>(PhantomData<N>);

/// Pairs of a tile: keys [head_dim / 2] vectors, values [head_dim / 32, pairs of positions, 2] vectors.
#[repr(C, align(64))]
pub(in super::super) struct PairBuffer {
    keys: [[u32; PAIRS]; HEAD_DIM_MAX / 2],
    values: [[u32; PAIRS]; HEAD_DIM_MAX / 2],
}

// Rows of keys are converted by fours, so the buffer must hold an even number of pair rows.
const _: () = assert!(HEAD_DIM_MAX.is_multiple_of(4));

impl<N: ToPairs> KvSource for PairedOnce<N> {
    type Stored = N;
    type Buffer = PairBuffer;

    #[inline(always)]
    unsafe fn prepare(tile: &KvTile<N>, layout: &KvLayout, buffer: *mut PairBuffer) -> PairedTile {
        // SAFETY: the caller guarantees a readable tile and a writable buffer; both fit `HEAD_DIM_MAX`.
        unsafe {
            let (keys, values) = ((&raw mut (*buffer).keys).cast(), (&raw mut (*buffer).values).cast());
            N::to_pairs(tile, layout.head_dim, layout.value_stride(), keys, values);
            PairedTile {
                keys: keys.cast(),
                key_stride: 0,
                values: values.cast(),
                value_stride: 0,
                key_scales: tile.key_scales,
                value_scales: tile.value_scales,
            }
        }
    }

    #[inline(always)]
    unsafe fn keys(tile: &PairedTile, step: usize) -> __m512i {
        // SAFETY: the caller guarantees a tile from `prepare`, whose buffer holds `head_dim / 2` key vectors.
        unsafe { _mm512_load_si512(tile.keys.cast::<__m512i>().add(step)) }
    }

    #[inline(always)]
    unsafe fn values(tile: &PairedTile, d: usize, pair: usize) -> (__m512i, __m512i) {
        // SAFETY: the caller guarantees a tile from `prepare`; `d` and `pair` are within its values.
        unsafe {
            let at = tile.values.cast::<__m512i>().add((d / COMPONENTS * (TILE / 2) + pair) * 2);
            (_mm512_load_si512(at), _mm512_load_si512(at.add(1)))
        }
    }
}

/// Conversion of a tile to bf16 pairs, exact for int8.
pub(in super::super) trait ToPairs: KvElement {
    /// Converts a tile to the layout of [`PairBuffer`]. Missing positions may hold anything; they are masked.
    ///
    /// # Safety
    /// The tile is readable, `keys` and `values` are aligned to 64 bytes with room for a tile (`keys` for an
    /// even number of vectors), and the machine supports AVX-512.
    unsafe fn to_pairs(
        tile: &KvTile<Self>,
        head_dim: usize,
        value_stride: usize,
        keys: *mut __m512i,
        values: *mut __m512i,
    );
}

impl ToPairs for Bf16 {
    #[inline(always)]
    unsafe fn to_pairs(
        tile: &KvTile<Self>,
        head_dim: usize,
        value_stride: usize,
        keys: *mut __m512i,
        values: *mut __m512i,
    ) {
        // SAFETY: the caller guarantees a readable tile, room in `keys` and `values`, and AVX-512.
        unsafe {
            for step in 0..head_dim / 2 {
                let pairs = pair_keys(tile.keys.add(2 * step * tile.key_stride), tile.key_stride);
                _mm512_store_si512(keys.add(step), pairs);
            }
            for d in (0..value_stride).step_by(COMPONENTS) {
                for pair in 0..TILE / 2 {
                    let (low, high) = pair_values(tile.values, value_stride, d, pair);
                    let at = values.add((d / COMPONENTS * (TILE / 2) + pair) * 2);
                    _mm512_store_si512(at, low);
                    _mm512_store_si512(at.add(1), high);
                }
            }
        }
    }
}

impl ToPairs for Int8 {
    #[inline(always)]
    unsafe fn to_pairs(
        tile: &KvTile<Self>,
        head_dim: usize,
        value_stride: usize,
        keys: *mut __m512i,
        values: *mut __m512i,
    ) {
        // SAFETY: the caller guarantees a readable tile, room for it, and AVX-512; VBMI is detected here.
        unsafe {
            // The standard library caches the detection.
            if is_x86_feature_detected!("avx512vbmi") {
                widen_keys_by_table(tile.keys.cast(), tile.key_stride, head_dim, keys);
                widen_values_by_table(tile.values.cast(), value_stride, values);
            } else {
                widen_keys(tile.keys.cast(), tile.key_stride, head_dim, keys);
                widen_values(tile.values.cast(), value_stride, values);
            }
        }
    }
}

/// Returns the upper or lower bytes of the bf16 values 0 to 127.
const fn bf16_bytes(upper: bool) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut i = 0;
    while i < 128 {
        let word = (i as f32).to_bits() >> 16;
        bytes[i] = if upper { (word >> 8) as u8 } else { word as u8 };
        i += 1;
    }
    bytes
}

/// Returns the byte permutation that pairs sixteen bf16 elements with those `distance` further on.
const fn interleave_order(elements: [u8; PAIRS], distance: u8) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut i = 0;
    while i < PAIRS {
        let (even, odd) = (elements[i], elements[i] + distance);
        (bytes[4 * i], bytes[4 * i + 1]) = (even, even + 64);
        (bytes[4 * i + 2], bytes[4 * i + 3]) = (odd, odd + 64);
        i += 1;
    }
    bytes
}

static UPPER_BYTES: [u8; 128] = bf16_bytes(true);
static LOWER_BYTES: [u8; 128] = bf16_bytes(false);
/// Permutations for rows of 16 keys: the first two of four rows, and the last two.
static KEY_ORDERS: [[u8; 64]; 2] = [
    interleave_order([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 16),
    interleave_order([32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47], 16),
];
/// Permutations for rows of 32 values, in the order of `unpacklo` and `unpackhi` of words.
static VALUE_ORDERS: [[u8; 64]; 2] = [
    interleave_order([0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27], 32),
    interleave_order([4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31], 32),
];

/// Widens 64 int8 elements to two vectors of bf16 pairs by table look-up of the magnitude, with VBMI. -128
/// differs from arithmetic widening, but occurs only at unwritten positions, which are masked.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn widen_by_table(elements: __m512i, orders: &[[u8; 64]; 2]) -> [__m512i; 2] {
    // SAFETY: the attribute enables VBMI; vectors are within the tables.
    unsafe {
        let [low, high] = [LOWER_BYTES.as_ptr().cast::<__m512i>(), UPPER_BYTES.as_ptr().cast()];
        let size = _mm512_abs_epi8(elements);
        let lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(low), size, _mm512_loadu_si512(low.add(1)));
        let upper = _mm512_permutex2var_epi8(_mm512_loadu_si512(high), size, _mm512_loadu_si512(high.add(1)));
        let sign = _mm512_and_si512(elements, _mm512_set1_epi8(i8::MIN));
        let upper = _mm512_or_si512(upper, sign);
        let [first, second] = [orders[0].as_ptr().cast(), orders[1].as_ptr().cast()];
        [
            _mm512_permutex2var_epi8(lower, _mm512_loadu_si512(first), upper),
            _mm512_permutex2var_epi8(lower, _mm512_loadu_si512(second), upper),
        ]
    }
}

/// Widens keys [head_dim, stride], 16 positions of each row, to vectors of pairs; `to` has room for head_dim
/// rounded up to a multiple of four.
///
/// # Safety
/// Rows are readable, `to` is writable and aligned to 64 bytes, and the machine supports AVX-512 with VBMI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
unsafe fn widen_keys_by_table(keys: *const u8, stride: usize, head_dim: usize, to: *mut __m512i) {
    for d in (0..head_dim).step_by(4) {
        // SAFETY: the caller guarantees readable rows below head_dim, which is even, and room in `to`.
        unsafe {
            let row = |i: usize| _mm_loadu_si128(keys.add((d + i) * stride).cast());
            let two = |i: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(i)), row(i + 1));
            let four = match () {
                _ if d + 4 > head_dim => _mm512_zextsi256_si512(two(0)),
                _ if stride == PAIRS => _mm512_loadu_si512(keys.add(d * stride).cast()),
                _ => _mm512_inserti64x4::<1>(_mm512_castsi256_si512(two(0)), two(2)),
            };
            let [first, second] = widen_by_table(four, &KEY_ORDERS);
            _mm512_store_si512(to.add(d / 2), first);
            _mm512_store_si512(to.add(d / 2 + 1), second);
        }
    }
}

/// Widens values [16, stride] to vectors of pairs, see [`PairBuffer`].
///
/// # Safety
/// Rows are readable, `to` is writable and aligned to 64 bytes, and the machine supports AVX-512 with VBMI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
unsafe fn widen_values_by_table(values: *const u8, stride: usize, to: *mut __m512i) {
    for d in (0..stride).step_by(COMPONENTS) {
        for pair in 0..TILE / 2 {
            // SAFETY: the caller guarantees 16 readable rows, whole vectors of 16 elements, and room in `to`.
            unsafe {
                let row = |i: usize| {
                    let from = values.add((2 * pair + i) * stride + d);
                    match d + COMPONENTS <= stride {
                        true => _mm256_loadu_si256(from.cast()),
                        false => _mm256_zextsi128_si256(_mm_loadu_si128(from.cast())),
                    }
                };
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(row(0)), row(1));
                let [low, high] = widen_by_table(both, &VALUE_ORDERS);
                let at = to.add((d / COMPONENTS * (TILE / 2) + pair) * 2);
                _mm512_store_si512(at, low);
                _mm512_store_si512(at.add(1), high);
            }
        }
    }
}

/// Converts int8 to bf16 pairs; integers this small have zeros in the lower half of an f32.
#[inline(always)]
unsafe fn pairs(even: __m128i, odd: __m128i) -> __m512i {
    // SAFETY: the caller guarantees AVX-512; no memory is accessed.
    unsafe {
        let even = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(even)));
        let odd = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(odd)));
        _mm512_or_si512(_mm512_srli_epi32::<16>(even), odd)
    }
}

/// Widens keys like [`widen_keys_by_table`], with AVX-512 alone.
#[inline(always)]
unsafe fn widen_keys(keys: *const u8, stride: usize, head_dim: usize, to: *mut __m512i) {
    for step in 0..head_dim / 2 {
        // SAFETY: the caller guarantees AVX-512, readable rows below head_dim, and room in `to`.
        unsafe {
            let row = keys.add(2 * step * stride);
            let two = pairs(_mm_loadu_si128(row.cast()), _mm_loadu_si128(row.add(stride).cast()));
            _mm512_store_si512(to.add(step), two);
        }
    }
}

/// Widens values like [`widen_values_by_table`], with AVX-512 alone.
#[inline(always)]
unsafe fn widen_values(values: *const u8, stride: usize, to: *mut __m512i) {
    for d in (0..stride).step_by(COMPONENTS) {
        for pair in 0..TILE / 2 {
            // SAFETY: the caller guarantees AVX-512, 16 readable rows of whole vectors, and room in `to`.
            unsafe {
                let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
                let row = |i: usize| {
                    let from = values.add((2 * pair + i) * stride + d);
                    let bytes = match d + COMPONENTS <= stride {
                        true => _mm256_loadu_si256(from.cast()),
                        false => _mm256_zextsi128_si256(_mm_loadu_si128(from.cast())),
                    };
                    _mm256_permutevar8x32_epi32(bytes, order)
                };
                let (even, odd) = (row(0), row(1));
                let at = to.add((d / COMPONENTS * (TILE / 2) + pair) * 2);
                let low = pairs(_mm256_castsi256_si128(even), _mm256_castsi256_si128(odd));
                let high = pairs(_mm256_extracti128_si256::<1>(even), _mm256_extracti128_si256::<1>(odd));
                _mm512_store_si512(at, low);
                _mm512_store_si512(at.add(1), high);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, IsaKind};
    use crate::cpu::simd::{Kernel, Simd, run_avx512_bf16};

    #[repr(C, align(64))]
    struct Words([[u32; PAIRS]; HEAD_DIM_MAX / 2]);

    struct WidenByArithmetic<'a> {
        keys: (&'a [u8], usize, usize, *mut __m512i),
        values: (&'a [u8], usize, *mut __m512i),
    }

    impl Kernel for WidenByArithmetic<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            // SAFETY: the test passes readable rows and buffers that are large enough.
            unsafe {
                widen_keys(self.keys.0.as_ptr(), self.keys.1, self.keys.2, self.keys.3);
                widen_values(self.values.0.as_ptr(), self.values.1, self.values.2);
            }
        }
    }

    #[test]
    fn every_int8_widens_to_its_bf16_value_by_table_and_by_arithmetic() {
        if Isa::detect().0 != IsaKind::Avx512Bf16 {
            return;
        }
        // Elements that a pool holds: from -127 on.
        let bytes: Vec<u8> = (0..HEAD_DIM_MAX * 32).map(|i| ((i * 37) as u8 as i8).max(-127) as u8).collect();
        let word = |i: usize| (f32::from(bytes[i] as i8).to_bits() >> 16) as u16;
        for (head_dim, key_stride) in [(64, 16), (62, 16), (66, 32), (HEAD_DIM_MAX, 16), (80, 32)] {
            let stride = head_dim_stride(head_dim);
            let rooms: [_; 4] = std::array::from_fn(|_| Box::new(Words([[0; PAIRS]; HEAD_DIM_MAX / 2])));
            let [keys, values, other_keys, other_values] = rooms.map(Box::into_raw);
            // SAFETY: the test returns early without AVX-512 BF16, and the buffers are large enough.
            unsafe {
                let plain = WidenByArithmetic {
                    keys: (&bytes, key_stride, head_dim, keys.cast()),
                    values: (&bytes, stride, values.cast()),
                };
                run_avx512_bf16(plain);
                let mut both = vec![(keys, values)];
                if is_x86_feature_detected!("avx512vbmi") {
                    widen_keys_by_table(bytes.as_ptr(), key_stride, head_dim, other_keys.cast());
                    widen_values_by_table(bytes.as_ptr(), stride, other_values.cast());
                    both.push((other_keys, other_values));
                }
                for (keys, values) in both {
                    for (step, j) in (0..head_dim / 2).flat_map(|step| (0..PAIRS).map(move |j| (step, j))) {
                        let [even, odd] = [0, 1].map(|i| u32::from(word((2 * step + i) * key_stride + j)));
                        assert_eq!(
                            (&(*keys).0)[step][j],
                            odd << 16 | even,
                            "keys {step} {j}, {head_dim} elements"
                        );
                    }
                    for (pair, d) in (0..TILE / 2).flat_map(|pair| (0..head_dim).map(move |d| (pair, d))) {
                        let [even, odd] = [0, 1].map(|i| u32::from(word((2 * pair + i) * stride + d)));
                        // `unpacklo` takes the first four of eight words, `unpackhi` the others.
                        let (high, lane) = (d % 8 / 4, d % COMPONENTS / 8 * 4 + d % 4);
                        let vector = (d / COMPONENTS * (TILE / 2) + pair) * 2 + high;
                        assert_eq!(
                            (&(*values).0)[vector][lane],
                            odd << 16 | even,
                            "values {pair} {d}, {head_dim} elements"
                        );
                    }
                }
                for buffer in [keys, values, other_keys, other_values] {
                    drop(Box::from_raw(buffer));
                }
            }
        }
    }

    fn head_dim_stride(head_dim: usize) -> usize {
        head_dim.next_multiple_of(TILE)
    }
}
