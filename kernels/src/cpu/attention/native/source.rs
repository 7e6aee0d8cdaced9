//! Where a span's keys and values come from, as pairs of bf16: those of two components for sixteen positions, and those of
//! two positions for sixteen components.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::super::kv::{Bf16, Int8, KvLayout, Number, TILE};
use super::super::{HEAD_DIM_MAX, Tile};

/// Pairs in a vector, and positions in a tile.
const PAIRS: usize = TILE;
/// Components that are weighed together: two vectors of pairs.
pub(super) const PART: usize = 2 * PAIRS;

/// Keys and values as a block of queries reads them.
///
/// # Safety
/// Tiles can be read and rooms be written; the machine has AVX-512 with BF16.
pub(in super::super) trait Source {
    /// What the pool holds.
    type Stored: Number;
    /// Room for a tile that is not read as it is.
    type Room;

    /// A tile as it is read from now on: from where it lies or from `room`, which need not be initialised. Neither may change until it
    /// was read for the last time.
    unsafe fn ready(tile: &Tile<Self::Stored>, layout: &KvLayout, room: *mut Self::Room) -> Ready;

    /// Components `2 * step` and `2 * step + 1` of the keys.
    unsafe fn keys(tile: &Ready, step: usize) -> __m512i;

    /// [`PART`] components from `d` on of the values at positions `2 * pair` and `2 * pair + 1`, in the order of `unpacklo` and
    /// `unpackhi`; 0 beyond the stride of values.
    unsafe fn values(tile: &Ready, d: usize, pair: usize) -> (__m512i, __m512i);
}

/// A tile as the kernel reads it.
#[derive(Clone, Copy)]
pub(in super::super) struct Ready {
    keys: *const Bf16,
    key_stride: usize,
    values: *const Bf16,
    value_stride: usize,
    /// As in [`Tile`].
    pub key_scales: *const f32,
    pub value_scales: *const f32,
}

/// bf16 numbers where they lie, which become pairs whenever they are read: for few queries.
pub(in super::super) struct InPlace;

impl Source for InPlace {
    type Stored = Bf16;
    type Room = ();

    #[inline(always)]
    unsafe fn ready(tile: &Tile<Bf16>, layout: &KvLayout, _room: *mut ()) -> Ready {
        let Tile { keys, key_stride, values, key_scales, value_scales } = *tile;
        Ready { keys, key_stride, values, value_stride: layout.value_stride(), key_scales, value_scales }
    }

    #[inline(always)]
    unsafe fn keys(tile: &Ready, step: usize) -> __m512i {
        // SAFETY: passed on to the caller.
        unsafe { pair_keys(tile.keys.add(2 * step * tile.key_stride), tile.key_stride) }
    }

    #[inline(always)]
    unsafe fn values(tile: &Ready, d: usize, pair: usize) -> (__m512i, __m512i) {
        // SAFETY: passed on to the caller.
        unsafe { pair_values(tile.values, tile.value_stride, d, pair) }
    }
}

/// Two rows of 16 keys, `stride` apart, as pairs.
///
/// # Safety
/// Rows can be read, and the machine has AVX-512.
#[inline(always)]
unsafe fn pair_keys(from: *const Bf16, stride: usize) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe {
        // Words of two rows side by side become pairs.
        let pairs = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
            18, 2, 17, 1, 16, 0,
        );
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(from.cast()));
        let high = _mm256_loadu_si256(from.add(stride).cast());
        _mm512_permutexvar_epi16(pairs, _mm512_inserti64x4::<1>(low, high))
    }
}

/// [`Source::values`] of rows of bf16 numbers, `stride` apart.
///
/// # Safety
/// Rows are whole vectors of 16 that can be read, `d` is below their length, and the machine has AVX-512.
#[inline(always)]
unsafe fn pair_values(values: *const Bf16, stride: usize, d: usize, pair: usize) -> (__m512i, __m512i) {
    // SAFETY: passed on to the caller; the mask keeps to the row.
    unsafe {
        let present: __mmask32 = if d + PART <= stride { u32::MAX } else { 0xffff };
        let at = values.add(2 * pair * stride + d).cast::<i16>();
        let even = _mm512_maskz_loadu_epi16(present, at);
        let odd = _mm512_maskz_loadu_epi16(present, at.add(stride));
        (_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd))
    }
}

/// Numbers that become pairs once, which all queries of a block read.
pub(in super::super) struct Paired<N>(PhantomData<N>);

/// A tile's vectors of pairs: keys [head_dim / 2], values [head_dim / 32, pairs of positions, 2].
#[repr(C, align(64))]
pub(in super::super) struct Pairs {
    keys: [[u32; PAIRS]; HEAD_DIM_MAX / 2],
    values: [[u32; PAIRS]; HEAD_DIM_MAX / 2],
}

/// Rows of keys are taken by fours, so that the room for their pairs must be even.
const _: () = assert!(HEAD_DIM_MAX.is_multiple_of(4));

impl<N: ToPairs> Source for Paired<N> {
    type Stored = N;
    type Room = Pairs;

    #[inline(always)]
    unsafe fn ready(tile: &Tile<N>, layout: &KvLayout, room: *mut Pairs) -> Ready {
        // SAFETY: passed on to the caller; a tile's keys and values fit into the room.
        unsafe {
            let (keys, values) = ((&raw mut (*room).keys).cast(), (&raw mut (*room).values).cast());
            N::to_pairs(tile, layout.head_dim, layout.value_stride(), keys, values);
            Ready {
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
    unsafe fn keys(tile: &Ready, step: usize) -> __m512i {
        // SAFETY: passed on to the caller.
        unsafe { _mm512_load_si512(tile.keys.cast::<__m512i>().add(step)) }
    }

    #[inline(always)]
    unsafe fn values(tile: &Ready, d: usize, pair: usize) -> (__m512i, __m512i) {
        // SAFETY: passed on to the caller.
        unsafe {
            let at = tile.values.cast::<__m512i>().add((d / PART * (TILE / 2) + pair) * 2);
            (_mm512_load_si512(at), _mm512_load_si512(at.add(1)))
        }
    }
}

/// Numbers that are bf16 numbers, or become such.
pub(in super::super) trait ToPairs: Number {
    /// Turns a tile into [`Pairs`]. Positions that do not exist may hold anything: nobody sees them.
    ///
    /// # Safety
    /// The tile can be read, `keys` and `values` are aligned and have room, that of keys for an even number of vectors, and the machine
    /// has AVX-512.
    unsafe fn to_pairs(
        tile: &Tile<Self>,
        head_dim: usize,
        value_stride: usize,
        keys: *mut __m512i,
        values: *mut __m512i,
    );
}

impl ToPairs for Bf16 {
    #[inline(always)]
    unsafe fn to_pairs(
        tile: &Tile<Self>,
        head_dim: usize,
        value_stride: usize,
        keys: *mut __m512i,
        values: *mut __m512i,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            for step in 0..head_dim / 2 {
                let pairs = pair_keys(tile.keys.add(2 * step * tile.key_stride), tile.key_stride);
                _mm512_store_si512(keys.add(step), pairs);
            }
            for d in (0..value_stride).step_by(PART) {
                for pair in 0..TILE / 2 {
                    let (low, high) = pair_values(tile.values, value_stride, d, pair);
                    let at = values.add((d / PART * (TILE / 2) + pair) * 2);
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
        tile: &Tile<Self>,
        head_dim: usize,
        value_stride: usize,
        keys: *mut __m512i,
        values: *mut __m512i,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            // The answer is kept by the standard library.
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

/// The upper or lower bytes of the bf16 numbers from 0 to 127.
const fn table(upper: bool) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut i = 0;
    while i < 128 {
        let word = (i as f32).to_bits() >> 16;
        bytes[i] = if upper { (word >> 8) as u8 } else { word as u8 };
        i += 1;
    }
    bytes
}

/// For each byte of a vector of pairs, that of sixteen numbers and those `apart` further on, which of the lower bytes it is, or of the
/// upper ones.
const fn pairing(numbers: [u8; PAIRS], apart: u8) -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut i = 0;
    while i < PAIRS {
        let (even, odd) = (numbers[i], numbers[i] + apart);
        (bytes[4 * i], bytes[4 * i + 1]) = (even, even + 64);
        (bytes[4 * i + 2], bytes[4 * i + 3]) = (odd, odd + 64);
        i += 1;
    }
    bytes
}

static UPPER: [u8; 128] = table(true);
static LOWER: [u8; 128] = table(false);
/// Rows of 16 keys, the first two of four and the last two.
static KEYS: [[u8; 64]; 2] = [
    pairing([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 16),
    pairing([32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47], 16),
];
/// Rows of 32 values, as `unpacklo` and `unpackhi` of words take them.
static VALUES: [[u8; 64]; 2] = [
    pairing([0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27], 32),
    pairing([4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31], 32),
];

/// The two vectors of pairs that 64 numbers become: a number's magnitude is looked up, and its sign kept. Of -128, which only
/// positions hold that nobody wrote, it makes another number than arithmetic does; neither is ever seen.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn widen_by_table(numbers: __m512i, pairings: &[[u8; 64]; 2]) -> [__m512i; 2] {
    // SAFETY: vectors are within the tables.
    unsafe {
        let [low, high] = [LOWER.as_ptr().cast::<__m512i>(), UPPER.as_ptr().cast()];
        let size = _mm512_abs_epi8(numbers);
        let lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(low), size, _mm512_loadu_si512(low.add(1)));
        let upper = _mm512_permutex2var_epi8(_mm512_loadu_si512(high), size, _mm512_loadu_si512(high.add(1)));
        let sign = _mm512_and_si512(numbers, _mm512_set1_epi8(i8::MIN));
        let upper = _mm512_or_si512(upper, sign);
        let [first, second] = [pairings[0].as_ptr().cast(), pairings[1].as_ptr().cast()];
        [
            _mm512_permutex2var_epi8(lower, _mm512_loadu_si512(first), upper),
            _mm512_permutex2var_epi8(lower, _mm512_loadu_si512(second), upper),
        ]
    }
}

/// Keys [head_dim, stride], of which 16 positions are asked for, as vectors of pairs; `to` has room for those of
/// as many rows as fours take.
///
/// # Safety
/// Rows can be read, `to` be written and is aligned, and the machine has AVX-512 with VBMI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
unsafe fn widen_keys_by_table(keys: *const u8, stride: usize, head_dim: usize, to: *mut __m512i) {
    for d in (0..head_dim).step_by(4) {
        // SAFETY: rows are below head_dim, which is even.
        unsafe {
            let row = |i: usize| _mm_loadu_si128(keys.add((d + i) * stride).cast());
            let two = |i: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(i)), row(i + 1));
            let four = match () {
                _ if d + 4 > head_dim => _mm512_zextsi256_si512(two(0)),
                _ if stride == PAIRS => _mm512_loadu_si512(keys.add(d * stride).cast()),
                _ => _mm512_inserti64x4::<1>(_mm512_castsi256_si512(two(0)), two(2)),
            };
            let [first, second] = widen_by_table(four, &KEYS);
            _mm512_store_si512(to.add(d / 2), first);
            _mm512_store_si512(to.add(d / 2 + 1), second);
        }
    }
}

/// Values [16, stride] as vectors of pairs, see [`Pairs`].
///
/// # Safety
/// As [`widen_keys_by_table`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
unsafe fn widen_values_by_table(values: *const u8, stride: usize, to: *mut __m512i) {
    for d in (0..stride).step_by(PART) {
        for pair in 0..TILE / 2 {
            // SAFETY: rows are whole vectors of 16.
            unsafe {
                let row = |i: usize| {
                    let from = values.add((2 * pair + i) * stride + d);
                    match d + PART <= stride {
                        true => _mm256_loadu_si256(from.cast()),
                        false => _mm256_zextsi128_si256(_mm_loadu_si128(from.cast())),
                    }
                };
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(row(0)), row(1));
                let [low, high] = widen_by_table(both, &VALUES);
                let at = to.add((d / PART * (TILE / 2) + pair) * 2);
                _mm512_store_si512(at, low);
                _mm512_store_si512(at.add(1), high);
            }
        }
    }
}

/// Pairs of bf16: numbers as small as these have nothing in the lower half of an f32.
#[inline(always)]
unsafe fn pairs(even: __m128i, odd: __m128i) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe {
        let even = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(even)));
        let odd = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(odd)));
        _mm512_or_si512(_mm512_srli_epi32::<16>(even), odd)
    }
}

/// As [`widen_keys_by_table`] with AVX-512 alone.
#[inline(always)]
unsafe fn widen_keys(keys: *const u8, stride: usize, head_dim: usize, to: *mut __m512i) {
    for step in 0..head_dim / 2 {
        // SAFETY: passed on to the caller.
        unsafe {
            let row = keys.add(2 * step * stride);
            let two = pairs(_mm_loadu_si128(row.cast()), _mm_loadu_si128(row.add(stride).cast()));
            _mm512_store_si512(to.add(step), two);
        }
    }
}

/// As [`widen_values_by_table`] with AVX-512 alone.
#[inline(always)]
unsafe fn widen_values(values: *const u8, stride: usize, to: *mut __m512i) {
    for d in (0..stride).step_by(PART) {
        for pair in 0..TILE / 2 {
            // SAFETY: passed on to the caller; rows are whole vectors of 16.
            unsafe {
                let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
                let row = |i: usize| {
                    let from = values.add((2 * pair + i) * stride + d);
                    let bytes = match d + PART <= stride {
                        true => _mm256_loadu_si256(from.cast()),
                        false => _mm256_zextsi128_si256(_mm_loadu_si128(from.cast())),
                    };
                    _mm256_permutevar8x32_epi32(bytes, order)
                };
                let (even, odd) = (row(0), row(1));
                let at = to.add((d / PART * (TILE / 2) + pair) * 2);
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
    use crate::cpu::isa::{Isa, Path};
    use crate::cpu::simd::{Kernel, Simd, run_avx512_bf16};

    #[repr(C, align(64))]
    struct Words([[u32; PAIRS]; HEAD_DIM_MAX / 2]);

    struct Plain<'a> {
        keys: (&'a [u8], usize, usize, *mut __m512i),
        values: (&'a [u8], usize, *mut __m512i),
    }

    impl Kernel for Plain<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            // SAFETY: passed on to the caller.
            unsafe {
                widen_keys(self.keys.0.as_ptr(), self.keys.1, self.keys.2, self.keys.3);
                widen_values(self.values.0.as_ptr(), self.values.1, self.values.2);
            }
        }
    }

    #[test]
    fn every_byte_becomes_the_bf16_number_that_it_is_by_table_or_by_arithmetic() {
        if Isa::detect().0 != Path::Avx512Bf16 {
            return;
        }
        // Numbers that a pool holds: from -127 on.
        let bytes: Vec<u8> = (0..HEAD_DIM_MAX * 32).map(|i| ((i * 37) as u8 as i8).max(-127) as u8).collect();
        let word = |i: usize| (f32::from(bytes[i] as i8).to_bits() >> 16) as u16;
        for (head_dim, key_stride) in [(64, 16), (62, 16), (66, 32), (HEAD_DIM_MAX, 16), (80, 32)] {
            let stride = head_dim_stride(head_dim);
            let rooms: [_; 4] = std::array::from_fn(|_| Box::new(Words([[0; PAIRS]; HEAD_DIM_MAX / 2])));
            let [keys, values, other_keys, other_values] = rooms.map(Box::into_raw);
            // SAFETY: the machine has what it takes, and the rooms are large enough.
            unsafe {
                let plain = Plain {
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
                            "keys {step} {j}, {head_dim} numbers"
                        );
                    }
                    for (pair, d) in (0..TILE / 2).flat_map(|pair| (0..head_dim).map(move |d| (pair, d))) {
                        let [even, odd] = [0, 1].map(|i| u32::from(word((2 * pair + i) * stride + d)));
                        // `unpacklo` takes the first four of eight words, `unpackhi` the others.
                        let (high, lane) = (d % 8 / 4, d % PART / 8 * 4 + d % 4);
                        let vector = (d / PART * (TILE / 2) + pair) * 2 + high;
                        assert_eq!(
                            (&(*values).0)[vector][lane],
                            odd << 16 | even,
                            "values {pair} {d}, {head_dim} numbers"
                        );
                    }
                }
                for room in [keys, values, other_keys, other_values] {
                    drop(Box::from_raw(room));
                }
            }
        }
    }

    fn head_dim_stride(head_dim: usize) -> usize {
        head_dim.next_multiple_of(TILE)
    }
}
