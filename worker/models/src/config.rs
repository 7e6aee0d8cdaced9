//! Model configuration: architecture and shape, from config.json.

use std::sync::Arc;

use inflight_kernels::cpu::{HEAD_DIM_MAX, RopeScaling};
use serde_json::Value;

use super::Error;
use super::architecture::{Architecture, ArchitectureSpec, Bias, SlidingWindow};
use super::config_keys;
use super::fields::Fields;
use super::files::Files;
use super::gguf;

/// Sanity bounds far above every supported model, so that a broken file can't request absurd amounts of
/// memory.
const WIDTH_MAX: u32 = 1 << 20;
const LAYERS_MAX: u32 = 1 << 10;
const TOKENS_MAX: u32 = 1 << 28;

/// Shape and options of a decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Model architecture.
    pub architecture: Architecture,
    /// Vocabulary size: rows of the embedding.
    pub vocab_size: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// MLP hidden size.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Base of the rotary embedding (RoPE).
    pub rope_theta: f64,
    /// RoPE scaling.
    pub rope_scaling: RopeScaling,
    /// Epsilon of RMSNorm.
    pub norm_eps: f32,
    /// The LM head shares the embedding's weights.
    pub tied_embeddings: bool,
    /// The QKV projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The MLP projections have biases.
    pub mlp_bias: bool,
    /// Queries and keys are normalized per head (QK-norm).
    pub qk_norm: bool,
    /// Sliding window of each layer in positions, including the query's own; `None`: full attention.
    pub windows: Vec<Option<u32>>,
    /// Maximum tokens of a sequence.
    pub context_tokens: u32,
    /// EOS token ids of config.json.
    pub eos_token_ids: Vec<u32>,
    /// BOS token id.
    pub bos_token_id: Option<u32>,
}

impl ModelConfig {
    pub(super) fn read(files: &Files) -> Result<Self, Error> {
        match Fields::read(files, "config.json")? {
            Some(fields) => Self::of(&fields),
            None => Err(Error::MissingFile { file: files.label("config.json"), advice: advice(files)? }),
        }
    }

    /// Validates the fields of a config.json.
    pub(super) fn of(fields: &Fields) -> Result<Self, Error> {
        let architecture = architecture(fields)?;
        let spec = architecture.spec();
        let hidden_size = fields.needed_count("hidden_size", WIDTH_MAX)?;
        let layers = fields.needed_count("num_hidden_layers", LAYERS_MAX)?;
        let heads = fields.needed_count("num_attention_heads", WIDTH_MAX)?;
        let kv_heads = match fields.count("num_key_value_heads", WIDTH_MAX)? {
            Some(kv_heads) => kv_heads,
            None if spec.kv_heads_required => return Err(fields.missing("num_key_value_heads")),
            None => heads,
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(
                fields.bad("num_key_value_heads", &format!("a divisor of the {heads} attention heads"))
            );
        }
        let head_dim = head_dim(fields, spec.default_head_dim, hidden_size, heads)?;
        match fields.text("hidden_act")? {
            None | Some("silu" | "swish") => {}
            Some(other) => return Err(fields.unsupported("hidden_act", other, "silu")),
        }
        let (rope_theta, rope_scaling) = rope(fields, head_dim)?;
        config_keys::check(fields, head_dim)?;
        check_biases(fields, spec)?;
        let norm_eps = match fields.number("rms_norm_eps")?.unwrap_or(1e-6) {
            eps if (0.0..=1.0).contains(&eps) => eps as f32,
            _ => return Err(fields.bad("rms_norm_eps", "a number from 0 to 1")),
        };
        Ok(Self {
            architecture,
            vocab_size: fields.needed_count("vocab_size", TOKENS_MAX)?,
            hidden_size,
            intermediate_size: fields.needed_count("intermediate_size", WIDTH_MAX)?,
            layers,
            heads,
            kv_heads,
            head_dim,
            rope_theta,
            rope_scaling,
            norm_eps,
            tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: spec.biases.qkv.read(fields)?,
            output_bias: spec.biases.output.read(fields)?,
            mlp_bias: spec.biases.mlp.read(fields)?,
            qk_norm: spec.qk_norm,
            windows: windows(fields, spec.sliding_window, layers)?,
            context_tokens: fields.needed_count("max_position_embeddings", TOKENS_MAX)? as u32,
            eos_token_ids: fields.tokens("eos_token_id")?.unwrap_or_default(),
            bos_token_id: fields.tokens("bos_token_id")?.and_then(|ids| ids.first().copied()),
        })
    }
}

/// Returns the architecture named in config.json.
fn architecture(fields: &Fields) -> Result<Architecture, Error> {
    let names = match fields.get("architectures") {
        None => return Err(fields.missing("architectures")),
        Some(Value::Array(names)) => names,
        Some(_) => return Err(fields.bad("architectures", "a list of names")),
    };
    names.iter().filter_map(Value::as_str).find_map(Architecture::by_name).ok_or_else(|| {
        let found: Vec<_> = names.iter().map(|name| name.as_str().unwrap_or("?")).collect();
        fields.unsupported("architectures", &found.join(", "), &Architecture::names())
    })
}

fn head_dim(fields: &Fields, default: Option<usize>, hidden: usize, heads: usize) -> Result<usize, Error> {
    let head_dim = match fields.count("head_dim", WIDTH_MAX)?.or(default) {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(fields.bad("num_attention_heads", &format!("a divisor of hidden_size, {hidden}")));
        }
    };
    if head_dim % 2 == 1 || head_dim > HEAD_DIM_MAX {
        let rule = format!("even and at most {HEAD_DIM_MAX}; it comes to {head_dim}");
        return Err(fields.bad("head_dim", &rule));
    }
    Ok(head_dim)
}

/// Returns what a directory without config.json seems to be, and what to do.
fn advice(files: &Files) -> Result<&'static str, Error> {
    Ok(if files.read("adapter_config.json")?.is_some() {
        "the directory has an adapter_config.json: it is a LoRA adapter, which is not served; merge it into its base \
         model and serve the result"
    } else if files.read("params.json")?.is_some() {
        "the directory has a params.json: it is in the layout of its publisher; take the model's files in the layout of \
         Hugging Face"
    } else if !files.list(".", ".gguf")?.is_empty() {
        "the directory has GGUF files; give one of them instead of the directory"
    } else {
        "a model directory needs it; is this the right directory?"
    })
}

/// Checks that config.json asks for no biases that the architecture does not have.
fn check_biases(fields: &Fields, spec: &ArchitectureSpec) -> Result<(), Error> {
    let biases = [("attention_bias", &spec.biases.qkv), ("mlp_bias", &spec.biases.mlp)];
    for (name, bias) in biases {
        if matches!(bias, Bias::Never) && fields.flag(name)? == Some(true) {
            return Err(fields.unsupported(name, "biases", "this architecture without them"));
        }
    }
    Ok(())
}

/// Checks that the rotary embedding covers whole heads.
fn check_rotated_part(fields: &Fields) -> Result<(), Error> {
    match fields.number("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(_) => Err(fields.bad("partial_rotary_factor", "1, as only whole heads can be rotated")),
    }
}

/// Returns base and scaling of RoPE, from `rope_parameters` (transformers 5) or from `rope_theta` and
/// `rope_scaling`.
fn rope(fields: &Fields, head_dim: usize) -> Result<(f64, RopeScaling), Error> {
    const THETA: f64 = 10_000.0;
    check_rotated_part(fields)?;
    let base = fields.positive("rope_theta")?;
    let (field, scaling) = match fields.object("rope_parameters")? {
        Some(parameters) => ("rope_parameters", Some(parameters)),
        None => ("rope_scaling", fields.object("rope_scaling")?),
    };
    let Some(scaling) = scaling else { return Ok((base.unwrap_or(THETA), RopeScaling::None)) };
    check_rotated_part(&scaling)?;
    if let Some((kind, _)) = scaling.iter().find(|(_, value)| value.is_object()) {
        let found = "frequencies by layer type";
        return Err(fields.unsupported(
            &format!("{field}.{kind}"),
            found,
            "one rotary embedding for all layers",
        ));
    }
    let theta = scaling.positive("rope_theta")?.or(base).unwrap_or(THETA);
    let kind = match scaling.text("rope_type")? {
        Some(kind) => kind,
        None => scaling.text("type")?.unwrap_or("default"),
    };
    let needed =
        |name: &str| scaling.positive(name)?.ok_or_else(|| scaling.missing(&format!("{field}.{name}")));
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: needed("factor")? },
        "llama3" => {
            let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
            if high <= low {
                return Err(scaling.bad("high_freq_factor", "above low_freq_factor"));
            }
            RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: needed("original_max_position_embeddings")?,
            }
        }
        gguf::FREQUENCY_DIVISORS => RopeScaling::Divisors(frequency_divisors(&scaling, head_dim)?),
        other => {
            return Err(fields.unsupported(&format!("{field}.rope_type"), other, "default, linear, llama3"));
        }
    };
    Ok((theta, scaling))
}

/// Returns the divisors of the rotary frequencies of a GGUF file, one for each pair of a head's elements.
fn frequency_divisors(scaling: &Fields, head_dim: usize) -> Result<Arc<[f32]>, Error> {
    let divisors = scaling.get(gguf::FREQUENCY_DIVISORS).and_then(Value::as_array);
    let divisors: Option<Arc<[f32]>> = divisors.and_then(|divisors| {
        let positive =
            |divisor: &Value| divisor.as_f64().map(|d| d as f32).filter(|d| d.is_finite() && *d > 0.0);
        divisors.iter().map(positive).collect()
    });
    let expected = format!("a list of {} numbers above 0", head_dim / 2);
    let valid = divisors.filter(|divisors| divisors.len() == head_dim / 2);
    valid.ok_or_else(|| scaling.bad(gguf::FREQUENCY_DIVISORS, &expected))
}

/// Returns the kinds of attention in `layer_types`: whether a layer has a sliding window.
fn layer_types(fields: &Fields, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let Some(types) = fields.get("layer_types") else { return Ok(None) };
    let types = types.as_array().map(Vec::as_slice).unwrap_or_default();
    if types.len() != layers {
        return Err(fields.bad("layer_types", &format!("a list of {layers} names")));
    }
    let slides = types.iter().map(|kind| match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        other => Err(fields.unsupported(
            "layer_types",
            other.unwrap_or("something that is not a name"),
            "full_attention, sliding_attention",
        )),
    });
    slides.collect::<Result<_, _>>().map(Some)
}

/// Returns the sliding window of each layer.
fn windows(fields: &Fields, rule: SlidingWindow, layers: usize) -> Result<Vec<Option<u32>>, Error> {
    let types = layer_types(fields, layers)?;
    let size = fields.count("sliding_window", TOKENS_MAX)?.map(|window| window as u32);
    let enabled = match rule {
        SlidingWindow::Never => {
            let context = fields.needed_count("max_position_embeddings", TOKENS_MAX)? as u32;
            let switched_off = fields.flag("use_sliding_window")? == Some(false);
            let full = |types: &Vec<bool>| !types.contains(&true);
            let slides =
                size.filter(|size| *size < context && !switched_off && !types.as_ref().is_some_and(full));
            if slides.is_some() || types.as_ref().is_some_and(|types| types.contains(&true)) {
                let supported =
                    "full attention in this architecture; remove the key if the model was trained so";
                let field = if slides.is_some() { "sliding_window" } else { "layer_types" };
                return Err(fields.unsupported(field, "a sliding window", supported));
            }
            false
        }
        SlidingWindow::Always => true,
        SlidingWindow::Optional => fields.flag("use_sliding_window")?.unwrap_or(false),
    };
    let Some(window) = size.filter(|_| enabled) else { return Ok(vec![None; layers]) };
    if let Some(types) = types {
        return Ok(types.into_iter().map(|slides| slides.then_some(window)).collect());
    }
    // The first `max_window_layers` layers use full attention.
    let first = match (rule == SlidingWindow::Optional, fields.get("max_window_layers").map(Value::as_u64)) {
        (false, _) => 0,
        (true, Some(Some(first))) => first.min(layers as u64) as usize,
        (true, Some(None)) => return Err(fields.bad("max_window_layers", "a number of layers")),
        (true, None) => return Err(fields.missing("max_window_layers")),
    };
    Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect())
}
