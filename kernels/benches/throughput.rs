//! GEMM throughput: `cargo bench -p inflight-kernels --bench throughput -- [THREADS]`.
//!
//! Prints GFLOP/s and, as a single row is bound by memory, GB/s of weights, for each instruction set and
//! format. Weights exceed all caches unless a size is given: `-- THREADS N K`. With a format's name as last
//! argument, it measures only that format on the best instruction set.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use inflight_kernels::cpu::roofline::{Arithmetic, Memory, arithmetic};
use inflight_kernels::cpu::{
    AccumulatorInit, Activations, Isa, PackedMatrix, Pool, WeightFormat, WeightRows, gemm,
};
use inflight_kernels::{Dtype, Encoding};

const ROWS: [usize; 10] = [1, 2, 4, 8, 16, 32, 48, 64, 128, 512];
const MIN_TIME: Duration = Duration::from_millis(300);

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo bench` appends `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let mut next = |default: usize| arguments.next().map_or(Ok(default), |argument| argument.parse());
    let threads = next(std::thread::available_parallelism()?.get())?;
    let (n, k) = (next(2048)?, next(2048)?);
    let only = arguments.next();
    let pool = Pool::new(threads)?;
    let isa = Isa::detect();
    let read = Memory::new(256 << 20, true)?.read(&pool, isa, MIN_TIME) / 1e9;
    let bf16 = arithmetic(&pool, isa, Arithmetic::Bf16, MIN_TIME) / 1e9;
    let int8 = arithmetic(&pool, isa, Arithmetic::Int8, MIN_TIME) / 1e9;
    println!(
        "{threads} threads, W[{n}, {k}]; limits {read:.1} GB/s, bf16 {bf16:.0} GFLOP/s, int8 {int8:.0} GOP/s"
    );
    let sets = if only.is_some() { vec![isa] } else { Isa::available() };
    for isa in sets {
        for format in [
            WeightFormat::F32,
            WeightFormat::Bf16,
            WeightFormat::F16,
            WeightFormat::Int8 { group: 128 },
            WeightFormat::Int8 { group: 64 },
            WeightFormat::Int8 { group: 32 },
            WeightFormat::Int4 { group: 32 },
        ] {
            if only.as_ref().is_some_and(|only| *only != format.to_string()) {
                continue;
            }
            let dtype = match format {
                WeightFormat::F32 => Dtype::F32,
                WeightFormat::F16 => Dtype::F16,
                _ => Dtype::Bf16,
            };
            // Realistic magnitudes: subnormals take some processors a hundred times as long.
            let weight = |i: usize| ((i * 31 % 61) as f32 - 30.5) * 0.01;
            let bytes: Vec<u8> = match dtype {
                Dtype::F32 => (0..n * k).flat_map(|i| weight(i).to_ne_bytes()).collect(),
                Dtype::F16 => (0..n * k).flat_map(|i| f16::from_f32(weight(i)).to_ne_bytes()).collect(),
                Dtype::Bf16 => (0..n * k).flat_map(|i| bf16::from_f32(weight(i)).to_ne_bytes()).collect(),
            };
            let rows =
                WeightRows { encoding: Encoding::Plain(dtype), bytes: &bytes, rows: n, interleaved: None };
            // Several matrices in turn, like the layers of a model.
            let copies = (96 << 20) / format.packed_bytes(isa, n, k) + 1;
            let pack = |_| PackedMatrix::pack(&pool, isa, k, &[rows], format);
            let weights: Vec<_> = (0..copies).map(pack).collect::<Result<_, _>>()?;
            print!("{:12} {:8}", isa.name(), format.to_string());
            for rows in ROWS {
                let x: Vec<f32> = (0..rows * k).map(|i| (i % 17) as f32 * 0.01).collect();
                let mut y = vec![0.0; rows * n];
                let mut scratch = Activations::default();
                let (mut calls, start) = (0, Instant::now());
                let mut best = f64::INFINITY;
                while start.elapsed() < MIN_TIME {
                    // One pass over all copies, so that none is cached when it is used again.
                    let begun = Instant::now();
                    for w in &weights {
                        gemm(&pool, w, black_box(&x), rows, AccumulatorInit::Zero, &mut y, &mut scratch);
                        black_box(&y);
                    }
                    calls += copies;
                    best = best.min(begun.elapsed().as_secs_f64() / copies as f64);
                }
                black_box(calls);
                let flops = 2.0 * (rows * n * k) as f64;
                print!("  {rows}: {:.0}", flops / best / 1e9);
                if rows == 1 {
                    print!(" ({:.1} GB/s)", weights[0].bytes() as f64 / best / 1e9);
                }
            }
            println!();
        }
    }
    Ok(())
}
