//! Sampling from logits of a large vocabulary.

use inflight_kernels::cuda::{
    Device, SAMPLING_SPLIT_BYTES, SamplingParams, SamplingResult, SamplingRow, SplitKernels, as_bytes,
    sample, sampling_parts,
};

use super::Bench;
use crate::SeededRng;
use crate::sampling::logits_of;

/// Vocabulary of Qwen3.
const VOCABULARY: usize = 151_936;
/// Different rows of logits; more rows repeat them.
const DISTINCT: usize = 8;
/// Launches of a pass.
const LAUNCHES: usize = 8;

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn sampling_by_parameters_and_rows() {
    let Some(bench) = Bench::new() else { return };
    let mut rng = SeededRng::new(5);
    // Bell-shaped, like a model's.
    let distinct: Vec<f32> = (0..DISTINCT).flat_map(|_| logits_of(2, VOCABULARY, &mut rng)).collect();
    let plain = SamplingRow {
        seed: 9,
        position: 1000,
        temperature: 1.0,
        top_p: 1.0,
        repetition: 1.0,
        rows: 1,
        fallback: u32::MAX,
        ..SamplingRow::default()
    };
    let ways = [
        ("greedy", SamplingRow { temperature: 0.0, ..plain }),
        ("temperature", plain),
        ("top_k 20, top_p 0.95", SamplingRow { temperature: 0.7, top_k: 20, top_p: 0.95, ..plain }),
        ("top_p 0.95", SamplingRow { top_p: 0.95, ..plain }),
        ("min_p 0.05", SamplingRow { min_p: 0.05, ..plain }),
        ("greedy, 5 logprobs", SamplingRow { temperature: 0.0, logprobs: 6, ..plain }),
    ];
    for rows in [1usize, 64, 256] {
        let logits = bench.tiled(rows * VOCABULARY * 4, &distinct);
        let results = bench.device.alloc(rows * size_of::<SamplingResult>());
        let (sampled, tokens) = (bench.device.alloc(rows * 4), bench.device.upload(&vec![0u32; rows]));
        let split = bench.device.alloc(rows * SAMPLING_SPLIT_BYTES);
        let parts = sampling_parts(&bench.overlapping.profile(), rows as u32, VOCABULARY as u32);
        // Whole rows, and split ones where they are.
        let parts = if parts.0 == 0 { vec![(0, 0)] } else { vec![(0, 0), parts] };
        for (name, way) in ways {
            let settings: Vec<u8> = (0..rows)
                .flat_map(|row| as_bytes(&SamplingRow { choice: row as u32, ..way }).to_vec())
                .collect();
            let settings = bench.device.upload(&settings);
            for (parts, part_tokens) in &parts {
                let p = SamplingParams {
                    logits: logits.address(),
                    rows: settings.address(),
                    results: results.address(),
                    sampled: sampled.address(),
                    tokens: tokens.address(),
                    split: split.address(),
                    vocabulary: VOCABULARY as u32,
                    stride: VOCABULARY as u32,
                    parts: *parts,
                    part_tokens: *part_tokens,
                };
                let needed = SplitKernels::of([&way], VOCABULARY as u32);
                let timing = bench.measure(&bench.overlapping, || {
                    for _ in 0..LAUNCHES {
                        unsafe { sample(&bench.overlapping, rows as u32, needed, &p) }.unwrap();
                    }
                });
                let bytes = (LAUNCHES * rows * VOCABULARY * 4) as f64;
                println!(
                    "{{\"kernel\": \"sample\", \"way\": \"{name}\", \"rows\": {rows}, \"parts\": {parts}, \
                     \"vocabulary\": {VOCABULARY}, {}, {}}}",
                    timing.fields(LAUNCHES),
                    bench.rate(bytes, timing.median)
                );
            }
        }
    }
}
