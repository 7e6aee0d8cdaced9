//! Weights of a decoder layer in device memory.

use super::gpu::{BiasAddresses, GpuMemory};
use super::shapes::output_stride;

/// What a linear layer computes in the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinearRole {
    /// Queries, keys and values.
    Qkv,
    /// Gates of the outputs of attention.
    Gates,
    /// Output projection of attention.
    Output,
    /// What a recurrent layer computes of its input: inputs of the convolution, gates, inputs of betas and of decays.
    DeltaInputs,
    /// Output projection of a recurrent layer.
    DeltaOutput,
    /// Gates and ups of the MLP.
    GateUp,
    /// Down projection of the MLP.
    Down,
}

/// GEMM operand [n, k] in device memory, with its bias in both types.
pub(super) struct DeviceLinear<M> {
    pub(super) matrix: M,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) f32_bias: Option<M>,
    pub(super) half_bias: Option<M>,
}

impl<M: GpuMemory> DeviceLinear<M> {
    /// Elements between the starts of two rows of the output.
    pub(super) fn stride(&self) -> u32 {
        output_stride(self.n.into()) as u32
    }

    pub(super) fn bias(&self) -> Option<BiasAddresses> {
        let (single, half) = (self.f32_bias.as_ref()?, self.half_bias.as_ref()?);
        Some(BiasAddresses { f32: single.address(), half: half.address() })
    }
}

/// Weights of attention.
pub(super) struct DeviceAttention<M> {
    pub(super) qkv: DeviceLinear<M>,
    /// Norms of queries and keys.
    pub(super) qk_norm: Option<(M, M)>,
    /// Gates of the outputs, if the model has them.
    pub(super) gates: Option<DeviceLinear<M>>,
    pub(super) output: DeviceLinear<M>,
}

/// Weights of a recurrent layer; vectors in f32.
pub(super) struct DeviceDelta<M> {
    pub(super) inputs: DeviceLinear<M>,
    /// [taps, channels].
    pub(super) convolution: M,
    /// Rates of the decays, and what is added to their inputs; [value_heads].
    pub(super) decay: M,
    pub(super) decay_bias: M,
    /// [value_dim].
    pub(super) norm: M,
    pub(super) output: DeviceLinear<M>,
}

/// Weights of what mixes the tokens of a sequence.
pub(super) enum DeviceMixer<M> {
    Attention(DeviceAttention<M>),
    Delta(DeviceDelta<M>),
}

/// Decoder layer in device memory.
pub(super) struct DeviceLayer<M> {
    pub(super) mixer_norm: M,
    pub(super) mixer: DeviceMixer<M>,
    pub(super) post_norms: Option<(M, M)>,
    pub(super) mlp_norm: M,
    pub(super) gate_up: DeviceLinear<M>,
    pub(super) down: DeviceLinear<M>,
}

impl<M> DeviceLayer<M> {
    /// Returns the linear layers in the order of the forward pass.
    pub(super) fn linears(&self) -> Vec<(LinearRole, &DeviceLinear<M>)> {
        let mut linears = match &self.mixer {
            DeviceMixer::Attention(attention) => {
                let gates = attention.gates.iter().map(|gates| (LinearRole::Gates, gates));
                let qkv = std::iter::once((LinearRole::Qkv, &attention.qkv));
                qkv.chain(gates).chain([(LinearRole::Output, &attention.output)]).collect()
            }
            DeviceMixer::Delta(delta) => {
                vec![(LinearRole::DeltaInputs, &delta.inputs), (LinearRole::DeltaOutput, &delta.output)]
            }
        };
        linears.extend([(LinearRole::GateUp, &self.gate_up), (LinearRole::Down, &self.down)]);
        linears
    }
}
