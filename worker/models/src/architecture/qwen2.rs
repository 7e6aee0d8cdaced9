//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

use super::{ArchitectureSpec, ArithmeticSpec, Bias, Biases, GgufSpec, Ropes, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Qwen2",
    name: "Qwen2ForCausalLM",
    wrapper: None,
    gguf: Some(GgufSpec {
        family: "qwen2",
        interleaved_heads: false,
        optional_attention_bias: false,
        recurrent: false,
    }),
    kv_heads_required: true,
    default_head_dim: None,
    biases: Biases { qkv: Bias::Always, ..Biases::NONE },
    qk_norm: false,
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
