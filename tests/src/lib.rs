//! Harness of the whole-cluster tests: `inflight up` as a real process, and ways to look at it from outside.

mod cluster;
mod collector;
mod command;
mod fleet;
mod gpu;
mod process;
mod raw;
mod scrape;
mod token_server;
mod wait;
mod wire_tap;

pub use cluster::{Cluster, Member, alone};
pub use collector::{Collector, SeenSpan};
pub use command::{Finished, run, run_in};
pub use fleet::Role;
pub use gpu::SimulatedGpu;
pub use process::{Mark, is_alive, kill};
pub use raw::send_raw;
pub use scrape::{Samples, scrape};
pub use token_server::{Answered, Fault, Script, TOKEN_SERVER_MODEL, TokenServer};
pub use wait::{DEADLINE, eventually};
pub use wire_tap::{Recorded, WireTap};
