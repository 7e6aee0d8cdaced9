//! Server middleware as one function per layer, with the boilerplate of tower's `Layer` and `Service` in one place.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

/// Response of a service to one call.
pub type Answer<E> = BoxFuture<'static, Result<Response<Body>, E>>;

/// Logic of a layer around the calls of its inner service.
pub trait Middleware: Clone {
    /// Answers a call: by `next`, or by a response of its own.
    fn call<E: Send + 'static>(&self, request: Request<Body>, next: Next<'_, E>) -> Answer<E>;
}

/// Inner service of a layer, ready for one call.
pub struct Next<'a, E>(&'a mut dyn FnMut(Request<Body>) -> Answer<E>);

impl<E> Next<'_, E> {
    /// Passes the call on.
    pub fn call(self, request: Request<Body>) -> Answer<E> {
        self.0(request)
    }
}

/// Returns the layer of a middleware.
pub fn middleware<M: Middleware>(middleware: M) -> MiddlewareLayer<M> {
    MiddlewareLayer(middleware)
}

/// Layer of a middleware.
#[derive(Debug, Clone)]
pub struct MiddlewareLayer<M>(M);

impl<M: Middleware, S> Layer<S> for MiddlewareLayer<M> {
    type Service = MiddlewareService<M, S>;

    fn layer(&self, inner: S) -> MiddlewareService<M, S> {
        MiddlewareService { middleware: self.0.clone(), inner }
    }
}

/// Service created by [`MiddlewareLayer`].
#[derive(Debug, Clone)]
pub struct MiddlewareService<M, S> {
    middleware: M,
    inner: S,
}

impl<M, S> Service<Request<Body>> for MiddlewareService<M, S>
where
    M: Middleware,
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Answer<S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Answer<S::Error> {
        let Self { middleware, inner } = self;
        middleware.call(request, Next(&mut |request| Box::pin(inner.call(request))))
    }
}
