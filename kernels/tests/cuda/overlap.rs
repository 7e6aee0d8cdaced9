//! Programmatic dependent launch on a GPU: a chain of overlapping kernels has the bits of a serialised one.

use inflight_kernels::cuda::{
    GemmParams, HalfDtype, NormParams, SwigluParams, gemm, norm, skinny_gemm, swiglu,
};

use crate::SeededRng;
use crate::device::TestDevice;
use crate::timing::StreamDevice;

/// MLP layers of the chain; each reads what the preceding one wrote.
const LAYERS: usize = 24;
const WIDTH: usize = 1024;
const INNER: usize = 3072;

#[test]
fn a_chain_of_overlapping_kernels_has_the_bits_of_a_serial_one() {
    let device = TestDevice::available().then(TestDevice::new);
    let Some(device @ TestDevice::Gpu(gpu)) = &device else { return };
    gpu.bind();
    let half = HalfDtype::Bf16;
    let mut rng = SeededRng::new(17);
    let residual = rng.values(8 * WIDTH, 1.0);
    let norm_weight = device.upload(&rng.values(WIDTH, 2.0));
    // The layers share one pair of matrices, which suffices to expose wrong ordering.
    let up = device.upload(&rng.halves(half, 2 * INNER * WIDTH, 0.05));
    let down = device.upload(&rng.halves(half, WIDTH * INNER, 0.05));
    for skinny in [true, false] {
        for m in [1u32, 3, 8] {
            let run = |overlap: bool| {
                let stream = StreamDevice::new(gpu, overlap);
                let hidden = device.upload(&residual);
                let [normed, delta] = [(); 2].map(|()| device.upload(&vec![0u16; 8 * WIDTH]));
                let (gate_up, gated) = (device.alloc(8 * INNER * 4), device.alloc(8 * INNER * 2));
                let run_gemm = |x: u64, weight: u64, out: u64, n: usize, k: usize| {
                    let (n, k) = (n as u32, k as u32);
                    let p = GemmParams { x, weight, bias: 0, out, m, n, k, stride: n };
                    match skinny {
                        true => unsafe { skinny_gemm(&stream, half, false, &p) }.unwrap(),
                        false => unsafe { gemm(&stream, half, false, &p) }.unwrap(),
                    }
                };
                // Uploads use the null stream, with which a non-blocking stream does not synchronise.
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
                    unsafe { norm(&stream, half, &p) }.unwrap();
                    run_gemm(normed.address(), up.address(), gate_up.address(), 2 * INNER, WIDTH);
                    let p = SwigluParams {
                        gate_up: gate_up.address(),
                        out: gated.address(),
                        rows: m,
                        width: INNER as u32,
                    };
                    unsafe { swiglu(&stream, half, &p) }.unwrap();
                    run_gemm(gated.address(), down.address(), delta.address(), WIDTH, INNER);
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
