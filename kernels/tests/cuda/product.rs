use inflight_kernels::cuda::{GemmParams, Half, gemm, skinny_gemm};
use proptest::prelude::*;

use crate::machine::Machine;
use crate::{Dice, half, on_harness, unit};

struct Product {
    half: Half,
    n: usize,
    k: usize,
    weight: Vec<u16>,
    bias: Option<Vec<f32>>,
}

impl Product {
    /// The bits of x[m, k] * weight^T + bias; of f32 if `wide`.
    fn run(&self, x: &[u16], m: usize, wide: bool, stride: usize) -> Vec<u32> {
        self.run_by(x, m, wide, stride, false)
    }

    /// The same by one of the two kernels.
    fn run_by(&self, x: &[u16], m: usize, wide: bool, stride: usize, skinny: bool) -> Vec<u32> {
        let device = Machine::new();
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

    /// Whether outputs, as [`Self::run`] has them, are exact to rounding.
    fn check(&self, x: &[u16], m: usize, wide: bool, got: &[u32]) -> Result<(), TestCaseError> {
        let Self { half, n, k, .. } = *self;
        for row in 0..m {
            for column in 0..n {
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
                let exact = bias
                    + (0..k)
                        .map(|i| {
                            let weight = half.widen(self.weight[column * k + i]);
                            f64::from(half.widen(x[row * k + i])) * f64::from(weight)
                        })
                        .sum::<f64>();
                let bits = got[row * n + column];
                let value = if wide { f32::from_bits(bits) } else { half.widen(bits as u16) };
                let tolerance = if wide { 1e-5 } else { 1.1 * unit(half) };
                prop_assert!((f64::from(value) - exact).abs() <= tolerance * exact.abs().max(1.0));
            }
        }
        Ok(())
    }
}

#[test]
pub(crate) fn products_are_right_and_a_row_has_the_same_bits_alone_and_among_many() {
    let rows = prop_oneof![Just(1usize), Just(16), Just(17), Just(64), Just(65), 1usize..140];
    let shape =
        (any::<u32>(), half(), rows, 1usize..150, 1usize..30, any::<bool>(), any::<bool>(), 0usize..5);
    on_harness(24, shape, |(seed, half, m, n, eights, wide, with_bias, padding)| {
        let mut dice = Dice::new(seed);
        let k = eights * 8;
        let product = Product {
            half,
            n,
            k,
            weight: dice.halves(half, n * k, 1.0),
            bias: with_bias.then(|| dice.numbers(n, 2.0)),
        };
        let x = dice.halves(half, m * k, 1.0);
        let got = product.run(&x, m, wide, n + padding);
        product.check(&x, m, wide, &got)?;
        let row = dice.below(m);
        let alone = product.run(&x[row * k..(row + 1) * k], 1, wide, n);
        prop_assert_eq!(&got[row * n..(row + 1) * n], &alone[..]);
        Ok(())
    });
}

#[test]
pub(crate) fn products_of_few_rows_are_right_and_their_bits_depend_on_the_row_alone() {
    // Columns of each tile there is, and k of less than a unit of a warp up to more than two rounds of them all.
    let columns = prop_oneof![Just(1usize), Just(8), Just(64), 1usize..40, 60usize..300];
    let eights = prop_oneof![3 => 1usize..70, 1 => Just(256usize), 1 => 250usize..600];
    let shape = (any::<u32>(), half(), 1usize..=8, columns, eights, any::<bool>(), any::<bool>(), 0usize..5);
    on_harness(32, shape, |(seed, half, m, n, eights, wide, with_bias, padding)| {
        let mut dice = Dice::new(seed);
        let k = eights * 8;
        let scale = 2.0 / (k as f32).sqrt();
        let product = Product {
            half,
            n,
            k,
            weight: dice.halves(half, n * k, scale),
            bias: with_bias.then(|| dice.numbers(n, 2.0)),
        };
        let x = dice.halves(half, m * k, 1.0);
        let got = product.run_by(&x, m, wide, n + padding, true);
        product.check(&x, m, wide, &got)?;
        // The same row alone, as the last of eight, and some of its columns, whose tile is another one.
        let row = dice.below(m);
        let (own, bits) = (&x[row * k..(row + 1) * k], &got[row * n..(row + 1) * n]);
        prop_assert_eq!(&product.run_by(own, 1, wide, n, true)[..], bits, "alone");
        let mut among = dice.halves(half, 7 * k, 1.0);
        among.extend_from_slice(own);
        prop_assert_eq!(&product.run_by(&among, 8, wide, n, true)[7 * n..], bits, "among eight");
        let first = dice.below(n);
        let some = 1 + dice.below((n - first).min(40));
        let part = Product {
            half,
            n: some,
            k,
            weight: product.weight[first * k..(first + some) * k].to_vec(),
            bias: product.bias.as_ref().map(|bias| bias[first..first + some].to_vec()),
        };
        prop_assert_eq!(
            &part.run_by(own, 1, wide, some, true)[..],
            &bits[first..first + some],
            "some columns"
        );
        Ok(())
    });
}

#[test]
fn a_skinny_product_of_nine_rows_or_of_matrices_out_of_line_is_refused() {
    if !Machine::available() {
        return;
    }
    let device = Machine::new();
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
        let refused = unsafe { skinny_gemm(&device, Half::Bf16, false, &wrong) }.unwrap_err();
        assert!(refused.to_string().contains("skinny"), "{refused}");
    }
}
