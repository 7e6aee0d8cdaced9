//! Device model fitted to a published cost profile.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::{BatchWork, Device, PiecewiseLinear};

/// Invalid cost profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("can't read the cost profile {path}: {source}")]
    Read {
        /// Path of the file.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The file is not `{input length: {output length: [batch, prefill s, decode s]}}`.
    #[error(
        "the cost profile {path} is not {{\"input length\": {{\"output length\": [batch, prefill seconds, decode \
         seconds]}}}}: {source}"
    )]
    Format {
        /// Path of the file.
        path: String,
        /// Cause, with its position.
        source: serde_json::Error,
    },
    /// The profile has too few entries to derive a device.
    #[error("the cost profile lacks {0}")]
    Lacks(&'static str),
}

/// Device fitted to a cost profile, which lists for each prompt and output length the largest batch that fits
/// its memory, and the seconds of prefill and of decode divided by the batch size.
///
/// A decode step takes a piecewise linear time in the batch size plus a time per key read, which is estimated
/// first, from pairs of entries with similar batches and different contexts. A prefill takes a piecewise
/// linear time in its tokens. A mixed step reads the weights once, so the time of an empty step counts once.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfiledDevice {
    /// Seconds of a decode step by batch size, without the keys.
    decode: PiecewiseLinear,
    /// Seconds per key read by a decode.
    key: f64,
    /// Seconds of a prefill by tokens.
    prefill: PiecewiseLinear,
    /// Seconds of an almost empty step.
    floor: f64,
    /// Seconds per copied block.
    pub copy_block: f64,
}

#[derive(Debug, Clone, Copy)]
struct ProfileEntry {
    batch: f64,
    /// Mean keys read in a decode step.
    keys: f64,
    step: f64,
    prompt_tokens: f64,
    prefill: f64,
}

impl ProfiledDevice {
    /// Reads a profile from a JSON file. Copies take `copy_block` seconds per block, which is not part of
    /// profiles.
    ///
    /// # Errors
    /// [`ProfileError`].
    pub fn read(path: &Path, copy_block: f64) -> Result<Self, ProfileError> {
        let name = || path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| ProfileError::Read { path: name(), source })?;
        let profile: BTreeMap<u32, BTreeMap<u32, (u32, f64, f64)>> =
            serde_json::from_str(&text).map_err(|source| ProfileError::Format { path: name(), source })?;
        Self::from_entries(
            profile.iter().flat_map(|(input, outputs)| {
                outputs
                    .iter()
                    .map(|(output, (batch, prefill, decode))| (*input, *output, *batch, *prefill, *decode))
            }),
            copy_block,
        )
    }

    /// Fits a device to profile entries: (prompt tokens, output tokens, batch size, prefill s, decode s).
    /// Prefill and decode times are in seconds per request: the time of the batch over the batch size.
    ///
    /// # Errors
    /// [`ProfileError::Lacks`].
    pub fn from_entries(
        entries: impl IntoIterator<Item = (u32, u32, u32, f64, f64)>,
        copy_block: f64,
    ) -> Result<Self, ProfileError> {
        let entries: Vec<ProfileEntry> = entries
            .into_iter()
            .map(|(input, output, batch, prefill, decode)| {
                let (input, output, batch) = (f64::from(input), f64::from(output), f64::from(batch));
                ProfileEntry {
                    batch,
                    keys: batch * (input + output / 2.0),
                    // The prefill generates the first token; an output of one token was timed with one step.
                    step: decode * batch / (output - 1.0).max(1.0),
                    prompt_tokens: batch * input,
                    prefill: prefill * batch,
                }
            })
            .collect();
        let key = seconds_per_key(&entries)
            .ok_or(ProfileError::Lacks("two entries of about the same batch with different contexts"))?;
        let decode: Vec<_> =
            entries.iter().map(|entry| (entry.batch, entry.step - key * entry.keys)).collect();
        let floor = decode.iter().map(|point| point.1).fold(f64::INFINITY, f64::min).max(0.0);
        let mut prefill: Vec<_> = entries.iter().map(|entry| (entry.prompt_tokens, entry.prefill)).collect();
        prefill.push((0.0, floor));
        let lacks = ProfileError::Lacks("a finite entry");
        let (Some(decode), Some(prefill)) = (PiecewiseLinear::new(decode), PiecewiseLinear::new(prefill))
        else {
            return Err(lacks);
        };
        Ok(Self { decode, key, prefill, floor, copy_block })
    }
}

/// Returns the median slope of step time over keys, among pairs of entries whose batches differ by at most 5
/// %.
fn seconds_per_key(entries: &[ProfileEntry]) -> Option<f64> {
    let mut slopes = Vec::new();
    for (position, a) in entries.iter().enumerate() {
        for b in &entries[position + 1..] {
            let similar = (a.batch - b.batch).abs() <= 0.05 * a.batch;
            let distance = (a.keys - b.keys).abs();
            if similar && distance > 0.1 * a.keys {
                slopes.push((a.step - b.step) / (a.keys - b.keys));
            }
        }
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied()
}

impl Device for ProfiledDevice {
    fn step(&self, work: &BatchWork) -> Duration {
        let mut seconds = 0.0;
        if work.decode.sequences > 0 {
            seconds += self.decode.at(f64::from(work.decode.sequences)) + self.key * work.decode.keys as f64;
        }
        if work.prefill.tokens > 0 {
            seconds += self.prefill.at(f64::from(work.prefill.tokens));
        }
        if work.decode.sequences > 0 && work.prefill.tokens > 0 {
            seconds -= self.floor;
        }
        Duration::from_secs_f64(seconds.clamp(0.0, 1e6))
    }

    fn copy(&self, blocks: u32) -> Duration {
        Duration::from_secs_f64((self.copy_block * f64::from(blocks)).clamp(0.0, 1e6))
    }
}
