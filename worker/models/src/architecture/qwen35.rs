//! Qwen3.5, 3.6 and 3.8, dense: gated delta rule in three of four layers, gated attention with a partial rotary embedding in the others;
//! zero-centred norms.

use super::{
    ArchitectureSpec, ArithmeticSpec, Bias, Biases, Default, GgufSpec, MtpNames, Ropes, SlidingWindow,
    TensorNames,
};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Qwen3.5",
    name: "Qwen3_5ForCausalLM",
    wrapper: Some("Qwen3_5ForConditionalGeneration"),
    gguf: Some(GgufSpec {
        family: "qwen35",
        interleaved_heads: false,
        optional_attention_bias: false,
        recurrent: true,
    }),
    kv_heads_required: true,
    default_head_dim: Some(256),
    biases: Biases {
        qkv: Bias::Field("attention_bias"),
        output: Bias::Field("attention_bias"),
        ..Biases::NONE
    },
    qk_norm: true,
    sliding_window: SlidingWindow::Never,
    ropes: Ropes::One,
    rotated_part: 0.25,
    full_attention_interval: Some(4),
    fused_delta: false,
    arithmetic: ArithmeticSpec { zero_centred_norms: true, output_gate: true, ..ArithmeticSpec::LLAMA },
    defaults: &[
        ("linear_conv_kernel_dim", Default::Count(4)),
        ("linear_key_head_dim", Default::Count(128)),
        ("linear_value_head_dim", Default::Count(128)),
        ("linear_num_key_heads", Default::Count(16)),
        ("linear_num_value_heads", Default::Count(32)),
    ],
    keys: &[
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "full_attention_interval",
        "attn_output_gate",
        crate::gguf::GGUF_DELTA,
        // States are in f32.
        "mamba_ssm_dtype",
        // Layers of multi-token prediction, which draft tokens.
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ],
    tensors: &TensorNames::LLAMA,
    mtp: Some(&MtpNames::QWEN),
};
