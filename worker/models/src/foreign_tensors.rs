//! Tensors of a checkpoint that its decoder does not use: harmless ones, and those that show that the model is of
//! another kind than config.json says.

use super::{DeltaForm, ModelConfig};

/// Ends of the names of tensors without effect: buffers that are computed from the configuration, and scales of a KV
/// cache in 8 bits.
const IGNORED_ENDS: [&str; 6] = [
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".self_attn.kv_scale",
];

/// Parts of names that no supported architecture has, and what a tensor of such a name shows the model to be. The first part that
/// occurs counts.
const FORMATS: [(&str, &str); 19] = [
    ("lora_", "an adapter (LoRA), or a model with one that was not merged"),
    (".qweight", "a model quantized by AWQ or GPTQ"),
    (".qzeros", "a model quantized by AWQ or GPTQ"),
    (".g_idx", "a model quantized by GPTQ"),
    ("weight_packed", "a model quantized by compressed-tensors"),
    ("weight_scale_2", "a model in NVFP4"),
    ("weight_scale_inv", "a model in FP8, with a scale for each block"),
    ("weight_scale", "a model in FP8"),
    ("_proj_blocks", "a model in MXFP4"),
    (".absmax", "a model quantized by bitsandbytes"),
    (".quant_", "a model quantized by bitsandbytes"),
    (".SCB", "a model quantized by bitsandbytes"),
    ("experts.", "a mixture of experts"),
    ("_exps.", "a mixture of experts"),
    ("sinks", "a model with attention sinks"),
    ("language_model.", "a multimodal model"),
    ("vision", "a multimodal model"),
    ("visual.", "a multimodal model"),
    ("rope_factors_", "a model with rotary frequencies by length (LongRoPE)"),
];

/// Parts of names that some supported architectures have.
const FEATURES: [(&str, &str); 4] = [
    ("linear_attn.", "a model with recurrent layers"),
    ("q_norm.", "a model with QK norms"),
    ("k_norm.", "a model with QK norms"),
    (".bias", "a model with biases"),
];

/// Returns what a model is that has a tensor of this name, if the name shows it and no supported architecture has such a tensor.
pub(super) fn format(tensor: &str) -> Option<&'static str> {
    // Base models and embedding models are saved without the prefix of the language model.
    if tensor == "embed_tokens.weight" || tensor.starts_with("layers.0.") {
        return Some("a model without LM head, such as an embedding model");
    }
    known(&FORMATS, tensor)
}

/// Returns what a model is that has an unused tensor of this name, if the name shows it.
pub(super) fn kind(tensor: &str) -> Option<&'static str> {
    format(tensor).or_else(|| known(&FEATURES, tensor))
}

fn known(parts: &[(&str, &'static str)], tensor: &str) -> Option<&'static str> {
    parts.iter().find(|(part, _)| tensor.contains(part)).map(|(_, kind)| *kind)
}

/// Returns whether a tensor that the decoder does not use is without effect on its output.
pub(super) fn is_ignored(tensor: &str, config: &ModelConfig) -> bool {
    let names = config.architecture.spec().tensors;
    let head = || config.tied_embeddings && tensor.strip_prefix(names.head) == Some(".weight");
    // Heads of multi-token prediction draft tokens; in GGUF files they are layers behind the others.
    let of_layers = tensor.strip_prefix(names.layers).and_then(|rest| rest.strip_prefix('.'));
    let layer = of_layers.or_else(|| tensor.strip_prefix("blk.")).and_then(|rest| rest.split('.').next());
    let behind = layer.and_then(|layer| layer.parse().ok()).is_some_and(|layer: usize| {
        let first = config.layers.len();
        (first..first.saturating_add(config.mtp_layers)).contains(&layer)
    });
    let of_gguf = config.delta.is_some_and(|delta| delta.form == DeltaForm::Gguf);
    let drafts = tensor.starts_with("mtp.") || of_gguf && behind;
    let ignored = IGNORED_ENDS.iter().any(|end| tensor.ends_with(end)) || drafts;
    ignored || head() || config.architecture.is_multimodal() && is_of_images(tensor)
}

/// Returns whether a tensor of a multimodal model is for images, which are not served.
fn is_of_images(tensor: &str) -> bool {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    ["vision_tower.", "multi_modal_projector.", "visual."].iter().any(|part| name.starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tensors_show_the_kind_of_model() {
        for (name, expected) in [
            ("model.layers.0.self_attn.q_proj.qweight", Some("AWQ or GPTQ")),
            ("model.layers.0.self_attn.q_proj.weight_packed", Some("compressed-tensors")),
            ("model.layers.0.self_attn.q_proj.weight_scale_2", Some("NVFP4")),
            ("model.layers.0.self_attn.q_proj.weight_scale", Some("FP8")),
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", Some("MXFP4")),
            ("model.layers.0.mlp.experts.0.gate_proj.weight", Some("mixture of experts")),
            ("blk.0.ffn_gate_exps.weight", Some("mixture of experts")),
            ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", Some("LoRA")),
            ("embed_tokens.weight", Some("embedding model")),
            ("model.language_model.embed_tokens.weight", Some("multimodal")),
            ("model.layers.0.self_attn.q_proj.weight", None),
        ] {
            let found = kind(name);
            let matches =
                expected.map_or(found.is_none(), |part| found.is_some_and(|kind| kind.contains(part)));
            assert!(matches, "{name}: {found:?}");
        }
    }
}
