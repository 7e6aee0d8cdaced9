//! Numerics fingerprint: digest of all that decides the bits of generated tokens.

use std::fmt::Write as _;

use inflight_kernels::VERSION;
use inflight_kernels::cpu::{Activation, Isa, RopeScaling};
use sha2::{Digest, Sha256};

use super::content::hex;
use super::{AttentionSpec, DeltaForm, DeltaSpec, Error, ModelConfig, ModelDir, NormPlaces};

/// Computes the numerics fingerprint of the CPU runtime: SHA-256, in hex, over everything that decides a
/// token's bits. Workers with equal fingerprints generate equal tokens.
///
/// It covers the configuration, the KV cache dtype, the storage `formats` of the weights, the instruction
/// set, the kernels' version, and name, type, shape and every byte of every tensor. It excludes the number of
/// threads.
///
/// To be called after the last tensor was loaded: it consists of the digests of the bytes that were loaded, and
/// reads only what no runtime has read.
///
/// # Errors
/// [`Error::Changed`] if a weight file has changed since it was opened; [`Error::Read`].
pub fn fingerprint(model: &ModelDir, kv_dtype: &str, formats: &str, isa: Isa) -> Result<String, Error> {
    fingerprint_of(model, kv_dtype, &format!("{formats} {}", isa.name()))
}

/// Computes the numerics fingerprint of any runtime, like [`fingerprint`]; `arithmetic` names everything that
/// decides bits besides model, KV cache dtype and kernel version.
///
/// # Errors
/// [`Error::Changed`] if a weight file has changed since it was opened; [`Error::Read`].
pub fn fingerprint_of(model: &ModelDir, kv_dtype: &str, arithmetic: &str) -> Result<String, Error> {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(described(&model.config).as_bytes());
    field(kv_dtype.as_bytes());
    field(arithmetic.as_bytes());
    field(&VERSION.to_le_bytes());
    // The crate that computes cosines, sines and powers of the rotary tables.
    field(b"libm 0.2");
    let digests = model.tensors.digests()?;
    for ((name, dtype, shape), digest) in model.tensors.iter().zip(&digests) {
        field(name.as_bytes());
        field(dtype.as_bytes());
        field(format!("{shape:?}").as_bytes());
        field(digest);
    }
    Ok(hex(&hash.finalize()))
}

/// Writes what of a configuration decides bits, or at which tokens a sequence ends: a line for each property. A feature that a model
/// does not have writes nothing, so that a new feature changes no fingerprint of a model without it. Numbers that are not whole are
/// written as their bits.
fn described(config: &ModelConfig) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name} {value}");
    };
    line("architecture", format!("{:?}", config.architecture));
    line("vocabulary", config.vocab_size.to_string());
    line("hidden", config.hidden_size.to_string());
    line("intermediate", config.intermediate_size.to_string());
    line("layers", config.layers.len().to_string());
    line("heads", format!("{} {} {}", config.heads, config.kv_heads, config.head_dim));
    line("norm_eps", format!("{:08x}", config.norm_eps.to_bits()));
    let bits = |number: f64| format!("{:016x}", number.to_bits());
    for rope in &config.ropes {
        line("rope", bits(rope.theta));
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => line("rope_linear", bits(*factor)),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let numbers = [factor, low_freq_factor, high_freq_factor, original_context];
                line("rope_llama3", numbers.map(|number| bits(*number)).join(" "));
            }
            RopeScaling::Divisors(divisors) => {
                let divisors = divisors.iter().map(|divisor| format!("{:08x}", divisor.to_bits()));
                line("rope_divisors", divisors.collect::<Vec<_>>().join(" "));
            }
        }
    }
    for (index, layer) in config.layers.iter().enumerate() {
        let Some(AttentionSpec { window, rope }) = layer.attention() else {
            line("recurrent", index.to_string());
            continue;
        };
        if let Some(window) = window {
            line("window", format!("{index} {window}"));
        }
        if rope > 0 {
            line("rope_of_layer", format!("{index} {rope}"));
        }
    }
    if let Some(DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps, form }) = config.delta {
        let form = if form == DeltaForm::Gguf { " gguf" } else { "" };
        line("delta", format!("{key_heads} {value_heads} {key_dim} {value_dim} {taps}{form}"));
    }
    if config.rotated_dim != config.head_dim {
        line("rotated", config.rotated_dim.to_string());
    }
    let features = [
        ("tied_embeddings", config.tied_embeddings),
        ("qkv_bias", config.qkv_bias),
        ("output_bias", config.output_bias),
        ("mlp_bias", config.mlp_bias),
        ("qk_norm", config.qk_norm),
        ("norms_around", config.arithmetic.norms == NormPlaces::Around),
        ("zero_centred_norms", config.arithmetic.zero_centred_norms),
        ("gelu_tanh", config.arithmetic.activation == Activation::GeluTanh),
        ("scaled_embedding", config.arithmetic.scaled_embedding),
        ("output_gate", config.arithmetic.output_gate),
    ];
    features.iter().filter(|(_, has)| *has).for_each(|(name, _)| line(name, "yes".to_owned()));
    if config.arithmetic.score_size != config.head_dim as f64 {
        line("score_size", bits(config.arithmetic.score_size));
    }
    for (name, tokens) in [("eos", config.eos_token_ids.as_slice()), ("bos", config.bos_token_id.as_slice())]
    {
        for token in tokens {
            line(name, token.to_string());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerSpec, Mixer, ModelSource, Rope};

    fn attention(window: Option<u32>, rope: usize) -> LayerSpec {
        LayerSpec { mixer: Mixer::Attention(AttentionSpec { window, rope }) }
    }

    /// The text of a model of today: a new feature must not change it.
    #[test]
    fn an_absent_feature_writes_nothing() {
        let model = ModelDir::open(&ModelSource::Embedded).unwrap();
        let plain = ModelConfig {
            vocab_size: 100,
            hidden_size: 64,
            intermediate_size: 96,
            layers: vec![attention(None, 0); 2],
            rotated_dim: 16,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            norm_eps: 1e-5,
            ropes: vec![Rope { theta: 10_000.0, scaling: RopeScaling::None }],
            arithmetic: crate::Arithmetic { score_size: 16.0, ..model.config().arithmetic },
            tied_embeddings: false,
            eos_token_ids: vec![2],
            bos_token_id: Some(1),
            ..model.config().clone()
        };
        let text = "architecture Llama\nvocabulary 100\nhidden 64\nintermediate 96\nlayers 2\nheads 4 2 16\n\
                    norm_eps 3727c5ac\nrope 40c3880000000000\neos 2\nbos 1\n";
        assert_eq!(described(&plain), text);
        // Every feature has a line of its own.
        let mut other = plain.clone();
        other.layers[1] = attention(Some(24), 1);
        other.layers.push(LayerSpec { mixer: Mixer::Delta });
        let form = DeltaForm::Checkpoint;
        other.delta =
            Some(DeltaSpec { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 32, taps: 4, form });
        other.rotated_dim = 8;
        other.arithmetic.output_gate = true;
        other.ropes.push(Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 8.0 } });
        other.arithmetic.activation = Activation::GeluTanh;
        other.arithmetic.norms = NormPlaces::Around;
        other.arithmetic.score_size = 256.0;
        let added: Vec<String> =
            described(&other).lines().filter(|line| !text.contains(line)).map(str::to_owned).collect();
        let expected = [
            "layers 3",
            "rope 412e848000000000",
            "rope_linear 4020000000000000",
            "window 1 24",
            "rope_of_layer 1 1",
            "recurrent 2",
            "delta 2 4 16 32 4",
            "rotated 8",
            "norms_around yes",
            "gelu_tanh yes",
            "output_gate yes",
            "score_size 4070000000000000",
        ];
        assert_eq!(added, expected);
    }
}
