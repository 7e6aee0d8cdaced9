//! Rows of logits that several thread blocks share for sampling, against rows that one block has alone.

use inflight_kernels::cuda::{
    Profile, SAMPLING_PARTS_MAX, SAMPLING_SPLIT_BYTES, SAMPLING_SPLIT_ROWS, SamplingParams, SamplingResult,
    SamplingRow, SplitKernels, sample, sampling_parts,
};
use proptest::prelude::*;

use crate::device::{Buffer, TestDevice};
use crate::sampling::logits_of;
use crate::{SeededRng, on_harness};

/// Parts of rows, and what they hand on.
pub(crate) struct SplitRows {
    buffer: Buffer,
    parts: u32,
    part_tokens: u32,
}

impl SplitRows {
    /// Splits rows into at most this many parts; 0: one block a row.
    pub(crate) fn new(device: &TestDevice, rows: usize, vocabulary: u32, parts: u32) -> Self {
        let part_tokens = vocabulary.div_ceil(parts.max(1)).next_multiple_of(4);
        let parts = if parts == 0 { 0 } else { vocabulary.div_ceil(part_tokens) };
        Self { buffer: device.alloc(rows * SAMPLING_SPLIT_BYTES), parts, part_tokens }
    }

    pub(crate) fn params(&self, whole: SamplingParams) -> SamplingParams {
        let Self { buffer, parts, part_tokens } = self;
        SamplingParams { split: buffer.address(), parts: *parts, part_tokens: *part_tokens, ..whole }
    }
}

#[test]
pub(crate) fn split_rows_yield_what_one_block_does() {
    let temperature = prop_oneof![1 => Just(0.0f32), 4 => 0.05f32..3.0];
    let cuts = prop_oneof![
        1 => Just((0u32, 1.0f32)),
        3 => (prop_oneof![2 => Just(0u32), 2 => 1u32..400, 1 => 600u32..3000], 0.01f32..1.0),
        1 => (1u32..400, Just(1.0f32)),
    ];
    let min_p = prop_oneof![Just(0.0f32), 0.001f32..0.3];
    let row = (temperature, cuts, min_p, 0u32..6, any::<bool>());
    let shape = (any::<u32>(), 1usize..6000, prop::collection::vec(row, 1..4), 1u32..=SAMPLING_PARTS_MAX);
    on_harness(40, shape, |(seed, vocabulary, rows, parts)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let stride = vocabulary.next_multiple_of(4);
        let mut logits = Vec::new();
        let mut table = Vec::new();
        for (position, (temperature, (top_k, top_p), min_p, kind, logprobs)) in (0..).zip(rows) {
            logits.extend(logits_of(kind, vocabulary, &mut rng));
            logits.resize((position as usize + 1) * stride, f32::NAN);
            table.push(SamplingRow {
                seed: seed.into(),
                position,
                temperature,
                top_k,
                top_p,
                min_p,
                repetition: 1.0,
                logprobs: u32::from(logprobs) * 6,
                rows: 1,
                fallback: u32::MAX,
                ..SamplingRow::default()
            });
        }
        let rows = table.len();
        let needed = SplitKernels::of(&table, vocabulary as u32);
        let mut drawn = Vec::new();
        for parts in [0, parts] {
            let (logits, table) = (device.upload(&logits), device.upload(&table));
            let results = device.upload(&vec![SamplingResult::default(); rows]);
            let sampled = device.alloc(rows * 4);
            let split = SplitRows::new(&device, rows, vocabulary as u32, parts);
            let p = split.params(SamplingParams {
                logits: logits.address(),
                rows: table.address(),
                results: results.address(),
                sampled: sampled.address(),
                vocabulary: vocabulary as u32,
                stride: stride as u32,
                ..SamplingParams::default()
            });
            unsafe { sample(&device, rows as u32, needed, &p) }.unwrap();
            drawn.push((results.read::<SamplingResult>(rows), sampled.read::<u32>(rows)));
        }
        prop_assert_eq!(&drawn[0], &drawn[1], "{} parts of {}", parts, vocabulary);
        Ok(())
    });
}

proptest! {
    #[test]
    fn the_parts_of_rows_cover_the_vocabulary_and_keep_no_more_blocks_than_two_a_processor(
        multiprocessors in 1u32..300, rows in 0u32..300, vocabulary in 1u32..300_000,
    ) {
        let profile = Profile { multiprocessors, shared_bytes: 0, multiprocessor_shared_bytes: 0 };
        let (parts, part_tokens) = sampling_parts(&profile, rows, vocabulary);
        if parts == 0 {
            prop_assert!(rows == 0 || rows > SAMPLING_SPLIT_ROWS || multiprocessors < rows || vocabulary <= 32);
        } else {
            prop_assert!((2..=SAMPLING_PARTS_MAX).contains(&parts) && parts * rows <= 2 * multiprocessors);
            prop_assert!(part_tokens % 4 == 0 && (parts - 1) * part_tokens < vocabulary);
            prop_assert!(parts * part_tokens >= vocabulary);
        }
    }
}
