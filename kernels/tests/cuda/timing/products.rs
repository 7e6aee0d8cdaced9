//! Matrix products of few rows as a share of read bandwidth.

use inflight_kernels::cuda::{GemmParams, HalfDtype, gemm, skinny_gemm};

use super::{Bench, StreamDevice};

/// Weight bytes per pass: more than any cache, and at least the largest matrix.
const WEIGHT_BYTES: usize = 3 << 29;
/// GEMM shapes (n, k) of Qwen3-0.6B, 1.7B and 8B: QKV, attention output, gate and up, down, LM head.
const SHAPES: [(u32, u32); 15] = [
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (151_936, 1024),
    (4096, 2048),
    (2048, 2048),
    (12_288, 2048),
    (2048, 6144),
    (151_936, 2048),
    (6144, 4096),
    (4096, 4096),
    (24_576, 4096),
    (4096, 12_288),
    (151_936, 4096),
];

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn skinny_gemm_as_a_share_of_bandwidth() {
    let Some(bench) = Bench::new() else { return };
    let weights = bench.random(WEIGHT_BYTES, 0.05);
    let (x, out) = (bench.random(8 * 12_288 * 2, 1.0), bench.device.alloc(8 * 151_936 * 4));
    let serial = StreamDevice::new(&bench.gpu, false);
    for stream in [&serial, &bench.overlapping] {
        for (n, k) in SHAPES {
            let each = n as usize * k as usize * 2;
            let matrices = WEIGHT_BYTES / each;
            assert!(matrices > 0, "a matrix of {n} by {k} has room");
            let wide = n > 100_000;
            for m in [1u32, 8] {
                let run = |skinny: bool| {
                    bench.measure(stream, || {
                        for i in 0..matrices {
                            let p = GemmParams {
                                x: x.address(),
                                weight: weights.address() + (i * each) as u64,
                                bias: 0,
                                out: out.address(),
                                m,
                                n,
                                k,
                                stride: n,
                            };
                            match skinny {
                                true => unsafe { skinny_gemm(stream, HalfDtype::Bf16, wide, &p) }.unwrap(),
                                false => unsafe { gemm(stream, HalfDtype::Bf16, wide, &p) }.unwrap(),
                            }
                        }
                    })
                };
                let (skinny, tiled) = (run(true), run(false));
                println!(
                    "{{\"kernel\": \"skinny_gemm\", \"m\": {m}, \"n\": {n}, \"k\": {k}, \"overlap\": {}, {}, {}, \
                     \"deterministic_us\": {:.2}}}",
                    stream.overlap,
                    skinny.fields(matrices),
                    bench.rate((matrices * each) as f64, skinny.median),
                    tiled.us(matrices)
                );
            }
        }
    }
}
