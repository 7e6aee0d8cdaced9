//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

use super::{ArchitectureSpec, Bias, Biases, GgufSpec, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Qwen2",
    name: "Qwen2ForCausalLM",
    gguf: Some(GgufSpec { family: "qwen2", interleaved_heads: false, optional_attention_bias: false }),
    kv_heads_required: true,
    default_head_dim: None,
    biases: Biases { qkv: Bias::Always, ..Biases::NONE },
    qk_norm: false,
    sliding_window: SlidingWindow::Optional,
    tensors: &TensorNames::LLAMA,
};
