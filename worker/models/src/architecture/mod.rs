//! Architectures: what distinguishes the supported decoder models from each other, in one table for the
//! configuration, the GGUF reader and every runtime.
//!
//! To add a dense architecture, describe it in a file of its own and list it in [`ARCHITECTURES`].

mod gemma3;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod qwen35;
mod qwen3_next;

use std::fmt;

use inflight_kernels::cpu::Activation;
use serde_json::Value;

use super::Error;
use super::NormPlaces;
use super::fields::Fields;

/// Every supported architecture, in the order of error messages.
static ARCHITECTURES: &[&ArchitectureSpec] = &[
    &llama::SPEC,
    &mistral::SPEC,
    &qwen2::SPEC,
    &qwen3::SPEC,
    &qwen3_next::SPEC,
    &qwen35::SPEC,
    &gemma3::SPEC,
];

/// Description of an architecture.
#[derive(Debug)]
pub(crate) struct ArchitectureSpec {
    /// Short name. Part of the numerics fingerprint: never changed.
    id: &'static str,
    /// Name in the `architectures` field of config.json.
    name: &'static str,
    /// Name of a multimodal model whose language model this is, under `text_config` in config.json.
    wrapper: Option<&'static str>,
    /// Properties of its GGUF files; `None` if GGUF knows it under the name of another architecture.
    gguf: Option<GgufSpec>,
    /// `num_key_value_heads` is required; otherwise it defaults to the number of query heads.
    pub kv_heads_required: bool,
    /// Default of `head_dim`; `None`: the hidden size divided by the number of query heads.
    pub default_head_dim: Option<usize>,
    /// Biases of the projections.
    pub biases: Biases,
    /// Queries and keys are normalized per head (QK-norm).
    pub qk_norm: bool,
    /// Rule for the layers' sliding windows.
    pub sliding_window: SlidingWindow,
    /// Rotary embeddings.
    pub ropes: Ropes,
    /// Part of a head that is rotated, unless config.json has `partial_rotary_factor`.
    pub rotated_part: f64,
    /// Layers are recurrent as `layer_types` or `full_attention_interval` says, this many in one by default; `None`: none is.
    pub full_attention_interval: Option<usize>,
    /// The projections of recurrent layers are fused, see [`DeltaForm::Fused`](crate::DeltaForm::Fused).
    pub fused_delta: bool,
    /// Arithmetic of all layers.
    pub arithmetic: ArithmeticSpec,
    /// Values of keys that config.json may leave out.
    pub defaults: &'static [(&'static str, Default)],
    /// Keys of config.json that this architecture reads and others do not have.
    pub keys: &'static [&'static str],
    /// Names of the tensors in checkpoints.
    pub tensors: &'static TensorNames,
    /// Names of the tensors of its MTP layer, if models have one.
    pub mtp: Option<&'static MtpNames>,
}

/// Properties of an architecture's GGUF files.
#[derive(Debug)]
pub(crate) struct GgufSpec {
    /// Value of `general.architecture`, and prefix of the other keys.
    pub family: &'static str,
    /// The rows of query and key heads are permuted: interleaved instead of half by half.
    pub interleaved_heads: bool,
    /// `attention_bias` of config.json is set if the file has biases of queries.
    pub optional_attention_bias: bool,
    /// The file has recurrent layers, and names the norm before the MLP after attention.
    pub recurrent: bool,
}

/// Biases of an architecture's projections.
#[derive(Debug)]
pub(crate) struct Biases {
    /// Query, key and value projections.
    pub qkv: Bias,
    /// Output projection of attention.
    pub output: Bias,
    /// Projections of the MLP.
    pub mlp: Bias,
}

impl Biases {
    /// No projection has a bias.
    pub const NONE: Self = Self { qkv: Bias::Never, output: Bias::Never, mlp: Bias::Never };
}

/// Presence of a projection's bias.
#[derive(Debug)]
pub(crate) enum Bias {
    /// No bias.
    Never,
    /// A bias in every model.
    Always,
    /// A bias in models whose config.json sets this field.
    Field(&'static str),
}

impl Bias {
    /// Returns whether the model of this config.json has the bias.
    ///
    /// # Errors
    /// The field is no boolean.
    pub fn read(&self, fields: &Fields) -> Result<bool, Error> {
        match self {
            Self::Never => Ok(false),
            Self::Always => Ok(true),
            Self::Field(name) => Ok(fields.flag(name)?.unwrap_or(false)),
        }
    }
}

/// Default value of a key of config.json.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Default {
    Count(u32),
    Flag(bool),
}

impl Default {
    /// Returns the value in JSON.
    pub fn value(self) -> Value {
        match self {
            Self::Count(count) => count.into(),
            Self::Flag(flag) => flag.into(),
        }
    }
}

/// Rotary embeddings of an architecture.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ropes {
    /// One for all layers.
    One,
    /// One for layers with full attention, another one, without scaling, for those with a window; with these bases by default.
    ByWindow { full: f64, window: f64 },
}

/// Arithmetic of an architecture's layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArithmeticSpec {
    pub norms: NormPlaces,
    pub zero_centred_norms: bool,
    pub activation: Activation,
    pub score_size: ScoreSize,
    pub scaled_embedding: bool,
    pub output_gate: bool,
}

impl ArithmeticSpec {
    /// Arithmetic of Llama, which most later architectures share.
    pub const LLAMA: Self = Self {
        norms: NormPlaces::Before,
        zero_centred_norms: false,
        activation: Activation::Silu,
        score_size: ScoreSize::Head,
        scaled_embedding: false,
        output_gate: false,
    };
}

/// Number by whose square root the scores of attention are divided.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ScoreSize {
    /// The size of a head.
    Head,
    /// This key of config.json, or the default.
    Field(&'static str, f64),
}

/// Rule for the layers with a sliding window, whose size is `sliding_window` of config.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlidingWindow {
    /// No layer.
    Never,
    /// Every layer, or those of `layer_types`.
    Always,
    /// With `use_sliding_window`: layers from `max_window_layers` on, or those of `layer_types`.
    Optional,
    /// All but each last one of `sliding_window_pattern` layers, or those of `layer_types`.
    Pattern,
}

/// Names of an architecture's tensors, without the suffixes `.weight` and `.bias`; those of a layer without
/// `LAYERS.INDEX.`. Stacked projections are listed in the order of their rows.
#[derive(Debug)]
pub(crate) struct TensorNames {
    pub embedding: &'static str,
    pub layers: &'static str,
    pub mixer_norm: &'static str,
    /// Query, key and value projections.
    pub qkv: [&'static str; 3],
    /// Norms of query heads and of key heads, of architectures with QK-norm.
    pub qk_norm: [&'static str; 2],
    pub output: &'static str,
    pub mlp_norm: &'static str,
    /// Norms behind attention and MLP, of architectures that have them.
    pub post_norms: Option<[&'static str; 2]>,
    /// Gate and up projections.
    pub gate_up: [&'static str; 2],
    pub down: &'static str,
    pub norm: &'static str,
    /// LM head; absent from models with tied embeddings.
    pub head: &'static str,
}

impl TensorNames {
    /// Names of Llama, which most later architectures share.
    pub const LLAMA: Self = Self {
        embedding: "model.embed_tokens",
        layers: "model.layers",
        mixer_norm: "input_layernorm",
        qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        qk_norm: ["self_attn.q_norm", "self_attn.k_norm"],
        output: "self_attn.o_proj",
        mlp_norm: "post_attention_layernorm",
        post_norms: None,
        gate_up: ["mlp.gate_proj", "mlp.up_proj"],
        down: "mlp.down_proj",
        norm: "model.norm",
        head: "lm_head",
    };

    /// Returns the name in checkpoints of a tensor of a GGUF file, of a model with or without recurrent layers; `None` if no runtime uses it.
    pub(crate) fn of_gguf(&self, name: &str, recurrent: bool) -> Option<String> {
        // The only one without a suffix.
        let decay = name.strip_prefix("blk.").and_then(|rest| rest.strip_suffix(".ssm_a"));
        if let Some(layer) = decay.filter(|_| recurrent) {
            return Some(format!("{}.{layer}.{}", self.layers, DeltaNames::QWEN.decay));
        }
        let (part, kind) = name.rsplit_once('.')?;
        let global = match part {
            "token_embd" => Some(self.embedding),
            "output_norm" => Some(self.norm),
            "output" => Some(self.head),
            _ => None,
        };
        if let Some(global) = global {
            return (kind == "weight").then(|| format!("{global}.weight"));
        }
        let (layer, part) = part.strip_prefix("blk.")?.split_once('.')?;
        let part = match part {
            "attn_norm" => self.mixer_norm,
            "attn_q" => self.qkv[0],
            "attn_k" => self.qkv[1],
            "attn_v" => self.qkv[2],
            "attn_q_norm" => self.qk_norm[0],
            "attn_k_norm" => self.qk_norm[1],
            "attn_output" => self.output,
            "ffn_norm" => self.mlp_norm,
            "ffn_gate" => self.gate_up[0],
            "ffn_up" => self.gate_up[1],
            "ffn_down" => self.down,
            _ if !recurrent => return None,
            "post_attention_norm" => self.mlp_norm,
            "attn_qkv" => DeltaNames::QWEN.inputs,
            "attn_gate" => DeltaNames::QWEN.gates,
            "ssm_beta" => DeltaNames::QWEN.beta,
            "ssm_alpha" => DeltaNames::QWEN.decay_input,
            "ssm_conv1d" => DeltaNames::QWEN.convolution,
            "ssm_norm" => DeltaNames::QWEN.norm,
            "ssm_out" => DeltaNames::QWEN.output,
            "ssm_dt" if kind == "bias" => {
                return Some(format!("{}.{layer}.{}", self.layers, DeltaNames::QWEN.decay_bias));
            }
            _ => return None,
        };
        Some(format!("{}.{layer}.{part}.{kind}", self.layers))
    }

    /// Returns whether a tensor of a checkpoint is a query or key projection, or its bias.
    pub(crate) fn is_query_or_key(&self, name: &str) -> bool {
        let part = name.rsplit_once('.').map_or(name, |(part, _)| part);
        self.qkv[..2].iter().any(|projection| part.ends_with(projection))
    }
}

/// Names of the tensors of a recurrent layer, as [`TensorNames`] has those of others; logarithms of A and biases of decays have no
/// suffix.
#[derive(Debug)]
pub(crate) struct DeltaNames {
    pub inputs: &'static str,
    pub gates: &'static str,
    pub beta: &'static str,
    pub decay_input: &'static str,
    pub convolution: &'static str,
    pub decay: &'static str,
    pub decay_bias: &'static str,
    pub norm: &'static str,
    pub output: &'static str,
    /// Fused projections: to the inputs and gates, and to betas and decays.
    pub fused: [&'static str; 2],
}

impl DeltaNames {
    /// Names of Qwen3.5 and Qwen3-Next.
    pub const QWEN: Self = Self {
        inputs: "linear_attn.in_proj_qkv",
        gates: "linear_attn.in_proj_z",
        beta: "linear_attn.in_proj_b",
        decay_input: "linear_attn.in_proj_a",
        convolution: "linear_attn.conv1d",
        decay: "linear_attn.A_log",
        decay_bias: "linear_attn.dt_bias",
        norm: "linear_attn.norm",
        output: "linear_attn.out_proj",
        fused: ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"],
    };
}

/// Names of the tensors of a layer of multi-token prediction (MTP), without the suffix `.weight`.
#[derive(Debug)]
pub(crate) struct MtpNames {
    /// Norm of the embedding of the next token.
    pub embedding_norm: &'static str,
    /// Norm of the last hidden state.
    pub hidden_norm: &'static str,
    /// Projection of both.
    pub inputs: &'static str,
    /// Prefix of the decoder layer.
    pub layer: &'static str,
    /// Norm before the LM head.
    pub norm: &'static str,
}

impl MtpNames {
    /// Names of Qwen3.5.
    pub const QWEN: Self = Self {
        embedding_norm: "mtp.pre_fc_norm_embedding",
        hidden_norm: "mtp.pre_fc_norm_hidden",
        inputs: "mtp.fc",
        layer: "mtp.layers.0",
        norm: "mtp.norm",
    };
}

/// Architecture of a model.
#[derive(Clone, Copy)]
pub struct Architecture(&'static ArchitectureSpec);

impl Architecture {
    /// Name in the `architectures` field of config.json, such as "LlamaForCausalLM".
    pub fn name(self) -> &'static str {
        self.0.name
    }

    pub(crate) fn spec(self) -> &'static ArchitectureSpec {
        self.0
    }

    /// Properties of its GGUF files.
    pub(crate) fn gguf(self) -> Option<&'static GgufSpec> {
        self.0.gguf.as_ref()
    }

    /// Returns the architecture of a name in `architectures` of config.json, also that of its multimodal model.
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        let is_named = |spec: &&&ArchitectureSpec| spec.name == name || spec.wrapper == Some(name);
        ARCHITECTURES.iter().find(is_named).map(|spec| Self(spec))
    }

    /// Returns whether multimodal models have this language model.
    pub(crate) fn is_multimodal(self) -> bool {
        self.0.wrapper.is_some()
    }

    /// Returns whether this is the name of a multimodal model with this language model.
    pub(crate) fn is_wrapped_by(self, name: &str) -> bool {
        self.0.wrapper == Some(name)
    }

    /// Returns the architecture of a GGUF file with this `general.architecture`.
    pub(crate) fn by_gguf_family(family: &str) -> Option<Self> {
        let of_family =
            |spec: &&&ArchitectureSpec| spec.gguf.as_ref().is_some_and(|gguf| gguf.family == family);
        ARCHITECTURES.iter().find(of_family).map(|spec| Self(spec))
    }

    /// Names of all supported architectures, for errors.
    pub(crate) fn names() -> String {
        ARCHITECTURES.iter().map(|spec| spec.name).collect::<Vec<_>>().join(", ")
    }

    /// Values of `general.architecture` in supported GGUF files, for errors.
    pub(crate) fn gguf_families() -> String {
        let families = ARCHITECTURES.iter().filter_map(|spec| spec.gguf.as_ref()).map(|gguf| gguf.family);
        families.collect::<Vec<_>>().join(", ")
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

impl Eq for Architecture {}

/// Writes the short name alone, which the numerics fingerprint covers.
impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.id)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn architectures_have_distinct_names_and_the_fingerprint_covers_the_short_one() {
        let distinct = |names: Vec<&str>| names.iter().collect::<BTreeSet<_>>().len();
        assert_eq!(distinct(ARCHITECTURES.iter().map(|spec| spec.id).collect()), ARCHITECTURES.len());
        assert_eq!(distinct(ARCHITECTURES.iter().map(|spec| spec.name).collect()), ARCHITECTURES.len());
        let families: Vec<&str> =
            ARCHITECTURES.iter().filter_map(|spec| spec.gguf.as_ref()).map(|g| g.family).collect();
        let count = families.len();
        assert_eq!(distinct(families), count);
        for spec in ARCHITECTURES {
            let architecture = Architecture::by_name(spec.name).unwrap();
            // Released workers with this output have the same fingerprint.
            assert_eq!(
                format!("{architecture:?}"),
                spec.name.trim_end_matches("ForCausalLM").replace('_', ".")
            );
        }
    }

    #[test]
    fn tensors_of_gguf_files_have_the_names_of_checkpoints() {
        let names = &TensorNames::LLAMA;
        for (gguf, expected) in [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("output_norm.weight", Some("model.norm.weight")),
            ("output.weight", Some("lm_head.weight")),
            ("output.bias", None),
            ("blk.7.attn_q.bias", Some("model.layers.7.self_attn.q_proj.bias")),
            ("blk.12.attn_k_norm.weight", Some("model.layers.12.self_attn.k_norm.weight")),
            ("blk.0.ffn_up.weight", Some("model.layers.0.mlp.up_proj.weight")),
            ("blk.0.ffn_gate_inp.weight", None),
            ("rope_freqs.weight", None),
            ("blk", None),
        ] {
            assert_eq!(names.of_gguf(gguf, false).as_deref(), expected, "{gguf}");
        }
        assert!(names.is_query_or_key("model.layers.7.self_attn.q_proj.bias"));
        assert!(names.is_query_or_key("model.layers.7.self_attn.k_proj.weight"));
        assert!(!names.is_query_or_key("model.layers.7.self_attn.v_proj.weight"));
        assert!(!names.is_query_or_key("model.layers.7.self_attn.q_norm.weight"));
    }
}
