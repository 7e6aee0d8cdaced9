//! Shape, weights and operands of the gated delta rule.

use std::ops::Range;

use super::super::matrix::SharedPtr;

/// Positions between two states.
pub const CELL: usize = 16;

/// Floats before what a head keeps: the first one holds its position, as bits.
pub(super) const HEADER: usize = 16;

/// Shape of a layer, or of a rank's part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of the key heads.
    pub value_heads: usize,
    /// Whether the value heads that a key head serves are as many apart as there are key heads, and not consecutive ones.
    pub tiled: bool,
    /// Elements of a query or key; a multiple of 16.
    pub key_dim: usize,
    /// Elements of a value; a multiple of 16.
    pub value_dim: usize,
    /// Kernel size of the convolution before the rule: positions that it sees, its own included; at least 2.
    pub taps: usize,
    /// Maximum drafts of a sequence in a step.
    pub drafts: usize,
}

impl DeltaShape {
    /// Returns the channels of the convolution: queries, keys and values of all heads, in this order.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Returns the key head that serves a value head.
    pub(super) fn key_head(&self, value_head: usize) -> usize {
        if self.tiled {
            value_head % self.key_heads
        } else {
            value_head / (self.value_heads / self.key_heads)
        }
    }

    /// Returns the elements of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the positions of the log.
    pub fn log(&self) -> usize {
        CELL + self.drafts
    }

    /// Returns the positions whose inputs of the convolution are kept.
    pub fn inputs(&self) -> usize {
        self.taps - 1 + self.drafts
    }

    /// Returns the bytes of the state after a multiple of [`CELL`] positions, from which a sequence resumes: of each key head and of each value
    /// head that position and the inputs of the convolution before it, then of each value head the matrix.
    pub fn state_pieces(&self) -> Vec<u64> {
        let before = self.taps - 1;
        let key = bytes(HEADER + before * 2 * self.key_dim);
        let head = bytes(HEADER + before * self.value_dim);
        // Alone, so that whole numbers of them fill blocks.
        let matrix = bytes(self.key_dim * self.value_dim);
        [vec![key; self.key_heads], vec![head; self.value_heads], vec![matrix; self.value_heads]].concat()
    }

    /// Returns the bytes of the log behind the state: of each key head (keys, and inputs of the convolution), then of each value head (updates,
    /// decays, and inputs).
    pub fn log_pieces(&self) -> Vec<u64> {
        let key = bytes(self.log() * self.key_dim + self.inputs() * 2 * self.key_dim);
        let log = self.log() * self.value_dim + self.log().next_multiple_of(16);
        let head = bytes(log + self.inputs() * self.value_dim);
        [vec![key; self.key_heads], vec![head; self.value_heads]].concat()
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

/// Returns the rates of decays of their logarithms.
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

/// Operands of all tasks of a layer.
pub(super) struct DeltaJob<'a> {
    pub(super) shape: DeltaShape,
    pub(super) weights: &'a DeltaWeights<'a>,
    pub(super) qkv: SharedPtr<f32>,
    pub(super) gates: &'a [f32],
    pub(super) scalars: &'a [f32],
    pub(super) sequences: &'a [DeltaSequence<'a>],
    pub(super) block_bytes: usize,
    pub(super) states: SharedPtr<u8>,
    /// Those of [`DeltaShape::state_pieces`], then those of [`DeltaShape::log_pieces`].
    pub(super) places: &'a [DeltaPlace],
    pub(super) y: SharedPtr<f32>,
}

impl DeltaJob<'_> {
    /// Returns position and inputs of the state of a head, counted from the key heads on, of a sequence.
    pub(super) fn state(&self, sequence: usize, head: usize) -> *mut f32 {
        self.piece(sequence, head)
    }

    /// Returns the matrix of a value head of a sequence.
    pub(super) fn matrix(&self, sequence: usize, head: usize) -> *mut f32 {
        self.piece(sequence, self.shape.key_heads + self.shape.value_heads + head)
    }

    /// Returns the log of a head, counted from the key heads on, of a sequence.
    pub(super) fn log(&self, sequence: usize, head: usize) -> *mut f32 {
        self.piece(sequence, self.shape.key_heads + 2 * self.shape.value_heads + head)
    }

    /// Returns the position of the state after the rows of a sequence: of those that are no drafts.
    pub(super) fn keep(&self, sequence: usize) -> usize {
        let DeltaSequence { ref rows, position, drafts, .. } = self.sequences[sequence];
        (position + rows.len() - drafts) / CELL * CELL
    }

    fn piece(&self, sequence: usize, piece: usize) -> *mut f32 {
        let DeltaPlace { part, offset } = self.places[piece];
        let block = self.sequences[sequence].blocks[part] as usize;
        // SAFETY: `check` has bounded blocks and places.
        unsafe { self.states.get().add(block * self.block_bytes + offset).cast() }
    }

    /// Returns a row of the convolution's channels from the channel `column` on.
    pub(super) fn channels(&self, row: usize, column: usize) -> *mut f32 {
        // SAFETY: `check` has bounded rows; columns are within a row.
        unsafe { self.qkv.get().add(row * self.shape.channels() + column) }
    }

    /// Stores the keys of the rows behind the last state, which later rows need.
    pub(super) fn keep_keys(&self, sequence: usize, head: usize) {
        let DeltaSequence { ref rows, position, .. } = self.sequences[sequence];
        let DeltaShape { key_heads, key_dim, .. } = self.shape;
        let (end, log) = (position + rows.len(), self.shape.log());
        let piece = self.log(sequence, head);
        for at in self.keep(sequence).max(position)..end {
            let key = self.channels(rows.start + at - position, (key_heads + head) * key_dim);
            // SAFETY: a log of `log` keys is at the start of the piece; each task has a piece of its own, and the rows are only read.
            unsafe { std::ptr::copy_nonoverlapping(key, piece.add(at % log * key_dim), key_dim) };
        }
    }
}
