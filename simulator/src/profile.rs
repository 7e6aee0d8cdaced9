use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::{BatchWork, Device, Table};

/// A cost profile that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file can't be read.
    #[error("can't read the cost profile {path}: {source}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not `{input length: {output length: [batch, prefill s, decode s]}}`.
    #[error(
        "the cost profile {path} is not {{\"input length\": {{\"output length\": [batch, prefill seconds, decode \
         seconds]}}}}: {source}"
    )]
    Format {
        /// Which file.
        path: String,
        /// Where it departs from that.
        source: serde_json::Error,
    },
    /// Too little in it to derive a device from.
    #[error("the cost profile lacks {0}")]
    Lacks(&'static str),
}

/// A device known from a cost profile: for each length of prompt and output the largest batch that fits its memory
/// and the seconds of prefill and of decode, each divided by the batch.
///
/// A decode step takes what the batch's size says (a table) and a time for each key read, which is found first,
/// from pairs of entries with about the same batch and different contexts. A prefill takes what its tokens say (a
/// table again). In a mixed step the weights are read once, so the time of an empty step counts once.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfiledDevice {
    /// Seconds of a decode step over the sequences in it, the keys apart.
    decode: Table,
    /// Seconds for each key that a decode reads.
    key: f64,
    /// Seconds of a prefill over its tokens.
    prefill: Table,
    /// Seconds of a step that hardly computes anything.
    floor: f64,
    /// Seconds to copy one block.
    pub copy_block: f64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    batch: f64,
    /// Keys read in a decode step, on average.
    keys: f64,
    step: f64,
    prompt_tokens: f64,
    prefill: f64,
}

impl ProfiledDevice {
    /// Reads a profile; copies take `copy_block` seconds a block, which no profile says.
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

    /// A device from a profile's entries: prompt tokens, output tokens, batch, seconds of prefill and seconds of
    /// decode per request.
    ///
    /// # Errors
    /// [`ProfileError::Lacks`].
    pub fn from_entries(
        entries: impl IntoIterator<Item = (u32, u32, u32, f64, f64)>,
        copy_block: f64,
    ) -> Result<Self, ProfileError> {
        let entries: Vec<Entry> = entries
            .into_iter()
            .map(|(input, output, batch, prefill, decode)| {
                let (input, output, batch) = (f64::from(input), f64::from(output), f64::from(batch));
                Entry {
                    batch,
                    keys: batch * (input + output / 2.0),
                    // The prefill yields the first token; an output of one token was timed with one step.
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
        let (Some(decode), Some(prefill)) = (Table::new(decode), Table::new(prefill)) else {
            return Err(lacks);
        };
        Ok(Self { decode, key, prefill, floor, copy_block })
    }
}

/// The median slope of step time over keys, among pairs of entries whose batches differ by at most 5 %.
fn seconds_per_key(entries: &[Entry]) -> Option<f64> {
    let mut slopes = Vec::new();
    for (place, a) in entries.iter().enumerate() {
        for b in &entries[place + 1..] {
            let (alike, apart) = ((a.batch - b.batch).abs() <= 0.05 * a.batch, (a.keys - b.keys).abs());
            if alike && apart > 0.1 * a.keys {
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
