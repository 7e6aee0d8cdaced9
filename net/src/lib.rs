//! Connections of routers and workers: accepting within limits, TLS certificates and secrets reloaded from disk,
//! receive budgets, and HTTP serving that writes the messages of many streams with one system call.

mod acceptor;
mod code_name;
mod connection;
mod connection_limits;
mod drained_body;
mod file_watcher;
mod http;
mod identity;
pub mod metrics;
mod open_calls;
mod open_files;
mod private_file;
mod receive;
mod receive_budget;
mod registry;
mod response_streams;
mod secret_file;
mod shared_pool;
mod sync;
mod tls;
mod unread;
mod unread_body;
mod wakeups;
mod write_timeout;

pub use acceptor::Acceptor;
pub use code_name::code_name;
pub use connection::{Connection, OpenCall, Peer};
pub use connection_limits::ConnectionLimits;
pub use file_watcher::{FileState, FileWatcher};
pub use http::{HttpServer, Protocols};
pub use identity::Identity;
pub use open_calls::{OpenCalls, OpenCallsLayer, hold};
pub use open_files::{OpenFileLimit, open_files, raise_open_file_limit};
pub use private_file::create_private_file;
pub use receive::{Framing, Receive, ReceiveError, ReceiveLayer, ReceiveLimits};
pub use receive_budget::{ReceiveBudget, ReservedBytes};
pub use registry::AddressKey;
pub use secret_file::{SECRET_BYTES_MIN, SecretError, SecretFile, Secrets, read_secrets};
pub use shared_pool::{Holder, PoolFull, PoolShare, SharedPool};
pub use tls::{ClientTls, ServerTls, ServerTlsFiles, TlsError};
pub use unread::UnreadBudget;
pub use wakeups::batch_wakeups;
