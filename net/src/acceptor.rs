//! Acceptor of connections: enforces the listener's limits and performs TLS handshakes.

use std::convert::Infallible;
use std::time::Duration;

use futures::Stream;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::connection::Connection;
use crate::connection_limits::ConnectionLimits;
use crate::metrics;
use crate::registry::Registry;
use crate::tls::ServerTls;

/// Capacity of the channel from the accept loop to the server, in connections.
const READY_MAX: usize = 64;

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
        if let Some(tls) = &self.tls {
            let (tls, stop) = (tls.clone(), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tls.follow() => {}
                }
            });
        }
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connection");
                    // Most likely out of file descriptors: wait for connections to close.
                    tokio::time::sleep(Duration::from_millis(100)).await;
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
                if ready.send(Connection::plain(name, stream, registration, &limits)).await.is_err() {
                    return;
                }
                continue;
            };
            let (acceptor, ready, stop) = (tls.acceptor(), ready.clone(), stop.clone());
            // Bounded: at most one task per registered connection.
            tokio::spawn(async move {
                let handshake = timeout(limits.handshake_max, acceptor.accept(stream));
                let result = tokio::select! {
                    () = stop.cancelled() => return,
                    () = registration.evicted().cancelled() => return metrics::closed(name, "evicted"),
                    result = handshake => result,
                };
                match result {
                    Ok(Ok(stream)) => {
                        // Fails only after the server has dropped the stream.
                        let _ = ready.send(Connection::tls(name, stream, registration, &limits)).await;
                    }
                    failed => {
                        metrics::closed(name, "handshake");
                        let reason = match failed {
                            Ok(Err(error)) => error.to_string(),
                            _ => "it took too long".to_owned(),
                        };
                        tracing::debug!(reason, "TLS handshake failed");
                    }
                }
            });
        }
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
