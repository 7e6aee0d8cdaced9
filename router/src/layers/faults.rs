//! Faults of handlers and layers: a call that panics gets the error envelope of its API, with the headers of every
//! response.

use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt as _;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use crate::outcome::Outcome;
use crate::protocols::http::errors::refuse;

/// Layer that answers calls whose handler panicked. The panic hook has logged the message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultLayer;

impl<S> Layer<S> for FaultLayer {
    type Service = Faults<S>;

    fn layer(&self, inner: S) -> Faults<S> {
        Faults { inner }
    }
}

/// Service of [`FaultLayer`].
#[derive(Debug, Clone)]
pub(crate) struct Faults<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for Faults<S>
where
    S: Service<Request<B>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The service that is ready makes the call.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let path = request.uri().path().to_owned();
        Box::pin(async move {
            let call = AssertUnwindSafe(async move { inner.call(request).await });
            call.catch_unwind().await.unwrap_or_else(|_| {
                let fault = "the call failed on a fault of the server";
                Ok(refuse(&path, Outcome::Internal(fault.to_owned())))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tower::{ServiceBuilder, ServiceExt as _, service_fn};

    use super::*;

    #[tokio::test]
    async fn a_call_that_panics_gets_the_envelope_of_its_api() {
        for (path, expected) in [
            (
                "/v1/messages",
                r#"{"type":"error","error":{"type":"api_error","message":"the call failed on a fault of the server"}}"#,
            ),
            (
                "/v1/completions",
                r#"{"error":{"message":"the call failed on a fault of the server","type":"server_error","param":null,"code":null}}"#,
            ),
        ] {
            let handler = service_fn(|request: Request<()>| async move {
                assert_eq!(request.uri().path(), "/", "a fault for the test");
                Ok::<_, Infallible>(Response::new(Body::empty()))
            });
            let service = ServiceBuilder::new().layer(FaultLayer).service(handler);
            let response = service.oneshot(Request::post(path).body(()).unwrap()).await.unwrap();
            assert_eq!(response.status().as_u16(), 500);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, expected);
        }
    }
}
