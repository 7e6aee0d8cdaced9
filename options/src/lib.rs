//! Options of the roles. The struct that clap parses is the struct that a crate takes: names, environment variables, defaults and help
//! of an option stand at its field. This crate has what such structs share.

mod defaults;
mod quantities;
mod server_address;

pub use defaults::{defaults, parse};
pub use quantities::{ByteSize, ListenAt, OptionalPort, Span, SpanOrOff, bytes, duration};
pub use server_address::ServerAddress;
