//! Models of code in which threads meet without a lock around it: wake-ups of responses, the engine's watchdog, the thread
//! pool of the kernels. loom runs each model in all interleavings, up to a number of preemptions, and with all values that
//! the memory model lets an atomic load return.
//!
//! The modules are those of the product, compiled here with loom's types in place of their crate's `sync` module. So the
//! models need no special build of the product and of its dependencies.

#[allow(dead_code)]
#[path = "../../../router/src/dispatcher/handoff.rs"]
mod handoff;
#[allow(dead_code)]
#[allow(clippy::reversed_empty_ranges, reason = "a thread of a model neither spins nor yields")]
#[path = "../../../kernels/src/cpu/pool.rs"]
mod pool;
#[path = "../../../net/src/response_streams.rs"]
mod response_streams;
#[path = "../../../net/src/wakeups.rs"]
mod wakeups;
#[allow(dead_code)]
#[path = "../../../worker/src/session/watchdog.rs"]
mod watchdog;

mod cpu_claim;
pub mod models;
mod sync;
