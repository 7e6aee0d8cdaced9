//! Pluggable transport to workers.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::codegen::http::Uri;
use tower::Service;

/// Byte stream to a worker.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

type Opening = Pin<Box<dyn Future<Output = io::Result<Box<dyn Io>>> + Send>>;

/// Transport to workers in place of TCP, such as a simulated network.
#[derive(Clone)]
pub struct Connector(Arc<dyn Fn(Uri) -> Opening + Send + Sync>);

impl Connector {
    /// Creates a connector from a function that opens a stream to an address, given as a URI without a path.
    pub fn new<F, S>(open: impl Fn(Uri) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<S>> + Send + 'static,
        S: Io + 'static,
    {
        Self(Arc::new(move |uri| {
            let opening = open(uri);
            Box::pin(async move { Ok(Box::new(opening.await?) as Box<dyn Io>) })
        }))
    }

    /// Returns the connector as a tower service, for tonic.
    pub(crate) fn service(
        &self,
    ) -> impl Service<
        Uri,
        Response = TokioIo<Box<dyn Io>>,
        Error = io::Error,
        Future = impl Future<Output = io::Result<TokioIo<Box<dyn Io>>>> + Send + use<>,
    > + Send
    + use<> {
        let open = self.0.clone();
        tower::service_fn(move |uri| {
            let opening = open(uri);
            async move { Ok(TokioIo::new(opening.await?)) }
        })
    }
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector")
    }
}
