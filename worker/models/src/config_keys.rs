//! Keys of config.json that change the model's arithmetic in a way that no runtime computes. A model that sets one
//! is refused by name, since without it its output would be wrong.
//!
//! [`UNSUPPORTED`] lists the keys of published families. A key in no list is refused, too, if its name
//! contains one of [`ARITHMETIC_WORDS`] and its value is not that of a switched-off feature.

use serde_json::Value;

use super::Error;
use super::fields::Fields;

/// Values at which a feature changes nothing.
enum Neutral {
    /// `false`, 0, or an empty text, list or object.
    Off,
    /// `true`.
    On,
    /// 1, or a list of nothing else.
    One,
    /// The usual scale of attention, 1/√`head_dim`.
    AttentionScale,
    /// The size of a head, whose reciprocal square root is the scale of attention.
    HeadSize,
    /// One of these texts.
    Text(&'static [&'static str]),
}

/// Key of config.json with a feature that no runtime computes.
struct UnsupportedKey {
    key: &'static str,
    feature: &'static str,
    neutral: Neutral,
}

const fn key(key: &'static str, neutral: Neutral, feature: &'static str) -> UnsupportedKey {
    UnsupportedKey { key, feature, neutral }
}

/// Keys of published families.
static UNSUPPORTED: &[UnsupportedKey] = &[
    // Logits and embeddings.
    key("final_logit_softcapping", Neutral::Off, "a soft cap of logits"),
    key("logits_soft_cap", Neutral::Off, "a soft cap of logits"),
    key("output_multiplier_scale", Neutral::One, "scaled logits"),
    key("logits_scaling", Neutral::One, "scaled logits"),
    key("logit_scale", Neutral::One, "scaled logits"),
    key("lm_head_multiplier", Neutral::One, "scaled logits"),
    key("dim_model_base", Neutral::Off, "scaled logits"),
    key("embedding_multiplier", Neutral::One, "scaled embeddings"),
    key("embedding_multiplier_scale", Neutral::One, "scaled embeddings"),
    key("scale_emb", Neutral::One, "scaled embeddings"),
    key("emb_scale_by_sqrt_dim", Neutral::Off, "scaled embeddings"),
    key("normalize_embedding", Neutral::Off, "normalized embeddings"),
    key("hidden_size_per_layer_input", Neutral::Off, "embeddings per layer"),
    key("word_embed_proj_dim", Neutral::Off, "projected embeddings"),
    // Residuals and norms.
    key("residual_multiplier", Neutral::One, "scaled residuals"),
    key("scale_depth", Neutral::Off, "scaled residuals"),
    key("use_parallel_residual", Neutral::Off, "parallel attention and MLP"),
    key("parallel_attn", Neutral::Off, "parallel attention and MLP"),
    key("use_post_norm", Neutral::Off, "norms behind the blocks"),
    key("post_norm", Neutral::Off, "norms behind the blocks"),
    key("use_qk_norm", Neutral::Off, "QK norms"),
    key("qk_norm", Neutral::Off, "QK norms"),
    key("qk_layernorm", Neutral::Off, "QK norms"),
    // Attention.
    key("attn_logit_softcapping", Neutral::Off, "a soft cap of attention"),
    key("attention_logit_cap", Neutral::Off, "a soft cap of attention"),
    key("attention_multiplier", Neutral::AttentionScale, "a scale of attention of its own"),
    key("attention_scale", Neutral::AttentionScale, "a scale of attention of its own"),
    key("attn_scale", Neutral::AttentionScale, "a scale of attention of its own"),
    key("softmax_scale", Neutral::AttentionScale, "a scale of attention of its own"),
    key("query_pre_attn_scalar", Neutral::HeadSize, "a scale of attention of its own"),
    key("attn_temperature_tuning", Neutral::Off, "a scale of attention by position"),
    key("llama_4_scaling_beta", Neutral::Off, "a scale of attention by position"),
    key("attention_chunk_size", Neutral::Off, "attention in chunks"),
    key("dual_chunk_attention_config", Neutral::Off, "attention in chunks"),
    key("attention_sinks", Neutral::Off, "attention sinks"),
    key("use_attention_sinks", Neutral::Off, "attention sinks"),
    key("is_causal", Neutral::On, "attention to later tokens"),
    key("use_bidirectional_attention", Neutral::Off, "attention to later tokens"),
    key("clip_qkv", Neutral::Off, "clipped queries, keys and values"),
    key("num_kv_shared_layers", Neutral::Off, "keys and values that layers share"),
    key("cla_share_factor", Neutral::One, "keys and values that layers share"),
    key("attention_k_eq_v", Neutral::Off, "values that are keys"),
    key("kv_lora_rank", Neutral::Off, "latent keys and values (MLA)"),
    key("q_lora_rank", Neutral::Off, "latent queries (MLA)"),
    key("qk_rope_head_dim", Neutral::Off, "latent keys and values (MLA)"),
    key("index_topk", Neutral::Off, "sparse attention by an indexer"),
    key("add_cross_attention", Neutral::Off, "cross attention"),
    key("is_encoder_decoder", Neutral::Off, "an encoder"),
    key("attn_output_gate", Neutral::Off, "gated attention"),
    // Positions.
    key("no_rope_layers", Neutral::One, "layers without rotary embedding"),
    key("no_rope_layer_interval", Neutral::Off, "layers without rotary embedding"),
    key("nope_layer_interval", Neutral::Off, "layers without rotary embedding"),
    key("rotary_pct", Neutral::One, "a partial rotary embedding"),
    key("rope_pct", Neutral::One, "a partial rotary embedding"),
    key("rotary_dim", Neutral::HeadSize, "a partial rotary embedding"),
    key("rope_dim", Neutral::HeadSize, "a partial rotary embedding"),
    key("rope_interleave", Neutral::Off, "an interleaved rotary embedding"),
    key("rope_interleaved", Neutral::Off, "an interleaved rotary embedding"),
    key("rope_local_base_freq", Neutral::Off, "rotary embeddings by layer type"),
    key("alibi", Neutral::Off, "ALiBi"),
    key("position_embedding_type", Neutral::Text(&["rope", "rotary", "rotary_embedding"]), "other positions"),
    // Layers of other kinds.
    key("num_experts", Neutral::Off, "a mixture of experts"),
    key("num_local_experts", Neutral::Off, "a mixture of experts"),
    key("n_routed_experts", Neutral::Off, "a mixture of experts"),
    key("moe_num_experts", Neutral::Off, "a mixture of experts"),
    key("linear_num_value_heads", Neutral::Off, "recurrent layers"),
    key("full_attention_interval", Neutral::One, "recurrent layers"),
    key("layers_block_type", Neutral::Off, "layers of several kinds"),
    key("block_types", Neutral::Off, "layers of several kinds"),
    key("ssm_cfg", Neutral::Off, "recurrent layers"),
    key("mamba_d_state", Neutral::Off, "recurrent layers"),
    key("hidden_activation", Neutral::Text(&["silu", "swish"]), "another activation"),
    key("activation_function", Neutral::Text(&["silu", "swish"]), "another activation"),
    key("swiglu_limit", Neutral::Off, "a clamped SwiGLU"),
    key("use_double_wide_mlp", Neutral::Off, "MLPs of several widths"),
    key("bias", Neutral::Off, "biases of all projections"),
    key("use_bias", Neutral::Off, "biases of all projections"),
    key("no_bias", Neutral::On, "biases of all projections"),
];

/// Keys that [`super::ModelConfig`] reads.
const READ: &[&str] = &[
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "partial_rotary_factor",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rms_norm_eps",
    "vocab_size",
    "intermediate_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "max_position_embeddings",
    "eos_token_id",
    "bos_token_id",
    "quantization_config",
    "compression_config",
];

/// Keys whose names contain a word of [`ARITHMETIC_WORDS`] and that change nothing when a text is generated.
const WITHOUT_EFFECT: &[&str] = &[
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "layernorm_epsilon",
    "residual_dropout",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "output_router_logits",
    // Read by mixtures of experts only, which are refused by their number of experts.
    "norm_topk_prob",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "original_max_position_embeddings",
    // Rotary embedding of images: the positions of text are plain.
    "use_mrope",
];

/// Words in the names of keys that change arithmetic.
const ARITHMETIC_WORDS: &[&str] = &[
    "softcap",
    "soft_cap",
    "multiplier",
    "scale",
    "scaling",
    "expert",
    "moe",
    "sink",
    "rope",
    "nope",
    "rotary",
    "alibi",
    "position_embedding",
    "window",
    "sliding",
    "chunk",
    "latent",
    "lora",
    "norm",
    "residual",
    "parallel_attn",
    "parallel_block",
    "conv",
    "mamba",
    "ssm",
    "linear_attn",
    "linear_attention",
    "recurrent",
    "router",
    "gate",
    "gating",
    "clip",
    "clamp",
    "temperature_tuning",
    "per_layer",
    "shared_layers",
    "kv_shared",
    "activation",
    "swiglu",
    "bidirectional",
    "bias",
    "indexer",
    "compress",
    "block_type",
    "layer_type",
    "quant",
];

/// Checks that config.json asks for nothing that no runtime computes.
///
/// # Errors
/// [`Error::Unsupported`] with the first such key.
pub(super) fn check(fields: &Fields, own: &[&str], head_dim: usize) -> Result<(), Error> {
    quantization(fields)?;
    for (name, value) in fields.iter() {
        let is_read = READ.contains(&name) || own.contains(&name);
        if is_read || WITHOUT_EFFECT.contains(&name) || value.is_null() {
            continue;
        }
        let (neutral, feature) = match UNSUPPORTED.iter().find(|known| known.key == name) {
            Some(known) => (known.neutral.allows(value, head_dim), known.feature),
            None if ARITHMETIC_WORDS.iter().any(|word| name.contains(word)) => {
                (is_switched_off(value), "an unknown feature")
            }
            None => continue,
        };
        if !neutral {
            let found = format!("{feature}, {}", excerpt(value));
            return Err(fields.unsupported(name, &found, "models without it; remove the key if this is one"));
        }
    }
    Ok(())
}

/// Checks that the weights are not quantized in a format of safetensors files.
pub(super) fn quantization(fields: &Fields) -> Result<(), Error> {
    for name in ["quantization_config", "compression_config"] {
        let Some(config) = fields.object(name)? else { continue };
        let method = ["quant_method", "quant_algo", "format"]
            .iter()
            .find_map(|key| Some((*key, config.get(key)?.as_str()?.to_owned())));
        let (name, method) = match method {
            Some((key, method)) => (format!("{name}.{key}"), method),
            None => (name.to_owned(), "an unnamed method".to_owned()),
        };
        let supported = format!(
            "weights in f32, bf16 and f16, which --quantize can quantize at load, and GGUF files in {}",
            inflight_kernels::Encoding::block_names()
        );
        return Err(fields.unsupported(&name, &format!("weights quantized by {method}"), &supported));
    }
    Ok(())
}

impl Neutral {
    /// Returns whether a value changes nothing.
    fn allows(&self, value: &Value, head_dim: usize) -> bool {
        let close = |expected: f64| value.as_f64().is_some_and(|found| (found / expected - 1.0).abs() < 1e-6);
        match self {
            Self::Off => is_off(value),
            Self::On => *value == Value::Bool(true),
            Self::One => is_one(value),
            Self::AttentionScale => close((head_dim as f64).sqrt().recip()),
            Self::HeadSize => close(head_dim as f64),
            Self::Text(texts) => value.as_str().is_some_and(|text| texts.contains(&text)),
        }
    }
}

/// Returns whether a value is `false`, 0, or empty, or a list of nothing else.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.iter().all(is_off),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// Returns whether a value is 1 or `true`, or a list of nothing else.
fn is_one(value: &Value) -> bool {
    match value {
        Value::Bool(flag) => *flag,
        Value::Array(items) => items.iter().all(is_one),
        value => value.as_f64() == Some(1.0),
    }
}

/// Returns whether the value of an unknown key is that of a feature that is off.
fn is_switched_off(value: &Value) -> bool {
    const OFF: [&str; 4] = ["none", "default", "rms_norm", "rmsnorm"];
    is_off(value) || value.as_f64() == Some(1.0) || value.as_str().is_some_and(|text| OFF.contains(&text))
}

/// Returns a value as JSON, cut to a length for messages.
fn excerpt(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_of_each_list_are_in_no_other() {
        let unsupported: Vec<&str> = UNSUPPORTED.iter().map(|known| known.key).collect();
        let all: Vec<&str> = [READ, WITHOUT_EFFECT, unsupported.as_slice()].concat();
        for (at, name) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(name), "{name}");
        }
        for name in WITHOUT_EFFECT {
            assert!(ARITHMETIC_WORDS.iter().any(|word| name.contains(word)), "{name} needs no exception");
        }
    }

    #[test]
    fn features_that_are_off_are_no_reason_to_refuse_a_model() {
        let refused = |name: &str, value: Value| {
            let map = serde_json::Map::from_iter([(name.to_owned(), value)]);
            check(&Fields::of("config.json".to_owned(), map), &[], 64).err().map(|error| error.to_string())
        };
        for (name, value) in [
            ("final_logit_softcapping", json!(null)),
            ("attention_multiplier", json!(0.125)),
            ("query_pre_attn_scalar", json!(64)),
            ("no_rope_layers", json!([1, 1, 1])),
            ("no_rope_layers", json!([])),
            ("residual_multiplier", json!(1.0)),
            ("is_causal", json!(true)),
            ("num_experts", json!(0)),
            ("some_new_multiplier", json!(1.0)),
            ("chunk_size_feed_forward", json!(0)),
            ("unsloth_version", json!("2026.1")),
            ("torch_dtype", json!("bfloat16")),
            ("hidden_activation", json!("silu")),
        ] {
            assert_eq!(refused(name, value.clone()), None, "{name}: {value}");
        }
        for (name, value, clue) in [
            ("final_logit_softcapping", json!(30.0), "a soft cap of logits, 30.0"),
            ("attention_multiplier", json!(0.015625), "a scale of attention"),
            ("query_pre_attn_scalar", json!(256), "a scale of attention"),
            ("no_rope_layers", json!([1, 1, 1, 0]), "without rotary"),
            ("is_causal", json!(false), "attention to later tokens"),
            ("num_local_experts", json!(8), "a mixture of experts"),
            ("some_new_multiplier", json!(0.5), "an unknown feature, 0.5"),
            ("quantization_config", json!({ "quant_method": "awq", "bits": 4 }), "quantized by awq"),
            ("quantization_config", json!({ "quant_algo": "NVFP4" }), "quantized by NVFP4"),
            ("quantization_config", json!({}), "quantization_config"),
        ] {
            let message = refused(name, value.clone()).unwrap_or_default();
            assert!(message.contains(clue) && message.contains(name), "{name}: {value}: {message}");
        }
    }
}
