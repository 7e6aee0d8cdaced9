//! A real router against scripted workers over real connections. Nothing sleeps: tests wait for observable
//! events.

#![allow(clippy::large_futures, reason = "a test is one future")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod administrators;
mod agent_loops;
mod both_ports;
mod chaos;
mod cluster;
mod connections;
mod constraints;
mod cut_calls;
mod failover;
mod foreign_clients;
mod grpc_tools;
mod http;
mod http2_client;
mod http_answers;
mod http_client;
mod http_cors;
mod http_disconnect;
mod http_faults;
mod http_fields;
mod http_limits;
mod http_refusals;
mod http_rendering;
mod http_resume;
mod http_streams;
mod http_timings;
mod http_tools;
mod http_usage;
mod kserve;
mod lifecycle;
mod live;
mod live_details;
mod model_names;
mod openapi;
mod prefix;
mod prompt_logprobs;
mod python_client;
mod quarantine;
mod recovery;
mod requests;
mod resume;
mod streams;
mod structured;
mod tenants;
mod tokenizing;
mod unary;
mod unread;
mod usage;
