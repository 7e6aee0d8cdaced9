//! Authentication of the worker's callers by proofs of the shared secret, beside any client certificate that TLS requires.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_net::{Answer, Middleware, Next, Peer, SecretFile};
use inflight_proto::{Challenges, ProofError};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Request;

use crate::metrics as names;

/// Path of the only method that needs no authentication.
const CHALLENGE_PATH: &str = "/inflight.v1.Worker/Challenge";
/// Minimum interval of warnings about rejected callers.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Verifies callers by the shared secret.
#[derive(Clone)]
pub(crate) struct Authenticator(Arc<AuthenticatorState>);

struct AuthenticatorState {
    secret: SecretFile,
    challenges: Challenges,
    warned: std::sync::Mutex<Option<Instant>>,
}

impl Authenticator {
    pub(crate) fn new(secret: SecretFile) -> Self {
        Self(Arc::new(AuthenticatorState {
            secret,
            challenges: Challenges::new(),
            warned: std::sync::Mutex::default(),
        }))
    }

    /// Issues a challenge for a call.
    pub(crate) fn challenge(&self) -> Vec<u8> {
        self.0.challenges.issue(Instant::now())
    }

    /// Authenticates a call. The extensions of the request then have the proof that answers the caller's.
    fn authenticate(&self, request: &mut Request<Body>) -> Result<(), Status> {
        let state = &*self.0;
        let peer = request.extensions().get::<Peer>().cloned();
        let secrets = state.secret.secrets();
        let verified =
            state.challenges.verify(&secrets, request.uri().path(), request.headers(), Instant::now());
        match verified {
            Ok(answer) => {
                request.extensions_mut().insert(answer);
                Ok(())
            }
            Err(error) => {
                self.report(peer, error);
                Err(match error {
                    ProofError::Full => Status::resource_exhausted(error.to_string()),
                    _ => Status::unauthenticated(format!(
                        "{error}; routers and tools need the worker's secret (--worker-secret-file)"
                    )),
                })
            }
        }
    }

    /// Counts a rejected call, and logs one per [`WARNING_INTERVAL`].
    fn report(&self, peer: Option<Peer>, error: ProofError) {
        names::unauthenticated(match error {
            ProofError::Missing => "missing",
            ProofError::Stale => "stale",
            ProofError::Wrong => "wrong",
            ProofError::Full => "full",
        });
        let now = Instant::now();
        let mut warned = self.0.warned.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if warned.is_none_or(|at| now.saturating_duration_since(at) >= WARNING_INTERVAL) {
            *warned = Some(now);
            let address = peer.and_then(|peer| peer.address()).map(|address| address.to_string());
            tracing::warn!(address, %error, "call rejected; further ones within a minute are only counted");
        }
    }
}

/// Rejects calls without authentication; without an authenticator it passes every call.
#[derive(Clone)]
pub(crate) struct Authentication(pub(crate) Option<Authenticator>);

impl Middleware for Authentication {
    fn call<E: Send + 'static>(&self, mut request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        if let Some(authenticator) = &self.0
            && request.uri().path() != CHALLENGE_PATH
            && let Err(status) = authenticator.authenticate(&mut request)
        {
            return Box::pin(async move { Ok(status.into_http()) });
        }
        next.call(request)
    }
}
