use inflight_kernels::cuda::{GemmParams, Half, gemm};
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
        let device = Machine::new();
        let (x, weight) = (device.upload(x), device.upload(&self.weight));
        let bias = self.bias.as_ref().map(|bias| device.upload(bias));
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
        unsafe { gemm(&device, self.half, wide, &p) }.unwrap();
        let rows =
            |bits: Vec<u32>| bits.chunks(stride).flat_map(|row| row[..self.n].to_vec()).collect::<Vec<_>>();
        match wide {
            true => rows(out.read::<u32>(m * stride)),
            false => rows(out.read::<u16>(m * stride).into_iter().map(u32::from).collect()),
        }
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
        for row in 0..m {
            for column in 0..n {
                let bias = product.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
                let exact = bias
                    + (0..k)
                        .map(|i| {
                            let weight = half.widen(product.weight[column * k + i]);
                            f64::from(half.widen(x[row * k + i])) * f64::from(weight)
                        })
                        .sum::<f64>();
                let bits = got[row * n + column];
                let value = if wide { f32::from_bits(bits) } else { half.widen(bits as u16) };
                let tolerance = if wide { 1e-5 } else { 1.1 * unit(half) };
                prop_assert!((f64::from(value) - exact).abs() <= tolerance * exact.abs().max(1.0));
            }
        }
        let row = dice.below(m);
        let alone = product.run(&x[row * k..(row + 1) * k], 1, wide, n);
        prop_assert_eq!(&got[row * n..(row + 1) * n], &alone[..]);
        Ok(())
    });
}
