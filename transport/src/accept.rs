use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::connection::Connection;
use crate::metrics;
use crate::tls::ServerTls;

/// Bounds of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most connections at once; further ones are closed at once.
    pub connections_max: usize,
    /// How long a TLS handshake may take.
    pub handshake_max: Duration,
    /// How long a connection may stay without its first call, headers and all.
    pub first_call_max: Duration,
    /// How long a connection may stay without a call open.
    pub idle_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            handshake_max: Duration::from_secs(10),
            first_call_max: Duration::from_secs(30),
            idle_max: Duration::from_secs(3600),
        }
    }
}

impl Limits {
    /// For connections that are never idle by themselves: their ends probe each other, and one call lasts as long as the
    /// connection.
    pub fn lasting(connections_max: usize) -> Self {
        let year = Duration::from_secs(365 * 24 * 3600);
        Self { connections_max, first_call_max: year, idle_max: year, ..Self::default() }
    }
}

/// Accepted connections that may wait for the server.
const READY_MAX: usize = 64;

/// Accepts connections within bounds; each has its handshake behind it.
#[derive(Debug)]
pub struct Accept {
    listener: TcpListener,
    tls: Option<ServerTls>,
    limits: Limits,
}

impl Accept {
    /// Accepts from this listener, in the clear or with TLS.
    pub fn new(listener: TcpListener, tls: Option<ServerTls>, limits: Limits) -> Self {
        Self { listener, tls, limits }
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
        let permits = Arc::new(Semaphore::new(self.limits.connections_max.min(Semaphore::MAX_PERMITS)));
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
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    // Out of file descriptors, most likely: give others time to close theirs.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Ok(permit) = permits.clone().try_acquire_owned() else {
                metrics::closed("full");
                continue;
            };
            // Tokens are small and must not wait for each other.
            if stream.set_nodelay(true).is_err() {
                continue;
            }
            let Limits { first_call_max, idle_max, handshake_max, .. } = self.limits;
            let Some(tls) = &self.tls else {
                let connection = Connection::plain(stream, permit, first_call_max, idle_max);
                if ready.send(connection).await.is_err() {
                    return;
                }
                continue;
            };
            let (acceptor, ready, stop) = (tls.acceptor(), ready.clone(), stop.clone());
            // Bounded by the permits.
            tokio::spawn(async move {
                let handshake = timeout(handshake_max, acceptor.accept(stream));
                let result = tokio::select! {
                    () = stop.cancelled() => return,
                    result = handshake => result,
                };
                match result {
                    Ok(Ok(stream)) => {
                        // The server that is gone needs none.
                        let _ = ready.send(Connection::tls(stream, permit, first_call_max, idle_max)).await;
                    }
                    failed => {
                        metrics::closed("handshake");
                        let reason = match failed {
                            Ok(Err(error)) => error.to_string(),
                            _ => "it took too long".to_owned(),
                        };
                        tracing::debug!(reason, "tls handshake failed");
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
