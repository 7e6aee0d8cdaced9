//! Measures products on this machine: `cargo run --release -p inflight-kernels --example throughput -- [THREADS]`.
//!
//! Prints GFLOP/s and, as one row is bound by memory, GB/s of weights, for each instruction set and dtype. Weights
//! are larger than the caches taken together unless a size is given: `-- THREADS N K`.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{Activations, Isa, PackedMatrix, Pool, Rows, Start, gemm};

const ROWS: [usize; 7] = [1, 2, 4, 8, 32, 128, 512];
const LEAST: Duration = Duration::from_millis(300);

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let mut next = |default: usize| arguments.next().unwrap_or(Ok(default));
    let threads = next(std::thread::available_parallelism()?.get())?;
    let (n, k) = (next(2048)?, next(2048)?);
    // Several matrices in turn, as the layers of a model are.
    let pool = Pool::new(threads)?;
    println!("{threads} threads, W[{n}, {k}]");
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let copies = (96 << 20) / (n * k * dtype.bytes()) + 1;
            let bytes: Vec<u8> = (0..n * k * dtype.bytes()).map(|i| (i * 31 % 61) as u8).collect();
            let rows = Rows { dtype, bytes: &bytes, rows: n };
            let weights: Vec<_> = (0..copies).map(|_| PackedMatrix::pack(&pool, isa, k, &[rows])).collect();
            print!("{:12} {:4}", isa.name(), dtype.name());
            for rows in ROWS {
                let x: Vec<f32> = (0..rows * k).map(|i| (i % 17) as f32 * 0.01).collect();
                let mut y = vec![0.0; rows * n];
                let mut scratch = Activations::default();
                let (mut calls, start) = (0, Instant::now());
                while start.elapsed() < LEAST {
                    let w = &weights[calls % copies];
                    gemm(&pool, w, black_box(&x), rows, Start::Zero, &mut y, &mut scratch);
                    black_box(&y);
                    calls += 1;
                }
                let seconds = start.elapsed().as_secs_f64() / calls as f64;
                let flops = 2.0 * (rows * n * k) as f64;
                print!("  {rows}: {:.0} GFLOP/s", flops / seconds / 1e9);
                if rows == 1 {
                    print!(" ({:.0} GB/s)", (n * k * dtype.bytes()) as f64 / seconds / 1e9);
                }
            }
            println!();
        }
    }
    Ok(())
}
