//! Benchmarks of every kernel on the shapes of a 1.1B-parameter model, with its share of the machine's
//! limits: `cargo bench -p inflight-kernels --bench kernels`. An argument selects kernels:
//! `cargo bench -p inflight-kernels --bench kernels -- gemm`.
//!
//! Criterion's statistics of a kernel are followed by its best rate and the limit measured right after.

#![allow(missing_docs, reason = "criterion's macro generates undocumented items")]

use std::cell::Cell;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use inflight_kernels::cpu::roofline::{Arithmetic, Memory, arithmetic};
use inflight_kernels::cpu::{
    AccumulatorInit, Activation, Activations, Isa, KvDtype, KvLayout, KvPool, KvSlot, PackedMatrix, Pool,
    QkvShape, Ragged, RopeScaling, RopeTable, Truncation, WeightFormat, WeightRows, Workspace, all_finite,
    argmax, attention, finish_qkv, gate, gemm, inverse_frequencies, rms_norm, sample,
};
use inflight_kernels::{Dtype, Encoding};

const HIDDEN: usize = 2048;
const INNER: usize = 5632;
const VOCAB: usize = 32_000;
const SHAPE: QkvShape = QkvShape { heads: 32, kv_heads: 4, head_dim: 64 };
const BLOCK_TOKENS: usize = 16;
const LIMIT_TIME: Duration = Duration::from_millis(100);

/// Resource that bounds a kernel, and its use per call.
#[derive(Clone, Copy)]
enum Work {
    /// Bytes read and written.
    Bytes(f64),
    /// Arithmetic operations; a multiply-add counts as two.
    Operations(Arithmetic, f64),
}

struct Bench {
    pool: Pool,
    isa: Isa,
    memory: Memory,
}

impl Bench {
    fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let pool = Pool::new(threads).expect("threads can be started");
        let memory = Memory::new(512 << 20, true).expect("memory can be allocated");
        Self { pool, isa: Isa::detect(), memory }
    }

    /// Measures `call` and the limit of its resource, and prints the share.
    fn run(&self, c: &mut Criterion, name: &str, work: Work, mut call: impl FnMut()) {
        let best = Cell::new(f64::INFINITY);
        c.bench_function(name, |b| {
            b.iter_custom(|count| {
                let begun = Instant::now();
                for _ in 0..count {
                    call();
                }
                let took = begun.elapsed();
                best.set(best.get().min(took.as_secs_f64() / count as f64));
                took
            });
        });
        if best.get().is_infinite() {
            return; // filtered out
        }
        let (done, limit, unit) = match work {
            Work::Bytes(bytes) => (bytes, self.memory.read(&self.pool, self.isa, LIMIT_TIME), "GB/s"),
            Work::Operations(kind, operations) => {
                (operations, arithmetic(&self.pool, self.isa, kind, LIMIT_TIME), "GOP/s")
            }
        };
        let rate = done / best.get();
        println!(
            "{name:48} {:8.1} of {:8.1} {unit}: {:5.1} %\n",
            rate / 1e9,
            limit / 1e9,
            rate / limit * 100.0
        );
    }
}

fn gemms(c: &mut Criterion) {
    let bench = Bench::new();
    for format in [
        WeightFormat::F32,
        WeightFormat::Bf16,
        WeightFormat::Int8 { group: 128 },
        WeightFormat::Int4 { group: 32 },
    ] {
        let kind = match format {
            WeightFormat::F32 | WeightFormat::F16 => Arithmetic::F32,
            WeightFormat::Bf16 => Arithmetic::Bf16,
            WeightFormat::Int8 { .. } | WeightFormat::Int4 { .. } => Arithmetic::Int8,
        };
        for (what, n, k) in [("up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER), ("output", HIDDEN, HIDDEN)] {
            let values: Vec<u8> =
                (0..n * k).flat_map(|i| (((i * 31) % 61) as f32 - 30.0).to_le_bytes()).collect();
            let encoding = Encoding::Plain(Dtype::F32);
            let rows = [WeightRows { encoding, bytes: &values, rows: n, interleaved: None }];
            let pack = || PackedMatrix::pack(&bench.pool, bench.isa, k, &rows, format).expect("it fits");
            // Several matrices in turn, like the layers of a model, so that weights come from memory.
            let copies = (128 << 20) / format.packed_bytes(bench.isa, n, k) + 1;
            let weights: Vec<_> = (0..copies).map(|_| pack()).collect();
            drop(values);
            for rows in [1, 16, 512] {
                let x: Vec<f32> = (0..rows * k).map(|i| (i % 17) as f32 * 0.01).collect();
                let mut y = vec![0.0; rows * n];
                let (mut scratch, mut next) = (Activations::default(), 0);
                let work = match rows {
                    1 => Work::Bytes(weights[0].bytes() as f64),
                    _ => Work::Operations(kind, 2.0 * (rows * n * k) as f64),
                };
                bench.run(c, &format!("gemm {format} {what} {rows}"), work, || {
                    let w = &weights[next % copies];
                    next += 1;
                    gemm(&bench.pool, w, &x, rows, AccumulatorInit::Zero, &mut y, &mut scratch);
                });
            }
        }
    }
}

fn attentions(c: &mut Criterion) {
    let bench = Bench::new();
    let (bf16, bytes) = (Dtype::Bf16.into(), KvDtype::Int8);
    // Sequences, cached tokens of each, new tokens of each.
    for (what, dtype, sequences, before, count) in [
        ("prefill 512", bf16, 1, 0, 512),
        ("chunk 64 at 4000", bf16, 1, 4000, 64),
        ("chunk 16 at 4000", bf16, 1, 4000, 16),
        ("decode 16 at 4000", bf16, 16, 4000, 1),
        ("prefill 512, int8", bytes, 1, 0, 512),
        ("chunk 64 at 4000, int8", bytes, 1, 4000, 64),
        ("decode 16 at 4000, int8", bytes, 16, 4000, 1),
    ] {
        let (kv_heads, head_dim) = (SHAPE.kv_heads, SHAPE.head_dim);
        let layout = KvLayout::new(dtype, kv_heads, head_dim, BLOCK_TOKENS);
        let tokens: usize = before + count;
        let table = tokens.div_ceil(BLOCK_TOKENS);
        let blocks: Vec<u32> = (0..(sequences * table) as u32).collect();
        let mut kv = KvPool::new(layout.layer_bytes(), sequences * table).expect("it fits");
        let mut rope = RopeTable::new(inverse_frequencies(SHAPE.head_dim, 10_000.0, &RopeScaling::None));
        rope.ensure(tokens);
        let values = |rows: usize| (0..rows * SHAPE.width()).map(|i| (i % 23) as f32 * 0.1 - 1.0).collect();
        for s in 0..sequences {
            let positions: Vec<u32> = (0..tokens as u32).collect();
            let place = |p: &u32| KvSlot {
                block: blocks[s * table + *p as usize / BLOCK_TOKENS],
                offset: p % BLOCK_TOKENS as u32,
            };
            let places: Vec<KvSlot> = positions.iter().map(place).collect();
            let mut qkv: Vec<f32> = values(tokens);
            finish_qkv(
                &bench.pool,
                bench.isa,
                SHAPE,
                &mut qkv,
                None,
                &rope,
                &positions,
                &places,
                &mut kv,
                &layout,
            );
        }
        let qkv: Vec<f32> = values(sequences * count);
        let mut out = vec![0.0; sequences * count * SHAPE.heads * SHAPE.head_dim];
        let positions: Vec<u32> = (before as u32..tokens as u32).collect();
        let mut ragged = Ragged::default();
        for blocks in blocks.chunks_exact(table) {
            ragged.push(&positions, 0, blocks.iter().copied(), BLOCK_TOKENS);
        }
        let visible: usize = (before + 1..=tokens).sum();
        let work = match count {
            1 => Work::Bytes((sequences * tokens) as f64 * layout.layer_bytes() as f64 / BLOCK_TOKENS as f64),
            _ => Work::Operations(Arithmetic::Bf16, 4.0 * (visible * SHAPE.heads * SHAPE.head_dim) as f64),
        };
        bench.run(c, &format!("attention {what}"), work, || {
            attention(
                &bench.pool,
                bench.isa,
                SHAPE,
                &qkv,
                &ragged,
                &kv,
                &layout,
                SHAPE.head_dim as f64,
                &mut out,
            );
        });
    }
}

fn rows(c: &mut Criterion) {
    let bench = Bench::new();
    let count = 512;
    let x = vec![0.5f32; count * HIDDEN];
    let (weight, mut y) = (vec![1.0f32; HIDDEN], vec![0.0f32; count * HIDDEN]);
    let bytes = |values: usize| Work::Bytes((values * 4) as f64);
    bench.run(c, "rms_norm 512", bytes(2 * x.len()), || {
        rms_norm(&bench.pool, bench.isa, &x, &weight, 1e-5, &mut y);
    });
    let gates = vec![0.5f32; count * 2 * INNER];
    let mut gated = vec![0.0f32; count * INNER];
    bench.run(c, "swiglu 512", bytes(3 * gated.len()), || {
        gate(&bench.pool, bench.isa, Activation::Silu, &gates, INNER, &mut gated);
    });
    let layout = KvLayout::new(Dtype::Bf16.into(), SHAPE.kv_heads, SHAPE.head_dim, BLOCK_TOKENS);
    let mut kv = KvPool::new(layout.layer_bytes(), count / BLOCK_TOKENS).expect("it fits");
    let mut rope = RopeTable::new(inverse_frequencies(SHAPE.head_dim, 10_000.0, &RopeScaling::None));
    rope.ensure(count);
    let mut qkv = vec![0.1f32; count * SHAPE.width()];
    let positions: Vec<u32> = (0..count as u32).collect();
    let tokens = BLOCK_TOKENS as u32;
    let places: Vec<KvSlot> =
        positions.iter().map(|p| KvSlot { block: p / tokens, offset: p % tokens }).collect();
    bench.run(c, "finish_qkv 512", bytes(2 * qkv.len()), || {
        finish_qkv(
            &bench.pool,
            bench.isa,
            SHAPE,
            &mut qkv,
            None,
            &rope,
            &positions,
            &places,
            &mut kv,
            &layout,
        );
    });
}

fn sampling(c: &mut Criterion) {
    let bench = Bench { pool: Pool::new(1).expect("it has one thread"), ..Bench::new() };
    let logits: Vec<f32> = (0..VOCAB).map(|i| ((i * 7919) % 10_007) as f32 * 1e-3).collect();
    let work = Work::Bytes((VOCAB * 4) as f64);
    bench.run(c, "argmax 32000", work, || {
        std::hint::black_box(argmax(bench.isa, &logits));
    });
    bench.run(c, "all_finite 32000", work, || {
        std::hint::black_box(all_finite(bench.isa, &logits));
    });
    let mut workspace = Workspace::default();
    let truncation = Truncation { temperature: 0.8, top_k: 50, top_p: 0.95, min_p: 0.0 };
    bench.run(c, "sample 32000", work, || {
        std::hint::black_box(sample(bench.isa, &logits, &truncation, 0.37, &mut workspace));
    });
}

criterion_group! {
    name = kernels;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600)).without_plots();
    targets = gemms, attentions, rows, sampling
}
criterion_main!(kernels);
