//! Conversion of GGUF metadata to the fields of a config.json.

use serde_json::{Map, Value, json};

use super::super::{Architecture, Error};
use super::Gguf;

/// Converts the metadata to the config.json of the same model.
///
/// # Errors
/// A required entry is missing, or an entry requests an unsupported feature.
pub(in super::super) fn config(gguf: &Gguf) -> Result<Map<String, Value>, Error> {
    let unsupported = |field: &str, found: &str, supported: &str| Error::Unsupported {
        file: gguf.label.clone(),
        field: field.to_owned(),
        found: found.to_owned(),
        supported: supported.to_owned(),
    };
    let missing = |field: &str| Error::MissingField { file: gguf.label.clone(), field: field.to_owned() };
    let get = |key: &str| gguf.metadata.get(key).filter(|value| !value.is_null());
    let family = get("general.architecture").and_then(Value::as_str);
    let family = family.ok_or_else(|| missing("general.architecture"))?;
    let known = Architecture::by_gguf_family(family).and_then(|known| Some((known, known.gguf()?)));
    let (architecture, spec) =
        known.ok_or_else(|| unsupported("general.architecture", family, &Architecture::gguf_families()))?;
    let own = |name: &str| get(&format!("{family}.{name}")).cloned();
    let needed = |name: &str| own(name).ok_or_else(|| missing(&format!("{family}.{name}")));
    if own("expert_count").and_then(|count| count.as_u64()).unwrap_or(0) > 0 {
        return Err(unsupported(&format!("{family}.expert_count"), "a mixture of experts", "dense models"));
    }
    let tensor = |name: &str| gguf.tensors.iter().find(|tensor| tensor.name == name);
    if tensor("rope_freqs.weight").is_some() {
        return Err(unsupported(
            "rope_freqs.weight",
            "rotary frequencies of its own",
            "those of a base and a factor",
        ));
    }
    let hidden = needed("embedding_length")?;
    let heads = needed("attention.head_count")?;
    let vocabulary = tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
    let vocabulary = vocabulary.ok_or_else(|| missing("token_embd.weight"))?;
    let token = |name: &str| get(&format!("tokenizer.ggml.{name}")).cloned();
    let mut config = json!({
        "architectures": [architecture.name()],
        "hidden_size": hidden,
        "num_hidden_layers": needed("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv").unwrap_or(heads),
        "intermediate_size": needed("feed_forward_length")?,
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon")?,
        "max_position_embeddings": needed("context_length")?,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tensor("output.weight").is_none(),
        "attention_bias": spec.optional_attention_bias && tensor("blk.0.attn_q.bias").is_some(),
        "rope_theta": own("rope.freq_base").unwrap_or(json!(10_000.0)),
        "head_dim": own("attention.key_length"),
        "bos_token_id": token("bos_token_id"),
        "eos_token_id": token("eos_token_id"),
    });
    if let Some(kind) = own("rope.scaling.type").as_ref().and_then(Value::as_str)
        && kind != "none"
    {
        // GGUF uses the names of config.json, so `ModelConfig` validates them.
        config["rope_scaling"] = json!({ "rope_type": kind, "factor": own("rope.scaling.factor") });
    }
    match config {
        Value::Object(map) => Ok(map),
        _ => Ok(Map::new()),
    }
}
