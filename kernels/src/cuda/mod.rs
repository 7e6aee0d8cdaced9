//! Kernels for CUDA devices: embedded images, parameter blocks and launch functions.
//!
//! The kernels are CUDA C++ in `kernels/cuda`, over a thin header of wrappers. Their machine code and PTX are
//! embedded as one compressed archive, unpacked when a GPU is used. The same sources, compiled as plain C++ over fibers (feature `harness`), run on any machine:
//! [`Harness`] is a [`Device`] that is correct but slow.
//!
//! All launch code is generic over [`Device`], so tests on the harness exercise the code that GPUs run.

mod attention_plan;
mod device;
#[cfg(feature = "harness")]
mod harness;
mod image;
mod launch;
mod params;
mod replacement;

pub use attention_plan::{AttentionPlan, PlanShape, PlannedSequence};
pub use device::{Device, DeviceError, HalfDtype, KvStore, Launch, Profile};
#[cfg(feature = "harness")]
pub use harness::{
    Harness, HostMemory, Mutant, from_e4m3_on_harness, narrow_on_harness, run_harness_unchecked,
    to_e4m3_on_harness, widen_on_harness,
};
pub use image::{Image, Images, KERNELS, Target, family_of};
pub use launch::{
    ATTENTION_ROWS, ATTENTION_SPLIT, ATTENTION_SPLIT_ROWS, HEAD_DIMS, SAMPLING_SPLIT_ROWS, SKINNY_ROWS,
    accept_drafts, attention, attention_blocks, copy_blocks, count_history, embedding, finish_qkv, gemm,
    kernel_names, norm, sample, sampling_parts, score, skinny_gemm, skinny_gemm_swiglu, skinny_supports,
    swiglu,
};
pub use params::{
    AttentionItem, AttentionParams, CopyParams, DRAFTS_MAX, EmbeddingParams, GemmParams, HistoryParams,
    NormParams, Plain, QkvParams, RECENT_TOKENS, SAMPLING_PARTS_MAX, SAMPLING_SPLIT_BYTES, SamplingParams,
    SamplingResult, SamplingRow, ScoreParams, ScoreRow, SlotOutput, SplitKernels, SwigluParams, TOP_MAX,
    as_bytes,
};
pub use replacement::{IMAGES_VARIABLE, Replacement};
