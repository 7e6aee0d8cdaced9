//! Tests of the repository: rules about sources, dependencies and features, the inventory of metrics, wire compatibility.

mod boundaries;
mod cycles;
mod features;
mod metrics;
mod sources;
mod wire;
