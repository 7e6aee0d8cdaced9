//! Mistral: Llama with a sliding window.

use super::{ArchitectureSpec, ArithmeticSpec, Biases, Ropes, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Mistral",
    name: "MistralForCausalLM",
    wrapper: None,
    // GGUF files of Mistral are of the family `llama`.
    gguf: None,
    kv_heads_required: true,
    default_head_dim: None,
    biases: Biases::NONE,
    qk_norm: false,
    sliding_window: SlidingWindow::Always,
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
