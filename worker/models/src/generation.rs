//! Defaults for generation, from generation_config.json.

use inflight_contract::SAMPLING_NUMBERS;

use super::fields::Fields;
use super::files::Files;
use super::{Error, ModelConfig};

/// Defaults for generation of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    /// EOS token ids, ascending, of generation_config.json or, if it has none, of config.json.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationDefaults {
    pub(super) fn read(files: &Files, config: &ModelConfig) -> Result<Self, Error> {
        let fields = Fields::read(files, "generation_config.json").unwrap_or_else(|error| {
            tracing::warn!("{error}; the model is served without its defaults");
            None
        });
        Self::of(fields, config)
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
            return Ok(Self { eos_token_ids: in_vocabulary(&config.eos_token_ids) });
        };
        // A model without its end-of-sequence tokens would never stop.
        let eos = fields.tokens("eos_token_id")?;
        // Any other invalid value is ignored: the model works without it.
        let warn = |error: Error| tracing::warn!("{error}; it is left out");
        // The router takes the sampling parameters from the file; here, the log says which it leaves out.
        let _ = fields.flag("do_sample").map_err(warn);
        for number in SAMPLING_NUMBERS.iter().filter(|number| number.model) {
            let Some(value) = fields.get(number.name) else { continue };
            if number.of_json(value.as_f64(), value.as_i64()).is_none() {
                warn(fields.bad(number.name, &format!("a number in {}", number.range)));
            }
        }
        Ok(Self { eos_token_ids: in_vocabulary(eos.as_deref().unwrap_or(&config.eos_token_ids)) })
    }
}
