//! Launches of the kernels of recurrent layers.

use super::device::{Device, DeviceError, HalfDtype};
use super::launch::{by_half, enqueue};
use super::params::{DeltaParams, OutputGateParams};

/// Elements of a query or key for which kernels of the gated delta rule exist.
pub const DELTA_KEY_DIMS: [u32; 2] = [64, 128];
/// The elements of a value are a multiple of this: the columns of a state that a thread block has.
pub const DELTA_COLUMNS: u32 = 32;

const THREADS: u32 = 128;
const WARPS: u32 = 4;
/// Positions between two states.
const CELL: u32 = 16;
const _: () = assert!(CELL as usize == crate::cpu::CELL, "the layouts of states differ");
/// Thread blocks of a launch that goes through all sequences, for each multiprocessor: as many as registers allow at once.
const RESIDENT_BLOCKS: u32 = 4;
const GATE_THREADS: u64 = 256;

/// Returns the shared memory of `delta_rule`: a `Cell` of `delta.cu`.
fn cell_bytes(key_dim: u32) -> u32 {
    let keys_and_queries = 2 * CELL * (key_dim + 4);
    let products = 2 * CELL * CELL + WARPS * CELL * 2 * DELTA_COLUMNS;
    (keys_and_queries + products + CELL * DELTA_COLUMNS + 2 * CELL) * 4
}

/// Returns the names of all kernels of recurrent layers and output gates.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let by_half = [
        "delta_inputs_bf16",
        "delta_inputs_f16",
        "delta_keep_bf16",
        "delta_keep_f16",
        "delta_norm_bf16",
        "delta_norm_f16",
        "output_gate_bf16",
        "output_gate_f16",
    ];
    by_half.into_iter().chain(DELTA_KEY_DIMS.map(rule_kernel))
}

fn rule_kernel(key_dim: u32) -> &'static str {
    match key_dim {
        64 => "delta_rule_64",
        _ => "delta_rule_128",
    }
}

/// Computes the gated delta rule of a layer from the outputs of its projections to the inputs of its output projection, and updates the
/// states. The grids depend on the rows alone, so that a captured graph serves any sequences.
///
/// # Errors
/// [`DeviceError::Failed`] for sizes without kernels, and those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`]; the elements of a key are of [`DELTA_KEY_DIMS`] and those of a value a multiple of [`DELTA_COLUMNS`]. Rows follow
/// each other as the sequences do, and no two sequences share a block. Pieces are within their blocks, at multiples of 64 bytes.
pub unsafe fn delta<D: Device>(device: &D, half: HalfDtype, p: &DeltaParams) -> Result<(), DeviceError> {
    if !DELTA_KEY_DIMS.contains(&p.key_dim) || !p.value_dim.is_multiple_of(DELTA_COLUMNS) || p.taps < 2 {
        return Err(DeviceError::Failed {
            what: format!(
                "a delta rule of keys of {}, values of {} and {} taps",
                p.key_dim, p.value_dim, p.taps
            ),
            reason: format!(
                "it takes keys of {DELTA_KEY_DIMS:?}, values of multiples of {DELTA_COLUMNS}, and 2 taps or more"
            ),
        });
    }
    let heads = p.key_heads + p.value_heads;
    let resident = device.profile().multiprocessors * RESIDENT_BLOCKS;
    // At most a sequence a row.
    let units = |each: u32| (p.rows.saturating_mul(each).min(resident), 1);
    let inputs = by_half(half, "delta_inputs_bf16", "delta_inputs_f16");
    enqueue(device, inputs, (p.rows, heads.div_ceil(WARPS)), THREADS, 0, p)?;
    let slices = p.value_dim / DELTA_COLUMNS;
    let shared = cell_bytes(p.key_dim);
    enqueue(device, rule_kernel(p.key_dim), units(p.value_heads * slices), THREADS, shared, p)?;
    let keep = by_half(half, "delta_keep_bf16", "delta_keep_f16");
    enqueue(device, keep, units(heads), THREADS, 0, p)?;
    let norm = by_half(half, "delta_norm_bf16", "delta_norm_f16");
    enqueue(device, norm, (p.rows, p.value_heads.div_ceil(WARPS)), THREADS, 0, p)
}

/// Multiplies the outputs of attention with the sigmoid of their gates.
///
/// # Errors
/// Those of [`Device::launch`].
///
/// # Safety
/// As [`Device::launch`].
pub unsafe fn output_gate<D: Device>(
    device: &D,
    half: HalfDtype,
    p: &OutputGateParams,
) -> Result<(), DeviceError> {
    let blocks = u32::try_from(p.elements.div_ceil(8 * GATE_THREADS)).unwrap_or(u32::MAX);
    enqueue(
        device,
        by_half(half, "output_gate_bf16", "output_gate_f16"),
        (blocks, 1),
        GATE_THREADS as u32,
        0,
        p,
    )
}
