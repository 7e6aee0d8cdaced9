//! Requests of a cluster simulation: Mooncake traces and synthetic conversations.

use std::path::Path;
use std::sync::Arc;

use inflight_contract::{Priority, Weight};
use inflight_traces::SplitMix64 as Random;
use inflight_worker_core::{BlockHash, Time};
use serde::Deserialize;

use crate::workload::LengthDistribution;

/// Tokens per block id of a trace.
const TRACE_BLOCK: u32 = 512;

/// Tenant of requests, and their priority.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterTenant {
    /// Name.
    pub name: String,
    /// Weight.
    pub weight: Weight,
    /// Priority of its requests.
    pub priority: Priority,
}

impl ClusterTenant {
    /// Returns a tenant of this weight whose requests have priority 0.
    pub fn new(name: &str, weight: Weight) -> Arc<Self> {
        Arc::new(Self { name: name.to_owned(), weight, priority: Priority::default() })
    }

    /// Returns the only tenant of a workload.
    pub fn only() -> Arc<Self> {
        Self::new("tenant", Weight::default())
    }
}

/// Request to a simulated cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterRequest {
    /// Tenant and priority.
    pub tenant: Arc<ClusterTenant>,
    /// Arrival time at a router.
    pub arrival: Time,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Output length in tokens.
    pub output_tokens: u32,
    /// Ids of the prompt's blocks of 512 tokens, the last of which may be partial. Equal prefixes have equal
    /// leading ids.
    pub blocks: Vec<u64>,
}

impl ClusterRequest {
    /// Returns the hashes of the prompt's full blocks of `block_tokens` tokens, which must divide 512.
    pub fn hashes(&self, block_tokens: u32) -> impl Iterator<Item = BlockHash> + '_ {
        let full = self.prompt_tokens / block_tokens;
        let parts = TRACE_BLOCK / block_tokens;
        (0..full).map_while(move |nth| {
            let id = *self.blocks.get((nth / parts) as usize)?;
            let short = Random::new(id.wrapping_mul(1 << 16).wrapping_add(u64::from(nth % parts))).bits();
            Some(BlockHash::from_raw((u128::from(id) << 64) | u128::from(short)))
        })
    }
}

/// Reason why a Mooncake trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MooncakeError {
    /// The file cannot be read.
    #[error("can't read the trace {path}: {source}")]
    Read {
        /// Path of the file.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// A line does not parse.
    #[error("the trace {path}, line {line}: {source}")]
    Line {
        /// Path of the file.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// Cause.
        source: serde_json::Error,
    },
}

/// Line of a Mooncake trace.
#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reads the first `max` requests of a Mooncake trace: JSON lines with `timestamp` in milliseconds,
/// `input_length`, `output_length` and `hash_ids`, the ids of blocks of 512 tokens.
///
/// The timestamps are clustered about three seconds apart; each cluster is spread uniformly over three
/// seconds, deterministically by `seed`.
///
/// # Errors
/// [`MooncakeError`].
pub fn read_mooncake(path: &Path, max: usize, seed: u64) -> Result<Vec<ClusterRequest>, MooncakeError> {
    let name = || path.display().to_string();
    let text =
        std::fs::read_to_string(path).map_err(|source| MooncakeError::Read { path: name(), source })?;
    let mut random = Random::new(seed);
    let tenant = ClusterTenant::only();
    let mut requests = Vec::new();
    for (position, line) in text.lines().take(max).enumerate() {
        let line: MooncakeLine = serde_json::from_str(line).map_err(|source| MooncakeError::Line {
            path: name(),
            line: position + 1,
            source,
        })?;
        let arrival = line.timestamp as f64 / 1e3 + 3.0 * random.unit();
        requests.push(ClusterRequest {
            tenant: tenant.clone(),
            arrival: Time::from_nanos((arrival * 1e9) as u64),
            prompt_tokens: line.input_length.max(1),
            output_tokens: line.output_length.max(1),
            blocks: line.hash_ids,
        });
    }
    requests.sort_by_key(|request| request.arrival);
    Ok(requests)
}

/// Generates multi-turn conversations like the Mooncake trace, with Poisson arrivals of `rate` requests per
/// second. Prompts have a median of 7,000 tokens and a 0.9 quantile of 28,000, outputs a median of 350. All
/// share one system prompt, and about 40 % of the blocks are repeated, since each turn resends the
/// conversation.
pub fn conversations(requests: usize, rate: f64, seed: u64) -> Vec<ClusterRequest> {
    let mut random = Random::new(seed);
    let first_turns = LengthDistribution::new(&[
        (0.0, 600.0),
        (0.5, 4500.0),
        (0.9, 21_000.0),
        (0.99, 60_000.0),
        (1.0, 100_000.0),
    ]);
    let later_turns = LengthDistribution::new(&[(0.0, 100.0), (0.5, 1500.0), (0.9, 9000.0), (1.0, 30_000.0)]);
    let outputs =
        LengthDistribution::new(&[(0.0, 10.0), (0.5, 355.0), (0.9, 605.0), (0.99, 1183.0), (1.0, 2000.0)]);
    let tenant = ClusterTenant::only();
    // Open conversations, each with the tokens and block ids of its last prompt.
    let mut open: Vec<(u32, Vec<u64>)> = Vec::new();
    let (mut ids, mut at) = (0, 0.0);
    let mut result = Vec::with_capacity(requests);
    for _ in 0..requests {
        at += random.exponential(rate);
        let continues = !open.is_empty() && random.unit() < 0.45;
        let (mut tokens, mut blocks) = match continues {
            true => {
                let nth = (random.unit() * open.len() as f64) as usize;
                open.swap_remove(nth.min(open.len() - 1))
            }
            false => (TRACE_BLOCK, vec![u64::MAX >> 20]),
        };
        tokens += if continues { later_turns.sample(&mut random) } else { first_turns.sample(&mut random) };
        let tokens = tokens.min(120_000);
        // A block that was partial now has different content, and a new id.
        blocks.truncate((tokens / TRACE_BLOCK) as usize);
        if continues && blocks.len() > 1 {
            blocks.pop();
        }
        while blocks.len() < tokens.div_ceil(TRACE_BLOCK) as usize {
            ids += 1;
            blocks.push(ids);
        }
        result.push(ClusterRequest {
            tenant: tenant.clone(),
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
