//! The products that a model consists of, before anything runs.

use super::division::Division;
use super::gpu::{Bias, Matmul, Memory};
use super::sizing::Shapes;
use super::weights::Weights;

/// A product, with the weights of every layer that has one of its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Product {
    pub(super) n: u32,
    pub(super) k: u32,
    /// Numbers from one row of the output to the next.
    pub(super) stride: u32,
    /// The output is f32: it is the head, which sampled rows alone go through.
    pub(super) wide: bool,
    /// Of each layer; at least one.
    pub(super) operands: Vec<Operand>,
}

/// What differs from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Operand {
    pub(super) weight: u64,
    pub(super) bias: Option<Bias>,
}

impl Product {
    /// A layer's product of `m` rows at `x`, to `y`; layers begin again behind the last.
    pub(super) fn at(&self, layer: usize, m: u32, x: u64, y: u64) -> Matmul {
        let Self { n, k, stride, wide, .. } = *self;
        let Operand { weight, bias } = self.operands[layer % self.operands.len()];
        Matmul { x, weight, bias, y, m, n, k, stride, wide }
    }

    /// Bytes of inputs and outputs of so many rows.
    pub(super) fn bytes(&self, rows: u64) -> (u64, u64) {
        let wide = if self.wide { 4 } else { 2 };
        (rows * u64::from(self.k) * 2, rows * u64::from(self.stride) * wide)
    }
}

/// Every product of a rank's part of a model with a vocabulary of so many tokens. The forward pass makes these, and no others.
pub(super) fn catalog<M: Memory>(
    weights: &Weights<M>,
    shapes: &Shapes,
    division: &Division,
    vocabulary: usize,
) -> Vec<Product> {
    let queries = shapes.heads * shapes.head_dim;
    let of_layers = [
        (shapes.qkv(), shapes.hidden),
        (shapes.hidden, queries),
        (2 * shapes.inner, shapes.hidden),
        (shapes.hidden, shapes.inner),
    ];
    let mut products: Vec<Product> = Vec::new();
    for (which, (n, k)) in of_layers.into_iter().enumerate() {
        let operands = weights.layers.iter().map(|layer| {
            let linear = layer.products()[which];
            Operand { weight: linear.matrix.address(), bias: linear.bias() }
        });
        products.push(Product {
            n: n as u32,
            k: k as u32,
            stride: n as u32,
            wide: false,
            operands: operands.collect(),
        });
    }
    let (n, stride) = match division.group() {
        Some(shards) => {
            (division.shard().vocabulary.len() as u64, shapes.gathered / shards.len().max(1) as u64)
        }
        None => (vocabulary as u64, shapes.logits),
    };
    products.push(Product {
        n: n as u32,
        k: shapes.hidden as u32,
        stride: stride as u32,
        wide: true,
        operands: vec![Operand { weight: weights.head(), bias: None }],
    });
    products
}
