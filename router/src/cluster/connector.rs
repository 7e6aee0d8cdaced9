use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::codegen::http::Uri;
use tower::Service;

/// A byte stream to a worker.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

type Opening = Pin<Box<dyn Future<Output = io::Result<Box<dyn Io>>> + Send>>;

/// How a router reaches its workers where that is not TCP: in a simulation, over a network that can be partitioned.
#[derive(Clone)]
pub struct Dial(Arc<dyn Fn(Uri) -> Opening + Send + Sync>);

impl Dial {
    /// A way to open a stream to an address, given as a URI without a path.
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

    /// As tonic takes it.
    pub(crate) fn connector(
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

impl std::fmt::Debug for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dial")
    }
}
