use std::path::Path;

use inflight_worker_core::{BlockHash, Time};
use serde::Deserialize;

use crate::workload::{Lengths, Random};

/// Tokens of a block that a trace names.
const TRACE_BLOCK: u32 = 512;

/// A request to a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterRequest {
    /// When it reaches a router.
    pub arrival: Time,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens that it generates.
    pub output_tokens: u32,
    /// Names of each 512 tokens of the prompt, of which the last may be fewer. Prompts that begin alike begin with the
    /// same names.
    pub blocks: Vec<u64>,
}

impl ClusterRequest {
    /// Hashes of the prompt's full blocks of this size, a divisor of 512.
    pub fn hashes(&self, block_tokens: u32) -> impl Iterator<Item = BlockHash> + '_ {
        let full = self.prompt_tokens / block_tokens;
        let parts = TRACE_BLOCK / block_tokens;
        (0..full).map_while(move |nth| {
            let name = *self.blocks.get((nth / parts) as usize)?;
            let short = Random::new(name.wrapping_mul(1 << 16).wrapping_add(u64::from(nth % parts))).bits();
            Some(BlockHash::from_raw((u128::from(name) << 64) | u128::from(short)))
        })
    }
}

/// A trace that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum MooncakeError {
    /// The file can't be read.
    #[error("can't read the trace {path}: {source}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A line is not what it should be.
    #[error("the trace {path}, line {line}: {source}")]
    Line {
        /// Which file.
        path: String,
        /// Which line, from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reads the first requests of a Mooncake trace: lines of JSON with `timestamp` in milliseconds, `input_length`,
/// `output_length` and `hash_ids`, the names of each 512 tokens.
///
/// Its timestamps fall in clumps about three seconds apart; each is spread evenly over these three seconds, the same way
/// for the same seed.
///
/// # Errors
/// [`MooncakeError`].
pub fn read_mooncake(path: &Path, most: usize, seed: u64) -> Result<Vec<ClusterRequest>, MooncakeError> {
    let name = || path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|source| MooncakeError::Read { path: name(), source })?;
    let mut random = Random::new(seed);
    let mut requests = Vec::new();
    for (place, line) in text.lines().take(most).enumerate() {
        let line: Line = serde_json::from_str(line).map_err(|source| MooncakeError::Line {
            path: name(),
            line: place + 1,
            source,
        })?;
        let arrival = line.timestamp as f64 / 1e3 + 3.0 * random.unit();
        requests.push(ClusterRequest {
            arrival: Time::from_nanos((arrival * 1e9) as u64),
            prompt_tokens: line.input_length.max(1),
            output_tokens: line.output_length.max(1),
            blocks: line.hash_ids,
        });
    }
    requests.sort_by_key(|request| request.arrival);
    Ok(requests)
}

/// Conversations like those of the Mooncake trace: prompts of 7,000 tokens in the median and 28,000 at the ninth decile,
/// outputs of 350, one system prompt for all, and about 40 % of the blocks seen before, as turns come back with all that
/// was said; a Poisson process of `rate` requests a second.
pub fn conversations(requests: usize, rate: f64, seed: u64) -> Vec<ClusterRequest> {
    let mut random = Random::new(seed);
    let begins =
        Lengths::new(&[(0.0, 600.0), (0.5, 4500.0), (0.9, 21_000.0), (0.99, 60_000.0), (1.0, 100_000.0)]);
    let grows = Lengths::new(&[(0.0, 100.0), (0.5, 1500.0), (0.9, 9000.0), (1.0, 30_000.0)]);
    let outputs = Lengths::new(&[(0.0, 10.0), (0.5, 355.0), (0.9, 605.0), (0.99, 1183.0), (1.0, 2000.0)]);
    // Conversations that go on, each with the tokens of its last prompt and their names.
    let mut open: Vec<(u32, Vec<u64>)> = Vec::new();
    let (mut names, mut at) = (0, 0.0);
    let mut result = Vec::with_capacity(requests);
    for _ in 0..requests {
        at += random.exponential(rate);
        let goes_on = !open.is_empty() && random.unit() < 0.45;
        let (mut tokens, mut blocks) = match goes_on {
            true => {
                let nth = (random.unit() * open.len() as f64) as usize;
                open.swap_remove(nth.min(open.len() - 1))
            }
            false => (TRACE_BLOCK, vec![u64::MAX >> 20]),
        };
        tokens += if goes_on { grows.sample(&mut random) } else { begins.sample(&mut random) };
        let tokens = tokens.min(120_000);
        // A block that was not full has other content now, and another name.
        blocks.truncate((tokens / TRACE_BLOCK) as usize);
        if goes_on && blocks.len() > 1 {
            blocks.pop();
        }
        while blocks.len() < tokens.div_ceil(TRACE_BLOCK) as usize {
            names += 1;
            blocks.push(names);
        }
        result.push(ClusterRequest {
            arrival: Time::from_nanos((at * 1e9) as u64),
            prompt_tokens: tokens,
            output_tokens: outputs.sample(&mut random),
            blocks: blocks.clone(),
        });
        open.push((tokens, blocks));
        if open.len() > 400 {
            open.remove(0);
        }
    }
    result
}
