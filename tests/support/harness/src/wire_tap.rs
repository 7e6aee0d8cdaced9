//! A gRPC proxy that records every message it forwards, to keep the wire format of a release.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};

use anyhow::Result;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{StreamExt as _, stream};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::server::{NamedService, StreamingService};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use crate::raw_call::RawCodec;

/// One recorded message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedMessage {
    /// `/package.Service/Method`.
    pub method: String,
    /// Whether the client sent it; otherwise the server did.
    pub request: bool,
    /// Encoded message, without gRPC's frame header.
    pub bytes: Vec<u8>,
}

impl RecordedMessage {
    /// Formats the message as a line of a recording: `>` (request) or `<` (response), method, bytes in hex.
    pub fn line(&self) -> String {
        let mut line = format!("{} {} ", if self.request { '>' } else { '<' }, self.method);
        for byte in &self.bytes {
            // Writing to a string cannot fail.
            let _ = write!(line, "{byte:02x}");
        }
        line
    }

    /// Parses a line of a recording; `None` if it is malformed.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let request = match words.next()? {
            ">" => true,
            "<" => false,
            _ => return None,
        };
        let method = words.next()?.to_owned();
        let hex = words.next()?.as_bytes();
        let digits = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes = hex.chunks(2).map(digits).collect::<Option<Vec<u8>>>()?;
        Some(Self { method, request, bytes })
    }
}

/// Proxy in front of one server that forwards and records every method of every service.
#[derive(Debug)]
pub struct WireTap {
    /// Address on which the proxy listens.
    pub address: SocketAddr,
    recorded: Arc<Mutex<Vec<RecordedMessage>>>,
    serving: tokio::task::JoinHandle<()>,
}

impl WireTap {
    /// Starts a proxy on a free port that forwards to `target`.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let recorded = Arc::new(Mutex::new(Vec::new()));
        let channel = Endpoint::from_shared(format!("http://{target}"))?.connect_lazy();
        let proxy = WireTapService { channel, recorded: recorded.clone() };
        let serving = tokio::spawn(async move {
            let server = Server::builder().serve_with_incoming(proxy, TcpListenerStream::new(listener));
            if let Err(error) = server.await {
                eprintln!("wire tap: {error}");
            }
        });
        Ok(Self { address, recorded, serving })
    }

    /// Returns the messages recorded so far, in the order of forwarding.
    pub fn recorded(&self) -> Vec<RecordedMessage> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for WireTap {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[derive(Clone)]
struct WireTapService {
    channel: Channel,
    recorded: Arc<Mutex<Vec<RecordedMessage>>>,
}

impl NamedService for WireTapService {
    const NAME: &'static str = "proxy";
}

impl tower::Service<HttpRequest<Body>> for WireTapService {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<HttpResponse<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let forward = ForwardedCall { proxy: self.clone(), method: request.uri().path().to_owned() };
        // On the wire, calls of all kinds look like bidirectional streams.
        Box::pin(async move { Ok(tonic::server::Grpc::new(RawCodec).streaming(forward, request).await) })
    }
}

struct ForwardedCall {
    proxy: WireTapService,
    method: String,
}

impl StreamingService<Vec<u8>> for ForwardedCall {
    type Response = Vec<u8>;
    type ResponseStream = BoxStream<'static, Result<Vec<u8>, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<Vec<u8>>>) -> Self::Future {
        let (proxy, method) = (self.proxy.clone(), self.method.clone());
        Box::pin(async move {
            let record = |request: bool| {
                let (recorded, method) = (proxy.recorded.clone(), method.clone());
                move |bytes: &Vec<u8>| {
                    let message = RecordedMessage { method: method.clone(), request, bytes: bytes.clone() };
                    recorded.lock().unwrap_or_else(PoisonError::into_inner).push(message);
                }
            };
            let (metadata, extensions, messages) = request.into_parts();
            let (sent, received) = (record(true), record(false));
            let messages = stream::unfold(messages, |mut messages| async move {
                // If the client cancels, the forwarded request stream ends, too.
                messages.message().await.ok().flatten().map(|bytes| (bytes, messages))
            });
            let outgoing = Request::from_parts(metadata, extensions, messages.inspect(sent));
            let mut client = tonic::client::Grpc::new(proxy.channel.clone());
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let path = PathAndQuery::from_maybe_shared(method.clone())
                .map_err(|_| Status::unimplemented("no such method"))?;
            let (metadata, answers, extensions) =
                client.streaming(outgoing, path, RawCodec).await?.into_parts();
            let answers = answers.inspect(move |answer| {
                if let Ok(bytes) = answer {
                    received(bytes);
                }
            });
            Ok(Response::from_parts(metadata, answers.boxed(), extensions))
        })
    }
}
