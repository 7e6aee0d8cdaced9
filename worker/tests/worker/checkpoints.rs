//! Checkpoints of published families and formats: each is served, or refused by a sentence that says what it is. None is served with a
//! part of its arithmetic left out.

use std::path::{Path, PathBuf};

use inflight_fixtures::{
    Arch, Checkpoint, Dtype, Family, GgufTensor, GgufValue, TempDir, add_tensor, rename_tensors,
};
use inflight_models::{ModelDir, ModelSource};
use serde_json::{Value, json};

/// Change to a checkpoint that makes it one of another family or format.
enum Change {
    /// Fields of config.json.
    Config(Value),
    /// A tensor of this name, type and shape.
    Tensor(&'static str, &'static str, &'static [usize]),
    /// A text in the names of all tensors, and its replacement.
    Names(&'static str, &'static str),
    /// A file of the directory, and its content; an empty content removes it.
    File(&'static str, &'static str),
}

use Change::{Config, File, Names, Tensor};

/// Tensor of layer 0 in a form that only quantized checkpoints have.
const fn packed(name: &'static str) -> Change {
    Tensor(name, "U8", &[4, 4])
}

/// Returns what a directory is refused for, or `None` if it is served.
fn refusal(path: &Path) -> Option<String> {
    ModelDir::open(&ModelSource::Directory(path.to_owned())).err().map(|error| error.to_string())
}

/// Writes a checkpoint of `arch` with changes.
fn directory(arch: Arch, changes: &[Change]) -> TempDir {
    let folder = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
    for change in changes {
        match change {
            Config(fields) => {
                let path = folder.path().join("config.json");
                let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                for (name, value) in fields.as_object().unwrap() {
                    config[name] = value.clone();
                }
                std::fs::write(&path, config.to_string()).unwrap();
            }
            Tensor(name, dtype, shape) => {
                let width = match *dtype {
                    "F32" | "I32" => 4,
                    "F16" | "BF16" => 2,
                    _ => 1,
                };
                let bytes = vec![0; shape.iter().product::<usize>() * width];
                add_tensor(folder.path(), name, dtype, shape, &bytes).unwrap();
            }
            Names(from, to) => rename_tensors(folder.path(), from, to).unwrap(),
            File(name, "") => std::fs::remove_file(folder.path().join(name)).unwrap(),
            File(name, content) => std::fs::write(folder.path().join(name), content).unwrap(),
        }
    }
    folder
}

fn architecture(name: &str) -> Change {
    Config(json!({ "architectures": [name] }))
}

fn quantized(method: &str) -> Change {
    Config(json!({ "quantization_config": { "quant_method": method, "bits": 4 } }))
}

/// Directories: the changes to a Llama 2, and what the sentence must contain; an empty clue: it is served.
fn directories() -> Vec<(&'static str, Vec<Change>, &'static str)> {
    let mut cases = vec![
        (
            "buffers without effect",
            vec![Tensor("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", &[8])],
            "",
        ),
        ("heads that draft", vec![Tensor("mtp.fc.weight", "BF16", &[4, 4])], ""),
        (
            "fields without effect",
            vec![Config(json!({ "unsloth_fixed": true, "final_logit_softcapping": null }))],
            "",
        ),
        (
            "Llama with a soft cap",
            vec![Config(json!({ "final_logit_softcapping": 30.0 }))],
            "a soft cap of logits",
        ),
        (
            "Llama with a multiplier",
            vec![Config(json!({ "attention_multiplier": 0.0078125 }))],
            "attention_multiplier",
        ),
        (
            "Llama with NoPE layers",
            vec![Config(json!({ "no_rope_layers": [1, 0] }))],
            "without rotary embedding",
        ),
        ("Llama with sinks", vec![Tensor("model.layers.0.self_attn.sinks", "BF16", &[4])], "attention sinks"),
        (
            "Llama with experts",
            vec![Tensor("model.layers.0.mlp.experts.0.gate_proj.weight", "BF16", &[4, 4])],
            "mixture of experts",
        ),
        ("Llama with a window", vec![Config(json!({ "sliding_window": 16 }))], "sliding_window"),
        (
            "Llama with fewer layers than weights",
            vec![Config(json!({ "num_hidden_layers": 1 }))],
            "more layers",
        ),
        (
            "Llama with QK norms",
            vec![Tensor("model.layers.0.self_attn.q_norm.weight", "BF16", &[16])],
            "QK norms",
        ),
        ("Llama with biases", vec![Tensor("model.layers.0.self_attn.q_proj.bias", "BF16", &[64])], "biases"),
        ("bidirectional", vec![Config(json!({ "is_causal": false }))], "attention to later tokens"),
        ("FP8 blocks", vec![quantized("fp8"), Tensor("x.weight_scale_inv", "F32", &[1])], "quantized by fp8"),
        (
            "FP8 without its field",
            vec![Tensor("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", &[1])],
            "FP8",
        ),
        ("AWQ", vec![quantized("awq"), Names(".q_proj.weight", ".q_proj.qweight")], "quantized by awq"),
        ("AWQ without its field", vec![Names(".q_proj.weight", ".q_proj.qweight")], "AWQ or GPTQ"),
        (
            "GPTQ",
            vec![quantized("gptq"), packed("model.layers.0.self_attn.q_proj.qzeros")],
            "quantized by gptq",
        ),
        ("compressed-tensors", vec![quantized("compressed-tensors")], "quantized by compressed-tensors"),
        ("pack-quantized", vec![Names(".q_proj.weight", ".q_proj.weight_packed")], "compressed-tensors"),
        ("NVFP4", vec![packed("model.layers.0.self_attn.q_proj.weight_scale_2")], "NVFP4"),
        ("MXFP4", vec![packed("model.layers.0.mlp.experts.gate_up_proj_blocks")], "MXFP4"),
        ("bitsandbytes", vec![quantized("bitsandbytes")], "quantized by bitsandbytes"),
        ("unmerged adapter", vec![Names("q_proj.weight", "q_proj.lora_A.weight")], "LoRA"),
        ("base model", vec![Names("model.", "")], "without LM head"),
        ("multimodal names", vec![Names("model.", "model.language_model.")], "multimodal"),
        ("LoRA adapter", vec![File("config.json", ""), File("adapter_config.json", "{}")], "LoRA adapter"),
        (
            "publisher's layout",
            vec![File("config.json", ""), File("params.json", "{}")],
            "layout of its publisher",
        ),
        (
            "directory of GGUF files",
            vec![File("config.json", ""), File("model.gguf", "GGUF")],
            "give one of them",
        ),
        (
            "rope by layer type",
            vec![Config(json!({ "rope_parameters": { "full_attention": {} } }))],
            "by layer type",
        ),
        ("YaRN", vec![Config(json!({ "rope_scaling": { "rope_type": "yarn", "factor": 4.0 } }))], "yarn"),
        ("LongRoPE", vec![Config(json!({ "rope_scaling": { "type": "longrope" } }))], "longrope"),
        (
            "dynamic NTK",
            vec![Config(json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }))],
            "dynamic",
        ),
    ];
    for name in [
        "Qwen3MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "MixtralForCausalLM",
        "GptOssForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Phi3ForCausalLM",
        "Ministral3ForCausalLM",
        "SmolLM3ForCausalLM",
        "GraniteForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "NemotronHForCausalLM",
        "Llama4ForCausalLM",
        "Olmo3ForCausalLM",
        "BertModel",
        "T5ForConditionalGeneration",
    ] {
        cases.push((name, vec![architecture(name)], "is not supported; supported: LlamaForCausalLM"));
    }
    cases
}

#[test]
fn directories_of_published_families_are_served_or_refused_by_what_they_are() {
    for arch in Arch::all() {
        assert_eq!(refusal(directory(*arch, &[]).path()), None, "{arch}");
    }
    for (name, changes, clue) in directories() {
        let refusal = refusal(directory(Arch::Llama2, &changes).path());
        println!("{name}: {refusal:?}");
        match (clue, refusal) {
            ("", refusal) => assert_eq!(refusal, None, "{name}"),
            (clue, Some(sentence)) => assert!(sentence.contains(clue), "{name}: {sentence}"),
            (_, None) => panic!("{name} is served"),
        }
    }
}

#[test]
fn biases_that_an_architecture_does_not_have_are_refused() {
    for (arch, field) in
        [(Arch::Mistral, "attention_bias"), (Arch::Qwen2, "mlp_bias"), (Arch::Qwen3, "mlp_bias")]
    {
        let refusal = refusal(directory(arch, &[Config(json!({ field: true }))]).path());
        assert!(refusal.is_some_and(|sentence| sentence.contains(field)), "{arch} {field}");
    }
}

/// Writes a GGUF file of `arch` with entries and tensors besides.
fn file(arch: Arch, entries: &[(&str, GgufValue)], tensors: &[GgufTensor]) -> (TempDir, PathBuf) {
    let folder = TempDir::new("inflight-checkpoints").unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), Family::Llama3.tokenizer_json()).unwrap();
    let path = folder.path().join("model.gguf");
    let entries: Vec<_> = entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    std::fs::write(&path, Checkpoint::new(arch, Dtype::F16).gguf_with(&entries, tensors).unwrap()).unwrap();
    (folder, path)
}

/// Name, entries and tensors besides those of a Llama 2, and what the sentence must contain; an empty clue: it is served.
type GgufCase = (&'static str, Vec<(&'static str, GgufValue)>, Vec<GgufTensor>, &'static str);

#[test]
fn gguf_files_of_published_families_are_served_or_refused_by_what_they_are() {
    use GgufValue::{Bool, F32, Floats, Ints, Text, U32};
    let text = |text: &str| Text(text.to_owned());
    let dims = Arch::Llama2.dims();
    let tensor = |name: &str, kind: u32| GgufTensor {
        name: name.to_owned(),
        shape: vec![32],
        kind,
        bytes: vec![0; 32 * 4],
    };
    let cases: Vec<GgufCase> = vec![
        ("plain", vec![], vec![], ""),
        (
            "entries without effect",
            vec![
                ("llama.vocab_size", U32(dims.vocab as u32)),
                ("llama.rope.dimension_count", U32(dims.head_dim as u32)),
                ("llama.attention.value_length", U32(dims.head_dim as u32)),
                ("llama.rope.scaling.attn_factor", F32(1.0)),
                ("llama.expert_count", U32(0)),
                ("llama.new_feature", Bool(false)),
                ("general.quantization_version", U32(2)),
                ("quantize.imatrix.entries_count", U32(7)),
            ],
            vec![],
            "",
        ),
        (
            "rotated half",
            vec![("llama.rope.dimension_count", U32(dims.head_dim as u32 / 2))],
            vec![],
            "dimension_count",
        ),
        ("window", vec![("llama.attention.sliding_window", U32(16))], vec![], "sliding window of 16"),
        ("scale", vec![("llama.attention.scale", F32(0.01))], vec![], "attention.scale"),
        ("values", vec![("llama.attention.value_length", U32(8))], vec![], "value_length"),
        ("bidirectional", vec![("llama.attention.causal", Bool(false))], vec![], "attention to later tokens"),
        ("soft cap", vec![("llama.final_logit_softcapping", F32(30.0))], vec![], "final_logit_softcapping"),
        ("multiplier", vec![("llama.logit_scale", F32(0.25))], vec![], "logit_scale"),
        ("embedding model", vec![("llama.pooling_type", U32(3))], vec![], "pooling_type"),
        ("layers by pattern", vec![("llama.new_pattern", Ints(vec![1, 0]))], vec![], "new_pattern"),
        ("unknown numbers", vec![("llama.new_numbers", Floats(vec![1.0]))], vec![], "new_numbers"),
        ("experts", vec![("llama.expert_count", U32(8))], vec![], "mixture of experts"),
        (
            "YaRN",
            vec![("llama.rope.scaling.type", text("yarn")), ("llama.rope.scaling.factor", F32(4.0))],
            vec![],
            "yarn",
        ),
        ("attention factor", vec![("llama.rope.scaling.attn_factor", F32(0.9))], vec![], "attn_factor"),
        ("one of several files", vec![("split.count", U32(3))], vec![], "part 1 of 3"),
        ("adapter", vec![("general.type", text("adapter"))], vec![], "adapter"),
        ("encoder of images", vec![("general.type", text("mmproj"))], vec![], "mmproj"),
        ("tensor of experts", vec![], vec![tensor("blk.0.ffn_gate_exps.weight", 0)], "mixture of experts"),
        ("sinks", vec![], vec![tensor("blk.0.attn_sinks.weight", 0)], "attention sinks"),
        ("LongRoPE", vec![], vec![tensor("rope_factors_long.weight", 0)], "LongRoPE"),
        (
            "norms behind blocks",
            vec![],
            vec![tensor("blk.0.post_attention_norm.weight", 0)],
            "post_attention_norm",
        ),
    ];
    for (name, entries, tensors, clue) in cases {
        let (_folder, path) = file(Arch::Llama2, &entries, &tensors);
        let refusal = refusal(&path);
        println!("{name}: {refusal:?}");
        match (clue, refusal) {
            ("", refusal) => assert_eq!(refusal, None, "{name}"),
            (clue, Some(sentence)) => assert!(sentence.contains(clue), "{name}: {sentence}"),
            (_, None) => panic!("{name} is served"),
        }
    }
    for family in [
        "qwen3moe",
        "qwen35moe",
        "gpt-oss",
        "gemma3",
        "gemma4",
        "phi3",
        "nemotron_h_moe",
        "deepseek2",
        "bert",
    ] {
        let (_folder, path) = file(Arch::Llama2, &[("general.architecture", text(family))], &[]);
        let sentence = refusal(&path).unwrap();
        assert!(
            sentence.contains(family) && sentence.contains("supported: llama, qwen2, qwen3"),
            "{sentence}"
        );
    }
    for (kind, name) in [(16, "iq2_xxs"), (18, "iq3_xxs"), (22, "iq2_s"), (34, "tq1_0"), (40, "nvfp4")] {
        let (_folder, path) = file(Arch::Llama2, &[], &[]);
        let mut bytes = std::fs::read(&path).unwrap();
        let tensor = b"blk.0.attn_q.weight";
        let entry = bytes.windows(tensor.len()).position(|window| window == tensor).unwrap() + tensor.len();
        // Behind the name: the number of dimensions, two of them, the type.
        bytes[entry + 20..entry + 24].copy_from_slice(&u32::to_le_bytes(kind));
        std::fs::write(&path, bytes).unwrap();
        let sentence = refusal(&path).unwrap();
        assert!(sentence.contains(&format!("is {name}; supported")), "{sentence}");
    }
}

/// A factor without a type of scaling is that of linear scaling.
#[test]
fn a_rope_factor_without_a_type_scales_linearly() {
    let config = |entries: &[(&str, GgufValue)]| {
        let (_folder, path) = file(Arch::Llama2, entries, &[]);
        ModelDir::open(&ModelSource::Directory(path)).unwrap().config().ropes[0].scaling.clone()
    };
    let linear = format!("{:?}", config(&[("llama.rope.scaling.factor", GgufValue::F32(4.0))]));
    assert!(linear.contains("Linear") && linear.contains('4'), "{linear}");
    for (key, factor) in [("llama.rope.scaling.factor", 1.0), ("llama.rope.scale_linear", 1.0)] {
        assert_eq!(format!("{:?}", config(&[(key, GgufValue::F32(factor))])), "None");
    }
    let legacy = format!("{:?}", config(&[("llama.rope.scale_linear", GgufValue::F32(2.0))]));
    assert!(legacy.contains("Linear"), "{legacy}");
}

/// Wraps a checkpoint of Gemma 3 as the language model of its multimodal model, with the names of this prefix.
fn multimodal_gemma(prefix: &'static str, more: Vec<Change>) -> TempDir {
    multimodal(Arch::Gemma3, prefix, more)
}

/// Wraps a checkpoint as the language model of its multimodal model, with the names of this prefix.
fn multimodal(arch: Arch, prefix: &'static str, more: Vec<Change>) -> TempDir {
    let inner = Checkpoint::new(arch, Dtype::Bf16).config();
    let (wrapper, vision) = match arch {
        Arch::Qwen35 => (
            "Qwen3_5ForConditionalGeneration",
            [
                Tensor("model.visual.patch_embed.proj.weight", "BF16", &[4, 4]),
                Tensor("mtp.layers.0.input_layernorm.weight", "BF16", &[4]),
            ],
        ),
        _ => (
            "Gemma3ForConditionalGeneration",
            [
                Tensor("vision_tower.vision_model.embeddings.patch_embedding.weight", "BF16", &[4, 4]),
                Tensor("multi_modal_projector.mm_soft_emb_norm.weight", "BF16", &[4]),
            ],
        ),
    };
    let mut config = json!({
        "architectures": [wrapper],
        "text_config": inner,
        "vision_config": { "hidden_size": 4 },
        "eos_token_id": [2, 3],
    });
    // Its own file has these beside the language model only.
    for name in ["architectures", "bos_token_id", "eos_token_id"] {
        config["text_config"].as_object_mut().unwrap().remove(name);
    }
    let file = Box::leak(config.to_string().into_boxed_str());
    let mut changes = vec![Names("model.", prefix), File("config.json", file)];
    changes.extend(vision);
    changes.extend(more);
    directory(arch, &changes)
}

#[test]
fn the_language_model_of_a_multimodal_one_is_served() {
    let open = |path: &Path| ModelDir::open(&ModelSource::Directory(path.to_owned())).unwrap();
    for arch in [Arch::Gemma3, Arch::Qwen35] {
        let plain = Checkpoint::new(arch, Dtype::Bf16).write_temp().unwrap();
        for prefix in ["model.language_model.", "language_model.model."] {
            let folder = multimodal(arch, prefix, vec![]);
            let (wrapped, plain) = (open(folder.path()), open(plain.path()));
            assert_eq!(wrapped.config().layers, plain.config().layers, "{arch} {prefix}");
            assert_eq!(wrapped.config().ropes, plain.config().ropes, "{arch} {prefix}");
            assert_eq!(wrapped.config().delta, plain.config().delta, "{arch} {prefix}");
            assert_eq!(wrapped.config().arithmetic, plain.config().arithmetic, "{arch} {prefix}");
            assert_eq!(wrapped.config().eos_token_ids, [2, 3], "{arch} {prefix}");
        }
    }
    // A tensor that is neither of the language model nor of images is none that may be left out.
    let odd = vec![Tensor("model.audio_tower.weight", "BF16", &[4, 4])];
    let refusal = refusal(multimodal_gemma("model.language_model.", odd).path());
    assert!(refusal.as_ref().is_some_and(|sentence| sentence.contains("audio_tower")), "{refusal:?}");
}

#[test]
fn recurrent_layers_have_shapes_that_are_computed() {
    for (change, clue) in [
        (json!({ "linear_conv_kernel_dim": 1 }), "`linear_conv_kernel_dim` is 1; it must be from 2 to 16"),
        (json!({ "linear_conv_kernel_dim": 17 }), "linear_conv_kernel_dim"),
        (
            json!({ "linear_key_head_dim": 24 }),
            "`linear_key_head_dim` is 24; it must be a multiple of 16 up to 256",
        ),
        (json!({ "linear_value_head_dim": 272 }), "linear_value_head_dim"),
        (json!({ "linear_num_value_heads": 3 }), "a multiple of the 2 key heads"),
        (json!({ "rope_parameters": { "partial_rotary_factor": 0.3 } }), "an even number of the 32 elements"),
        (json!({ "rope_parameters": { "partial_rotary_factor": 1.5 } }), "above 0 and at most 1"),
        (json!({ "layer_types": vec!["linear_attention"; 4] }), "such that a layer has full attention"),
        (json!({ "full_attention_interval": 5 }), "such that a layer has full attention"),
        (json!({ "full_attention_interval": 2 }), "has no tensor model.layers.1.self_attn.q_proj.weight"),
        (json!({ "layer_types": vec!["mamba"; 4] }), "full_attention, sliding_attention, linear_attention"),
        (json!({ "attn_output_gate": false }), "self_attn.q_proj"),
        (json!({ "num_experts": 4 }), "a mixture of experts"),
        (
            json!({ "architectures": ["Qwen3NextForCausalLM"], "num_experts": 512, "decoder_sparse_step": 1 }),
            "a mixture of experts",
        ),
        (json!({ "architectures": ["Qwen3NextForCausalLM"] }), "linear_attn.in_proj_qkvz.weight"),
    ] {
        let refusal = refusal(directory(Arch::Qwen35, &[Config(change.clone())]).path());
        assert!(refusal.as_ref().is_some_and(|sentence| sentence.contains(clue)), "{change}: {refusal:?}");
    }
    // Other architectures have none.
    let types = json!({ "layer_types": ["linear_attention", "full_attention"] });
    let refusal = refusal(directory(Arch::Qwen3, &[Config(types)]).path());
    assert!(refusal.as_ref().is_some_and(|sentence| sentence.contains("linear_attention")), "{refusal:?}");
}

#[test]
fn an_mtp_layer_of_another_model_is_refused_where_it_is_to_draft_and_ignored_elsewhere() {
    let open = |changes: &[Change]| {
        let folder = directory(Arch::Qwen35, changes);
        let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
        assert!(model.decoder().is_ok(), "it is served without drafts");
        model
    };
    let one = || Config(json!({ "mtp_num_hidden_layers": 1 }));
    for (changes, clue) in [
        (vec![one(), Tensor("mtp.fc.weight", "BF16", &[64, 64])], "mtp.fc.weight"),
        (vec![one(), Tensor("mtp.fc.weight", "BF16", &[64, 128])], "mtp.pre_fc_norm_embedding.weight"),
    ] {
        let model = open(&changes);
        assert!(model.has_mtp());
        let refusal = model.mtp().err().map(|error| error.to_string());
        assert!(refusal.as_ref().is_some_and(|sentence| sentence.contains(clue)), "{refusal:?}");
    }
    let two = Config(json!({ "mtp_num_hidden_layers": 2 }));
    let own = Config(json!({ "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": true }));
    for changes in [vec![one()], vec![two, Tensor("mtp.fc.weight", "BF16", &[64, 128])], vec![own]] {
        let model = open(&changes);
        assert!(!model.has_mtp() && model.mtp().unwrap().is_none());
    }
}

#[test]
fn a_multimodal_model_ties_its_embeddings_as_config_json_says_at_either_place() {
    let tied = |outer: Option<bool>, inner: Option<bool>| {
        let head = Tensor("lm_head.weight", "BF16", &[320, 96]);
        let folder = multimodal_gemma("model.language_model.", vec![head]);
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["text_config"].as_object_mut().unwrap().remove("tie_word_embeddings");
        for (place, value) in [("", outer), ("text_config", inner)] {
            let object = if place.is_empty() { &mut config } else { &mut config[place] };
            if let Some(value) = value {
                object["tie_word_embeddings"] = value.into();
            }
        }
        std::fs::write(&path, config.to_string()).unwrap();
        let opened = ModelDir::open(&ModelSource::Directory(folder.path().to_owned()));
        opened.map(|model| model.config().tied_embeddings).map_err(|error| error.to_string())
    };
    assert_eq!(tied(None, None), Ok(true));
    assert_eq!(tied(Some(true), None), Ok(true));
    assert_eq!(tied(None, Some(true)), Ok(true));
    assert_eq!(tied(Some(false), None), Ok(false));
    assert!(tied(Some(false), Some(true)).is_err_and(|error| error.contains("tie_word_embeddings")));
}

#[test]
fn layers_with_a_window_need_its_size() {
    let folder = Checkpoint::new(Arch::Mistral, Dtype::Bf16).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
    config["layer_types"] = json!(vec!["sliding_attention"; layers]);
    config["sliding_window"] = Value::Null;
    std::fs::write(&path, config.to_string()).unwrap();
    let sentence = refusal(folder.path()).unwrap_or_default();
    assert!(sentence.contains("`sliding_window` is"), "{sentence}");
}

#[test]
fn keys_that_gemma_3_leaves_out_have_its_defaults() {
    let inner = json!({
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 12, "sliding_window": 1024,
        "intermediate_size": 10240, "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
    });
    let folder = Checkpoint::new(Arch::Gemma3, Dtype::Bf16).write_temp().unwrap();
    std::fs::write(folder.path().join("config.json"), inner.to_string()).unwrap();
    // The shapes differ from the weights', so the sentence names the first tensor, with the defaults.
    let sentence = refusal(folder.path()).unwrap();
    assert!(sentence.contains("[262208, 2560]"), "{sentence}");
}
