//! Whole-cluster tests: `inflight up`, routers, workers and clients as real processes.

mod bench;
mod chaos;
mod chat;
mod command_line;
mod confined_host;
mod documented_tour;
mod failover;
mod fairness;
mod foreign_clients;
mod gpu;
mod host_limits;
mod http_clients;
mod hub;
mod hub_network;
mod invalid_requests;
mod lifecycle;
mod live;
mod live_page;
mod lives;
mod metrics;
mod mistakes;
mod models;
mod overload;
mod placement;
mod python_package;
mod recording;
mod requests;
mod resuming_commands;
mod resumption;
mod rolling;
mod several_models;
mod startup_errors;
mod storm;
mod structured_failover;
mod top;
mod traces;
mod upgrade;

use std::path::Path;

/// Path of the `inflight` binary of this build.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_inflight"))
}
