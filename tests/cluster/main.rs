//! Whole-cluster tests: `inflight up` and what stands around it, as real processes.

mod attacks;
mod bench;
mod chaos;
mod clients;
mod fairness;
mod gpu;
mod input;
mod life;
mod models;
mod overload;
mod placement;
mod requests;
mod rolling;
mod start;
mod storm;
mod trace;

use std::path::Path;

/// The binary that this very build made.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_inflight"))
}
