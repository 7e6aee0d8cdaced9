//! Defaults for generation, from generation_config.json.

use inflight_contract::{NumberKind, SAMPLING_NUMBERS};
use serde_json::Value;

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
            return Ok(Self { eos_token_ids: in_vocabulary(&config.eos_token_ids) });
        };
        let eos = fields.tokens("eos_token_id")?;
        // The router takes the sampling parameters from the file; here, a worker with a wrong one fails at its start.
        fields.flag("do_sample")?;
        for number in SAMPLING_NUMBERS.iter().filter(|number| number.model) {
            match number.kind {
                NumberKind::Float => _ = fields.number(number.name)?,
                NumberKind::Integer => {
                    let count = |value: &Value| value.as_u64().is_some_and(|count| count <= u32::MAX.into());
                    if !fields.get(number.name).is_none_or(count) {
                        return Err(fields.bad(number.name, "an integer of at least 0"));
                    }
                }
            }
        }
        Ok(Self { eos_token_ids: in_vocabulary(eos.as_deref().unwrap_or(&config.eos_token_ids)) })
    }
}
