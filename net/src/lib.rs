//! Connections of routers and workers: accepting within limits, TLS with certificates reloaded from disk,
//! receive budgets, and HTTP serving that writes the messages of many streams with one system call.

mod accept;
mod code_name;
mod connection;
mod drained_body;
mod http;
mod identity;
mod limits;
pub mod metrics;
mod open_calls;
mod receive;
mod registry;
mod response_streams;
mod tls;
mod wakeups;
mod watch;
mod write_timeout;

pub use accept::Accept;
pub use code_name::code_name;
pub use connection::{Connection, OpenCall, Peer};
pub use http::{HttpServer, Protocols};
pub use identity::Identity;
pub use limits::Limits;
pub use open_calls::{OpenCalls, OpenCallsLayer, hold};
pub use receive::{
    Framing, Receive, ReceiveBudget, ReceiveError, ReceiveLayer, ReceiveLimits, ReceivedBytes,
};
pub use tls::{ClientTls, ServerTls, ServerTlsFiles, TlsError};
pub use wakeups::batch_wakeups;
pub use watch::{FileState, Watched};
