//! Defaults for generation, from generation_config.json.

use super::fields::Fields;
use super::files::Files;
use super::{Error, ModelConfig};

/// Defaults for generation of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// EOS token ids, ascending, of generation_config.json or, if it has none, of config.json.
    pub eos_token_ids: Vec<u32>,
    /// Sampling instead of greedy decoding.
    pub do_sample: Option<bool>,
    /// Temperature.
    pub temperature: Option<f32>,
    /// Top-p.
    pub top_p: Option<f32>,
    /// Top-k.
    pub top_k: Option<u32>,
    /// Min-p.
    pub min_p: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    pub(super) fn read(files: &Files, config: &ModelConfig) -> Result<Self, Error> {
        Self::of(Fields::read(files, "generation_config.json")?, config)
    }

    /// Validates the fields of a generation_config.json, if there is one.
    pub(super) fn of(fields: Option<Fields>, config: &ModelConfig) -> Result<Self, Error> {
        let in_vocabulary = |ids: &[u32]| -> Vec<u32> {
            let mut ids: Vec<u32> =
                ids.iter().copied().filter(|id| (*id as usize) < config.vocab_size).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        let Some(fields) = fields else {
            return Ok(Self { eos_token_ids: in_vocabulary(&config.eos_token_ids), ..Self::default() });
        };
        let eos = fields.tokens("eos_token_id")?;
        let number = |field: &str| Ok::<_, Error>(fields.number(field)?.map(|number| number as f32));
        let top_k = match fields.get("top_k") {
            None => None,
            Some(value) => match value.as_u64().and_then(|k| u32::try_from(k).ok()) {
                Some(k) => Some(k),
                None => return Err(fields.bad("top_k", "an integer of at least 0")),
            },
        };
        Ok(Self {
            eos_token_ids: in_vocabulary(eos.as_deref().unwrap_or(&config.eos_token_ids)),
            do_sample: fields.flag("do_sample")?,
            temperature: number("temperature")?,
            top_p: number("top_p")?,
            top_k,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }
}
