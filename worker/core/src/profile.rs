//! Device profiles: linear cost coefficients and pool sizes of a simulated device.

use std::time::Duration;

use inflight_contract::CostCoefficients;

use crate::cost::{CostPrior, StepWork};

/// Cost profile of a simulated device: durations of steps and copies, and the sizes of its KV pools.
///
/// A step takes `step`, plus `prompt_token * tokens + prompt_key * keys` for prefill chunks, plus `sequence`
/// for each decoding sequence and `decode_key` for each key it reads. Prefill is compute-bound and decode is
/// memory-bound, so their keys have different costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceProfile {
    /// Fixed seconds per step: one read of the weights.
    pub step: f64,
    /// Seconds per prefill token.
    pub prompt_token: f64,
    /// Seconds per key attended to by a prefill token.
    pub prompt_key: f64,
    /// Seconds per decoding sequence.
    pub sequence: f64,
    /// Seconds per key attended to by a decoding sequence.
    pub decode_key: f64,
    /// Fixed seconds per copy between device and host.
    pub copy: f64,
    /// Seconds per token whose keys and values are copied.
    pub copy_token: f64,
    /// Capacity of the device KV pool in tokens.
    pub pool_tokens: u32,
    /// Capacity of the host KV pool in tokens; 0 means no host pool.
    pub host_tokens: u32,
}

/// Invalid device profile.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// No built-in profile has this name.
    #[error("there is no profile `{0}`; built in are {known}", known = DeviceProfile::NAMES.join(", "))]
    UnknownName(String),
    /// No coefficient has this name.
    #[error("a profile has no `{0}`; it has {known}", known = DeviceProfile::KEYS.join(", "))]
    UnknownKey(String),
    /// Value out of range.
    #[error("{key} is {value}; it must be {range}")]
    OutOfRange {
        /// Name of the coefficient.
        key: String,
        /// Given value.
        value: f64,
        /// Allowed range.
        range: &'static str,
    },
}

impl DeviceProfile {
    /// Names of the built-in profiles.
    pub const NAMES: [&'static str; 3] = ["a10g-llama2-7b", "h200-llama3-8b", "flat"];

    /// Names of the coefficients accepted by [`DeviceProfile::set`].
    pub const KEYS: [&'static str; 9] = [
        "step",
        "prompt_token",
        "prompt_key",
        "sequence",
        "decode_key",
        "copy",
        "copy_token",
        "pool_tokens",
        "host_tokens",
    ];

    /// Returns a built-in profile.
    ///
    /// - `a10g-llama2-7b`: fitted to the cost profile published with the VTC artifact, with its pool of
    ///   10,000 tokens; prompt keys computed for 125 TFLOP/s; copies over PCIe 4.
    /// - `h200-llama3-8b`: computed, not measured: 16 GB of weights and 128 KiB of KV per token at 4 TB/s,
    ///   550 TFLOP/s in GEMMs and 400 in attention, PCIe 5, 105 GB for the pool.
    /// - `flat`: every step takes 2 ms, independent of the batch. For load tests of routers; models no
    ///   hardware.
    ///
    /// # Errors
    /// [`ProfileError::UnknownName`].
    pub fn built_in(name: &str) -> Result<Self, ProfileError> {
        match name {
            "a10g-llama2-7b" => Ok(Self {
                step: 24.5e-3,
                prompt_token: 2.1e-4,
                prompt_key: 4e-9,
                sequence: 1.7e-4,
                decode_key: 1.1e-6,
                copy: 2e-5,
                copy_token: 2.1e-5,
                pool_tokens: 10_000,
                host_tokens: 0,
            }),
            "h200-llama3-8b" => Ok(Self {
                step: 4e-3,
                prompt_token: 2.9e-5,
                prompt_key: 1.3e-9,
                sequence: 1e-5,
                decode_key: 3.3e-8,
                copy: 2e-5,
                copy_token: 2.4e-6,
                pool_tokens: 800_000,
                host_tokens: 0,
            }),
            "flat" => Ok(Self {
                step: 2e-3,
                prompt_token: 0.0,
                prompt_key: 0.0,
                sequence: 0.0,
                decode_key: 0.0,
                copy: 0.0,
                copy_token: 0.0,
                pool_tokens: 4_000_000,
                host_tokens: 0,
            }),
            other => Err(ProfileError::UnknownName(other.to_owned())),
        }
    }

    /// Sets the coefficient named `key`.
    ///
    /// # Errors
    /// [`ProfileError`]; the profile is then unchanged.
    pub fn set(&mut self, key: &str, value: f64) -> Result<(), ProfileError> {
        let out = |range| ProfileError::OutOfRange { key: key.to_owned(), value, range };
        let tokens = |min: f64| {
            let fits = value.fract() == 0.0 && (min..=f64::from(1u32 << 30)).contains(&value);
            fits.then_some(value as u32).ok_or_else(|| out("a whole number of at most 2^30"))
        };
        let seconds = || (0.0..=60.0).contains(&value).then_some(value).ok_or_else(|| out("from 0 to 60"));
        match key {
            "step" => self.step = seconds()?,
            "prompt_token" => self.prompt_token = seconds()?,
            "prompt_key" => self.prompt_key = seconds()?,
            "sequence" => self.sequence = seconds()?,
            "decode_key" => self.decode_key = seconds()?,
            "copy" => self.copy = seconds()?,
            "copy_token" => self.copy_token = seconds()?,
            "pool_tokens" => self.pool_tokens = tokens(1.0)?,
            "host_tokens" => self.host_tokens = tokens(0.0)?,
            other => return Err(ProfileError::UnknownKey(other.to_owned())),
        }
        Ok(())
    }

    /// Returns the duration of a step with the given prefill and decode work.
    pub fn step_time(&self, prefill: &StepWork, decode: &StepWork) -> Duration {
        let seconds = self.step
            + self.prompt_token * f64::from(prefill.tokens)
            + self.prompt_key * prefill.keys as f64
            + self.sequence * f64::from(decode.sequences)
            + self.decode_key * decode.keys as f64;
        Duration::from_secs_f64(seconds.clamp(0.0, 1e6))
    }

    /// Returns the duration of a one-way copy of the KV of `tokens` tokens.
    pub fn copy_time(&self, tokens: u64) -> Duration {
        Duration::from_secs_f64((self.copy + self.copy_token * tokens as f64).clamp(0.0, 1e6))
    }

    /// Returns the cost-model prior of this device for blocks of `block_tokens` tokens.
    pub fn prior(&self, block_tokens: u32) -> CostPrior {
        let cost = CostCoefficients {
            step_s: self.step,
            token_s: self.prompt_token.max(1e-9),
            prefill_key_s: self.prompt_key.max(1e-13),
            decode_key_s: self.decode_key.max(1e-13),
            sequence_s: self.sequence.max(1e-9),
            copy_s: self.copy.max(1e-9),
            copy_block_s: (self.copy_token * f64::from(block_tokens)).max(1e-9),
        };
        CostPrior { cost, trust: 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_and_key_is_accepted_and_no_other() {
        for name in DeviceProfile::NAMES {
            let built_in = DeviceProfile::built_in(name).unwrap();
            for key in DeviceProfile::KEYS {
                let mut changed = built_in;
                changed.set(key, 7.0).unwrap();
                assert_ne!(changed, built_in, "{key} changes nothing in {name}");
                for bad in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
                    let before = changed;
                    assert!(changed.set(key, bad).is_err(), "{key} = {bad}");
                    assert_eq!(changed, before);
                }
            }
        }
        assert!(DeviceProfile::built_in("abacus").unwrap_err().to_string().contains("h200-llama3-8b"));
        assert!(DeviceProfile::built_in("flat").unwrap().set("speed", 1.0).is_err());
        assert!(DeviceProfile::built_in("flat").unwrap().set("pool_tokens", 0.5).is_err());
    }
}
