//! Bounds of the rounding error of tensor cores, for comparisons on a GPU. The harness rounds each sum once and needs none.

use crate::device::TestDevice;

/// Products that one instruction adds to a sum.
const PRODUCTS: usize = 16;

/// Returns the largest error of a sum of `products` products of 16-bit values that is accumulated in f32 on tensor cores,
/// 16 products an instruction, where no product and no partial sum exceeds `largest` in magnitude; 0 on the harness.
///
/// An instruction aligns its 16 products and the sum to the largest of them and truncates each at 24 bits: 17 errors
/// below `2^-23 * largest`. The result, at most 17 times `largest`, is truncated again: as much once more. Source: Fasi, Higham,
/// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021). Later generations keep one or two bits more.
pub(crate) fn sum_error(products: usize, largest: f64) -> f64 {
    if TestDevice::is_harness() {
        return 0.0;
    }
    let per_instruction = 2.0 * (PRODUCTS + 1) as f64 * 2f64.powi(-23) * largest;
    products.div_ceil(PRODUCTS) as f64 * per_instruction
}
