//! Tests of the simulation, and of the scheduler and the router's policies in it: fairness against published
//! measurements, batching, KV memory, placement, the prefix index.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod batching;
mod burst;
mod common;
mod drafts;
mod fairness;
mod fairness_bound;
mod first_token;
mod hybrids;
mod knobs;
mod kv_memory;
mod placement;
mod prefix_index;
mod simulation;
