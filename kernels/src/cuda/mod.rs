//! Kernels for CUDA devices: embedded images, parameter blocks and launch functions.
//!
//! The kernels are CUDA C++ in `kernels/cuda`, over a thin header of wrappers. Their machine code and PTX are
//! embedded as one compressed archive, unpacked when a GPU is used.
//!
//! All launch code is generic over [`Device`], so tests exercise the code that GPUs run: on the harness of `tests/support/kernels`, which
//! compiles the same sources as C++ and runs each CUDA thread as a fiber.

mod attention_plan;
mod delta;
mod device;
mod image;
mod launch;
mod params;
mod replacement;

pub use attention_plan::{AttentionPlan, PlanShape, PlannedSequence};
pub use delta::{DELTA_COLUMNS, DELTA_KEY_DIMS, delta, output_gate};
pub use device::{Device, DeviceError, HalfDtype, KvStore, Launch, Profile};
pub use image::{Image, Images, KERNELS, Target, family_of};
pub use launch::{
    ATTENTION_KEY_TILE, ATTENTION_ROWS, ATTENTION_SPLIT, ATTENTION_SPLIT_ROWS, HEAD_DIMS,
    SAMPLING_SPLIT_ROWS, SKINNY_ROWS, accept_drafts, attention, attention_blocks, copy_blocks, count_history,
    embedding, finish_qkv, geglu, gemm, kernel_names, norm, norm_after, sample, sampling_parts, score,
    skinny_gemm, skinny_gemm_swiglu, skinny_supports, swiglu,
};
pub use params::{
    AttentionItem, AttentionParams, CopyParams, DRAFTS_MAX, DeltaParams, DeltaPlace, DeltaSequence,
    EmbeddingParams, GemmParams, HistoryParams, NormParams, OutputGateParams, Plain, QkvParams,
    RECENT_TOKENS, SAMPLING_PARTS_MAX, SAMPLING_SPLIT_BYTES, SamplingParams, SamplingResult, SamplingRow,
    ScoreParams, ScoreRow, SlotOutput, SplitKernels, SwigluParams, TOP_MAX, as_bytes,
};
pub use replacement::{IMAGES_VARIABLE, Replacement};
