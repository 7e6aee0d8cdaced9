//! Load snapshots and the prefill outlook reported to routers.

use std::time::Duration;

/// Current load of the scheduler and its counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences with a slot.
    pub running: u32,
    /// Sequences in the waiting queue.
    pub waiting: u32,
    /// Sequences swapped out or being swapped out.
    pub swapped: u32,
    /// Device blocks owned by sequences and transfers.
    pub blocks_used: u32,
    /// Device blocks in total.
    pub blocks: u32,
    /// Positions of the running sequences' blocks that hold no token: the ends of their last blocks.
    pub unfilled_tokens: u32,
    /// Host blocks owned by sequences and transfers.
    pub host_blocks_used: u32,
    /// Total preemptions by recompute.
    pub recompute_preemptions: u64,
    /// Total preemptions by swap.
    pub swap_preemptions: u64,
    /// Total tokens whose KV was dropped by preemption and must be recomputed.
    pub recomputed_tokens: u64,
    /// Total known tokens of admitted sequences.
    pub admitted_tokens: u64,
    /// Subset of `admitted_tokens` found in the prefix cache or shared with a sibling.
    pub cached_tokens: u64,
    /// Subset of `cached_tokens` found in the host pool.
    pub host_cached_tokens: u64,
    /// Total known tokens of admitted sequences that were in the prefix cache and had been evicted, among the last
    /// evictions, as many as the pool has blocks: hits of a pool twice as large.
    pub evicted_hit_tokens: u64,
    /// Total predicted cost of the preemptions, by the mode that was chosen, in microseconds.
    pub preemption_cost_us: u64,
    /// Total predicted cost if all preemptions were by recompute, in microseconds.
    pub preemption_recompute_us: u64,
    /// Total predicted cost if all preemptions were by swap, in microseconds.
    pub preemption_swap_us: u64,
    /// Total preempted sequences that run again.
    pub resumed_sequences: u64,
    /// Total time from their preemption until they ran again, in microseconds.
    pub preemption_pause_us: u64,
    /// Total cold prefix-cache blocks copied to the host.
    pub blocks_offloaded: u64,
    /// Total blocks swapped out.
    pub blocks_swapped_out: u64,
    /// Total blocks swapped in.
    pub blocks_swapped_in: u64,
    /// Total drafted tokens of committed iterations.
    pub drafted_tokens: u64,
    /// Subset of `drafted_tokens` that became output.
    pub accepted_drafts: u64,
    /// Total tokens that the MTP layer was to predict in committed iterations, to be drafts of the next ones.
    pub predicted_tokens: u64,
    /// Total steps whose decodes alone took too long for the objective for gaps.
    pub gap_objective_unmet: u64,
    /// Total steps at which the prompts could not all meet the objective for first tokens.
    pub first_token_objective_unmet: u64,
}

/// Predicted prefill delay of a prompt submitted now, by the cost model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillEstimate {
    /// Time to prefill all accepted but uncomputed prompt tokens, without decodes.
    pub backlog: Duration,
    /// Slowdown of prefill in chunks beside the running decodes; at least 1.
    pub slowdown: f64,
    /// Duration of a step with the running decodes alone.
    pub decode_step: Duration,
}
