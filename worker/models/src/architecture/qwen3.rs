//! Qwen3: Llama with normalized queries and keys.

use super::{ArchitectureSpec, ArithmeticSpec, Bias, Biases, GgufSpec, Ropes, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Qwen3",
    name: "Qwen3ForCausalLM",
    wrapper: None,
    gguf: Some(GgufSpec {
        family: "qwen3",
        interleaved_heads: false,
        optional_attention_bias: false,
        recurrent: false,
    }),
    kv_heads_required: true,
    // Not derived from the hidden size.
    default_head_dim: Some(128),
    biases: Biases {
        qkv: Bias::Field("attention_bias"),
        output: Bias::Field("attention_bias"),
        ..Biases::NONE
    },
    qk_norm: true,
    sliding_window: SlidingWindow::Optional,
    ropes: Ropes::One,
    rotated_part: 1.0,
    full_attention_interval: None,
    fused_delta: false,
    arithmetic: ArithmeticSpec::LLAMA,
    defaults: &[],
    keys: &[],
    tensors: &TensorNames::LLAMA,
    mtp: None,
};
