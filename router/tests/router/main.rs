//! A real router against workers that play a script, over real connections. Nothing sleeps: tests wait for
//! what they see on the wire.

#![allow(clippy::large_futures, reason = "a test is one future")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod chaos;
mod cluster;
mod connections;
mod failover;
mod kserve;
mod lifecycle;
mod prefix;
mod recovery;
mod requests;
mod streams;
mod suspects;
mod tenants;
mod worker;
