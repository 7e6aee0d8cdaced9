//! Llama 1, 2 and 3.x.

use super::{ArchitectureSpec, ArithmeticSpec, Bias, Biases, GgufSpec, Ropes, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Llama",
    name: "LlamaForCausalLM",
    wrapper: None,
    // llama.cpp permutes the rows of query and key heads of this architecture only.
    gguf: Some(GgufSpec {
        family: "llama",
        interleaved_heads: true,
        optional_attention_bias: true,
        recurrent: false,
    }),
    kv_heads_required: false,
    default_head_dim: None,
    biases: Biases {
        qkv: Bias::Field("attention_bias"),
        output: Bias::Field("attention_bias"),
        mlp: Bias::Field("mlp_bias"),
    },
    qk_norm: false,
    sliding_window: SlidingWindow::Never,
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
