//! HTTP/2 serving for many streams of small messages.

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
use hyper::server::conn::http2::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio::task::coop::unconstrained;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::transport::server::Connected;
use tower::{Service, ServiceExt as _};

use crate::answers::{Answer, Answers};
use crate::leftover::DrainedBody;

/// Streams that a client may make this side reset before its connection is closed; h2's own default.
const LOCAL_RESETS_MAX: usize = 1024;
/// Bytes that a client may send ahead of what is read, on a connection and on each of its streams: what a connection
/// whose calls are not read can take of memory.
const CONNECTION_WINDOW_BYTES: u32 = 512 << 10;
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// Serves gRPC over HTTP/2, for many streams of small messages.
///
/// A connection and the answers written to it are one task: whatever has something to send when the task runs goes out
/// with one write. Were each stream a task of its own, as hyper's usual executors have it, a worker's update would wake as
/// many tasks as it has tokens, on several threads, which take turns at the connection and write a few frames each. What
/// leads to an answer, from the layers to the handler, is a task of its own for each call, so that it holds up nobody.
#[derive(Debug, Clone, Copy)]
pub struct Http2 {
    /// Time between two probes of a connection, and how long the answer may take.
    pub keepalive_interval: Duration,
    /// Most bytes of a call's headers.
    pub header_bytes_max: u32,
    /// Most calls open at once on a connection.
    pub streams_max: u32,
}

impl Http2 {
    /// Serves connections until `drain` is cancelled; then no more are accepted, those there are take no further calls, and
    /// this ends with the last of them. Dropped, it closes them all.
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
                        connections.spawn(self.connection(connection, service.clone(), drain.clone()));
                    }
                    Some(Err(error)) => tracing::debug!(%error, "cannot accept connection"),
                    None => break,
                }
            }
        }
        while connections.join_next().await.is_some() {}
    }

    async fn connection<C, S>(self, connection: C, service: S, drain: CancellationToken)
    where
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send,
    {
        let begun = Begun::default();
        let mut builder = Builder::new(begun.clone());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_interval)
            // Guards against clients that make the server reset streams (CVE-2025-8671). It counts over a connection's
            // life, so bodies of refused calls are read to their ends, see `DrainedBody`.
            .max_local_error_reset_streams(LOCAL_RESETS_MAX)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .max_header_list_size(self.header_bytes_max)
            .max_concurrent_streams(self.streams_max);
        let calls = Calls { service, info: connection.connect_info() };
        let connection = Box::pin(builder.serve_connection(TokioIo::new(connection), calls));
        let mut served = Served { connection, answers: Answers::default(), begun };
        let ended = tokio::select! {
            ended = &mut served => ended,
            () = drain.cancelled() => {
                served.connection.as_mut().graceful_shutdown();
                served.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection failed");
        }
    }
}

/// Answers that a connection has begun to write and does not poll yet. It holds none while the connection waits.
#[derive(Clone, Default)]
struct Begun(Arc<Mutex<Vec<Answer>>>);

impl Begun {
    fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<F> Executor<F> for Begun
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, answer: F) {
        // All of them share the task's budget, and the socket's is enough.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::pin(unconstrained(answer)));
    }
}

/// A connection and all that is answered on it.
struct Served<C> {
    connection: Pin<Box<C>>,
    answers: Answers,
    begun: Begun,
}

/// Answers hold the list that holds them, until they are taken.
impl<C> Drop for Served<C> {
    fn drop(&mut self) {
        drop(self.begun.take());
    }
}

impl<C> Future for Served<C>
where
    C: Future<Output = hyper::Result<()>>,
{
    type Output = hyper::Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            // First the answers, so that all they have is there when the connection writes.
            this.answers.poll(context);
            let ended = this.connection.as_mut().poll(context);
            let begun = this.begun.take();
            if ended.is_ready() || begun.is_empty() {
                return ended;
            }
            begun.into_iter().for_each(|answer| this.answers.push(answer));
        }
    }
}

/// Makes the calls of a connection tasks.
struct Calls<S, I> {
    service: S,
    /// What is known of the other end, for the extensions of every call.
    info: I,
}

impl<S, I> hyper::service::Service<Request<Incoming>> for Calls<S, I>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
    I: Clone + Send + Sync + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let mut request = request.map(|body| Body::new(DrainedBody::new(body)));
        request.extensions_mut().insert(self.info.clone());
        // Aborted when its stream is reset or its connection ends.
        let call = AbortOnDropHandle::new(tokio::spawn(self.service.clone().oneshot(request)));
        Box::pin(async move {
            match call.await {
                Ok(answer) => answer,
                // It panicked: what it said of that is in the log.
                Err(_) => Ok(Status::internal("the call failed on a fault of the server").into_http()),
            }
        })
    }
}
