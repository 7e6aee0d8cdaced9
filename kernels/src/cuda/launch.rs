//! How each kernel is launched: its name, grid and shared memory, from the shapes in its parameters.

use super::device::{Device, DeviceError, Half, KvStore, Launch, Profile};
use super::params::{
    AttentionParams, CopyParams, EmbeddingParams, GemmParams, HistoryParams, NormParams, Plain, QkvParams,
    SamplingParams, SwigluParams, as_bytes,
};

/// Head dimensions that attention is built for.
pub const HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];
/// Positions of a split of keys.
pub const ATTENTION_SPLIT: u32 = 256;
/// Rows (tokens times heads of a group) of an item that splits its keys.
pub const ATTENTION_SPLIT_ROWS: u32 = 16;
/// Rows of an item of many rows, of heads up to 128 numbers.
pub const ATTENTION_ROWS: u32 = 128;

const ATTENTION_THREADS: u32 = 128;
const MERGE_BYTES: u32 = (2 * 4 + 1) * ATTENTION_SPLIT_ROWS * 4 + 16;
const SAMPLING_THREADS: u32 = 512;
const SAMPLING_SHARED_BYTES: u32 = 2048 * 8 + 16 * 8 + 4 * 8 + 8 + 20 * 8;
const COLUMNS_OF_COPY: u32 = 32;
/// Kernels that come before all others of a step, or between steps.
const FIRST: [&str; 3] = ["embedding", "copy_blocks", "count_history"];
/// Most rows of [`skinny_gemm`].
pub const SKINNY_ROWS: u32 = 8;
const SKINNY_THREADS: u32 = 256;
/// What every block takes of its multiprocessor's shared memory beside its own.
const SHARED_BYTES_OF_SYSTEM: u32 = 1024;

/// Rows of an item of many rows.
pub(super) fn whole_rows(head_dim: u32) -> u32 {
    if head_dim <= 128 { ATTENTION_ROWS } else { ATTENTION_ROWS / 2 }
}

fn go<D: Device, P: Plain>(
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
    // What a step begins with follows copies of the host's, not kernels.
    let overlaps = !FIRST.iter().any(|first| kernel.starts_with(first));
    let params = as_bytes(params);
    // SAFETY: passed on to the caller.
    unsafe { device.launch(&Launch { kernel, grid, threads, shared_bytes, params, overlaps }) }
}

/// Rows of the embedding; `width` is a multiple of 8.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn embedding<D: Device>(device: &D, half: Half, p: &EmbeddingParams) -> Result<(), DeviceError> {
    let kernel = by_half(half, "embedding_bf16", "embedding_f16");
    go(device, kernel, (p.rows, 1), 128, 0, p)
}

/// Sum and RMS norm of rows; `width` is a multiple of 8.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn norm<D: Device>(device: &D, half: Half, p: &NormParams) -> Result<(), DeviceError> {
    go(device, by_half(half, "norm_bf16", "norm_f16"), (p.rows, 1), 256, 64, p)
}

/// Norms, rotation and the write to the pool.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn finish_qkv<D: Device>(
    device: &D,
    half: Half,
    store: KvStore,
    p: &QkvParams,
) -> Result<(), DeviceError> {
    let warps = p.rows * (p.heads + 2 * p.kv_heads);
    let kernel = match store {
        KvStore::Half => by_half(half, "finish_qkv_bf16", "finish_qkv_f16"),
        KvStore::Fp8 => by_half(half, "finish_qkv_bf16_fp8", "finish_qkv_f16_fp8"),
    };
    go(device, kernel, (warps.div_ceil(4), 1), 128, 0, p)
}

/// The gated activation; `width` is a multiple of 8.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn swiglu<D: Device>(device: &D, half: Half, p: &SwigluParams) -> Result<(), DeviceError> {
    let eights = u64::from(p.rows) * u64::from(p.width / 8);
    let blocks = u32::try_from(eights.div_ceil(256)).unwrap_or(u32::MAX);
    go(device, by_half(half, "swiglu_bf16", "swiglu_f16"), (blocks, 1), 256, 0, p)
}

/// Bytes of a row of a tile in shared memory, as `Tile` in `device.cuh`.
fn row_bytes(head_dim: u32) -> u32 {
    if head_dim.is_multiple_of(64) { head_dim * 2 } else { head_dim * 2 + 16 }
}

/// Shared memory of so many stages of so many keys and values, with what 8-bit ones are widened to.
fn stage_bytes(head_dim: u32, store: KvStore, keys: u32, stages: u32) -> u32 {
    let tile = 2 * keys * row_bytes(head_dim);
    match store {
        KvStore::Half => stages * tile,
        KvStore::Fp8 => stages * 2 * keys * (head_dim + 4) + tile,
    }
}

/// Shared memory of an item that splits its keys, with so many stages.
fn split_bytes(head_dim: u32, store: KvStore, stages: u32) -> u32 {
    let keys = if head_dim <= 128 { 64 } else { 32 };
    let queries = ATTENTION_SPLIT_ROWS * row_bytes(head_dim);
    let tiles = queries + stage_bytes(head_dim, store, keys, stages);
    tiles + ATTENTION_SPLIT_ROWS * (head_dim + 8) * 4 + MERGE_BYTES
}

/// Shared memory of an item of many rows.
fn whole_bytes(head_dim: u32, store: KvStore) -> u32 {
    let keys = if head_dim <= 64 { 64 } else { 32 };
    let queries = whole_rows(head_dim) * row_bytes(head_dim);
    queries + stage_bytes(head_dim, store, keys, 2) + whole_rows(head_dim) * 4 + 8
}

/// Registers of a multiprocessor, in blocks of attention: what the compiler's figures allow.
fn blocks_by_registers(head_dim: u32, mixed: bool) -> u32 {
    match (mixed, head_dim) {
        (true, _) | (false, 256) => 2,
        (false, 64) => 4,
        (false, _) => 3,
    }
}

/// Shared memory of a block of attention and stages of its pipeline.
fn attention_shape(profile: &Profile, head_dim: u32, store: KvStore, mixed: bool) -> (u32, u32) {
    // A third stage where two blocks still fit a multiprocessor with it.
    let three = split_bytes(head_dim, store, 3);
    let deep = three <= profile.shared_bytes
        && 2 * (three + SHARED_BYTES_OF_SYSTEM) <= profile.multiprocessor_shared_bytes;
    let stages = if deep { 3 } else { 2 };
    let split = split_bytes(head_dim, store, stages);
    (if mixed { split.max(whole_bytes(head_dim, store)) } else { split }, stages)
}

/// Blocks of attention that a device runs at once. The grid is as large, for each block goes through items in strides: one
/// that waits for a place would come too late with its share.
pub fn attention_blocks(profile: &Profile, head_dim: u32, store: KvStore, mixed: bool) -> u32 {
    let (shared, _) = attention_shape(profile, head_dim, store, mixed);
    let by_shared = profile.multiprocessor_shared_bytes / (shared + SHARED_BYTES_OF_SYSTEM);
    profile.multiprocessors * by_shared.min(blocks_by_registers(head_dim, mixed)).max(1)
}

/// Attention over the items of a plan, with a grid of `blocks` blocks ([`attention_blocks`]); fills in `stages`.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`]; the head dimension is one of [`HEAD_DIMS`] and a group has at most 16 heads.
pub unsafe fn attention<D: Device>(
    device: &D,
    half: Half,
    store: KvStore,
    head_dim: u32,
    mixed: bool,
    blocks: u32,
    p: &AttentionParams,
) -> Result<(), DeviceError> {
    let (shared, stages) = attention_shape(&device.profile(), head_dim, store, mixed);
    let p = AttentionParams { stages, ..*p };
    go(device, attention_kernel(half, store, head_dim, mixed), (blocks, 1), ATTENTION_THREADS, shared, &p)
}

fn attention_kernel(half: Half, store: KvStore, head_dim: u32, mixed: bool) -> &'static str {
    macro_rules! of_head_dim {
        ($way:literal, $half:literal, $store:literal) => {
            match head_dim {
                64 => concat!("attention_", $way, "_", $half, "_64", $store),
                96 => concat!("attention_", $way, "_", $half, "_96", $store),
                128 => concat!("attention_", $way, "_", $half, "_128", $store),
                _ => concat!("attention_", $way, "_", $half, "_256", $store),
            }
        };
    }
    match (half, store, mixed) {
        (Half::Bf16, KvStore::Half, false) => of_head_dim!("decode", "bf16", ""),
        (Half::Bf16, KvStore::Half, true) => of_head_dim!("mixed", "bf16", ""),
        (Half::F16, KvStore::Half, false) => of_head_dim!("decode", "f16", ""),
        (Half::F16, KvStore::Half, true) => of_head_dim!("mixed", "f16", ""),
        (Half::Bf16, KvStore::Fp8, false) => of_head_dim!("decode", "bf16", "_fp8"),
        (Half::Bf16, KvStore::Fp8, true) => of_head_dim!("mixed", "bf16", "_fp8"),
        (Half::F16, KvStore::Fp8, false) => of_head_dim!("decode", "f16", "_fp8"),
        (Half::F16, KvStore::Fp8, true) => of_head_dim!("mixed", "f16", "_fp8"),
    }
}

/// Names of all kernels, so that a device can look them up at load.
pub fn kernel_names() -> Vec<&'static str> {
    let mut names = vec!["copy_blocks", "sample", "count_history"];
    for half in [Half::Bf16, Half::F16] {
        for (bf16, f16) in [
            ("embedding_bf16", "embedding_f16"),
            ("norm_bf16", "norm_f16"),
            ("swiglu_bf16", "swiglu_f16"),
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
        for head_dim in HEAD_DIMS {
            for store in [KvStore::Half, KvStore::Fp8] {
                names.extend([false, true].map(|mixed| attention_kernel(half, store, head_dim, mixed)));
            }
        }
    }
    names
}

/// A product whose bits do not depend on the number of rows. `wide`: the output is f32. `k` is a multiple of 8.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn gemm<D: Device>(device: &D, half: Half, wide: bool, p: &GemmParams) -> Result<(), DeviceError> {
    let (kernel, rows, columns, stages) = gemm_kernel(half, wide, p.m);
    let shared = stages * (rows + columns) * 128;
    go(device, kernel, (p.n.div_ceil(columns), p.m.div_ceil(rows)), 128, shared, p)
}

/// The kernel for so many rows, its tile and the stages of its pipeline.
fn gemm_kernel(half: Half, wide: bool, m: u32) -> (&'static str, u32, u32, u32) {
    let (rows, columns, stages) = match m {
        0..=16 => (16, 64, 8),
        17..=64 => (64, 64, 4),
        _ => (128, 128, 3),
    };
    let kernel = match (half, wide, rows) {
        (Half::Bf16, false, 16) => "gemm_few_bf16_half",
        (Half::Bf16, false, 64) => "gemm_some_bf16_half",
        (Half::Bf16, false, _) => "gemm_many_bf16_half",
        (Half::Bf16, true, 16) => "gemm_few_bf16_f32",
        (Half::Bf16, true, 64) => "gemm_some_bf16_f32",
        (Half::Bf16, true, _) => "gemm_many_bf16_f32",
        (Half::F16, false, 16) => "gemm_few_f16_half",
        (Half::F16, false, 64) => "gemm_some_f16_half",
        (Half::F16, false, _) => "gemm_many_f16_half",
        (Half::F16, true, 16) => "gemm_few_f16_f32",
        (Half::F16, true, 64) => "gemm_some_f16_f32",
        (Half::F16, true, _) => "gemm_many_f16_f32",
    };
    (kernel, rows, columns, stages)
}

/// Whether [`skinny_gemm`] takes a product of `m` rows over `k`.
pub fn skinny_takes(m: u32, k: u32) -> bool {
    (1..=SKINNY_ROWS).contains(&m) && k > 0 && k.is_multiple_of(8) && i32::try_from(k).is_ok()
}

/// A product of few rows, which reads each weight once and has the first on their way before the kernel before it ends.
/// Operands are those of [`gemm`], `x` and `weight` at multiples of 16 bytes, rows and `k` such that [`skinny_takes`] says
/// so. A row's bits do not depend on the rows beside it, but are others than those of [`gemm`].
///
/// # Errors
/// [`DeviceError::Failed`] for shapes that it does not take, and as [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`]; no kernel that may still run writes to the weight or the bias.
pub unsafe fn skinny_gemm<D: Device>(
    device: &D,
    half: Half,
    wide: bool,
    p: &GemmParams,
) -> Result<(), DeviceError> {
    if p.m == 0 || p.n == 0 {
        return Ok(());
    }
    if !skinny_takes(p.m, p.k) || !(p.x | p.weight).is_multiple_of(16) {
        return Err(DeviceError::Failed {
            what: format!("a skinny product of {} rows over {}", p.m, p.k),
            reason: format!("it takes 1 to {SKINNY_ROWS} rows, multiples of 8 and aligned matrices"),
        });
    }
    let columns = skinny_columns(p.n, device.profile().multiprocessors);
    // The warps' sums, [8, rows, columns].
    let shared = SKINNY_THREADS / 32 * SKINNY_ROWS * columns * 4;
    go(device, skinny_kernel(half, wide, columns), (p.n.div_ceil(columns), 1), SKINNY_THREADS, shared, p)
}

/// Columns of a block: as few as give every multiprocessor its two blocks at once, else as many as there can be. Bits are
/// the same.
fn skinny_columns(n: u32, multiprocessors: u32) -> u32 {
    [8, 16].into_iter().find(|columns| n.div_ceil(*columns) <= 2 * multiprocessors).unwrap_or(32)
}

fn skinny_kernel(half: Half, wide: bool, columns: u32) -> &'static str {
    match (half, wide, columns) {
        (Half::Bf16, false, 8) => "skinny_gemm_8_bf16_half",
        (Half::Bf16, false, 16) => "skinny_gemm_16_bf16_half",
        (Half::Bf16, false, _) => "skinny_gemm_32_bf16_half",
        (Half::Bf16, true, 8) => "skinny_gemm_8_bf16_f32",
        (Half::Bf16, true, 16) => "skinny_gemm_16_bf16_f32",
        (Half::Bf16, true, _) => "skinny_gemm_32_bf16_f32",
        (Half::F16, false, 8) => "skinny_gemm_8_f16_half",
        (Half::F16, false, 16) => "skinny_gemm_16_f16_half",
        (Half::F16, false, _) => "skinny_gemm_32_f16_half",
        (Half::F16, true, 8) => "skinny_gemm_8_f16_f32",
        (Half::F16, true, 16) => "skinny_gemm_16_f16_f32",
        (Half::F16, true, _) => "skinny_gemm_32_f16_f32",
    }
}

/// Copies of `pairs` blocks; none of them writes what another one reads or writes.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn copy_blocks<D: Device>(device: &D, pairs: u32, p: &CopyParams) -> Result<(), DeviceError> {
    go(device, "copy_blocks", (COLUMNS_OF_COPY, pairs), 256, 0, p)
}

/// A token for each of `rows` rows of logits.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn sample<D: Device>(device: &D, rows: u32, p: &SamplingParams) -> Result<(), DeviceError> {
    go(device, "sample", (rows, 1), SAMPLING_THREADS, SAMPLING_SHARED_BYTES, p)
}

/// Counts the tokens of a sequence.
///
/// # Errors
/// As [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn count_history<D: Device>(device: &D, p: &HistoryParams) -> Result<(), DeviceError> {
    go(device, "count_history", (1, 1), SAMPLING_THREADS, 0, p)
}

fn by_half(half: Half, bf16: &'static str, f16: &'static str) -> &'static str {
    match half {
        Half::Bf16 => bf16,
        Half::F16 => f16,
    }
}
