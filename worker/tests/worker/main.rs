//! Tests of the worker: models and the CPU runtime against references, recorded bits, bits under any schedule and with too little of
//! everything, the CUDA runtime on a simulated driver (in child processes), the engine over recording and simulated runtimes, sessions
//! with routers. One binary, as each costs time to link.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod bad_models;
mod changed_files;
mod checkpoints;
mod engine;
mod gguf;
mod golden;
mod gpu;
mod mtp;
mod no_gpu;
mod observation;
mod parity;
mod quantization;
mod scarcity;
mod schedule;
mod service;
mod simulated;
mod structured;
mod tensor_parallel;

use inflight_fixtures::skipped;
use inflight_kernels::cpu::Isa;

/// Returns the instruction sets of this machine; reports those that it lacks as skipped for `what`.
fn instruction_sets(what: &str) -> Vec<Isa> {
    for name in ["avx2", "avx512", "avx512-vnni", "avx512-bf16"] {
        if Isa::by_name(name).is_none() {
            skipped(what, &format!("this machine has no {name}"));
        }
    }
    Isa::available()
}
