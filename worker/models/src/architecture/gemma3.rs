//! Gemma 3: windows beside full attention, each with a rotary embedding of its own; norms before and behind each block, with
//! zero-centred weights; GELU; scaled embeddings.

use inflight_kernels::cpu::Activation;

use super::{
    ArchitectureSpec, ArithmeticSpec, Bias, Biases, Default, Ropes, ScoreSize, SlidingWindow, TensorNames,
};
use crate::NormPlaces;

pub(super) static SPEC: ArchitectureSpec = ArchitectureSpec {
    id: "Gemma3",
    name: "Gemma3ForCausalLM",
    wrapper: Some("Gemma3ForConditionalGeneration"),
    gguf: None,
    kv_heads_required: false,
    default_head_dim: Some(256),
    biases: Biases {
        qkv: Bias::Field("attention_bias"),
        output: Bias::Field("attention_bias"),
        ..Biases::NONE
    },
    qk_norm: true,
    sliding_window: SlidingWindow::Pattern,
    ropes: Ropes::ByWindow { full: 1_000_000.0, window: 10_000.0 },
    rotated_part: 1.0,
    full_attention_interval: None,
    fused_delta: false,
    arithmetic: ArithmeticSpec {
        norms: NormPlaces::Around,
        zero_centred_norms: true,
        activation: Activation::GeluTanh,
        score_size: ScoreSize::Field("query_pre_attn_scalar", 256.0),
        scaled_embedding: true,
        output_gate: false,
    },
    defaults: &[
        ("vocab_size", Default::Count(262_208)),
        ("hidden_size", Default::Count(2304)),
        ("intermediate_size", Default::Count(9216)),
        ("num_hidden_layers", Default::Count(26)),
        ("num_attention_heads", Default::Count(8)),
        ("num_key_value_heads", Default::Count(4)),
        ("max_position_embeddings", Default::Count(131_072)),
        ("sliding_window", Default::Count(4096)),
        ("sliding_window_pattern", Default::Count(6)),
        ("tie_word_embeddings", Default::Flag(true)),
    ],
    keys: &[
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "hidden_activation",
    ],
    tensors: &TensorNames {
        mlp_norm: "pre_feedforward_layernorm",
        post_norms: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
        ..TensorNames::LLAMA
    },
    mtp: None,
};
