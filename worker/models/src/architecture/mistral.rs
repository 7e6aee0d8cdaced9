//! Mistral: Llama with a sliding window.

use super::{ArchitectureSpec, Biases, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Mistral",
    name: "MistralForCausalLM",
    // GGUF files of Mistral are of the family `llama`.
    gguf: None,
    kv_heads_required: true,
    default_head_dim: None,
    biases: Biases::NONE,
    qk_norm: false,
    sliding_window: SlidingWindow::Always,
    tensors: &TensorNames::LLAMA,
};
