//! Errors of unusable model directories: they name the file and, where applicable, field or tensor, with
//! expected and found values.

use std::path::Path;

use inflight_fixtures::{Arch, Checkpoint, ConfigStyle, Corruption, Dtype, TempDir};
use inflight_kernels::cpu::Isa;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::Runtime;
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, Error, Quantization, kv_bytes_per_token};
use serde_json::{Value, json};

const OPTIONS: CpuOptions = CpuOptions {
    threads: Some(1),
    kv_bytes: 1 << 20,
    host_bytes: 0,
    block_tokens: 16,
    slots: 4,
    batch_tokens: 32,
    context_tokens: None,
    isa: None,
    quantize: None,
    kv_dtype: None,
    tensor_parallel: 1,
    mtp: false,
};

/// Opens and loads a model like a worker.
fn load(path: &Path) -> Result<CpuRuntime, Error> {
    let model = ModelDir::open(&ModelSource::Directory(path.to_path_buf()))?;
    CpuRuntime::load(&model, &OPTIONS, &|_, _| {})
}

fn message(path: &Path) -> String {
    match load(path) {
        Ok(_) => panic!("{} loads", path.display()),
        Err(error) => error.to_string(),
    }
}

/// Writes a checkpoint with one field of config.json changed; null removes it.
fn with(arch: Arch, field: &str, value: Value) -> TempDir {
    let folder = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    match value {
        Value::Null => _ = config.as_object_mut().unwrap().remove(field),
        value => config[field] = value,
    }
    std::fs::write(&path, config.to_string()).unwrap();
    folder
}

#[test]
fn every_corruption_is_rejected_with_its_location() {
    for arch in [Arch::Llama2, Arch::Qwen3] {
        for shards in [1, 2] {
            for style in [ConfigStyle::Transformers4, ConfigStyle::Transformers5] {
                for corruption in Corruption::all() {
                    let checkpoint = Checkpoint::new(arch, Dtype::Bf16).sharded(shards).styled(style);
                    let folder = checkpoint.write_temp().unwrap();
                    load(folder.path()).expect("it loads before it is damaged");
                    corruption.apply(folder.path()).unwrap();
                    let message = message(folder.path());
                    println!("{corruption}: {message}");
                    assert!(message.contains(corruption.clue()), "{arch} {shards} {corruption}: {message}");
                }
            }
        }
    }
}

#[test]
fn a_wrong_shape_names_tensor_and_both_shapes() {
    let folder = with(Arch::Llama2, "intermediate_size", json!(64));
    let message = message(folder.path());
    let hidden = Arch::Llama2.dims().hidden;
    assert!(message.contains("model.layers.0.mlp.gate_proj.weight"), "{message}");
    assert!(message.contains(&format!("[64, {hidden}]")), "{message}");
    assert!(message.contains("has shape ["), "{message}");
}

#[test]
fn every_missing_required_field_is_named() {
    let needed = [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ];
    for field in needed {
        let message = message(with(Arch::Llama31, field, Value::Null).path());
        assert!(message.contains("config.json") && message.contains(field), "{field}: {message}");
    }
    let message = message(with(Arch::Qwen2, "num_key_value_heads", Value::Null).path());
    assert!(message.contains("num_key_value_heads"), "{message}");
}

#[test]
fn unsupported_architectures_are_rejected_with_the_supported_ones() {
    let message = message(with(Arch::Llama2, "architectures", json!(["BertModel"])).path());
    for name in
        ["BertModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
    {
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn unsupported_or_absurd_fields_are_rejected_by_name() {
    let cases = [
        ("rope_scaling", json!({ "type": "yarn", "factor": 4.0 }), "yarn"),
        ("rope_scaling", json!({ "rope_type": "dynamic", "factor": 4.0 }), "dynamic"),
        ("rope_scaling", json!({ "rope_type": "linear" }), "rope_scaling.factor"),
        ("rope_scaling", json!("linear"), "rope_scaling"),
        ("rope_theta", json!(0), "rope_theta"),
        ("rms_norm_eps", json!("tiny"), "rms_norm_eps"),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps"),
        ("head_dim", json!(7), "head_dim"),
        ("head_dim", json!(4096), "head_dim"),
        ("vocab_size", json!(1u64 << 40), "vocab_size"),
        ("num_hidden_layers", json!(1 << 30), "num_hidden_layers"),
        ("num_hidden_layers", json!(2.5), "num_hidden_layers"),
        ("hidden_act", json!("gelu"), "hidden_act"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("tie_word_embeddings", json!("yes"), "tie_word_embeddings"),
        ("eos_token_id", json!("</s>"), "eos_token_id"),
        (
            "rope_parameters",
            json!({ "rope_type": "default", "partial_rotary_factor": 0.25 }),
            "partial_rotary_factor",
        ),
        ("rope_parameters", json!({ "full_attention": { "rope_theta": 1e6 } }), "full_attention"),
        ("attention_bias", json!(true), "model.layers.0.self_attn.q_proj.bias"),
    ];
    for (field, value, clue) in cases {
        let message = message(with(Arch::Llama2, field, value.clone()).path());
        assert!(message.contains(clue), "{field} = {value}: {message}");
    }
}

#[test]
fn sliding_windows_follow_the_rules_of_each_architecture() {
    let windows = |folder: &TempDir| {
        let source = ModelSource::Directory(folder.path().to_path_buf());
        let windows = |model: ModelDir| {
            model
                .config()
                .layers
                .iter()
                .map(|layer| layer.attention().and_then(|attention| attention.window))
                .collect::<Vec<_>>()
        };
        ModelDir::open(&source).map(windows).map_err(|error| error.to_string())
    };
    let edit = |folder: &TempDir, fields: Value| {
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for (name, value) in fields.as_object().unwrap() {
            config[name] = value.clone();
        }
        std::fs::write(&path, config.to_string()).unwrap();
    };
    let qwen = Checkpoint::new(Arch::Qwen25, Dtype::Bf16).write_temp().unwrap();
    assert_eq!(windows(&qwen).unwrap(), [None; 3], "switched off");
    edit(&qwen, json!({ "use_sliding_window": true, "sliding_window": 9, "max_window_layers": 2 }));
    assert_eq!(windows(&qwen).unwrap(), [None, None, Some(9)], "the first layers attend to everything");
    let types = json!({ "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] });
    edit(&qwen, types);
    assert_eq!(windows(&qwen).unwrap(), [Some(9), None, Some(9)], "layer_types decide");
    edit(&qwen, json!({ "layer_types": ["sliding_attention"] }));
    assert!(windows(&qwen).unwrap_err().contains("layer_types"));
    edit(&qwen, json!({ "layer_types": ["chunked_attention", "full_attention", "full_attention"] }));
    assert!(windows(&qwen).unwrap_err().contains("chunked_attention"));
    let mistral = Checkpoint::new(Arch::Mistral, Dtype::Bf16).write_temp().unwrap();
    assert_eq!(windows(&mistral).unwrap(), [Some(24); 2]);
    edit(&mistral, json!({ "sliding_window": null }));
    assert_eq!(windows(&mistral).unwrap(), [None; 2]);
    // Llama has no windows: one that would bound what a token attends to is refused.
    let layers = Arch::Llama2.dims().layers;
    let llama = with(Arch::Llama2, "sliding_window", json!(8));
    assert!(windows(&llama).unwrap_err().contains("sliding_window"));
    edit(&llama, json!({ "layer_types": vec!["full_attention"; layers] }));
    assert_eq!(windows(&llama).unwrap(), vec![None; layers]);
    edit(&llama, json!({ "layer_types": vec!["sliding_attention"; layers] }));
    assert!(windows(&llama).unwrap_err().contains("sliding_window"));
    let llama = with(Arch::Llama2, "sliding_window", json!(1 << 20));
    assert_eq!(windows(&llama).unwrap(), vec![None; layers]);
}

#[test]
fn a_path_without_a_model_is_rejected() {
    let folder = TempDir::new("inflight-none").unwrap();
    let missing = folder.path().join("nowhere");
    assert!(message(&missing).contains("nowhere"));
    std::fs::write(&missing, "x").unwrap();
    assert!(message(&missing).contains("it is a file"));
    assert!(message(folder.path()).contains("config.json"));
}

#[test]
fn options_out_of_range_are_rejected_with_the_allowed_values() {
    let folder = Checkpoint::new(Arch::Llama2, Dtype::Bf16).write_temp().unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let refused = |options: CpuOptions| match CpuRuntime::load(&model, &options, &|_, _| {}) {
        Ok(_) => panic!("accepted {options:?}"),
        Err(error) => error.to_string(),
    };
    let per_token = kv_bytes_per_token(model.config(), inflight_kernels::Dtype::Bf16.into());
    let too_small = refused(CpuOptions { kv_bytes: 16 * per_token as u64 - 1, ..OPTIONS });
    assert!(too_small.contains(&(16 * per_token).to_string()), "{too_small}");
    assert!(refused(CpuOptions { kv_bytes: 1 << 60, ..OPTIONS }).contains("--kv-cache-bytes"));
    // Of layers with windows, a block holds only a part of a span.
    let windowed = Checkpoint::new(Arch::Gemma3, Dtype::Bf16).write_temp().unwrap();
    let windowed = ModelDir::open(&ModelSource::Directory(windowed.path().to_path_buf())).unwrap();
    let load = |kv_bytes: u64| {
        let loaded = CpuRuntime::load(&windowed, &CpuOptions { kv_bytes, ..OPTIONS }, &|_, _| {});
        loaded.map(|_| ()).map_err(|error| error.to_string())
    };
    let span_bytes = {
        let loaded = CpuRuntime::load(&windowed, &OPTIONS, &|_, _| {}).unwrap();
        loaded.capabilities().shape.span_blocks() as u64 * loaded.capabilities().block_bytes
    };
    let too_small = load(span_bytes - 1).unwrap_err();
    assert!(
        too_small.contains(&format!("can't hold 16 tokens (--block-tokens), which take {span_bytes}")),
        "{too_small}"
    );
    assert_eq!(load(span_bytes), Ok(()));
    assert!(refused(CpuOptions { block_tokens: 24, ..OPTIONS }).contains("power of two"));
    assert!(refused(CpuOptions { block_tokens: 0, ..OPTIONS }).contains("--block-tokens"));
    assert!(refused(CpuOptions { slots: 0, ..OPTIONS }).contains("--max-sequences"));
    assert!(refused(CpuOptions { batch_tokens: 0, ..OPTIONS }).contains("--max-batch-tokens"));
    assert!(refused(CpuOptions { threads: Some(0), ..OPTIONS }).contains("--threads"));
    assert!(
        refused(CpuOptions { context_tokens: Some(1 << 20), ..OPTIONS }).contains("--max-context-tokens")
    );
    for tensor_parallel in [0, 65, usize::MAX] {
        assert!(refused(CpuOptions { tensor_parallel, ..OPTIONS }).contains("--tensor-parallel"));
    }
    let odd = refused(CpuOptions { tensor_parallel: 3, ..OPTIONS });
    assert!(odd.contains("4 attention heads") && odd.contains("1, 2, 4 would do"), "{odd}");
    // Two ranks divide the model, but split a quantization group of 64.
    let split = CpuOptions { tensor_parallel: 2, quantize: Some(Quantization::INT8), ..OPTIONS };
    let split = refused(split);
    assert!(split.contains("32 of the 64 inputs of o_proj") && split.contains("groups of 64"), "{split}");
}

#[test]
fn the_embedded_model_opens_and_runs_like_any_other() {
    let model = ModelDir::open(&ModelSource::Embedded).unwrap();
    assert!(
        model.bundle_files().iter().any(|(name, content)| name == "tokenizer.json" && !content.is_empty())
    );
    assert!(!model.eos_token_ids().is_empty());
    let runtime = CpuRuntime::load(&model, &OPTIONS, &|_, _| {}).unwrap();
    assert_eq!(runtime.capabilities().vocab_size as usize, model.config().vocab_size);
    assert_eq!(runtime.capabilities().fingerprint.len(), 64);
    let facts = &runtime.capabilities().facts;
    assert!(facts.device.ends_with(&format!("({})", Isa::detect().name())), "{facts:?}");
    assert!(facts.weight_bytes > 0 && facts.memory_bytes > facts.weight_bytes, "{facts:?}");
    assert!(
        !facts.weight_encoding.is_empty() && !facts.kv_encoding.is_empty() && facts.ranks == 1,
        "{facts:?}"
    );
}

#[test]
fn the_fingerprint_covers_weights_and_kernels_but_not_threads() {
    let fingerprint = |checkpoint: &Checkpoint, options: &CpuOptions| {
        let folder = checkpoint.write_temp().unwrap();
        let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
        CpuRuntime::load(&model, options, &|_, _| {}).unwrap().capabilities().fingerprint.clone()
    };
    let checkpoint = Checkpoint::new(Arch::Llama31, Dtype::Bf16);
    let base = fingerprint(&checkpoint, &OPTIONS);
    let other_shape =
        CpuOptions { threads: Some(3), block_tokens: 32, slots: 9, kv_bytes: 2 << 20, ..OPTIONS };
    assert_eq!(base, fingerprint(&checkpoint, &other_shape));
    assert_ne!(base, fingerprint(&checkpoint.clone().seeded(1), &OPTIONS));
    assert_ne!(base, fingerprint(&Checkpoint::new(Arch::Llama31, Dtype::F16), &OPTIONS));
    // The tensor-parallel degree decides the summation order.
    let divided = |tensor_parallel| CpuOptions { tensor_parallel, ..other_shape.clone() };
    let (halves, quarters) = (fingerprint(&checkpoint, &divided(2)), fingerprint(&checkpoint, &divided(4)));
    assert!(base != halves && base != quarters && halves != quarters);
    assert_eq!(halves, fingerprint(&checkpoint, &CpuOptions { tensor_parallel: 2, ..OPTIONS }));
    let portable = CpuOptions { isa: Some(inflight_kernels::cpu::Isa::PORTABLE), ..OPTIONS };
    let detected = inflight_kernels::cpu::Isa::detect() == inflight_kernels::cpu::Isa::PORTABLE;
    assert_eq!(base == fingerprint(&checkpoint, &portable), detected);
}
