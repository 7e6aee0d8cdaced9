//! Connections of both kinds of process: accepting them within bounds, TLS with certificates that are reloaded when
//! their files change.

mod accept;
mod connection;
mod identity;
pub mod metrics;
mod tls;
mod watch;

pub use accept::{Accept, Limits};
pub use connection::{Connection, OpenCall, Peer};
pub use identity::Identity;
pub use tls::{ClientTls, ServerTls, ServerTlsFiles, TlsError};
pub use watch::{FileState, Watched};
