//! Tiny models for tests, with head dimensions that the kernels support.

use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir};
use inflight_kernels::cuda::HalfDtype;
use inflight_kernels::philox4x32;
use inflight_models::{AttentionSpec, LayerSpec, Mixer, ModelConfig, ModelDir, ModelSource};
use serde_json::json;

use super::bytes_of;

/// Model whose files stay while it is loaded.
pub(super) struct TestModel {
    model: ModelDir,
    _folder: TempDir,
}

impl std::ops::Deref for TestModel {
    type Target = ModelDir;

    fn deref(&self) -> &ModelDir {
        &self.model
    }
}

/// Returns a tiny model with a head dimension that the kernels support.
pub(super) fn model(arch: Arch, dtype: Dtype, seed: u32) -> TestModel {
    model_of(arch, dtype, seed, 6, false)
}

/// Returns a tiny model with the given query heads; `tied`: the LM head is the embedding.
pub(super) fn model_of(arch: Arch, dtype: Dtype, seed: u32, heads: usize, tied: bool) -> TestModel {
    // Gemma 3 has layers with a sliding window beside layers with full attention.
    let (layers, head_dim, types) = match arch {
        Arch::Gemma3 => (3, 256, Some(["sliding_attention", "full_attention", "sliding_attention"])),
        // Every second layer is recurrent.
        Arch::Qwen35 => (4, 64, None),
        _ => (2, 64, None),
    };
    let folder: TempDir = Checkpoint::new(arch, dtype).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let (hidden, inner, kv_heads) = (48usize, 64usize, 2usize);
    for (field, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", inner),
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("head_dim", head_dim),
        ("num_hidden_layers", layers),
        ("max_position_embeddings", 1024),
    ] {
        config[field] = json!(value);
    }
    config.as_object_mut().unwrap().remove("layer_types");
    if let Some(types) = types {
        config["layer_types"] = json!(types);
        config["sliding_window"] = json!(20);
    }
    config["tie_word_embeddings"] = json!(tied);
    let is_recurrent = |layer: usize| arch == Arch::Qwen35 && layer.is_multiple_of(2);
    if arch == Arch::Qwen35 {
        config["full_attention_interval"] = json!(2);
        config["linear_key_head_dim"] = json!(DELTA_KEY_DIM);
        config["linear_num_key_heads"] = json!(DELTA_HEADS);
        config["linear_num_value_heads"] = json!(DELTA_HEADS);
    }
    std::fs::write(&path, config.to_string()).unwrap();
    let vocabulary = config["vocab_size"].as_u64().unwrap() as usize;
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![vocabulary, hidden]),
    ];
    for layer in 0..layers {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        tensors.extend([
            (at("input_layernorm.weight"), vec![hidden]),
            (at("post_attention_layernorm.weight"), vec![hidden]),
            (at("mlp.gate_proj.weight"), vec![inner, hidden]),
            (at("mlp.up_proj.weight"), vec![inner, hidden]),
            (at("mlp.down_proj.weight"), vec![hidden, inner]),
        ]);
        if is_recurrent(layer) {
            tensors.extend(recurrent_tensors(arch, hidden).map(|(name, shape)| (at(name), shape)));
            continue;
        }
        let gated = if arch.dims().output_gate { 2 } else { 1 };
        tensors.extend([
            (at("self_attn.q_proj.weight"), vec![gated * queries, hidden]),
            (at("self_attn.k_proj.weight"), vec![keys, hidden]),
            (at("self_attn.v_proj.weight"), vec![keys, hidden]),
            (at("self_attn.q_proj.bias"), vec![queries]),
            (at("self_attn.k_proj.bias"), vec![keys]),
            (at("self_attn.v_proj.bias"), vec![keys]),
            (at("self_attn.q_norm.weight"), vec![head_dim]),
            (at("self_attn.k_norm.weight"), vec![head_dim]),
            (at("self_attn.o_proj.weight"), vec![hidden, queries]),
        ]);
        if arch.dims().post_norms {
            let norms = ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"];
            tensors.extend(norms.map(|name| (at(name), vec![hidden])));
        }
    }
    let kind = if dtype == Dtype::F16 { safetensors::Dtype::F16 } else { safetensors::Dtype::BF16 };
    let encoded = encoded(arch, dtype, seed, tensors);
    let views = encoded.iter().map(|(name, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(kind, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    TestModel { model, _folder: folder }
}

/// Returns those of the tensors that the architecture has, with random elements.
fn encoded(
    arch: Arch,
    dtype: Dtype,
    seed: u32,
    tensors: Vec<(String, Vec<usize>)>,
) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let half = if dtype == Dtype::F16 { HalfDtype::F16 } else { HalfDtype::Bf16 };
    let mut count = 0;
    let encode = |(name, shape): (String, Vec<usize>)| {
        let elements: usize = shape.iter().product();
        // Norms are about 1; matrices keep the magnitude of their input.
        let (middle, scale) = match shape.as_slice() {
            [_, k] | [_, _, k] => (0.0, 1.7 / (*k as f32).sqrt()),
            _ if arch == Arch::Gemma3 => (0.0, 0.2),
            _ if arch == Arch::Qwen35 && !name.ends_with("linear_attn.norm.weight") => (0.0, 0.3),
            _ if name.ends_with("bias") => (0.0, 0.3),
            _ => (1.0, 0.2),
        };
        let values = (0..elements).map(|_| {
            count += 1;
            let word = philox4x32([count, 0, 0, 0], [seed, 9])[0];
            half.narrow(middle + scale * (word as f32 / 2f32.powi(31) - 1.0))
        });
        let values: Vec<u16> = values.collect();
        (name, shape, bytes_of(&values).to_vec())
    };
    let encoded = tensors.into_iter().map(encode);
    let encoded = encoded.filter(|(name, ..)| !name.ends_with(".bias") || arch.dims().qkv_bias);
    encoded.filter(|(name, ..)| !name.contains("_norm.weight") || arch.dims().qk_norm).collect()
}

/// Elements of a key of the recurrent layers, and their heads.
const DELTA_KEY_DIM: usize = 64;
const DELTA_HEADS: usize = 4;

/// Returns names and shapes of the tensors of a recurrent layer.
fn recurrent_tensors(arch: Arch, hidden: usize) -> [(&'static str, Vec<usize>); 9] {
    let dims = arch.dims().delta.unwrap();
    let values = DELTA_HEADS * dims.value_dim;
    let channels = 2 * DELTA_HEADS * DELTA_KEY_DIM + values;
    [
        ("linear_attn.in_proj_qkv.weight", vec![channels, hidden]),
        ("linear_attn.in_proj_z.weight", vec![values, hidden]),
        ("linear_attn.in_proj_b.weight", vec![DELTA_HEADS, hidden]),
        ("linear_attn.in_proj_a.weight", vec![DELTA_HEADS, hidden]),
        ("linear_attn.conv1d.weight", vec![channels, 1, dims.taps]),
        ("linear_attn.A_log", vec![DELTA_HEADS]),
        ("linear_attn.dt_bias", vec![DELTA_HEADS]),
        ("linear_attn.norm.weight", vec![dims.value_dim]),
        ("linear_attn.out_proj.weight", vec![hidden, values]),
    ]
}

/// Returns the configuration of a tiny model with a layer for each of these windows.
pub(crate) fn with_windows(windows: &[Option<u32>]) -> ModelConfig {
    let folder = Checkpoint::new(Arch::Qwen3, Dtype::Bf16).write_temp().unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let mut config = model.config().clone();
    let layer = |window: &Option<u32>| LayerSpec {
        mixer: Mixer::Attention(AttentionSpec { window: *window, rope: 0 }),
    };
    config.layers = windows.iter().map(layer).collect();
    config
}
