//! Connections of both kinds of process: accepting them within bounds, TLS with certificates that are reloaded when
//! their files change, HTTP/2 that writes the answers of many calls together.

mod accept;
mod answers;
mod calls;
mod connection;
mod http2;
mod identity;
mod leftover;
mod limits;
pub mod metrics;
mod receive;
mod registry;
mod tls;
mod together;
mod watch;

pub use accept::Accept;
pub use calls::{OpenCalls, OpenCallsLayer, hold};
pub use connection::{Connection, OpenCall, Peer};
pub use http2::Http2;
pub use identity::Identity;
pub use limits::Limits;
pub use receive::{Receive, ReceiveBudget, ReceiveLayer, ReceiveLimits, ReceivedBytes};
pub use tls::{ClientTls, ServerTls, ServerTlsFiles, TlsError};
pub use together::together;
pub use watch::{FileState, Watched};
