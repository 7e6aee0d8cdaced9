//! Acceptor of connections: enforces the listener's limits and performs TLS handshakes.

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::connection::Connection;
use crate::connection_limits::ConnectionLimits;
use crate::metrics;
use crate::notice_interval::NoticeInterval;
use crate::plain_text;
use crate::registry::{Registration, Registry};
use crate::tls::ServerTls;

/// Capacity of the channel from the accept loop to the server, in connections.
const READY_MAX: usize = 64;
/// Wait after a failed attempt to accept a connection.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum connections to evict after an attempt that failed for want of a file descriptor.
const EVICTIONS_PER_FAILURE: usize = 16;

/// Listener that accepts connections within [`ConnectionLimits`] and yields them after their handshakes.
#[derive(Debug)]
pub struct Acceptor {
    name: &'static str,
    listener: TcpListener,
    tls: Option<ServerTls>,
    limits: ConnectionLimits,
}

impl Acceptor {
    /// Wraps a listener, with TLS or in plain text; `name` is the value of the metrics' `listener` label.
    pub fn new(
        name: &'static str,
        listener: TcpListener,
        tls: Option<ServerTls>,
        limits: ConnectionLimits,
    ) -> Self {
        Self { name, listener, tls, limits }
    }

    /// Starts accepting and returns the stream of connections. Dropping the stream stops the accept loop.
    pub fn incoming(self) -> impl Stream<Item = Result<Connection, Infallible>> + Send + Unpin + use<> {
        let (ready, connections) = mpsc::channel(READY_MAX);
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = stopped.cancelled() => {}
                () = self.accept(ready, stop) => {}
            }
        });
        IncomingConnections { connections: ReceiverStream::new(connections), _stop_guard: guard }
            .into_stream()
    }

    async fn accept(self, ready: mpsc::Sender<Connection>, stop: CancellationToken) {
        let (name, limits) = (self.name, self.limits);
        let registry = Registry::new(limits);
        let notices = Arc::new(NoticeInterval::default());
        let failures = AcceptFailures::new(name);
        if let Some(tls) = &self.tls {
            let (tls, stop) = (tls.clone(), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = tls.follow() => {}
                }
            });
        }
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    failures.handle(&error, &registry).await;
                    continue;
                }
            };
            let registration = match registry.register(address.ip()) {
                Ok(registration) => registration,
                Err(rejection) => {
                    metrics::closed(name, rejection.label());
                    continue;
                }
            };
            // Without Nagle's algorithm: messages of one token must not wait for acknowledgements.
            if stream.set_nodelay(true).is_err() {
                continue;
            }
            let Some(tls) = &self.tls else {
                let connection = Connection::plain(name, stream, registration, &limits, notices.clone());
                if ready.send(connection).await.is_err() {
                    return;
                }
                continue;
            };
            let (acceptor, ready, stop) = (tls.acceptor(), ready.clone(), stop.clone());
            let handshake = Handshake { name, acceptor, limits, notices: notices.clone() };
            // Bounded: at most one task per registered connection.
            tokio::spawn(async move {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    Some(connection) = handshake.run(stream, registration) => {
                        // Fails only after the server has dropped the stream.
                        let _ = ready.send(connection).await;
                    }
                    else => {}
                }
            });
        }
    }
}

/// TLS handshake of an accepted connection.
struct Handshake {
    /// Name of the listener.
    name: &'static str,
    acceptor: TlsAcceptor,
    limits: ConnectionLimits,
    notices: Arc<NoticeInterval>,
}

impl Handshake {
    /// Performs the handshake within its time; `None` if it fails.
    async fn run(self, stream: TcpStream, registration: Registration) -> Option<Connection> {
        let name = self.name;
        let handshake = timeout(self.limits.handshake_max, self.accept(stream));
        let result = tokio::select! {
            biased;
            () = registration.evicted().cancelled() => {
                metrics::closed(name, "evicted");
                return None;
            }
            result = handshake => result,
        };
        let reason = match result {
            Ok(Ok(Some(stream))) => return Some(Connection::tls(name, stream, registration, &self.limits)),
            Ok(Ok(None)) => "the client speaks plain text".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it took too long".to_owned(),
        };
        metrics::closed(name, "handshake");
        tracing::debug!(reason, "TLS handshake failed");
        None
    }

    /// Accepts a client; `None` if it speaks plain text, and has been told so.
    async fn accept(&self, stream: TcpStream) -> io::Result<Option<TlsStream<TcpStream>>> {
        if !plain_text::is_http(&stream).await? {
            return self.acceptor.accept(stream).await.map(Some);
        }
        if self.notices.is_due() {
            let (listener, peer) = (self.name, stream.peer_addr().ok());
            tracing::warn!(
                listener,
                ?peer,
                "client speaks plain text at a port with TLS; it needs https:// or a TLS channel"
            );
        }
        plain_text::refuse(stream).await?;
        Ok(None)
    }
}

/// Failed attempts to accept a connection.
struct AcceptFailures {
    /// Name of the listener.
    name: &'static str,
    notices: NoticeInterval,
}

impl AcceptFailures {
    fn new(name: &'static str) -> Self {
        Self { name, notices: NoticeInterval::default() }
    }

    /// Counts a failure, logs one a minute and waits before the next attempt. Without a free file
    /// descriptor, closes connections that are not in use: the waiting one may be a client's with a key.
    async fn handle(&self, error: &std::io::Error, registry: &Registry) {
        if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) {
            // Of the connection alone, which is gone.
            return;
        }
        let exhausted = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
        metrics::accept_failed(self.name, if exhausted { "descriptors" } else { "other" });
        if self.notices.is_due() {
            let listener = self.name;
            if exhausted {
                tracing::warn!(listener, %error, "no file descriptor for a connection; raise `ulimit -n`, or lower --connections-max");
            } else {
                tracing::warn!(listener, %error, "cannot accept connection");
            }
        }
        if exhausted {
            registry.evict(EVICTIONS_PER_FAILURE);
        }
        // Also lets the evicted connections close.
        sleep(ACCEPT_RETRY_INTERVAL).await;
    }
}

/// Accepted connections, with the guard whose drop stops the accept loop.
struct IncomingConnections {
    connections: ReceiverStream<Connection>,
    _stop_guard: DropGuard,
}

impl IncomingConnections {
    fn into_stream(self) -> impl Stream<Item = Result<Connection, Infallible>> + Send + Unpin + use<> {
        let Self { connections, _stop_guard } = self;
        connections.map(move |connection| {
            let _held = &_stop_guard;
            Ok(connection)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn without_a_file_descriptor_connections_that_are_not_in_use_are_closed_and_accept_pauses() {
        let registry = Registry::new(ConnectionLimits::default());
        let address = IpAddr::from([10, 0, 0, 1]);
        let used = registry.register(address).unwrap();
        used.watch_idle(|| None);
        used.authentication().mark();
        let idle: Vec<_> = (0..20).map(|_| registry.register(address).unwrap()).collect();
        let evicted = || idle.iter().filter(|idle| idle.evicted().is_cancelled()).count();
        let failures = AcceptFailures::new("test");
        let begun = Instant::now();
        for (code, waits, expected) in
            [(libc::ECONNABORTED, 0, 0), (libc::ENOBUFS, 1, 0), (libc::EMFILE, 2, 16), (libc::ENFILE, 3, 20)]
        {
            failures.handle(&std::io::Error::from_raw_os_error(code), &registry).await;
            assert_eq!(begun.elapsed(), waits * ACCEPT_RETRY_INTERVAL, "after error {code}");
            assert_eq!(evicted(), expected, "after error {code}");
        }
        assert!(!used.evicted().is_cancelled());
    }
}
