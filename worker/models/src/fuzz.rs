//! Entry points for fuzzing: each parses any bytes as one kind of model file and checks what must hold of every
//! accepted one. They return whether the input was accepted.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use inflight_kernels::Encoding;
use inflight_kernels::cpu::HEAD_DIM_MAX;
use serde_json::Value;

use super::fields::Fields;
use super::gguf::{self, Gguf};
use super::tensors::Tensors;
use super::weight_file::WeightFile;
use super::{GenerationDefaults, LayerSpec, ModelConfig};

/// Label of the input in error messages.
const LABEL: &str = "input";
/// Largest tensor that is converted to f32, in elements.
const ELEMENTS_MAX: usize = 1 << 14;

/// Returns an open file with these bytes and no name, in memory where the system allows it.
fn weight_file(data: &[u8]) -> WeightFile {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!("inflight-fuzz-{}-{number}", std::process::id()));
    let mut file =
        File::options().read(true).write(true).create_new(true).open(&path).expect("the file can be created");
    file.write_all(data).expect("the file can be written");
    fs::remove_file(&path).expect("the file can be removed");
    WeightFile::new(LABEL.to_owned(), file).expect("an open file has an identity")
}

/// GGUF file: its tensors lie within it and can be read, its metadata gives a valid configuration or an error.
///
/// # Panics
/// If one of these does not hold.
pub fn gguf(data: &[u8]) -> bool {
    let content = Arc::new(weight_file(data));
    let Ok(file) = Gguf::parse(&content) else { return false };
    for tensor in &file.tensors {
        let bytes = &data[tensor.range.start as usize..tensor.range.end as usize];
        if let Ok(encoding) = tensor.encoding {
            check_tensor(encoding, &tensor.shape, bytes);
        }
    }
    if let Ok(map) = gguf::config(&file, std::slice::from_ref(&content))
        && let Ok(config) = ModelConfig::of(&Fields::of(LABEL.to_owned(), map))
    {
        check_config(&config);
    }
    if let Ok(files) = gguf::tokenizer(&file) {
        for (name, content) in files {
            let parsed = serde_json::from_str::<Value>(&content.to_string());
            assert!(parsed.is_ok_and(|parsed| parsed.is_object()), "{name} is no JSON object");
        }
    }
    true
}

/// Safetensors file: its tensors lie within it, do not overlap and can be read.
///
/// # Panics
/// If one of these does not hold.
pub fn safetensors(data: &[u8]) -> bool {
    let Ok(tensors) = Tensors::of_safetensors(weight_file(data)) else { return false };
    let mut ranges = Vec::new();
    for (name, entry) in tensors.entries() {
        let range = entry.content.range();
        let expected = &data[range.start as usize..range.end as usize];
        let bytes = entry.content.read(0..entry.content.len()).expect("the file has not changed");
        assert!(*bytes == *expected, "{name} has other bytes than the file");
        if let Ok(encoding) = entry.encoding {
            check_tensor(encoding, &entry.shape, &bytes);
        }
        if !bytes.is_empty() {
            ranges.push((range.start, range.end, name));
        }
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].1 <= pair[1].0, "{} and {} overlap", pair[0].2, pair[1].2);
    }
    true
}

/// config.json, and the same object as generation_config.json: an accepted one is within the documented bounds.
///
/// # Panics
/// If it is not.
pub fn config(data: &[u8]) -> bool {
    let Ok(Value::Object(map)) = serde_json::from_slice(data) else { return false };
    let Ok(config) = ModelConfig::of(&Fields::of(LABEL.to_owned(), map.clone())) else { return false };
    check_config(&config);
    let fields = Fields::of(LABEL.to_owned(), map);
    let Ok(defaults) = GenerationDefaults::of(Some(fields), &config) else { return true };
    let ids = &defaults.eos_token_ids;
    assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|id| (*id as usize) < config.vocab_size));
    true
}

/// Checks that a tensor has as many bytes as its shape says, and converts it.
fn check_tensor(encoding: Encoding, shape: &[usize], bytes: &[u8]) {
    let elements: usize = shape.iter().product();
    assert_eq!(bytes.len(), encoding.bytes(elements), "{encoding} of shape {shape:?}");
    if elements <= ELEMENTS_MAX {
        encoding.widen(bytes, &mut vec![0.0; elements]);
    }
}

fn check_config(config: &ModelConfig) {
    let ModelConfig { heads, kv_heads, head_dim, .. } = *config;
    assert!(heads.is_multiple_of(kv_heads), "{heads} heads, {kv_heads} KV heads");
    assert!((2..=HEAD_DIM_MAX).contains(&head_dim) && head_dim.is_multiple_of(2), "{head_dim}");
    assert!(!config.layers.is_empty(), "no layers");
    let sound = |layer: &LayerSpec| match layer.attention() {
        Some(attention) => attention.window != Some(0) && attention.rope < config.ropes.len(),
        None => config.delta.is_some(),
    };
    assert!(config.layers.iter().all(sound), "{:?}", config.layers);
    let sizes = [config.vocab_size, config.hidden_size, config.intermediate_size];
    assert!(sizes.iter().all(|size| *size > 0), "{sizes:?}");
    assert!(config.ropes.iter().all(|rope| rope.theta.is_finite() && rope.theta > 0.0));
    let score_size = config.arithmetic.score_size;
    assert!(config.context_tokens > 0 && score_size.is_finite() && score_size > 0.0);
    assert!(config.norm_eps.is_finite() && config.norm_eps >= 0.0);
}
