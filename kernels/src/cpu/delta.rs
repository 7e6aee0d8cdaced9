//! Gated delta rule (Yang et al., 2024): layers whose memory of a sequence is a matrix a head, whatever its length.
//!
//! The state S of a head, [key_dim, value_dim], follows S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q. Here the state
//! changes at multiples of [`CELL`] positions only. Between them, a log has what each position adds: with b the last multiple and
//! c_t the sum of the g from b to t,
//!
//! ```text
//! u_t = beta_t (v_t - e^(c_t) S_b^T k_t - sum over b <= j < t of e^(c_t - c_j) (k_t . k_j) u_j)
//! o_t = e^(c_t) S_b^T q_t + sum over b <= j <= t of e^(c_t - c_j) (q_t . k_j) u_j
//! S_(b + CELL) = e^c S_b + sum of e^(c - c_j) k_j u_j^T
//! ```
//!
//! Each sum has one order, so that the bits of a position depend on the positions before it and not on the rows that are computed
//! together. Rejected drafts are overwritten in the log; no state has seen one.

mod head;
mod projections;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::isa::Isa;
use super::kv::KvPool;
use super::matrix::SharedPtr;
use super::pool::Pool;
use super::simd;

use head::HeadRows;
use projections::KeyRows;

/// Positions between two states.
pub const CELL: usize = 16;

/// Floats before a head's state: the first one holds the position of the state, as bits.
const HEADER: usize = 16;

/// Shape of a layer, or of a rank's part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of the key heads, of which each serves as many consecutive ones.
    pub value_heads: usize,
    /// Elements of a query or key; a multiple of 16.
    pub key_dim: usize,
    /// Elements of a value; a multiple of 16.
    pub value_dim: usize,
    /// Positions that the convolution before the rule sees, its own included; at least 2.
    pub taps: usize,
    /// Maximum drafts of a sequence in a step.
    pub drafts: usize,
}

impl DeltaShape {
    /// Returns the channels of the convolution: queries, keys and values of all heads, in this order.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Returns the elements of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Positions of the log.
    fn log(&self) -> usize {
        CELL + self.drafts
    }

    /// Positions whose inputs of the convolution are kept.
    fn inputs(&self) -> usize {
        self.taps - 1 + self.drafts
    }

    /// Returns the bytes that a sequence keeps of a key head: keys, and inputs of the convolution.
    pub fn key_bytes(&self) -> u64 {
        bytes(self.log() * self.key_dim + self.inputs() * 2 * self.key_dim)
    }

    /// Returns the bytes that a sequence keeps of a value head: state, log, and inputs of the convolution.
    pub fn head_bytes(&self) -> u64 {
        let state = self.key_dim * self.value_dim;
        let log = self.log() * self.value_dim + self.log().next_multiple_of(16);
        bytes(HEADER + state + log + self.inputs() * self.value_dim)
    }

    /// Returns the bytes of what a sequence keeps of the layer: of each key head, then of each value head.
    pub fn pieces(&self) -> Vec<u64> {
        [vec![self.key_bytes(); self.key_heads], vec![self.head_bytes(); self.value_heads]].concat()
    }
}

fn bytes(floats: usize) -> u64 {
    (floats * size_of::<f32>()).next_multiple_of(64) as u64
}

/// Place of a piece of a sequence's state: index of the block among those of the state, and bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaPlace {
    /// Index of the block among those of a sequence's state.
    pub part: usize,
    /// Bytes from the start of the block; a multiple of 64.
    pub offset: usize,
}

/// Weights of a layer, or of a rank's part of it.
#[derive(Debug, Clone, Copy)]
pub struct DeltaWeights<'a> {
    /// Weights of the convolution; [taps, channels].
    pub convolution: &'a [f32],
    /// Rate of the decays of each value head: A, above 0.
    pub decay: &'a [f32],
    /// What is added to the inputs of the decays; [value_heads].
    pub decay_bias: &'a [f32],
    /// Weights of the norm of outputs; [value_dim].
    pub norm: &'a [f32],
    /// Epsilon of that norm.
    pub norm_eps: f32,
}

/// Returns the rates of decays of their logarithms, as models have them.
pub fn decay_rates(mut logarithms: Vec<f32>) -> Vec<f32> {
    logarithms.iter_mut().for_each(|rate| *rate = libm::expf(*rate));
    logarithms
}

/// Inputs of a layer: outputs of its projections. Those of the convolution are overwritten.
#[derive(Debug)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values; [rows, channels].
    pub qkv: &'a mut [f32],
    /// Gates of the outputs; [rows, value_heads * value_dim].
    pub gates: &'a [f32],
    /// Inputs of beta, then of the decays; [rows, 2 * value_heads].
    pub scalars: &'a [f32],
}

/// Rows of a sequence in a batch.
#[derive(Debug, Clone)]
pub struct DeltaSequence<'a> {
    /// Rows in the batch; not empty.
    pub rows: Range<usize>,
    /// Position of the first row.
    pub position: usize,
    /// Number of drafts among the rows, the last ones.
    pub drafts: usize,
    /// Blocks of its state.
    pub blocks: &'a [u32],
}

/// Computes y = norm(o) * silu(gates) for all rows, [rows, value_heads * value_dim], and updates the states of the sequences.
///
/// # Panics
/// If shapes do not match, a block is out of the pool or a piece beyond its block, or a sequence has more drafts than the shape allows
/// or no other row.
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
    assert!(heads.is_multiple_of(shape.key_heads) && shape.taps >= 2, "the heads are no multiple");
    assert!(shape.key_dim.is_multiple_of(16) && shape.value_dim.is_multiple_of(16), "heads of other sizes");
    let rows = sequences.last().map_or(0, |sequence| sequence.rows.end);
    assert!(inputs.qkv.len() >= rows * shape.channels(), "qkv is not [rows, channels]");
    assert!(inputs.gates.len() >= rows * shape.values(), "gates are not [rows, values]");
    assert!(inputs.scalars.len() >= rows * 2 * heads, "scalars are not [rows, 2 * value_heads]");
    assert!(outputs >= rows * shape.values(), "y is not [rows, values]");
    assert_eq!(weights.convolution.len(), shape.taps * shape.channels(), "the weights of the convolution");
    let lengths = [weights.decay.len(), weights.decay_bias.len(), weights.norm.len()];
    assert_eq!(lengths, [heads, heads, shape.value_dim], "the weights of the heads");
    let pieces = shape.pieces();
    assert_eq!(places.len(), pieces.len(), "each head has a place");
    for (place, bytes) in places.iter().zip(&pieces) {
        let end = place.offset + *bytes as usize;
        assert!(end <= states.block_bytes() && place.offset.is_multiple_of(64), "a piece beyond its block");
    }
    let parts = places.iter().map(|place| place.part + 1).max().unwrap_or(0);
    for (index, sequence) in sequences.iter().enumerate() {
        let before = index.checked_sub(1).map_or(0, |before| sequences[before].rows.end);
        assert_eq!(sequence.rows.start, before, "the rows of a sequence follow those of the one before");
        assert!(sequence.drafts < sequence.rows.len() && sequence.drafts <= shape.drafts, "too many drafts");
        assert!(sequence.blocks.len() >= parts, "a state without all its blocks");
        let within = sequence.blocks.iter().all(|block| (*block as usize) < states.blocks());
        assert!(within, "a block is out of the pool");
    }
}

/// Operands of all tasks of a layer.
struct DeltaJob<'a> {
    shape: DeltaShape,
    weights: &'a DeltaWeights<'a>,
    qkv: SharedPtr<f32>,
    gates: &'a [f32],
    scalars: &'a [f32],
    sequences: &'a [DeltaSequence<'a>],
    block_bytes: usize,
    states: SharedPtr<u8>,
    places: &'a [DeltaPlace],
    y: SharedPtr<f32>,
}

impl DeltaJob<'_> {
    /// Returns what a sequence keeps of a piece.
    fn piece(&self, sequence: usize, piece: usize) -> *mut f32 {
        let DeltaPlace { part, offset } = self.places[piece];
        let block = self.sequences[sequence].blocks[part] as usize;
        // SAFETY: `check` has bounded blocks and places.
        unsafe { self.states.get().add(block * self.block_bytes + offset).cast() }
    }

    /// Returns a row of the convolution's channels from the channel `column` on.
    fn channels(&self, row: usize, column: usize) -> *mut f32 {
        // SAFETY: `check` has bounded rows; columns are within a row.
        unsafe { self.qkv.get().add(row * self.shape.channels() + column) }
    }

    /// Stores the keys of the rows behind the last state, which later rows need.
    fn keep_keys(&self, sequence: usize, head: usize) {
        let DeltaSequence { ref rows, position, drafts, .. } = self.sequences[sequence];
        let DeltaShape { key_heads, key_dim, .. } = self.shape;
        let (end, log) = (position + rows.len(), self.shape.log());
        let kept = (end - drafts) / CELL * CELL;
        let piece = self.piece(sequence, head);
        for at in kept.max(position)..end {
            let key = self.channels(rows.start + at - position, (key_heads + head) * key_dim);
            // SAFETY: a log of `log` keys is at the start of the piece; each task has a piece of its own, and the rows are only read.
            unsafe { std::ptr::copy_nonoverlapping(key, piece.add(at % log * key_dim), key_dim) };
        }
    }
}
