use inflight_kernels::cuda::{
    GemmParams, HalfDtype, SwigluParams, gemm, skinny_gemm, skinny_gemm_swiglu, swiglu,
};
use proptest::prelude::*;

use crate::device::TestDevice;
use crate::tensor_cores::sum_error;
use crate::{SeededRng, half, on_harness, unit};

/// GEMM operands other than the activations.
struct GemmCase {
    half: HalfDtype,
    n: usize,
    k: usize,
    weight: Vec<u16>,
    bias: Option<Vec<f32>>,
}

impl GemmCase {
    /// Returns the bits of x[m, k] * weight^T + bias; f32 bits if `wide`.
    fn run(&self, x: &[u16], m: usize, wide: bool, stride: usize) -> Vec<u32> {
        self.run_kernel(x, m, wide, stride, false)
    }

    /// Returns the bits of [`Self::run`] by `skinny_gemm` or `gemm`.
    fn run_kernel(&self, x: &[u16], m: usize, wide: bool, stride: usize, skinny: bool) -> Vec<u32> {
        let device = TestDevice::new();
        let (x, weight) = (device.upload(x), device.upload_constant(&self.weight));
        let bias = self.bias.as_ref().map(|bias| device.upload_constant(bias));
        let out = device.alloc(m * stride * if wide { 4 } else { 2 });
        let p = GemmParams {
            x: x.address(),
            weight: weight.address(),
            bias: bias.as_ref().map_or(0, |bias| bias.address()),
            out: out.address(),
            m: m as u32,
            n: self.n as u32,
            k: self.k as u32,
            stride: stride as u32,
        };
        match skinny {
            true => unsafe { skinny_gemm(&device, self.half, wide, &p) }.unwrap(),
            false => unsafe { gemm(&device, self.half, wide, &p) }.unwrap(),
        }
        let rows =
            |bits: Vec<u32>| bits.chunks(stride).flat_map(|row| row[..self.n].to_vec()).collect::<Vec<_>>();
        match wide {
            true => rows(out.read::<u32>(m * stride)),
            false => rows(out.read::<u16>(m * stride).into_iter().map(u32::from).collect()),
        }
    }

    /// Checks that outputs of [`Self::run`] are exact to rounding.
    fn check(&self, x: &[u16], m: usize, wide: bool, got: &[u32]) -> Result<(), TestCaseError> {
        let Self { half, n, k, .. } = *self;
        for row in 0..m {
            for column in 0..n {
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
                let (mut exact, mut largest) = (0.0f64, 0.0f64);
                for i in 0..k {
                    let weight = half.widen(self.weight[column * k + i]);
                    let product = f64::from(half.widen(x[row * k + i])) * f64::from(weight);
                    exact += product;
                    largest = largest.max(exact.abs()).max(product.abs());
                }
                exact += bias;
                let bits = got[row * n + column];
                let value = if wide { f32::from_bits(bits) } else { half.widen(bits as u16) };
                let tolerance = if wide { 1e-5 } else { 1.1 * unit(half) };
                let allowed = tolerance * exact.abs().max(1.0) + sum_error(k, largest);
                prop_assert!((f64::from(value) - exact).abs() <= allowed, "{value} is not {exact}");
            }
        }
        Ok(())
    }
}

#[test]
pub(crate) fn gemm_is_correct_and_batch_invariant() {
    let rows = prop_oneof![Just(1usize), Just(16), Just(17), Just(64), Just(65), 1usize..140];
    let shape =
        (any::<u32>(), half(), rows, 1usize..150, 1usize..30, any::<bool>(), any::<bool>(), 0usize..5);
    on_harness(24, shape, |(seed, half, m, n, eights, wide, with_bias, padding)| {
        let mut rng = SeededRng::new(seed);
        let k = eights * 8;
        let case = GemmCase {
            half,
            n,
            k,
            weight: rng.halves(half, n * k, 1.0),
            bias: with_bias.then(|| rng.values(n, 2.0)),
        };
        let x = rng.halves(half, m * k, 1.0);
        let got = case.run(&x, m, wide, n + padding);
        case.check(&x, m, wide, &got)?;
        let row = rng.below(m);
        let alone = case.run(&x[row * k..(row + 1) * k], 1, wide, n);
        prop_assert_eq!(&got[row * n..(row + 1) * n], &alone[..]);
        Ok(())
    });
}

#[test]
pub(crate) fn skinny_gemm_is_correct_and_bits_depend_on_the_row_alone() {
    // Column counts around every tile size; k from less than one warp's share to two rounds of all.
    let columns = prop_oneof![Just(1usize), Just(8), Just(64), 1usize..40, 60usize..300];
    let eights = prop_oneof![3 => 1usize..70, 1 => Just(256usize), 1 => 250usize..600];
    let shape = (any::<u32>(), half(), 1usize..=8, columns, eights, any::<bool>(), any::<bool>(), 0usize..5);
    on_harness(32, shape, |(seed, half, m, n, eights, wide, with_bias, padding)| {
        let mut rng = SeededRng::new(seed);
        let k = eights * 8;
        let scale = 2.0 / (k as f32).sqrt();
        let case = GemmCase {
            half,
            n,
            k,
            weight: rng.halves(half, n * k, scale),
            bias: with_bias.then(|| rng.values(n, 2.0)),
        };
        let x = rng.halves(half, m * k, 1.0);
        let got = case.run_kernel(&x, m, wide, n + padding, true);
        case.check(&x, m, wide, &got)?;
        // The row alone, as the last of eight, and some of its columns, which fall into another tile.
        let row = rng.below(m);
        let (own, bits) = (&x[row * k..(row + 1) * k], &got[row * n..(row + 1) * n]);
        prop_assert_eq!(&case.run_kernel(own, 1, wide, n, true)[..], bits, "alone");
        let mut among = rng.halves(half, 7 * k, 1.0);
        among.extend_from_slice(own);
        prop_assert_eq!(&case.run_kernel(&among, 8, wide, n, true)[7 * n..], bits, "among eight");
        let first = rng.below(n);
        let some = 1 + rng.below((n - first).min(40));
        let part = GemmCase {
            half,
            n: some,
            k,
            weight: case.weight[first * k..(first + some) * k].to_vec(),
            bias: case.bias.as_ref().map(|bias| bias[first..first + some].to_vec()),
        };
        prop_assert_eq!(
            &part.run_kernel(own, 1, wide, some, true)[..],
            &bits[first..first + some],
            "some columns"
        );
        Ok(())
    });
}

/// Gates, ups, and the activation of both in one kernel: the bits of the product followed by SwiGLU.
#[test]
pub(crate) fn skinny_gemm_with_swiglu_has_the_bits_of_the_two_kernels() {
    let columns = prop_oneof![Just(8usize), Just(16), 1usize..40, 60usize..300];
    let eights = prop_oneof![3 => 1usize..70, 1 => 250usize..600];
    let shape = (any::<u32>(), half(), 1usize..=8, columns, eights, any::<bool>(), 0usize..5);
    on_harness(24, shape, |(seed, half, m, inner, eights, with_bias, padding)| {
        let mut rng = SeededRng::new(seed);
        // SwiGLU alone takes eight columns at a time.
        let (inner, k) = (inner.next_multiple_of(8), eights * 8);
        let scale = 2.0 / (k as f32).sqrt();
        let device = TestDevice::new();
        let x = device.upload(&rng.halves(half, m * k, 1.0));
        let weight = device.upload_constant(&rng.halves(half, 2 * inner * k, scale));
        let bias = with_bias.then(|| device.upload_constant(&rng.values(2 * inner, 2.0)));
        let stride = inner + padding;
        let (gate_up, apart) = (device.alloc(m * 2 * inner * 2), device.alloc(m * inner * 2));
        let fused = device.alloc(m * stride * 2);
        let p = GemmParams {
            x: x.address(),
            weight: weight.address(),
            bias: bias.as_ref().map_or(0, |bias| bias.address()),
            out: gate_up.address(),
            m: m as u32,
            n: 2 * inner as u32,
            k: k as u32,
            stride: 2 * inner as u32,
        };
        let activation = SwigluParams {
            gate_up: gate_up.address(),
            out: apart.address(),
            rows: m as u32,
            width: inner as u32,
        };
        unsafe {
            skinny_gemm(&device, half, false, &p).unwrap();
            swiglu(&device, half, &activation).unwrap();
            let p = GemmParams { out: fused.address(), stride: stride as u32, ..p };
            skinny_gemm_swiglu(&device, half, &p).unwrap();
        }
        let (apart, fused) = (apart.read::<u16>(m * inner), fused.read::<u16>(m * stride));
        for row in 0..m {
            let expected = &apart[row * inner..(row + 1) * inner];
            prop_assert_eq!(&fused[row * stride..row * stride + inner], expected, "row {}", row);
        }
        Ok(())
    });
}

#[test]
fn skinny_gemm_rejects_nine_rows_and_unaligned_matrices() {
    if !TestDevice::available() {
        return;
    }
    let device = TestDevice::new();
    let memory = device.upload(&[0u16; 1024]);
    let at = memory.address();
    let right = GemmParams { x: at, weight: at, bias: 0, out: at, m: 8, n: 8, k: 8, stride: 8 };
    for wrong in [
        GemmParams { m: 9, ..right },
        GemmParams { k: 12, ..right },
        GemmParams { k: 0, ..right },
        GemmParams { x: at + 8, ..right },
        GemmParams { weight: at + 2, ..right },
    ] {
        let refused = unsafe { skinny_gemm(&device, HalfDtype::Bf16, false, &wrong) }.unwrap_err();
        assert!(refused.to_string().contains("skinny"), "{refused}");
    }
}
