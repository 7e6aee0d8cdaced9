//! Tests of the repository: rules about sources, dependencies and features, the inventory of metrics, wire compatibility, the table of
//! sampling parameters.

mod boundaries;
mod cycles;
mod features;
mod metrics;
mod sampling;
mod sources;
mod wire;
