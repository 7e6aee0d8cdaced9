//! GEMM shapes and weight addresses of a model, for planning and autotuning before the first step.

use super::device_layer::{DeviceLayer, LinearRole};
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
    let mut gemms: Vec<(LinearRole, ModelGemm)> = Vec::new();
    for (role, linear) in weights.layers.iter().flat_map(DeviceLayer::linears) {
        let operand = GemmOperand { weight: linear.matrix.address(), bias: linear.bias() };
        match gemms.iter_mut().find(|(known, _)| *known == role) {
            Some((_, gemm)) => gemm.operands.push(operand),
            None => {
                let (n, k, stride) = (linear.n, linear.k, linear.stride());
                gemms.push((role, ModelGemm { n, k, stride, f32_out: false, operands: vec![operand] }));
            }
        }
    }
    let (n, stride) = match shard_plan.collective_shards() {
        Some(shards) => {
            (shard_plan.shard().vocabulary.len() as u64, shapes.gathered / shards.len().max(1) as u64)
        }
        None => (vocabulary as u64, shapes.logits),
    };
    let head = ModelGemm {
        n: n as u32,
        k: shapes.hidden as u32,
        stride: stride as u32,
        f32_out: true,
        operands: vec![GemmOperand { weight: weights.head(), bias: None }],
    };
    gemms.into_iter().map(|(_, gemm)| gemm).chain([head]).collect()
}
