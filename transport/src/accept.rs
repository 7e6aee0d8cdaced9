//! Accepting connections within limits, with TLS where it is configured.

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
use crate::limits::Limits;
use crate::metrics;
use crate::registry::Registry;
use crate::tls::ServerTls;

/// Accepted connections that may wait for the server.
const READY_MAX: usize = 64;

/// Accepts connections within bounds; each has its handshake behind it.
#[derive(Debug)]
pub struct Accept {
    name: &'static str,
    listener: TcpListener,
    tls: Option<ServerTls>,
    limits: Limits,
}

impl Accept {
    /// Accepts from this listener, in the clear or with TLS; `name` is its label in metrics.
    pub fn new(name: &'static str, listener: TcpListener, tls: Option<ServerTls>, limits: Limits) -> Self {
        Self { name, listener, tls, limits }
    }

    /// The connections. Accepting ends when the stream is dropped.
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
        Guarded { connections: ReceiverStream::new(connections), _guard: guard }.connections()
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
                    // Out of file descriptors, most likely: give others time to close theirs.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let registration = match registry.register(address.ip()) {
                Ok(registration) => registration,
                Err(refused) => {
                    metrics::closed(name, refused.label());
                    continue;
                }
            };
            // Tokens are small and must not wait for each other.
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
            // At most as many tasks as connections.
            tokio::spawn(async move {
                let handshake = timeout(limits.handshake_max, acceptor.accept(stream));
                let result = tokio::select! {
                    () = stop.cancelled() => return,
                    () = registration.evicted().cancelled() => return metrics::closed(name, "evicted"),
                    result = handshake => result,
                };
                match result {
                    Ok(Ok(stream)) => {
                        // The server that is gone needs none.
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

struct Guarded {
    connections: ReceiverStream<Connection>,
    _guard: DropGuard,
}

impl Guarded {
    fn connections(self) -> impl Stream<Item = Result<Connection, Infallible>> + Send + Unpin + use<> {
        let Self { connections, _guard } = self;
        connections.map(move |connection| {
            let _held = &_guard;
            Ok(connection)
        })
    }
}
