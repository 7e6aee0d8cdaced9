//! Kernels that work row by row, at the widths of models: norms, what finishes the QKV product, SwiGLU.

use inflight_kernels::cuda::{
    HalfDtype, KvStore, NormParams, QkvParams, SwigluParams, finish_qkv, norm, swiglu,
};

use super::{Bench, Timing};
use crate::SeededRng;

const HALF: HalfDtype = HalfDtype::Bf16;
const HEAD_DIM: u32 = 128;
const KV_HEADS: u32 = 8;
const BLOCK_TOKENS: u32 = 16;
/// Rows of decode and prefill batches.
const ROWS: [u32; 4] = [1, 64, 1024, 8192];
/// Launches of a pass, each over rows of its own while they fit: one launch is shorter than events resolve.
const LAUNCHES: usize = 16;
/// Bytes of a pass's buffers, more than any cache.
const PASS_BYTES: usize = 256 << 20;

/// Widths of a model's rows.
#[derive(Clone, Copy)]
struct Widths {
    name: &'static str,
    hidden: u32,
    inner: u32,
    heads: u32,
}

const MODELS: [Widths; 2] = [
    Widths { name: "qwen3-0.6b", hidden: 1024, inner: 3072, heads: 16 },
    Widths { name: "qwen3-8b", hidden: 4096, inner: 12_288, heads: 32 },
];

/// Returns how many different sets of rows of `bytes` a pass goes through.
fn sets(bytes: usize) -> usize {
    (PASS_BYTES / bytes).clamp(1, LAUNCHES)
}

/// Prints the time of one launch that reads and writes `bytes`.
fn print(bench: &Bench, kernel: &str, model: Widths, rows: u32, bytes: usize, timing: &Timing) {
    println!(
        "{{\"kernel\": \"{kernel}\", \"model\": \"{}\", \"rows\": {rows}, {}, {}}}",
        model.name,
        timing.fields(LAUNCHES),
        bench.rate((bytes * LAUNCHES) as f64, timing.median)
    );
}

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn norm_as_a_share_of_bandwidth() {
    let Some(bench) = Bench::new() else { return };
    for model in MODELS {
        for rows in ROWS {
            let elements = rows as usize * model.hidden as usize;
            let sets = sets(elements * 8);
            // As single-precision numbers, random bits would have NaN among them.
            let residual = bench.tiled(sets * elements * 4, &SeededRng::new(3).values(1 << 16, 1.0));
            let delta = bench.random(sets * elements * 2, 1.0);
            let weight = bench.device.upload(&vec![1f32; model.hidden as usize]);
            let out = bench.device.alloc(sets * elements * 2);
            let timing = bench.measure(&bench.overlapping, || {
                for launch in 0..LAUNCHES {
                    let at = (launch % sets * elements) as u64;
                    let p = NormParams {
                        residual: residual.address() + 4 * at,
                        delta: delta.address() + 2 * at,
                        weight: weight.address(),
                        out: out.address() + 2 * at,
                        pick: 0,
                        rows,
                        width: model.hidden,
                        eps: 1e-6,
                        unused: 0,
                    };
                    unsafe { norm(&bench.overlapping, HALF, &p) }.unwrap();
                }
            });
            // The residual is read and written, the addend read, the result written.
            print(&bench, "norm", model, rows, elements * (4 + 4 + 2 + 2), &timing);
        }
    }
}

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn finish_qkv_as_a_share_of_bandwidth() {
    let Some(bench) = Bench::new() else { return };
    for (model, store) in
        MODELS.into_iter().flat_map(|model| [KvStore::Half, KvStore::Fp8].map(|store| (model, store)))
    {
        let layer_bytes = store.layer_bytes(KV_HEADS.into(), BLOCK_TOKENS.into(), HEAD_DIM.into()) as usize;
        let positions_max = ROWS[ROWS.len() - 1];
        let blocks = positions_max.div_ceil(BLOCK_TOKENS) as usize;
        let kv = bench.random(blocks * layer_bytes, 1.0);
        // Rotations by no angle.
        let angles = bench.tiled((positions_max * HEAD_DIM) as usize * 4, &[1f32, 0.0]);
        let weight = bench.device.upload(&[1f32; HEAD_DIM as usize]);
        for rows in ROWS {
            let elements = rows as usize * ((model.heads + 2 * KV_HEADS) * HEAD_DIM) as usize;
            let sets = sets(elements * 2);
            let qkv = bench.random(sets * elements * 2, 1.0);
            let positions: Vec<u32> = (0..rows).collect();
            // One decoded token a block, or whole blocks of a prompt.
            let places = match rows {
                0..=64 => positions.iter().map(|row| row * BLOCK_TOKENS).collect(),
                _ => positions.clone(),
            };
            let (positions, places) = (bench.device.upload(&positions), bench.device.upload(&places));
            let timing = bench.measure(&bench.overlapping, || {
                for launch in 0..LAUNCHES {
                    let p = QkvParams {
                        qkv: qkv.address() + (launch % sets * elements * 2) as u64,
                        q_norm: weight.address(),
                        k_norm: weight.address(),
                        angles: angles.address(),
                        positions: positions.address(),
                        places: places.address(),
                        kv: kv.address(),
                        block_numbers: layer_bytes as u64 / store.unit(),
                        layer_offset: 0,
                        rows,
                        heads: model.heads,
                        kv_heads: KV_HEADS,
                        head_dim: HEAD_DIM,
                        block_tokens: BLOCK_TOKENS,
                        eps: 1e-6,
                    };
                    unsafe { finish_qkv(&bench.overlapping, HALF, store, &p) }.unwrap();
                }
            });
            let queries = rows as usize * (model.heads * HEAD_DIM) as usize;
            let cached = layer_bytes / BLOCK_TOKENS as usize * rows as usize;
            let kernel = if store == KvStore::Fp8 { "finish_qkv_fp8" } else { "finish_qkv" };
            print(&bench, kernel, model, rows, elements * 2 + queries * 2 + cached, &timing);
        }
    }
}

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn swiglu_as_a_share_of_bandwidth() {
    let Some(bench) = Bench::new() else { return };
    for model in MODELS {
        for rows in ROWS {
            let elements = rows as usize * model.inner as usize;
            let sets = sets(elements * 6);
            let gate_up = bench.random(sets * elements * 4, 1.0);
            let out = bench.device.alloc(sets * elements * 2);
            let timing = bench.measure(&bench.overlapping, || {
                for launch in 0..LAUNCHES {
                    let at = (launch % sets * elements) as u64;
                    let p = SwigluParams {
                        gate_up: gate_up.address() + 4 * at,
                        out: out.address() + 2 * at,
                        rows,
                        width: model.inner,
                    };
                    unsafe { swiglu(&bench.overlapping, HALF, &p) }.unwrap();
                }
            });
            print(&bench, "swiglu", model, rows, elements * (4 + 2), &timing);
        }
    }
}
