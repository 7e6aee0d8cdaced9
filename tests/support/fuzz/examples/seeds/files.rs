//! Seeds of the parsers of model files.

use inflight_fixtures::{Arch, Checkpoint, ConfigStyle, Dtype, Family, GgufTensor, GgufValue, gguf};
use inflight_kernels::Encoding;
use serde_json::{Value, json};

use super::{Result, Seeds};

/// Configuration of every architecture, in both styles.
pub fn config() -> Result<Seeds> {
    let mut seeds = Seeds::new();
    for arch in Arch::all() {
        for (style, name) in [(ConfigStyle::Transformers4, "v4"), (ConfigStyle::Transformers5, "v5")] {
            let config = Checkpoint::new(*arch, Dtype::F32).styled(style).config();
            seeds.push((format!("{}-{name}", arch.name()), serde_json::to_vec(&config)?));
        }
    }
    let windows = json!({
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 4, "vocab_size": 9, "max_position_embeddings": 16,
        "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 1, "eos_token_id": [8, 2, -1],
        "top_k": 5, "temperature": 0.5, "do_sample": true,
    });
    seeds.push(("windows".to_owned(), serde_json::to_vec(&windows)?));
    Ok(seeds)
}

/// GGUF files with one layer's metadata, each with tensors of one encoding, with and without a vocabulary.
pub fn gguf_files() -> Result<Seeds> {
    let tensor = |name: &str, kind: u32, row: usize, bytes: usize| GgufTensor {
        name: name.to_owned(),
        shape: vec![2, row],
        kind,
        bytes: (0..2 * bytes).map(|at| at as u8).collect(),
    };
    let block = |encoding: Encoding| {
        (encoding.to_string(), encoding.ggml_type(), encoding.block(), encoding.block_bytes())
    };
    let plain = [("f32", 0, 2, 8), ("f16", 1, 2, 4), ("bf16", 30, 2, 4), ("unknown", 77, 2, 8)];
    let plain = plain.map(|(name, kind, row, bytes)| (name.to_owned(), kind, row, bytes));
    let encodings = plain.into_iter().chain(Encoding::blocks().map(block));
    let mut seeds = Seeds::new();
    for (at, (name, kind, row, bytes)) in encodings.enumerate() {
        let family = ["llama", "qwen2", "qwen3"][at % 3];
        let mut metadata = metadata(family);
        if at % 2 == 0 {
            metadata.extend(vocabulary(["llama-bpe", "qwen2", "default"][at % 3]));
        }
        let tensors = [
            tensor("token_embd.weight", kind, row, bytes),
            tensor("blk.0.attn_q.weight", kind, row, bytes),
            tensor("output.weight", kind, row, bytes),
        ];
        seeds.push((name, gguf(&metadata, &tensors)));
    }
    Ok(seeds)
}

fn metadata(family: &str) -> Vec<(String, GgufValue)> {
    let own = |name: &str, value| (format!("{family}.{name}"), value);
    vec![
        ("general.architecture".to_owned(), GgufValue::Text(family.to_owned())),
        ("general.alignment".to_owned(), GgufValue::U32(32)),
        own("block_count", GgufValue::U32(1)),
        own("embedding_length", GgufValue::U32(8)),
        own("feed_forward_length", GgufValue::U32(16)),
        own("context_length", GgufValue::U32(64)),
        own("attention.head_count", GgufValue::U32(2)),
        own("attention.head_count_kv", GgufValue::U32(1)),
        own("attention.key_length", GgufValue::U32(4)),
        own("attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5)),
        own("rope.freq_base", GgufValue::F32(10_000.0)),
        own("rope.scaling.type", GgufValue::Text("linear".to_owned())),
        own("rope.scaling.factor", GgufValue::F32(2.0)),
    ]
}

fn vocabulary(rule: &str) -> Vec<(String, GgufValue)> {
    let own = |name: &str, value| (format!("tokenizer.ggml.{name}"), value);
    let texts = |texts: &[&str]| GgufValue::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
    vec![
        own("model", GgufValue::Text("gpt2".to_owned())),
        own("pre", GgufValue::Text(rule.to_owned())),
        own("tokens", texts(&["a", "b", "ab", "<s>"])),
        own("token_type", GgufValue::Ints(vec![1, 1, 1, 3])),
        own("merges", texts(&["a b"])),
        own("bos_token_id", GgufValue::U32(3)),
        own("eos_token_id", GgufValue::U32(3)),
        own("add_bos_token", GgufValue::Bool(true)),
        ("tokenizer.chat_template".to_owned(), GgufValue::Text("{{ messages[0].content }}".to_owned())),
    ]
}

/// Safetensors files with few elements.
pub fn safetensors() -> Result<Seeds> {
    let file = |header: &Value, bytes: usize| -> Result<Vec<u8>> {
        let header = serde_json::to_vec(header)?;
        let length = (header.len() as u64).to_le_bytes();
        Ok([&length[..], &header, &vec![7; bytes]].concat())
    };
    let tensor = |dtype: &str, shape: &[usize], offsets: [usize; 2]| json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
    let seeds = [
        ("empty", file(&json!({}), 0)?),
        ("f32", file(&json!({"a": tensor("F32", &[2, 3], [0, 24])}), 24)?),
        (
            "several",
            file(
                &json!({
                    "__metadata__": {"format": "pt"},
                    "a": tensor("BF16", &[4], [0, 8]), "b": tensor("F16", &[1, 2], [8, 12]),
                    "c": tensor("I64", &[1], [12, 20]), "d": tensor("F32", &[], [20, 24]),
                    "e": tensor("U8", &[0], [24, 24]),
                }),
                24,
            )?,
        ),
        ("overlap", file(&json!({"a": tensor("F32", &[2], [0, 8]), "b": tensor("F32", &[2], [4, 12])}), 12)?),
        ("reversed", file(&json!({"a": tensor("F32", &[2], [8, 0])}), 8)?),
        ("large", file(&json!({"a": tensor("F32", &[usize::MAX, 2], [0, 8])}), 8)?),
        ("past", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
    ];
    Ok(seeds.map(|(name, content)| (name.to_owned(), content)).into())
}

/// Every family's tokenizer as it is and with other steps, with a text.
pub fn tokenizers() -> Result<Seeds> {
    type Change = (&'static str, fn(&mut Value));
    let changes: [Change; 4] = [
        ("nfc", |tokenizer| tokenizer["normalizer"] = json!({"type": "NFC"})),
        ("lowercase", |tokenizer| {
            tokenizer["normalizer"] =
                json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]});
        }),
        ("strip", |tokenizer| tokenizer["added_tokens"][0]["rstrip"] = json!(true)),
        ("digits", |tokenizer| {
            tokenizer["pre_tokenizer"] = json!({"type": "Digits", "individual_digits": true});
        }),
    ];
    let text = "A naïve text, 12 words\n\n  and \u{1f642}.";
    let mut seeds = Seeds::new();
    for family in Family::all() {
        let whole: Value = serde_json::from_str(family.tokenizer_json())?;
        let mut add = |name: &str, tokenizer: &Value| -> Result<()> {
            let content = [&serde_json::to_vec(tokenizer)?, &[0][..], text.as_bytes()].concat();
            seeds.push((format!("{}-{name}", family.name()), content));
            Ok(())
        };
        add("whole", &whole)?;
        for (name, change) in changes {
            let mut changed = whole.clone();
            change(&mut changed);
            add(name, &changed)?;
        }
    }
    for (name, model) in [
        ("bpe", json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]})),
        ("wordlevel", json!({"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"})),
        ("unigram", json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]})),
        (
            "wordpiece",
            json!({"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                             "max_input_chars_per_word": 9, "vocab": {"a": 0, "##b": 1}}),
        ),
    ] {
        let tokenizer = json!({"version": "1.0", "model": model, "decoder": {"type": "ByteLevel",
                               "add_prefix_space": false, "trim_offsets": false, "use_regex": false}});
        let content = [&serde_json::to_vec(&tokenizer)?, &[0][..], b"ab a"].concat();
        seeds.push((format!("small-{name}"), content));
    }
    Ok(seeds)
}

/// Every family's chat template with a conversation, and templates of single features.
pub fn templates() -> Result<Seeds> {
    let mut seeds = Seeds::new();
    for family in Family::all() {
        let config: Value = serde_json::from_str(family.tokenizer_config_json())?;
        let source = config["chat_template"].as_str().unwrap_or_default();
        seeds.push((family.name().to_owned(), format!("{source}\0Hi\0Hello!\0Be brief.").into_bytes()));
    }
    let features = [
        "{{ bos_token }}{% for m in messages %}{{ loop.index }}{{ m['content'].strip() | tojson }}{% endfor %}",
        "{% set ns = namespace(x='') %}{% for i in range(9) %}{% set ns.x = ns.x ~ i %}{% endfor %}{{ ns.x }}",
        "{% macro f(x, y=1) %}{{ x * y }}{% endmacro %}{{ f(3) }}{{ f('a', y=4) }}",
        "{{ raise_exception('no ' + messages[0]['role']) }}",
        "{{ messages | tojson(indent=2) }}{{ {'a': [1, 2.5, none, true]} | tojson }}",
        "{% if messages[0].content.startswith('H') and not x is defined %}{{ 'a'.upper().split('A') }}{% endif %}",
        "{{ 'x' * 3 }}{{ [1, 2] + [3] }}{{ messages[::-1][0].role }}{{ -7 // 2 }}{{ 2 ** 10 }}",
        "{%- for i in range(3) -%}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% break %}{%- endfor -%}",
        "{{ messages | map(attribute='content') | join(', ') | replace('i', 'o') | trim | title }}",
        "{% set x %}block{% endset %}{% filter upper %}{{ x }}{% endfilter %}{% raw %}{{ y }}{% endraw %}{# c #}",
        "{{ '%s and %d' | format('a', 3) }}{{ messages[0].content | indent(4) | length }}",
    ];
    for (at, source) in features.into_iter().enumerate() {
        seeds.push((format!("feature-{at:02}"), format!("{source}\0Hi there").into_bytes()));
    }
    Ok(seeds)
}
