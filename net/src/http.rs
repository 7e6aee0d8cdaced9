//! HTTP server for many streams of small messages: one task per connection writes all its responses.

use std::any::Any;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{Stream, StreamExt as _};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::task::coop::unconstrained;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::transport::server::Connected;
use tower::{Service, ServiceExt as _};

use crate::connection::Peer;
use crate::drained_body::DrainedBody;
use crate::metrics;
use crate::poll_times::{Measured, PollTimes};
use crate::response_streams::{ResponseStream, ResponseStreams};
use crate::unread::{ConnectionUnread, ResponseAccount, UnreadBudget};
use crate::unread_body::UnreadBody;
use crate::write_timeout::WriteTimeout;

/// Streams that a client may make this side reset before its connection is closed; h2's own default.
const LOCAL_RESETS_MAX: usize = 1024;
/// Initial flow-control window of a connection, in bytes; bounds the memory of unread request data.
const CONNECTION_WINDOW_BYTES: u32 = 512 << 10;
/// Initial flow-control window of a stream, in bytes.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// Smallest read buffer of an HTTP/1.1 connection, which bounds its headers, in bytes; hyper's minimum.
const HTTP1_BUFFER_BYTES_MIN: usize = 8 << 10;

/// Versions of HTTP that a server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocols {
    /// HTTP/2, for gRPC.
    Http2,
    /// HTTP/1.1 and HTTP/2, by the connection's first bytes.
    Any,
}

/// HTTP server for many streams of small messages.
///
/// One task drives a connection and all its response streams, so one write carries the frames of every stream
/// that is ready. With one task per stream, as under hyper's usual executors, a worker's update would wake as
/// many tasks as it has tokens, on several threads, each of which locks the connection and writes a few
/// frames. Layers and handlers run in a separate task per call, so a slow call does not block its connection.
#[derive(Clone)]
pub struct HttpServer {
    /// Value of the metrics' `listener` label.
    pub listener: &'static str,
    /// Accepted versions of HTTP.
    pub protocols: Protocols,
    /// Interval of HTTP/2 keep-alive pings, and timeout of their acknowledgements.
    pub keepalive_interval: Duration,
    /// Maximum size of a call's headers, in bytes; at least 8 KiB under HTTP/1.1.
    pub header_bytes_max: u32,
    /// Maximum concurrent streams of an HTTP/2 connection.
    pub streams_max: u32,
    /// Time after which a connection whose peer reads nothing of what is written is closed. HTTP/1.1 has no
    /// pings that would find such a peer.
    pub write_timeout: Duration,
    /// Budget of the response data that clients do not read.
    pub unread: UnreadBudget,
    /// Response to a call whose handler panicked.
    pub fault: fn() -> Response<Body>,
}

impl HttpServer {
    /// Serves connections until `drain` is cancelled. It then stops accepting, sends GOAWAY on the open
    /// connections and returns when the last one has ended. Dropping the future closes all connections.
    pub async fn serve<I, C, E, S>(self, incoming: I, service: S, drain: CancellationToken)
    where
        I: Stream<Item = Result<C, E>>,
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        E: std::fmt::Display,
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send,
    {
        let mut connections = JoinSet::new();
        let times = PollTimes::new(self.listener);
        {
            let mut incoming = std::pin::pin!(incoming);
            loop {
                let next = tokio::select! {
                    biased;
                    () = drain.cancelled() => break,
                    Some(_) = connections.join_next() => continue,
                    next = incoming.next() => next,
                };
                match next {
                    Some(Ok(connection)) => {
                        let (server, drain) = (self.clone(), drain.clone());
                        let (service, times) = (service.clone(), times.clone());
                        connections.spawn(server.connection(connection, service, drain, times));
                    }
                    Some(Err(error)) => tracing::debug!(%error, "cannot accept connection"),
                    None => break,
                }
            }
        }
        while connections.join_next().await.is_some() {}
    }

    async fn connection<C, S>(
        self,
        connection: C,
        service: S,
        drain: CancellationToken,
        times: Arc<PollTimes>,
    ) where
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send,
    {
        let pending = PendingExecutor::default();
        let mut builder = Builder::new(pending.clone());
        if self.protocols == Protocols::Http2 {
            builder = builder.http2_only();
        }
        let buffer_bytes = usize::try_from(self.header_bytes_max).unwrap_or(usize::MAX);
        // No timeout of headers: the limits of a connection count the time until and between its calls.
        builder.http1().header_read_timeout(None).max_buf_size(buffer_bytes.max(HTTP1_BUFFER_BYTES_MIN));
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_interval)
            // Guards against clients that make the server reset streams (CVE-2025-8671). It counts over the
            // lifetime of a connection, so bodies of rejected calls are read to their ends, see
            // `DrainedBody`.
            .max_local_error_reset_streams(LOCAL_RESETS_MAX)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .max_header_list_size(self.header_bytes_max)
            .max_concurrent_streams(self.streams_max);
        let unread = self.unread.connect();
        let connect_info = connection.connect_info();
        let peer = (&connect_info as &dyn Any).downcast_ref::<Peer>().and_then(Peer::address);
        let (account, call_times) = (unread.account(), times.clone());
        let calls =
            CallSpawner { service, connect_info, unread: account, times: call_times, fault: self.fault };
        let connection = TokioIo::new(WriteTimeout::new(connection, self.write_timeout));
        let connection = Box::pin(builder.serve_connection(connection, calls));
        let mut task = ConnectionTask { connection, responses: ResponseStreams::default(), pending, times };
        let serving = async {
            tokio::select! {
                biased;
                ended = &mut task => ended,
                () = drain.cancelled() => {
                    task.connection.as_mut().graceful_shutdown();
                    task.await
                }
            }
        };
        // Counts and logs it before the connection is dropped.
        let evicted = async {
            let (unread_bytes, listener) = (unread.evicted().await, self.listener);
            metrics::closed(listener, "unread");
            tracing::warn!(
                listener,
                ?peer,
                unread_bytes,
                "connection closed: its client does not read responses"
            );
        };
        tokio::select! {
            biased;
            ended = serving => if let Err(error) = ended {
                tracing::debug!(%error, "connection failed");
            },
            () = evicted => {}
        }
    }
}

/// hyper executor that collects response futures for the connection's task, which takes them before it waits.
#[derive(Clone, Default)]
struct PendingExecutor(Arc<Mutex<Vec<ResponseStream>>>);

impl PendingExecutor {
    fn take(&self) -> Vec<ResponseStream> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<F> Executor<F> for PendingExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, response: F) {
        // Unconstrained: all responses share one task, and its coop budget applies to the socket.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::pin(unconstrained(response)));
    }
}

/// Future that drives a connection and its responses to their end.
struct ConnectionTask<C> {
    connection: Pin<Box<C>>,
    responses: ResponseStreams,
    pending: PendingExecutor,
    times: Arc<PollTimes>,
}

/// Breaks the reference cycle between pending responses and the executor that owns them.
impl<C> Drop for ConnectionTask<C> {
    fn drop(&mut self) {
        drop(self.pending.take());
    }
}

impl<C, E> Future for ConnectionTask<C>
where
    C: Future<Output = Result<(), E>>,
{
    type Output = Result<(), E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { connection, responses, pending, times } = self.get_mut();
        times.measure(|| {
            loop {
                // Responses first, so that all their frames are queued when the connection writes.
                responses.poll(context);
                let ended = connection.as_mut().poll(context);
                let pending = pending.take();
                if ended.is_ready() || pending.is_empty() {
                    return ended;
                }
                pending.into_iter().for_each(|response| responses.push(response));
            }
        })
    }
}

/// hyper service that spawns a task for each call of a connection.
struct CallSpawner<S, I> {
    service: S,
    /// Connection information, inserted into the extensions of every request.
    connect_info: I,
    /// Account of the responses.
    unread: Arc<ConnectionUnread>,
    times: Arc<PollTimes>,
    /// Response to a call whose handler panicked.
    fault: fn() -> Response<Body>,
}

impl<S, I> hyper::service::Service<Request<Incoming>> for CallSpawner<S, I>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
    I: Clone + Send + Sync + 'static,
{
    type Response = Response<UnreadBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<UnreadBody>, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let mut request = request.map(|body| Body::new(DrainedBody::new(body)));
        let account = ResponseAccount::open(&self.unread);
        request.extensions_mut().insert(self.connect_info.clone());
        request.extensions_mut().insert(account.clone());
        // Aborted when its stream is reset or its connection ends.
        let call = Measured::new(self.service.clone().oneshot(request), self.times.clone());
        let call = AbortOnDropHandle::new(tokio::spawn(call));
        let fault = self.fault;
        Box::pin(async move {
            // An error means that the handler panicked; the panic hook has logged the message.
            let response = call.await.unwrap_or_else(|_| Ok(fault()));
            response.map(|response| response.map(|body| UnreadBody::new(body, account.stream())))
        })
    }
}
