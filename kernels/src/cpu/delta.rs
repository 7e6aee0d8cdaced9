//! Gated delta rule (Gated DeltaNet, Yang et al., 2024): layers whose memory of a sequence is a matrix a head, whatever its length. This is
//! its chunkwise form with chunks of 16 positions at absolute multiples, and the causal convolution before it.
//!
//! The state S of a head, [key_dim, value_dim], follows S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q. Here the state
//! changes at multiples of [`CELL`] positions only. Between them, a log has what each position adds: with b the last multiple and
//! c_t the sum of the g from b to t,
//!
//! ```text
//! u_t = beta_t (v_t - e^(c_t) S_b^T k_t - sum over b <= j < t of e^(c_t - c_j) (k_t . k_j) u_j)
//! o_t = e^(c_t) S_b^T q_t + sum over b <= j <= t of e^(c_t - c_j) (q_t . k_j) u_j
//! S_(b + CELL) = e^c S_b + sum of e^(c - c_j) k_j u_j^T, with c = c_(b + CELL - 1)
//! ```
//!
//! Each sum has one order, so that the bits of a position depend on the positions before it and not on the rows that are computed
//! together. Rejected drafts are overwritten in the log; no state has seen one.

mod head;
mod job;
mod projections;
#[cfg(test)]
mod tests;

use super::isa::Isa;
use super::kv::KvPool;
use super::matrix::SharedPtr;
use super::pool::Pool;
use super::simd;

use head::HeadRows;
use job::DeltaJob;
pub use job::{CELL, DeltaInputs, DeltaPlace, DeltaSequence, DeltaShape, DeltaWeights, decay_rates};
use projections::KeyRows;

/// Computes y = norm(o) * silu(gates) for all rows, [rows, value_heads * value_dim], and updates the states of the sequences.
///
/// # Panics
/// If shapes do not match, a block is out of the pool or of two sequences, a piece is beyond its block, or a sequence has more drafts than
/// the shape allows or no other row, or a state that does not precede its first position.
#[allow(clippy::too_many_arguments, reason = "the operands of a layer")]
pub fn delta_rule(
    pool: &Pool,
    isa: Isa,
    shape: &DeltaShape,
    weights: &DeltaWeights<'_>,
    inputs: &mut DeltaInputs<'_>,
    sequences: &[DeltaSequence<'_>],
    states: &mut KvPool,
    places: &[DeltaPlace],
    y: &mut [f32],
) {
    check(shape, weights, inputs, sequences, states, places, y.len());
    let job = DeltaJob {
        shape: *shape,
        weights,
        qkv: SharedPtr(inputs.qkv.as_mut_ptr()),
        gates: inputs.gates,
        scalars: inputs.scalars,
        sequences,
        block_bytes: states.block_bytes(),
        states: SharedPtr(states.as_mut_ptr()),
        places,
        y: SharedPtr(y.as_mut_ptr()),
    };
    let each = |heads: usize, task: &(dyn Fn(usize, usize) + Sync)| {
        pool.split(sequences.len() * heads, 1, &|items| {
            items.for_each(|item| task(item / heads, item % heads));
        });
    };
    each(shape.key_heads, &|sequence, head| simd::run(isa, KeyRows { job: &job, sequence, head }));
    each(shape.value_heads, &|sequence, head| simd::run(isa, HeadRows { job: &job, sequence, head }));
    // Once no head reads the keys before.
    each(shape.key_heads, &|sequence, head| job.keep_keys(sequence, head));
}

fn check(
    shape: &DeltaShape,
    weights: &DeltaWeights<'_>,
    inputs: &DeltaInputs<'_>,
    sequences: &[DeltaSequence<'_>],
    states: &KvPool,
    places: &[DeltaPlace],
    outputs: usize,
) {
    let heads = shape.value_heads;
    assert!(heads.is_multiple_of(shape.key_heads), "the heads are no multiple");
    // A state has the inputs before it, at least CELL.
    assert!((2..=CELL + 1).contains(&shape.taps), "a convolution of too few or too many positions");
    assert!(shape.key_dim.is_multiple_of(16) && shape.value_dim.is_multiple_of(16), "heads of other sizes");
    let rows = sequences.last().map_or(0, |sequence| sequence.rows.end);
    assert!(inputs.qkv.len() >= rows * shape.channels(), "qkv is not [rows, channels]");
    assert!(inputs.gates.len() >= rows * shape.values(), "gates are not [rows, values]");
    assert!(inputs.scalars.len() >= rows * 2 * heads, "scalars are not [rows, 2 * value_heads]");
    assert!(outputs >= rows * shape.values(), "y is not [rows, values]");
    assert_eq!(weights.convolution.len(), shape.taps * shape.channels(), "the weights of the convolution");
    let lengths = [weights.decay.len(), weights.decay_bias.len(), weights.norm.len()];
    assert_eq!(lengths, [heads, heads, shape.value_dim], "the weights of the heads");
    let pieces = [shape.state_pieces(), shape.log_pieces()].concat();
    assert_eq!(places.len(), pieces.len(), "each head has a place");
    for (place, bytes) in places.iter().zip(&pieces) {
        let end = place.offset + *bytes as usize;
        assert!(end <= states.block_bytes() && place.offset.is_multiple_of(64), "a piece beyond its block");
    }
    assert!(states.block_bytes().is_multiple_of(4), "blocks of a state are not aligned");
    let parts = places.iter().map(|place| place.part + 1).max().unwrap_or(0);
    let mut blocks: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.blocks).copied().collect();
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|pair| pair[0] < pair[1]), "a block of two states");
    for (index, sequence) in sequences.iter().enumerate() {
        let before = index.checked_sub(1).map_or(0, |before| sequences[before].rows.end);
        assert_eq!(sequence.rows.start, before, "the rows of a sequence follow those of the one before");
        assert!(sequence.drafts < sequence.rows.len() && sequence.drafts <= shape.drafts, "too many drafts");
        assert!(sequence.blocks.len() >= parts, "a state without all its blocks");
        let within = sequence.blocks.iter().all(|block| (*block as usize) < states.blocks());
        assert!(within, "a block is out of the pool");
    }
}
