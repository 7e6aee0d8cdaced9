use std::time::Duration;

/// How busy the scheduler is, and what it has done since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences with a slot.
    pub running: u32,
    /// Sequences that wait.
    pub waiting: u32,
    /// Sequences whose blocks are on the host, or on their way there.
    pub swapped: u32,
    /// Device blocks owned, by sequences and transfers.
    pub blocks_used: u32,
    /// Device blocks in all.
    pub blocks: u32,
    /// Host blocks owned.
    pub host_blocks_used: u32,
    /// Preemptions that dropped the blocks.
    pub recompute_preemptions: u64,
    /// Preemptions that moved them to the host.
    pub swap_preemptions: u64,
    /// Tokens computed again.
    pub recomputed_tokens: u64,
    /// Known tokens of all admissions.
    pub admitted_tokens: u64,
    /// Of these, found in the prefix cache or shared with a sibling.
    pub cached_tokens: u64,
    /// Of these, found on the host.
    pub host_cached_tokens: u64,
    /// Cold blocks of the prefix cache copied to the host.
    pub blocks_offloaded: u64,
    /// Device blocks moved to the host.
    pub blocks_swapped_out: u64,
    /// Blocks moved back.
    pub blocks_swapped_in: u64,
}

/// What a prompt that comes now has ahead of it, by the cost model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillOutlook {
    /// Time that the prompts taken on and not computed take on their own.
    pub ahead: Duration,
    /// By what factor computing prompts takes longer in chunks, beside the sequences that decode; at least 1.
    pub stretch: f64,
    /// Duration of a step with these sequences alone.
    pub decode_step: Duration,
}
