//! Qwen3-Next, dense: the layers of Qwen3.5 with fused projections of the gated delta rule. Published models have experts, which are not
//! served.

use super::{ArchitectureSpec, ArithmeticSpec, Bias, Biases, Default, Ropes, SlidingWindow, TensorNames};

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Qwen3Next",
    name: "Qwen3NextForCausalLM",
    wrapper: None,
    gguf: None,
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
    fused_delta: true,
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
        // States are in f32.
        "mamba_ssm_dtype",
        // Of the layers with experts, if there were some.
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts_per_tok",
        "output_router_logits",
        "router_aux_loss_coef",
        "shared_expert_intermediate_size",
    ],
    tensors: &TensorNames::LLAMA,
    // Its tensors are those of experts.
    mtp: None,
};
