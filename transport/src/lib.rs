//! Connections of both kinds of process: accepting them within bounds, TLS with certificates that are reloaded when
//! their files change, HTTP/2 that writes the answers of many calls together.

mod accept;
mod answers;
mod connection;
mod http2;
mod identity;
pub mod metrics;
mod tls;
mod together;
mod watch;

pub use accept::{Accept, Limits};
pub use connection::{Connection, OpenCall, Peer};
pub use http2::Http2;
pub use identity::Identity;
pub use tls::{ClientTls, ServerTls, ServerTlsFiles, TlsError};
pub use together::together;
pub use watch::{FileState, Watched};
