//! Harness of the whole-cluster tests: routers and workers as real processes, metric scraping, an OTLP
//! collector, a simulated GPU, a recording gRPC proxy, a scripted token server, a scripted Admin service and programs in
//! pseudo-terminals.

mod admin_server;
mod cluster;
mod collector;
mod command;
mod gpu;
mod process;
mod pseudo_terminal;
mod raw_call;
mod role_process;
mod scrape;
mod token_server;
mod wait;
mod wire_tap;

pub use admin_server::AdminServer;
pub use cluster::{ClusterMember, LocalCluster, exclusive};
pub use collector::{Collector, RecordedLog, RecordedMetric, RecordedSpan};
pub use command::{CommandOutput, run, run_with_env};
pub use gpu::SimulatedGpu;
pub use process::{ProcessTag, is_alive, kill};
pub use pseudo_terminal::PseudoTerminal;
pub use raw_call::send_raw;
pub use role_process::{Confine, RoleProcess};
pub use scrape::{Samples, scrape};
pub use token_server::{Answered, Fault, Script, TOKEN_SERVER_MODEL, TokenServer};
pub use wait::{DEADLINE, eventually};
pub use wire_tap::{RecordedMessage, WireTap};
