//! CPU kernels, compiled for up to five instruction sets and selected at run time by [`Isa`].

mod attention;
mod buffer;
mod cpu_claim;
mod delta;
mod gemm;
mod isa;
mod kv;
mod matrix;
mod pool;
pub mod roofline;
mod rope;
mod rows;
mod sampling;
mod simd;
mod sync;

pub use attention::{HEAD_DIM_MAX, Ragged, attention};
pub use delta::{
    CELL, DeltaInputs, DeltaPlace, DeltaSequence, DeltaShape, DeltaWeights, decay_rates, delta_rule,
};
pub use gemm::{AccumulatorInit, Activations, gemm, gemm_gated};
pub use isa::Isa;
pub use kv::{KvCopier, KvDirection, KvDtype, KvLayout, KvPool, KvSlot};
pub use matrix::{GROUP_MAX, GROUP_STEP, PackedMatrix, WeightFormat, WeightRows};
pub use pool::Pool;
pub use rope::{QkvShape, RopeScaling, RopeTable, finish_qkv, inverse_frequencies};
pub use rows::{Activation, gate, rms_norm, sigmoid_gate};
pub use sampling::{
    Score, Truncation, Workspace, all_finite, argmax, log_sum_exp, logprob, mask_nan, sample, score, top,
};
