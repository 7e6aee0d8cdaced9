//! Kernels that begin while those before them end, on a GPU: a chain of them must have the bits of one that goes step by step.

use inflight_kernels::cuda::{GemmParams, Half, NormParams, SwigluParams, gemm, norm, skinny_gemm, swiglu};

use crate::Dice;
use crate::machine::Machine;
use crate::timing::Queue;

/// Layers of a feed-forward part: each reads what the one before has just written.
const LAYERS: usize = 24;
const WIDTH: usize = 1024;
const INNER: usize = 3072;

#[test]
fn a_chain_of_kernels_that_overlap_has_the_bits_of_one_that_does_not() {
    let machine = Machine::available().then(Machine::new);
    let Some(machine @ Machine::Gpu(gpu)) = &machine else { return };
    gpu.bind();
    let half = Half::Bf16;
    let mut dice = Dice::new(17);
    let residual = dice.numbers(8 * WIDTH, 1.0);
    let norm_weight = machine.upload(&dice.numbers(WIDTH, 2.0));
    // One pair of matrices for all: what is to be found is order, and a second pair would bring nothing.
    let up = machine.upload(&dice.halves(half, 2 * INNER * WIDTH, 0.05));
    let down = machine.upload(&dice.halves(half, WIDTH * INNER, 0.05));
    for skinny in [true, false] {
        for m in [1u32, 3, 8] {
            let run = |overlap: bool| {
                let queue = Queue::new(gpu, overlap);
                let hidden = machine.upload(&residual);
                let [normed, delta] = [(); 2].map(|()| machine.upload(&vec![0u16; 8 * WIDTH]));
                let (gate_up, gated) = (machine.alloc(8 * INNER * 4), machine.alloc(8 * INNER * 2));
                let product = |x: u64, weight: u64, out: u64, n: usize, k: usize| {
                    let (n, k) = (n as u32, k as u32);
                    let p = GemmParams { x, weight, bias: 0, out, m, n, k, stride: n };
                    match skinny {
                        true => unsafe { skinny_gemm(&queue, half, false, &p) }.unwrap(),
                        false => unsafe { gemm(&queue, half, false, &p) }.unwrap(),
                    }
                };
                // Uploads went through the null stream, which this one does not wait for.
                cudarc::driver::result::ctx::synchronize().unwrap();
                for _ in 0..LAYERS {
                    let p = NormParams {
                        residual: hidden.address(),
                        delta: delta.address(),
                        weight: norm_weight.address(),
                        out: normed.address(),
                        pick: 0,
                        rows: m,
                        width: WIDTH as u32,
                        eps: 1e-6,
                        unused: 0,
                    };
                    unsafe { norm(&queue, half, &p) }.unwrap();
                    product(normed.address(), up.address(), gate_up.address(), 2 * INNER, WIDTH);
                    let p = SwigluParams {
                        gate_up: gate_up.address(),
                        out: gated.address(),
                        rows: m,
                        width: INNER as u32,
                    };
                    unsafe { swiglu(&queue, half, &p) }.unwrap();
                    product(gated.address(), down.address(), delta.address(), WIDTH, INNER);
                }
                cudarc::driver::result::ctx::synchronize().unwrap();
                (hidden.read::<u32>(8 * WIDTH), delta.read::<u16>(8 * WIDTH))
            };
            let serial = run(false);
            assert!(serial.0.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            for round in 0..20 {
                assert_eq!(run(true), serial, "skinny {skinny}, {m} rows, round {round}");
            }
        }
    }
}
