//! Numeric kernels for CPUs and CUDA devices.
//!
//! **Invariant: batch invariance.** Every output element is reduced in an order that depends on the model's
//! shapes alone: not on the number of rows beside it, its row index, tile shapes, the number of threads or
//! the physical block that holds a key. One row at a time and 2,048 rows at once give the same bits. The
//! order does depend on the instruction set ([`cpu::Isa`]), which is therefore part of the numerics
//! fingerprint, as is [`VERSION`].
pub mod cpu;
pub mod cuda;
mod dtype;
mod encoding;
mod philox;
#[cfg(test)]
mod test_size;

pub use dtype::{Dtype, widen};
pub use encoding::Encoding;
pub use philox::{RandomKey, philox4x32};

/// Version of the arithmetic. Raised by every change that may alter a bit of any result.
pub const VERSION: u32 = 5;
