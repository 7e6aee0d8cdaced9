//! GEMM shapes and weight addresses of a model, for planning and autotuning before the first step.

use super::gpu::{BiasAddresses, GpuMemory, Matmul};
use super::shapes::ModelShapes;
use super::shard_plan::ShardPlan;
use super::weights::DeviceWeights;

/// GEMM shape with the weights of every layer that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelGemm {
    pub(super) n: u32,
    pub(super) k: u32,
    /// Elements between the starts of two output rows.
    pub(super) stride: u32,
    /// Whether the output is f32; true for the LM head only, which computes sampled rows alone.
    pub(super) f32_out: bool,
    /// Weights and bias by layer; at least one entry.
    pub(super) operands: Vec<GemmOperand>,
}

/// Device addresses of one layer's weight and bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GemmOperand {
    pub(super) weight: u64,
    pub(super) bias: Option<BiasAddresses>,
}

impl ModelGemm {
    /// Returns one layer's GEMM of `m` rows from `x` to `y`; the layer index wraps around.
    pub(super) fn of_layer(&self, layer: usize, m: u32, x: u64, y: u64) -> Matmul {
        let Self { n, k, stride, f32_out, .. } = *self;
        let GemmOperand { weight, bias } = self.operands[layer % self.operands.len()];
        Matmul { x, weight, bias, y, m, n, k, stride, f32_out }
    }

    /// Returns the bytes of input and of output for this number of rows.
    pub(super) fn bytes(&self, rows: u64) -> (u64, u64) {
        let out_bytes = if self.f32_out { 4 } else { 2 };
        (rows * u64::from(self.k) * 2, rows * u64::from(self.stride) * out_bytes)
    }
}

/// Lists all GEMMs of a rank's shard: the forward pass runs these and no others. `vocabulary` is the
/// unsharded vocabulary size.
pub(super) fn model_gemms<M: GpuMemory>(
    weights: &DeviceWeights<M>,
    shapes: &ModelShapes,
    shard_plan: &ShardPlan,
    vocabulary: usize,
) -> Vec<ModelGemm> {
    let queries = shapes.heads * shapes.head_dim;
    let layer_shapes = [
        (shapes.qkv(), shapes.hidden),
        (shapes.hidden, queries),
        (2 * shapes.inner, shapes.hidden),
        (shapes.hidden, shapes.inner),
    ];
    let mut gemms: Vec<ModelGemm> = Vec::new();
    for (index, (n, k)) in layer_shapes.into_iter().enumerate() {
        let operands = weights.layers.iter().map(|layer| {
            let linear = layer.linears()[index];
            GemmOperand { weight: linear.matrix.address(), bias: linear.bias() }
        });
        gemms.push(ModelGemm {
            n: n as u32,
            k: k as u32,
            stride: n as u32,
            f32_out: false,
            operands: operands.collect(),
        });
    }
    let (n, stride) = match shard_plan.collective_shards() {
        Some(shards) => {
            (shard_plan.shard().vocabulary.len() as u64, shapes.gathered / shards.len().max(1) as u64)
        }
        None => (vocabulary as u64, shapes.logits),
    };
    gemms.push(ModelGemm {
        n: n as u32,
        k: shapes.hidden as u32,
        stride: stride as u32,
        f32_out: true,
        operands: vec![GemmOperand { weight: weights.head(), bias: None }],
    });
    gemms
}
