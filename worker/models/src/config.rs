//! Model configuration: architecture and shape, from config.json.

use std::sync::Arc;

use inflight_kernels::cpu::{Activation, HEAD_DIM_MAX, RopeScaling};
use serde_json::Value;

use super::Error;
use super::architecture::{
    Architecture, ArchitectureSpec, ArithmeticSpec, Bias, Ropes, ScoreSize, SlidingWindow,
};
use super::config_keys;
use super::fields::Fields;
use super::files::Files;
use super::gguf;
use super::gguf::GGUF_DELTA;
use super::{Arithmetic, AttentionSpec, DeltaForm, DeltaSpec, LayerSpec, Mixer, Rope};

/// Sanity bounds far above every supported model, so that a broken file can't request absurd amounts of
/// memory.
const WIDTH_MAX: u32 = 1 << 20;
const LAYERS_MAX: u32 = 1 << 10;
const TOKENS_MAX: u32 = 1 << 28;
/// Positions of a convolution, and elements of a head of a recurrent layer.
const TAPS_MAX: u32 = 16;
const DELTA_HEAD_MAX: usize = 256;

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
    /// Decoder layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Arithmetic that all layers share.
    pub arithmetic: Arithmetic,
    /// Rotary embeddings.
    pub ropes: Vec<Rope>,
    /// Elements of a head that are rotated, its first ones; even.
    pub rotated_dim: usize,
    /// Gated delta rule of the recurrent layers, if the model has some.
    pub delta: Option<DeltaSpec>,
    /// Layers of multi-token prediction behind the others, which draft tokens.
    pub mtp_layers: usize,
    /// They have an embedding of their own.
    pub mtp_embedding: bool,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
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
            Some(fields) => match architecture(&fields)?.1.flag(GGUF_DELTA)? {
                None => Self::of(&fields),
                Some(_) => {
                    Err(fields.unsupported(GGUF_DELTA, "the form of GGUF files", "that of checkpoints"))
                }
            },
            None => Err(Error::MissingFile { file: files.label("config.json"), advice: advice(files)? }),
        }
    }

    /// Validates the fields of a config.json.
    pub(super) fn of(outer: &Fields) -> Result<Self, Error> {
        let (architecture, fields) = architecture(outer)?;
        config_keys::quantization(outer)?;
        let fields = &fields;
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
        check_activation(fields, spec.arithmetic.activation)?;
        let types = layer_types(fields, layers)?;
        let recurrent = recurrent_layers(fields, spec.full_attention_interval, layers, types.as_deref())?;
        let windows = windows(fields, spec.sliding_window, layers, types)?;
        let rotated_dim = rotated_dim(fields, spec.rotated_part, head_dim)?;
        let ropes = ropes(fields, spec.ropes, rotated_dim)?;
        let rope_of = |window: &Option<u32>| usize::from(window.is_some() && ropes.len() > 1);
        config_keys::check(fields, spec.keys, head_dim)?;
        check_biases(fields, spec)?;
        // A multimodal model has them beside its language model or in it.
        let tokens = |field: &str| Ok(outer.tokens(field)?.or(fields.tokens(field)?));
        let norm_eps = match fields.number("rms_norm_eps")?.unwrap_or(1e-6) {
            eps if (0.0..=1.0).contains(&eps) => eps as f32,
            _ => return Err(fields.bad("rms_norm_eps", "a number from 0 to 1")),
        };
        Ok(Self {
            architecture,
            vocab_size: fields.needed_count("vocab_size", TOKENS_MAX)?,
            hidden_size,
            arithmetic: arithmetic(fields, spec, head_dim)?,
            intermediate_size: fields.needed_count("intermediate_size", WIDTH_MAX)?,
            layers: windows
                .iter()
                .zip(&recurrent)
                .map(|(window, recurrent)| LayerSpec {
                    mixer: match recurrent {
                        true => Mixer::Delta,
                        false => Mixer::Attention(AttentionSpec { window: *window, rope: rope_of(window) }),
                    },
                })
                .collect(),
            ropes,
            rotated_dim,
            delta: if recurrent.contains(&true) { Some(delta(fields, spec.fused_delta)?) } else { None },
            mtp_layers: fields.number("mtp_num_hidden_layers")?.map_or(0, |layers| layers as usize),
            mtp_embedding: fields.flag("mtp_use_dedicated_embeddings")?.unwrap_or(false),
            heads,
            kv_heads,
            head_dim,
            norm_eps,
            tied_embeddings: fields.flag(TIED)?.unwrap_or(false),
            qkv_bias: spec.biases.qkv.read(fields)?,
            output_bias: spec.biases.output.read(fields)?,
            mlp_bias: spec.biases.mlp.read(fields)?,
            qk_norm: spec.qk_norm,
            context_tokens: fields.needed_count("max_position_embeddings", TOKENS_MAX)? as u32,
            eos_token_ids: tokens("eos_token_id")?.unwrap_or_default(),
            bos_token_id: tokens("bos_token_id")?.and_then(|ids| ids.first().copied()),
        })
    }
}

/// Key of config.json, of a multimodal model beside `text_config` or in it.
const TIED: &str = "tie_word_embeddings";

/// Returns the architecture named in config.json, and the fields of the language model with the architecture's defaults.
fn architecture(fields: &Fields) -> Result<(Architecture, Fields), Error> {
    let names = match fields.get("architectures") {
        None => return Err(fields.missing("architectures")),
        Some(Value::Array(names)) => names,
        Some(_) => return Err(fields.bad("architectures", "a list of names")),
    };
    let known =
        names.iter().filter_map(Value::as_str).find_map(|name| Some((name, Architecture::by_name(name)?)));
    let Some((name, architecture)) = known else {
        let found: Vec<_> = names.iter().map(|name| name.as_str().unwrap_or("?")).collect();
        return Err(fields.unsupported("architectures", &found.join(", "), &Architecture::names()));
    };
    let mut own = if architecture.is_wrapped_by(name) {
        fields.object("text_config")?.ok_or_else(|| fields.missing("text_config"))?
    } else {
        fields.clone()
    };
    if let (Some(outer), Some(inner)) = (fields.flag(TIED)?, own.flag(TIED)?)
        && outer != inner
    {
        let supported = format!("the value of text_config, {inner}");
        return Err(fields.unsupported(TIED, &outer.to_string(), &supported));
    }
    if let Some(tied) = fields.get(TIED) {
        own.set_default(TIED, tied.clone());
    }
    for (key, default) in architecture.spec().defaults {
        own.set_default(key, default.value());
    }
    Ok((architecture, own))
}

/// Checks that config.json asks for the architecture's activation.
fn check_activation(fields: &Fields, activation: Activation) -> Result<(), Error> {
    let (field, names): (&str, &[&str]) = match activation {
        Activation::Silu => ("hidden_act", &["silu", "swish"]),
        Activation::GeluTanh => ("hidden_activation", &["gelu_pytorch_tanh", "gelu_tanh"]),
    };
    match fields.text(field)? {
        Some(other) if !names.contains(&other) => Err(fields.unsupported(field, other, names[0])),
        _ => Ok(()),
    }
}

/// Returns the arithmetic that all layers share.
fn arithmetic(fields: &Fields, spec: &ArchitectureSpec, head_dim: usize) -> Result<Arithmetic, Error> {
    let ArithmeticSpec { norms, zero_centred_norms, activation, score_size, scaled_embedding, output_gate } =
        spec.arithmetic;
    let zero_centred_norms = zero_centred_norms && !fields.flag(GGUF_DELTA)?.unwrap_or(false);
    let output_gate = output_gate && fields.flag("attn_output_gate")?.unwrap_or(true);
    let score_size = match score_size {
        ScoreSize::Head => head_dim as f64,
        ScoreSize::Field(name, default) => fields.positive(name)?.unwrap_or(default),
    };
    Ok(Arithmetic { norms, zero_centred_norms, activation, score_size, scaled_embedding, output_gate })
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
    } else if files.read("refs/main")?.is_some() {
        "the directory is that of a model in the Hub's cache; give the model's name, as in org/name, or a directory in its \
         `snapshots`"
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

/// Returns the elements of a head that are rotated. `part` is the architecture's default: 1 if it rotates whole heads.
fn rotated_dim(fields: &Fields, part: f64, head_dim: usize) -> Result<usize, Error> {
    let mut found = part;
    for fields in [Some(fields.clone()), fields.object("rope_scaling")?, fields.object("rope_parameters")?] {
        let Some(fields) = fields else { continue };
        match fields.number("partial_rotary_factor")? {
            None => {}
            Some(own) if part == 1.0 && own != 1.0 => {
                return Err(fields.bad("partial_rotary_factor", "1, as only whole heads can be rotated"));
            }
            Some(own) if own > 0.0 && own <= 1.0 => found = own,
            Some(_) => return Err(fields.bad("partial_rotary_factor", "above 0 and at most 1")),
        }
    }
    let rotated = (head_dim as f64 * found) as usize;
    if rotated == 0 || rotated % 2 == 1 {
        let rule = format!("such that an even number of the {head_dim} elements of a head are rotated");
        return Err(fields.bad("partial_rotary_factor", &rule));
    }
    Ok(rotated)
}

/// Returns which layers are recurrent.
fn recurrent_layers(
    fields: &Fields,
    interval: Option<usize>,
    layers: usize,
    types: Option<&[LayerType]>,
) -> Result<Vec<bool>, Error> {
    let Some(default) = interval else {
        if types.is_some_and(|types| types.contains(&LayerType::Linear)) {
            let supported = "full_attention, sliding_attention";
            return Err(fields.unsupported("layer_types", "linear_attention", supported));
        }
        return Ok(vec![false; layers]);
    };
    let interval = fields.count("full_attention_interval", LAYERS_MAX)?.unwrap_or(default);
    let recurrent: Vec<bool> = match types {
        Some(types) => types.iter().map(|kind| *kind == LayerType::Linear).collect(),
        None => (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect(),
    };
    // Blocks have the size of a layer's keys and values.
    if !recurrent.contains(&false) {
        let field = if types.is_some() { "layer_types" } else { "full_attention_interval" };
        return Err(fields.bad(field, "such that a layer has full attention"));
    }
    Ok(recurrent)
}

/// Returns the gated delta rule of the recurrent layers.
fn delta(fields: &Fields, fused: bool) -> Result<DeltaSpec, Error> {
    let spec = DeltaSpec {
        key_heads: fields.needed_count("linear_num_key_heads", WIDTH_MAX)?,
        value_heads: fields.needed_count("linear_num_value_heads", WIDTH_MAX)?,
        key_dim: fields.needed_count("linear_key_head_dim", WIDTH_MAX)?,
        value_dim: fields.needed_count("linear_value_head_dim", WIDTH_MAX)?,
        taps: fields.needed_count("linear_conv_kernel_dim", TAPS_MAX)?,
        form: match fields.flag(GGUF_DELTA)? {
            Some(true) => DeltaForm::Gguf,
            _ if fused => DeltaForm::Fused,
            _ => DeltaForm::Checkpoint,
        },
    };
    if !spec.value_heads.is_multiple_of(spec.key_heads) {
        let rule = format!("a multiple of the {} key heads", spec.key_heads);
        return Err(fields.bad("linear_num_value_heads", &rule));
    }
    for (name, size) in [("linear_key_head_dim", spec.key_dim), ("linear_value_head_dim", spec.value_dim)] {
        if !size.is_multiple_of(16) || size > DELTA_HEAD_MAX {
            return Err(fields.bad(name, &format!("a multiple of 16 up to {DELTA_HEAD_MAX}")));
        }
    }
    if spec.taps < 2 {
        return Err(fields.bad("linear_conv_kernel_dim", &format!("from 2 to {TAPS_MAX}")));
    }
    Ok(spec)
}

/// Returns the rotary embeddings: that of layers with full attention, and that of layers with a window if it is another one.
fn ropes(fields: &Fields, rule: Ropes, head_dim: usize) -> Result<Vec<Rope>, Error> {
    const THETA: f64 = 10_000.0;
    let (field, parameters) = match fields.object("rope_parameters")? {
        Some(parameters) => ("rope_parameters", Some(parameters)),
        None => ("rope_scaling", fields.object("rope_scaling")?),
    };
    let by_type = parameters.iter().flat_map(Fields::iter).find(|(_, value)| value.is_object());
    let nested = by_type.map(|(kind, _)| kind.to_owned());
    match (rule, nested) {
        (Ropes::One, Some(kind)) => {
            let supported = "one rotary embedding for all layers";
            let found = "frequencies by layer type";
            Err(fields.unsupported(&format!("{field}.{kind}"), found, supported))
        }
        (Ropes::One, None) => Ok(vec![rope(fields, field, parameters, "rope_theta", THETA, head_dim)?]),
        (Ropes::ByWindow { full, window }, Some(_)) => {
            let of = |kind: &str| parameters.as_ref().map_or(Ok(None), |parameters| parameters.object(kind));
            let full = rope(fields, field, of("full_attention")?, "rope_theta", full, head_dim)?;
            let window =
                rope(fields, field, of("sliding_attention")?, "rope_local_base_freq", window, head_dim)?;
            Ok(vec![full, window])
        }
        (Ropes::ByWindow { full, window }, None) => {
            let full = rope(fields, field, parameters, "rope_theta", full, head_dim)?;
            Ok(vec![full, rope(fields, field, None, "rope_local_base_freq", window, head_dim)?])
        }
    }
}

/// Returns a rotary embedding from `scaling`, the value of `field`: `rope_parameters` (transformers 5) or `rope_scaling`. Its base
/// is there, in the key `base` of config.json, or `default`.
fn rope(
    fields: &Fields,
    field: &str,
    scaling: Option<Fields>,
    base: &str,
    default: f64,
    head_dim: usize,
) -> Result<Rope, Error> {
    let base = fields.positive(base)?;
    let Some(scaling) = scaling else {
        return Ok(Rope { theta: base.unwrap_or(default), scaling: RopeScaling::None });
    };
    let theta = scaling.positive("rope_theta")?.or(base).unwrap_or(default);
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
    Ok(Rope { theta, scaling })
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

/// Kind of a layer in `layer_types`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerType {
    Full,
    Sliding,
    Linear,
}

/// Returns the kinds of layers in `layer_types`.
fn layer_types(fields: &Fields, layers: usize) -> Result<Option<Vec<LayerType>>, Error> {
    let Some(types) = fields.get("layer_types") else { return Ok(None) };
    let types = types.as_array().map(Vec::as_slice).unwrap_or_default();
    if types.len() != layers {
        return Err(fields.bad("layer_types", &format!("a list of {layers} names")));
    }
    let slides = types.iter().map(|kind| match kind.as_str() {
        Some("sliding_attention") => Ok(LayerType::Sliding),
        Some("full_attention") => Ok(LayerType::Full),
        Some("linear_attention") => Ok(LayerType::Linear),
        other => Err(fields.unsupported(
            "layer_types",
            other.unwrap_or("something that is not a name"),
            "full_attention, sliding_attention, linear_attention",
        )),
    });
    slides.collect::<Result<_, _>>().map(Some)
}

/// Returns the sliding window of each layer.
fn windows(
    fields: &Fields,
    rule: SlidingWindow,
    layers: usize,
    types: Option<Vec<LayerType>>,
) -> Result<Vec<Option<u32>>, Error> {
    let types: Option<Vec<bool>> =
        types.map(|types| types.into_iter().map(|kind| kind == LayerType::Sliding).collect());
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
        SlidingWindow::Pattern => true,
    };
    let Some(window) = size.filter(|_| enabled) else {
        let slides = types.map_or(rule == SlidingWindow::Pattern, |types| types.contains(&true));
        if enabled && slides {
            return Err(fields.bad("sliding_window", "the number of positions that layers with a window see"));
        }
        return Ok(vec![None; layers]);
    };
    if let Some(types) = types {
        return Ok(types.into_iter().map(|slides| slides.then_some(window)).collect());
    }
    if rule == SlidingWindow::Pattern {
        let pattern = match fields.count("sliding_window_pattern", LAYERS_MAX)? {
            Some(pattern) => pattern,
            None => return Err(fields.missing("sliding_window_pattern")),
        };
        return Ok((1..=layers).map(|layer| (!layer.is_multiple_of(pattern)).then_some(window)).collect());
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
