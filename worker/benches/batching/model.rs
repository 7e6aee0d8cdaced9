//! Models of the benchmark: a checkpoint, one with a longer context, or random weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use inflight_fixtures::TempDir;
use inflight_models::{ModelDir, ModelSource};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use crate::options::{BenchResult, Options};
use crate::stats::SplitMix64;

/// Directory of the demo model and its weight file.
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/demo");
const DEMO_WEIGHTS: &str = "inflight-demo.gguf";

/// Opened model.
pub struct BenchModel {
    pub dir: ModelDir,
    pub name: String,
    /// Temporary directory of a generated model.
    _folder: Option<TempDir>,
}

impl BenchModel {
    /// Opens the model that the options name; its context length is `--context`, else `context`, else the
    /// model's own.
    pub fn open(options: &Options, context: Option<u32>) -> BenchResult<Self> {
        let context = options.get("context")?.or(context);
        let shape: Option<String> = options.get("random")?;
        let given: Option<PathBuf> = options.get("model")?;
        let (folder, path) = match (shape, &given, context) {
            (Some(shape), ..) => {
                random(&shape, context.unwrap_or(1024), options.number("vocab", 2048, 512)?)?
            }
            (None, Some(given), Some(context)) => stretch(given, context)?,
            (None, None, Some(context)) => stretch_demo(context)?,
            (None, given, None) => {
                let source = given.clone().map_or(ModelSource::Embedded, ModelSource::Directory);
                let dir = ModelDir::open(&source)?;
                return Ok(Self { name: dir.name().to_owned(), dir, _folder: None });
            }
        };
        let dir = ModelDir::open(&ModelSource::Directory(path))?;
        let stem = given.map_or_else(|| "demo model".to_owned(), |path| path.display().to_string());
        let name = options.get("random")?.map_or(stem, |shape: String| format!("random weights {shape}"));
        let context = dir.config().context_tokens;
        Ok(Self { name: format!("{name}, {context} positions"), dir, _folder: Some(folder) })
    }
}

/// Creates a copy of a model directory with `context` as the context length.
fn stretch(model: &Path, context: u32) -> BenchResult<(TempDir, PathBuf)> {
    let folder = TempDir::new("inflight-batching")?;
    link(model, &folder, &["config.json"])?;
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(model.join("config.json"))?)?;
    config["max_position_embeddings"] = context.into();
    std::fs::write(folder.path().join("config.json"), config.to_string())?;
    let path = folder.path().to_owned();
    Ok((folder, path))
}

/// Creates a copy of the demo model with `context` as the context length.
fn stretch_demo(context: u32) -> BenchResult<(TempDir, PathBuf)> {
    const KEY: &[u8] = b"llama.context_length";
    let folder = TempDir::new("inflight-batching")?;
    link(DEMO.as_ref(), &folder, &[DEMO_WEIGHTS])?;
    let mut weights = std::fs::read(Path::new(DEMO).join(DEMO_WEIGHTS))?;
    let key = weights.windows(KEY.len()).position(|bytes| bytes == KEY).ok_or("no context length")?;
    // After the key, the type of the value in 4 bytes.
    let value = key + KEY.len() + 4;
    weights[value..value + 4].copy_from_slice(&context.to_le_bytes());
    let path = folder.path().join(DEMO_WEIGHTS);
    std::fs::write(&path, weights)?;
    Ok((folder, path))
}

/// Creates a Llama model of the shape `WIDTHxLAYERS` with `vocab` tokens and random bf16 weights.
fn random(shape: &str, context: u32, vocab: u32) -> BenchResult<(TempDir, PathBuf)> {
    let wrong = || format!("--random is `{shape}`; it must be WIDTHxLAYERS, the width a multiple of 128");
    let (width, layers) = shape.split_once('x').ok_or_else(wrong)?;
    let (width, layers): (usize, usize) = (width.parse()?, layers.parse()?);
    if width == 0 || !width.is_multiple_of(128) || layers == 0 {
        return Err(wrong().into());
    }
    let folder = TempDir::new("inflight-batching")?;
    link(DEMO.as_ref(), &folder, &[DEMO_WEIGHTS])?;
    let (inner, head, vocab) = (width * 8 / 3 / 64 * 64, 64, vocab as usize);
    let (heads, kv_heads) = (width / head, width / head / 2);
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": true,
        "bos_token_id": 0,
        "eos_token_id": 1,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string())?;
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, width]),
        ("model.norm.weight".to_owned(), vec![width]),
    ];
    for layer in 0..layers {
        let of_layer = [
            ("input_layernorm", vec![width]),
            ("post_attention_layernorm", vec![width]),
            ("self_attn.q_proj", vec![heads * head, width]),
            ("self_attn.k_proj", vec![kv_heads * head, width]),
            ("self_attn.v_proj", vec![kv_heads * head, width]),
            ("self_attn.o_proj", vec![width, heads * head]),
            ("mlp.gate_proj", vec![inner, width]),
            ("mlp.up_proj", vec![inner, width]),
            ("mlp.down_proj", vec![width, inner]),
        ];
        let named = of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape));
        shapes.extend(named);
    }
    let mut random_bits = SplitMix64(7);
    let scale = 2.0 / (width as f64).sqrt();
    let tensors: Vec<_> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let mut value = || match shape.len() {
                1 => 1.0, // a norm
                _ => scale * ((random_bits.next() >> 32) as f64 / f64::from(u32::MAX) - 0.5),
            };
            let count: usize = shape.iter().product();
            let bytes: Vec<u8> = (0..count).flat_map(|_| bf16::from_f64(value()).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views: Result<BTreeMap<_, _>, _> = tensors
        .iter()
        .map(|(name, shape, bytes)| {
            TensorView::new(Dtype::BF16, shape.clone(), bytes).map(|view| (name.clone(), view))
        })
        .collect();
    safetensors::serialize_to_file(views?, None, &folder.path().join("model.safetensors"))?;
    let path = folder.path().to_owned();
    Ok((folder, path))
}

/// Symlinks a model's files except `without` into `folder`.
fn link(model: &Path, folder: &TempDir, without: &[&str]) -> BenchResult<()> {
    for entry in std::fs::read_dir(model)? {
        let path = std::path::absolute(entry?.path())?;
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if path.is_file() && !without.contains(&name) {
            std::os::unix::fs::symlink(&path, folder.path().join(name))?;
        }
    }
    Ok(())
}
