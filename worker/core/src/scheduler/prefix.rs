//! Prefix of a waiting sequence that need not be computed: of the prefix caches, or of a sibling.

use inflight_contract::BlockHash;

use super::Scheduler;
use crate::memory::{FoundPrefix, Spans};
use crate::{BlockedBy, Direction};

/// Result of a prefix-cache lookup. Holds counts only, so that a lookup does not allocate.
#[derive(Debug)]
pub(super) struct PrefixMatch {
    /// Leading spans whose KV is on the device: found in the prefix cache by their hashes, or in the tables of the sibling. Of a group with a
    /// sliding window, only the spans that the next token sees.
    pub found: FoundPrefix,
    /// Sequence of the same group whose tables are shared.
    pub sibling: Option<u32>,
    /// Whether the partial span behind the shared ones is copied from the sibling.
    pub copy: bool,
    /// Number of host blocks to load behind the shared ones; of a model with one group only.
    pub host: u32,
    /// Number of tokens that need not be computed.
    pub tokens: u32,
}

impl Scheduler {
    /// Returns true if no sequence runs and no transfer is in flight.
    pub(super) fn is_alone(&self) -> bool {
        self.running.is_empty() && self.transfers.is_empty()
    }

    /// Returns the spans up to which the tables reach at admission, and the blocks that must be free for it.
    pub(super) fn admission_need(&self, index: u32, prefix: &PrefixMatch) -> (Spans, u32) {
        self.memory.admission_need(&self.sequences[index], &prefix.found, prefix.tokens, self.is_alone())
    }

    /// Returns the blocks that must be free to admit a waiting sequence; `None` if it waits for a prefix.
    pub(super) fn blocks_to_admit(&self, index: u32) -> Option<u32> {
        let prefix = self.match_prefix(index).ok()?;
        Some(self.admission_need(index, &prefix).1)
    }

    /// Returns true if a sequence may wait for a prefix that another one computes. After too many bypasses it
    /// computes the prefix itself.
    pub(super) fn may_wait_to_share(&self, index: u32) -> bool {
        self.sequences[index].bypass_count < self.limits.bypass_max.max(1)
    }

    /// Looks up the cached prefix of a sequence.
    pub(super) fn match_prefix(&self, index: u32) -> Result<PrefixMatch, BlockedBy> {
        if self.limits.shape.state_blocks() > 0 {
            return self.match_snapshot(index);
        }
        if let Some(prefix) = self.match_sibling(index)? {
            return Ok(prefix);
        }
        let sequence = &self.sequences[index];
        let max = (sequence.reusable_tokens() / self.limits.block_tokens()) as usize;
        let hashes = &sequence.hashes[..sequence.hashes.len().min(max)];
        let found = self.memory.find_prefix(hashes);
        let next = found.cached as usize;
        if let Some(hash) = hashes.get(next) {
            // Hashes are chained, so equal hashes are at equal positions.
            let computes = |other: &u32| {
                let other = &self.sequences[*other];
                !other.is_marked()
                    && other.sealed_spans as usize <= next
                    && other.hashes.get(next) == Some(hash)
            };
            if self.may_wait_to_share(index) && self.running.iter().any(computes) {
                return Err(BlockedBy::PrefixUnderWay);
            }
        }
        let host =
            if sequence.skip_host { 0 } else { self.host_prefix_blocks(index, &hashes[next..], next)? };
        let tokens = (found.spans + host) * self.limits.block_tokens();
        Ok(PrefixMatch { found, sibling: None, copy: false, host, tokens })
    }

    /// Matches the prompt of a sibling in the same group that has computed it: full blocks are shared, and
    /// the partial block that both will write to is copied.
    fn match_sibling(&self, index: u32) -> Result<Option<PrefixMatch>, BlockedBy> {
        let sequence = &self.sequences[index];
        let fresh = sequence.known_tokens == sequence.input_tokens && sequence.scored.is_empty();
        let Some(group) = sequence.group.filter(|_| fresh) else { return Ok(None) };
        let is_sibling = |other: &&u32| {
            let other = &self.sequences[**other];
            other.group == Some(group) && other.input_tokens == sequence.input_tokens && !other.is_marked()
        };
        let Some(&sibling) = self.running.iter().find(is_sibling) else { return Ok(None) };
        let sibling = &self.sequences[sibling];
        if sibling.committed_tokens < sequence.known_tokens {
            return if self.may_wait_to_share(index) { Err(BlockedBy::PrefixUnderWay) } else { Ok(None) };
        }
        let tokens = sequence.known_tokens - 1;
        if !self.memory.sees(sibling, tokens) {
            return Ok(None);
        }
        let spans = tokens / self.limits.block_tokens();
        let found = FoundPrefix { spans, unowned: 0, pinned: 0, cached: spans };
        let copy = !tokens.is_multiple_of(self.limits.block_tokens());
        Ok(Some(PrefixMatch { found, sibling: Some(sibling.id.index), copy, host: 0, tokens }))
    }

    /// Returns the number of host blocks that extend the prefix on the device; 0 if computing them is cheaper
    /// than copying. `hashes` are the hashes of the blocks from table position `next` on.
    fn host_prefix_blocks(&self, index: u32, hashes: &[BlockHash], next: usize) -> Result<u32, BlockedBy> {
        let host = self.memory.find_on_host(hashes);
        let Some(first) = hashes.first().filter(|_| host > 0) else { return Ok(0) };
        let loads = self.transfers.iter().any(|transfer| {
            let owner = transfer.owner().filter(|_| transfer.direction == Direction::In);
            owner.is_some_and(|owner| self.sequences[owner.index].hashes.get(next) == Some(first))
        });
        if loads && self.may_wait_to_share(index) {
            return Err(BlockedBy::PrefixUnderWay);
        }
        let (start, tokens) = (next as u32 * self.limits.block_tokens(), host * self.limits.block_tokens());
        let cheaper = self.cost.copy(host) < self.cost.prefill(start, tokens);
        Ok(if cheaper { host } else { 0 })
    }
}
