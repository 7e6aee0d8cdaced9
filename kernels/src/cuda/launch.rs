//! Launch functions: each derives the kernel, grid and shared memory from the shapes in the parameters.

use super::device::{Device, DeviceError, HalfDtype, KvStore, Launch, Profile};
use super::params::{
    AttentionParams, CopyParams, DRAFTS_MAX, EmbeddingParams, GemmParams, HistoryParams, NormParams, Plain,
    QkvParams, SAMPLING_PARTS_MAX, SamplingParams, ScoreParams, SplitKernels, SwigluParams, as_bytes,
};

/// Head dimensions for which attention kernels exist: those of the supported models (Llama 1/2/3.x, Mistral,
/// Qwen2/2.5, Qwen3, Qwen3.5, Gemma 3).
pub const HEAD_DIMS: [u32; 3] = [64, 128, 256];
/// Maximum key positions of an attention tile. Kernels read the tile in which a sliding window begins from its start, with the keys
/// before the window masked.
pub const ATTENTION_KEY_TILE: u32 = 64;
/// Key positions per split (split-KV decoding).
pub const ATTENTION_SPLIT: u32 = 256;
/// Query rows (tokens times heads of a group) of a split-KV attention item.
pub const ATTENTION_SPLIT_ROWS: u32 = 16;
/// Query rows of an attention item that takes its whole key range, for head dimensions up to 128.
pub const ATTENTION_ROWS: u32 = 128;

const ATTENTION_THREADS: u32 = 128;
const MERGE_BYTES: u32 = (2 * 4 + 1) * ATTENTION_SPLIT_ROWS * 4 + 16;
const SAMPLING_THREADS: u32 = 512;
const _: () = assert!(DRAFTS_MAX == SAMPLING_THREADS as usize, "a thread holds a draft");
/// Maximum rows that are split for sampling; more keep the device busy by themselves.
pub const SAMPLING_SPLIT_ROWS: u32 = 256;
/// Resident thread blocks per multiprocessor of the split-sampling kernels.
const PART_BLOCKS: u32 = 2;
/// Warps of [`finish_qkv`] that keep a GPU busy; beyond them a warp treats more heads of its row.
const QKV_WARPS: u64 = 4096;
const ACCEPT_THREADS: u32 = 32;
const SAMPLING_SHARED_BYTES: u32 = 2048 * 8 + 16 * 8 + 4 * 8 + 8;
const COPY_BLOCKS_X: u32 = 32;
/// Prefixes of kernels that start a step or run between steps.
const STEP_STARTS: [&str; 3] = ["embedding", "copy_blocks", "count_history"];
/// Maximum rows of [`skinny_gemm`].
pub const SKINNY_ROWS: u32 = 8;
const SKINNY_THREADS: u32 = 256;
/// Shared memory that the CUDA runtime reserves per thread block, in bytes.
const RESERVED_SHARED_BYTES: u32 = 1024;

/// Returns the query rows of an attention item that takes its whole key range.
pub(super) fn whole_rows(head_dim: u32) -> u32 {
    if head_dim <= 128 { ATTENTION_ROWS } else { ATTENTION_ROWS / 2 }
}

/// Launches `kernel` unless its grid is empty.
pub(super) fn enqueue<D: Device, P: Plain>(
    device: &D,
    kernel: &'static str,
    grid: (u32, u32),
    threads: u32,
    shared_bytes: u32,
    params: &P,
) -> Result<(), DeviceError> {
    if grid.0 == 0 || grid.1 == 0 {
        return Ok(());
    }
    // The first kernels of a step follow copies from the host, not kernels.
    let overlaps = !STEP_STARTS.iter().any(|first| kernel.starts_with(first));
    let params = as_bytes(params);
    // SAFETY: all callers are `unsafe fn`s whose callers guarantee that the addresses in `params` are live
    // and of memory large enough for `kernel`.
    unsafe { device.launch(&Launch { kernel, grid, threads, shared_bytes, params, overlaps }) }
}

/// Gathers embedding rows of the batch's tokens, times `scale` if `scaled`; `width` is a multiple of 8.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn embedding<D: Device>(
    device: &D,
    half: HalfDtype,
    scaled: bool,
    p: &EmbeddingParams,
) -> Result<(), DeviceError> {
    let kernel = match scaled {
        false => by_half(half, "embedding_bf16", "embedding_f16"),
        true => by_half(half, "embedding_scaled_bf16", "embedding_scaled_f16"),
    };
    enqueue(device, kernel, (p.rows, 1), 128, 0, p)
}

/// Adds the residual and computes RMS norms of rows; `width` is a multiple of 8.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn norm<D: Device>(device: &D, half: HalfDtype, p: &NormParams) -> Result<(), DeviceError> {
    enqueue(device, by_half(half, "norm_bf16", "norm_f16"), (p.rows, 1), 256, 64, p)
}

/// Post-norm: adds the RMS norm of the output of attention or MLP (`delta`) to the residual; `width` is a multiple of 8.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn norm_after<D: Device>(device: &D, half: HalfDtype, p: &NormParams) -> Result<(), DeviceError> {
    enqueue(device, by_half(half, "norm_after_bf16", "norm_after_f16"), (p.rows, 1), 256, 64, p)
}

/// Applies the q and k norms and RoPE, and writes keys and values to the KV pool. The head dimension is a multiple of 16, at most
/// 512.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn finish_qkv<D: Device>(
    device: &D,
    half: HalfDtype,
    store: KvStore,
    p: &QkvParams,
) -> Result<(), DeviceError> {
    let kernel = match store {
        KvStore::Half => by_half(half, "finish_qkv_bf16", "finish_qkv_f16"),
        KvStore::Fp8 => by_half(half, "finish_qkv_bf16_fp8", "finish_qkv_f16_fp8"),
    };
    // A lane has 16 elements of a head. Where rows are few, their heads are shared by several thread blocks.
    let at_once = 32 / (p.head_dim / 16).next_power_of_two().clamp(1, 32);
    let passes = (p.heads + 2 * p.kv_heads).div_ceil(at_once);
    let each = (u64::from(p.rows) * u64::from(passes) / QKV_WARPS).clamp(1, passes.max(1).into());
    enqueue(device, kernel, (passes.div_ceil(each as u32), p.rows.div_ceil(4)), 128, 0, p)
}

/// Applies SwiGLU to gate and up projections; `width` is a multiple of 8.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn swiglu<D: Device>(device: &D, half: HalfDtype, p: &SwigluParams) -> Result<(), DeviceError> {
    let kernel = by_half(half, "swiglu_bf16", "swiglu_f16");
    enqueue(device, kernel, (gate_blocks(p), 1), 256, 0, p)
}

/// Applies GELU, approximated with tanh, to the gates and multiplies with the up projections; `width` is a multiple of 8.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn geglu<D: Device>(device: &D, half: HalfDtype, p: &SwigluParams) -> Result<(), DeviceError> {
    enqueue(device, by_half(half, "geglu_bf16", "geglu_f16"), (gate_blocks(p), 1), 256, 0, p)
}

/// Returns the thread blocks of [`swiglu`] and [`geglu`].
fn gate_blocks(p: &SwigluParams) -> u32 {
    let eights = u64::from(p.rows) * u64::from(p.width / 8);
    u32::try_from(eights.div_ceil(256)).unwrap_or(u32::MAX)
}

/// Returns the padded bytes of a tile row in shared memory; matches `Tile` in `device.cuh`.
fn row_bytes(head_dim: u32) -> u32 {
    if head_dim.is_multiple_of(64) { head_dim * 2 } else { head_dim * 2 + 16 }
}

/// Returns the shared memory of `stages` pipeline stages of `keys` keys and values, and FP8's widened tile.
fn stage_bytes(head_dim: u32, store: KvStore, keys: u32, stages: u32) -> u32 {
    let tile = 2 * keys * row_bytes(head_dim);
    match store {
        KvStore::Half => stages * tile,
        KvStore::Fp8 => stages * 2 * keys * (head_dim + 4) + tile,
    }
}

/// Returns the shared memory of a split-KV attention item with a pipeline of `stages` stages.
fn split_bytes(head_dim: u32, store: KvStore, stages: u32) -> u32 {
    let keys = if head_dim <= 128 { 64 } else { 32 };
    let queries = ATTENTION_SPLIT_ROWS * row_bytes(head_dim);
    let tiles = queries + stage_bytes(head_dim, store, keys, stages);
    tiles + ATTENTION_SPLIT_ROWS * (head_dim + 8) * 4 + MERGE_BYTES
}

/// Returns the shared memory of an attention item that takes its whole key range.
fn whole_bytes(head_dim: u32, store: KvStore) -> u32 {
    let keys = if head_dim <= 64 { 64 } else { 32 };
    let queries = whole_rows(head_dim) * row_bytes(head_dim);
    queries + stage_bytes(head_dim, store, keys, 2) + whole_rows(head_dim) * 4 + 8
}

/// Returns the attention blocks per multiprocessor that registers allow, by the compiler's register counts.
fn blocks_by_registers(head_dim: u32, mixed: bool) -> u32 {
    match (mixed, head_dim) {
        (true, _) => 2,
        (false, 64) => 4,
        (false, 128) => 3,
        (false, _) => 2,
    }
}

/// Returns the shared memory of an attention block and the stages of its pipeline.
fn attention_shape(profile: &Profile, head_dim: u32, store: KvStore, mixed: bool) -> (u32, u32) {
    // A third stage only where two blocks still fit on a multiprocessor with it.
    let three = split_bytes(head_dim, store, 3);
    let deep = three <= profile.shared_bytes
        && 2 * (three + RESERVED_SHARED_BYTES) <= profile.multiprocessor_shared_bytes;
    let stages = if deep { 3 } else { 2 };
    let split = split_bytes(head_dim, store, stages);
    (if mixed { split.max(whole_bytes(head_dim, store)) } else { split }, stages)
}

/// Returns the number of attention blocks that are resident at once, which is the grid size: blocks stride
/// over the items, and a block that waited for residency would start its share too late.
pub fn attention_blocks(profile: &Profile, head_dim: u32, store: KvStore, mixed: bool) -> u32 {
    let (shared, _) = attention_shape(profile, head_dim, store, mixed);
    let by_shared = profile.multiprocessor_shared_bytes / (shared + RESERVED_SHARED_BYTES);
    profile.multiprocessors * by_shared.min(blocks_by_registers(head_dim, mixed)).max(1)
}

/// Computes attention over a plan's items with `blocks` blocks ([`attention_blocks`]); sets `stages`.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`]; the head dimension is one of [`HEAD_DIMS`] and a group has at most 16 heads.
pub unsafe fn attention<D: Device>(
    device: &D,
    half: HalfDtype,
    store: KvStore,
    head_dim: u32,
    mixed: bool,
    blocks: u32,
    p: &AttentionParams,
) -> Result<(), DeviceError> {
    let (shared, stages) = attention_shape(&device.profile(), head_dim, store, mixed);
    let p = AttentionParams { stages, ..*p };
    enqueue(
        device,
        attention_kernel(half, store, head_dim, mixed),
        (blocks, 1),
        ATTENTION_THREADS,
        shared,
        &p,
    )
}

fn attention_kernel(half: HalfDtype, store: KvStore, head_dim: u32, mixed: bool) -> &'static str {
    macro_rules! for_head_dim {
        ($way:literal, $half:literal, $store:literal) => {
            match head_dim {
                64 => concat!("attention_", $way, "_", $half, "_64", $store),
                128 => concat!("attention_", $way, "_", $half, "_128", $store),
                _ => concat!("attention_", $way, "_", $half, "_256", $store),
            }
        };
    }
    match (half, store, mixed) {
        (HalfDtype::Bf16, KvStore::Half, false) => for_head_dim!("decode", "bf16", ""),
        (HalfDtype::Bf16, KvStore::Half, true) => for_head_dim!("mixed", "bf16", ""),
        (HalfDtype::F16, KvStore::Half, false) => for_head_dim!("decode", "f16", ""),
        (HalfDtype::F16, KvStore::Half, true) => for_head_dim!("mixed", "f16", ""),
        (HalfDtype::Bf16, KvStore::Fp8, false) => for_head_dim!("decode", "bf16", "_fp8"),
        (HalfDtype::Bf16, KvStore::Fp8, true) => for_head_dim!("mixed", "bf16", "_fp8"),
        (HalfDtype::F16, KvStore::Fp8, false) => for_head_dim!("decode", "f16", "_fp8"),
        (HalfDtype::F16, KvStore::Fp8, true) => for_head_dim!("mixed", "f16", "_fp8"),
    }
}

/// Returns the names of all kernels, so that a device can look them up at load.
pub fn kernel_names() -> Vec<&'static str> {
    let mut names = vec![
        "copy_blocks",
        "sample_best",
        "sample_measure",
        "sample_collect",
        "sample",
        "accept_drafts",
        "score",
        "count_history",
    ];
    for half in [HalfDtype::Bf16, HalfDtype::F16] {
        for (bf16, f16) in [
            ("embedding_bf16", "embedding_f16"),
            ("embedding_scaled_bf16", "embedding_scaled_f16"),
            ("norm_bf16", "norm_f16"),
            ("norm_after_bf16", "norm_after_f16"),
            ("swiglu_bf16", "swiglu_f16"),
            ("geglu_bf16", "geglu_f16"),
            ("finish_qkv_bf16", "finish_qkv_f16"),
            ("finish_qkv_bf16_fp8", "finish_qkv_f16_fp8"),
        ] {
            names.push(by_half(half, bf16, f16));
        }
        for rows in [1, 17, 65] {
            names.extend([false, true].map(|wide| gemm_kernel(half, wide, rows).0));
        }
        for columns in [8, 16, 32] {
            names.extend([false, true].map(|wide| skinny_kernel(half, wide, columns)));
        }
        names.extend([16, 32].map(|columns| skinny_swiglu_kernel(half, columns)));
        for head_dim in HEAD_DIMS {
            for store in [KvStore::Half, KvStore::Fp8] {
                names.extend([false, true].map(|mixed| attention_kernel(half, store, head_dim, mixed)));
            }
        }
    }
    names.extend(super::delta::names());
    names
}

/// Batch-invariant GEMM; `wide` selects f32 output, `k` is a multiple of 8.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn gemm<D: Device>(
    device: &D,
    half: HalfDtype,
    wide: bool,
    p: &GemmParams,
) -> Result<(), DeviceError> {
    let (kernel, rows, columns, stages) = gemm_kernel(half, wide, p.m);
    let shared = stages * (rows + columns) * 128;
    enqueue(device, kernel, (p.n.div_ceil(columns), p.m.div_ceil(rows)), 128, shared, p)
}

/// Returns the kernel for `m` rows, its tile's rows and columns, and its pipeline stages.
fn gemm_kernel(half: HalfDtype, wide: bool, m: u32) -> (&'static str, u32, u32, u32) {
    let (rows, columns, stages) = match m {
        0..=16 => (16, 64, 8),
        17..=64 => (64, 64, 4),
        _ => (128, 128, 3),
    };
    let kernel = match (half, wide, rows) {
        (HalfDtype::Bf16, false, 16) => "gemm_few_bf16_half",
        (HalfDtype::Bf16, false, 64) => "gemm_some_bf16_half",
        (HalfDtype::Bf16, false, _) => "gemm_many_bf16_half",
        (HalfDtype::Bf16, true, 16) => "gemm_few_bf16_f32",
        (HalfDtype::Bf16, true, 64) => "gemm_some_bf16_f32",
        (HalfDtype::Bf16, true, _) => "gemm_many_bf16_f32",
        (HalfDtype::F16, false, 16) => "gemm_few_f16_half",
        (HalfDtype::F16, false, 64) => "gemm_some_f16_half",
        (HalfDtype::F16, false, _) => "gemm_many_f16_half",
        (HalfDtype::F16, true, 16) => "gemm_few_f16_f32",
        (HalfDtype::F16, true, 64) => "gemm_some_f16_f32",
        (HalfDtype::F16, true, _) => "gemm_many_f16_f32",
    };
    (kernel, rows, columns, stages)
}

/// Returns whether [`skinny_gemm`] supports `m` rows and reduction length `k`.
pub fn skinny_supports(m: u32, k: u32) -> bool {
    (1..=SKINNY_ROWS).contains(&m) && k > 0 && k.is_multiple_of(8) && i32::try_from(k).is_ok()
}

/// GEMM of few rows, which reads each weight once and prefetches weights before the preceding kernel ends.
/// Operands as for [`gemm`], with `x` and `weight` aligned to 16 bytes and shapes that [`skinny_supports`]
/// accepts. A row's bits do not depend on the rows beside it, but differ from those of [`gemm`].
///
/// # Errors
/// [`DeviceError::Failed`] for unsupported shapes, and those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`]; no kernel that may still run writes to the weight or the bias.
pub unsafe fn skinny_gemm<D: Device>(
    device: &D,
    half: HalfDtype,
    wide: bool,
    p: &GemmParams,
) -> Result<(), DeviceError> {
    if p.m == 0 || p.n == 0 {
        return Ok(());
    }
    if !skinny_supports(p.m, p.k) || !(p.x | p.weight).is_multiple_of(16) {
        return Err(DeviceError::Failed {
            what: format!("a skinny product of {} rows over {}", p.m, p.k),
            reason: format!("it takes 1 to {SKINNY_ROWS} rows, multiples of 8 and aligned matrices"),
        });
    }
    let columns = skinny_columns(p.n, device.profile().multiprocessors);
    // Partial sums of the warps, [8, rows, columns].
    let shared = SKINNY_THREADS / 32 * SKINNY_ROWS * columns * 4;
    enqueue(device, skinny_kernel(half, wide, columns), (p.n.div_ceil(columns), 1), SKINNY_THREADS, shared, p)
}

/// [`skinny_gemm`] followed by [`swiglu`], with their bits, in one kernel: columns 0 to n / 2 of the GEMM are gates, the others
/// ups, and out is [m, n / 2] in 16 bits with rows of `stride` elements.
///
/// # Errors
/// [`DeviceError::Failed`] for unsupported shapes, and those of [`Device::launch`].
///
/// # Safety
/// As [`skinny_gemm`].
pub unsafe fn skinny_gemm_swiglu<D: Device>(
    device: &D,
    half: HalfDtype,
    p: &GemmParams,
) -> Result<(), DeviceError> {
    if p.m == 0 || p.n == 0 {
        return Ok(());
    }
    if !skinny_supports(p.m, p.k) || !p.n.is_multiple_of(2) || !(p.x | p.weight).is_multiple_of(16) {
        return Err(DeviceError::Failed {
            what: format!("a skinny product of {} rows over {} with SwiGLU", p.m, p.k),
            reason: format!(
                "it takes 1 to {SKINNY_ROWS} rows, multiples of 8, aligned matrices and as many gates as ups"
            ),
        });
    }
    // A block of one tile cannot have gates and ups.
    let columns = skinny_columns(p.n, device.profile().multiprocessors).max(16);
    let shared = SKINNY_THREADS / 32 * SKINNY_ROWS * columns * 4;
    let blocks = p.n.div_ceil(columns);
    enqueue(device, skinny_swiglu_kernel(half, columns), (blocks, 1), SKINNY_THREADS, shared, p)
}

fn skinny_swiglu_kernel(half: HalfDtype, columns: u32) -> &'static str {
    match (half, columns) {
        (HalfDtype::Bf16, 16) => "skinny_gemm_swiglu_16_bf16",
        (HalfDtype::Bf16, _) => "skinny_gemm_swiglu_32_bf16",
        (HalfDtype::F16, 16) => "skinny_gemm_swiglu_16_f16",
        (HalfDtype::F16, _) => "skinny_gemm_swiglu_32_f16",
    }
}

/// Returns the columns per block: the fewest with which two blocks per multiprocessor cover `n`. Bits are
/// equal for all.
fn skinny_columns(n: u32, multiprocessors: u32) -> u32 {
    [8, 16].into_iter().find(|columns| n.div_ceil(*columns) <= 2 * multiprocessors).unwrap_or(32)
}

fn skinny_kernel(half: HalfDtype, wide: bool, columns: u32) -> &'static str {
    match (half, wide, columns) {
        (HalfDtype::Bf16, false, 8) => "skinny_gemm_8_bf16_half",
        (HalfDtype::Bf16, false, 16) => "skinny_gemm_16_bf16_half",
        (HalfDtype::Bf16, false, _) => "skinny_gemm_32_bf16_half",
        (HalfDtype::Bf16, true, 8) => "skinny_gemm_8_bf16_f32",
        (HalfDtype::Bf16, true, 16) => "skinny_gemm_16_bf16_f32",
        (HalfDtype::Bf16, true, _) => "skinny_gemm_32_bf16_f32",
        (HalfDtype::F16, false, 8) => "skinny_gemm_8_f16_half",
        (HalfDtype::F16, false, 16) => "skinny_gemm_16_f16_half",
        (HalfDtype::F16, false, _) => "skinny_gemm_32_f16_half",
        (HalfDtype::F16, true, 8) => "skinny_gemm_8_f16_f32",
        (HalfDtype::F16, true, 16) => "skinny_gemm_16_f16_f32",
        (HalfDtype::F16, true, _) => "skinny_gemm_32_f16_f32",
    }
}

/// Copies `pairs` KV blocks; no destination overlaps another pair's source or destination.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn copy_blocks<D: Device>(device: &D, pairs: u32, p: &CopyParams) -> Result<(), DeviceError> {
    enqueue(device, "copy_blocks", (COPY_BLOCKS_X, pairs), 256, 0, p)
}

/// Returns into how many parts each of `rows` rows of `vocabulary` logits is split for sampling, and the tokens of a part, a
/// multiple of 32. 0 parts: one kernel does all. Parts of all rows together are at most twice the multiprocessors.
pub fn sampling_parts(profile: &Profile, rows: u32, vocabulary: u32) -> (u32, u32) {
    if rows == 0 || rows > SAMPLING_SPLIT_ROWS {
        return (0, 0);
    }
    let wanted = (PART_BLOCKS * profile.multiprocessors / rows).clamp(1, SAMPLING_PARTS_MAX);
    let part_tokens = vocabulary.div_ceil(wanted).next_multiple_of(32);
    match vocabulary.div_ceil(part_tokens.max(1)) {
        // On an H100 drawing from 256 whole rows takes 249 us in one kernel, 345 in two.
        0 | 1 => (0, 0),
        parts => (parts, part_tokens),
    }
}

/// Samples a token for each of `rows` rows of logits, and counts those of slots without drafts. Where rows are split
/// ([`sampling_parts`]), `needed` kernels run before.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`]; `needed` has all that the rows need.
pub unsafe fn sample<D: Device>(
    device: &D,
    rows: u32,
    needed: SplitKernels,
    p: &SamplingParams,
) -> Result<(), DeviceError> {
    let launch =
        |kernel, parts| enqueue(device, kernel, (rows, parts), SAMPLING_THREADS, SAMPLING_SHARED_BYTES, p);
    if p.parts > 0 {
        launch("sample_best", p.parts)?;
        if needed.measure {
            launch("sample_measure", p.parts)?;
        }
        if needed.collect {
            launch("sample_collect", p.parts)?;
        }
    }
    launch("sample", 1)
}

/// Counts, for each slot with drafts among the `rows` rows that [`sample`] sampled from, its tokens up to the first one that
/// is not the draft behind it.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn accept_drafts<D: Device>(device: &D, rows: u32, p: &SamplingParams) -> Result<(), DeviceError> {
    enqueue(device, "accept_drafts", (rows, 1), ACCEPT_THREADS, 0, p)
}

/// Computes log probability, rank and alternatives of a given token for each of `rows` rows of logits.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn score<D: Device>(device: &D, rows: u32, p: &ScoreParams) -> Result<(), DeviceError> {
    enqueue(device, "score", (rows, 1), SAMPLING_THREADS, SAMPLING_SHARED_BYTES, p)
}

/// Counts the tokens of a sequence's prompt and output, for penalties.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn count_history<D: Device>(device: &D, p: &HistoryParams) -> Result<(), DeviceError> {
    enqueue(device, "count_history", (1, 1), SAMPLING_THREADS, 0, p)
}

pub(super) fn by_half(half: HalfDtype, bf16: &'static str, f16: &'static str) -> &'static str {
    match half {
        HalfDtype::Bf16 => bf16,
        HalfDtype::F16 => f16,
    }
}
