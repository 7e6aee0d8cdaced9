//! Faults of handlers and layers: a call that panics gets the error envelope of its API, with the headers of every
//! response.

use std::panic::{AssertUnwindSafe, catch_unwind};

use futures::FutureExt as _;
use inflight_net::{Answer, Middleware, Next};
use tonic::body::Body;
use tonic::codegen::http::Request;

use crate::layers::refusal::Refuse;
use crate::outcome::Outcome;

/// Answers calls whose handler panicked. The panic hook has logged the message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Faults {
    pub(crate) refuse: Refuse,
}

impl Middleware for Faults {
    fn call<E: Send + 'static>(&self, request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let (path, refuse) = (request.uri().path().to_owned(), self.refuse);
        let refused =
            move || refuse(&path, Outcome::Internal("the call failed on a fault of the server".to_owned()));
        match catch_unwind(AssertUnwindSafe(|| next.call(request))) {
            Ok(call) => Box::pin(async move {
                AssertUnwindSafe(call).catch_unwind().await.unwrap_or_else(|_| Ok(refused()))
            }),
            Err(_) => Box::pin(async move { Ok(refused()) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::BodyExt as _;
    use inflight_net::middleware;
    use tonic::codegen::http::Response;
    use tower::{ServiceBuilder, ServiceExt as _, service_fn};

    use super::*;
    use crate::protocols::http::refuse;

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
            let handler = service_fn(|request: Request<Body>| async move {
                assert_eq!(request.uri().path(), "/", "a fault for the test");
                Ok::<_, Infallible>(Response::new(Body::empty()))
            });
            let service = ServiceBuilder::new().layer(middleware(Faults { refuse })).service(handler);
            let response = service.oneshot(Request::post(path).body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(response.status().as_u16(), 500);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, expected);
        }
    }
}
