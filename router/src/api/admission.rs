use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use inflight_router_core::{OverLimit, QueueLimits, Spent};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use crate::api::paths::MODEL_STREAM_INFER;
use crate::clock;
use crate::dispatcher::Dispatch;
use crate::metrics as names;
use crate::outcome::{Outcome, Overload};
use crate::tenants::{Caller, Tenant};

/// Whom a request's work is for, and what bounds it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RequestTerms {
    pub(crate) tenant: String,
    pub(crate) weight: f32,
    pub(crate) priority: i32,
    /// What may wait of the tenant.
    pub(crate) bounds: QueueLimits,
}

/// Applies tenants' limits at one router.
#[derive(Clone)]
pub(crate) struct Admission {
    dispatch: Arc<Dispatch>,
    epoch: Instant,
}

impl Admission {
    pub(crate) fn new(dispatch: Arc<Dispatch>) -> Self {
        Self { dispatch, epoch: clock::now() }
    }

    /// Counts a request in; it is counted out when the guard is dropped.
    pub(crate) fn enter(&self, caller: &Caller) -> Result<Option<AdmissionGuard>, Outcome> {
        let Caller::Tenant(tenant) = caller else { return Ok(None) };
        let now = clock::now().saturating_duration_since(self.epoch);
        let routers = self.dispatch.routers();
        let mut state = tenant.lock();
        let limits = state.limits;
        let entered = state.gate.enter(&limits, routers, now);
        drop(state);
        entered.map_err(|over| refuse(&over, tenant))?;
        Ok(Some(AdmissionGuard { tenant: tenant.clone(), admission: self.clone() }))
    }
}

/// The refusal of a request by a limit of its tenant, counted.
pub(crate) fn refuse(over: &OverLimit, tenant: &Tenant) -> Outcome {
    metrics::counter!(names::TENANT_REFUSED, "tenant" => tenant.name.to_string(), "quota" => over.quota())
        .increment(1);
    Outcome::Limited(Box::new(Overload::of_tenant(over, &tenant.name)))
}

/// A request that its tenant's limits let in, until it is dropped.
pub(crate) struct AdmissionGuard {
    tenant: Arc<Tenant>,
    admission: Admission,
}

impl std::fmt::Debug for AdmissionGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AdmissionGuard({})", self.tenant.name)
    }
}

impl AdmissionGuard {
    /// Takes the tokens that the request may come to hold from the tenant's allowance.
    pub(crate) fn take_tokens(&self, tokens: u64) -> Result<TokenCharge, Outcome> {
        let now = clock::now().saturating_duration_since(self.admission.epoch);
        let routers = self.admission.dispatch.routers();
        let mut state = self.tenant.lock();
        let limits = state.limits;
        let taken = state.gate.take_tokens(&limits, routers, tokens, now);
        drop(state);
        let taken = taken.map_err(|over| refuse(&over, &self.tenant))?;
        Ok(TokenCharge { tenant: self.tenant.clone(), taken, unused: tokens })
    }
}

impl Drop for AdmissionGuard {
    fn drop(&mut self) {
        self.tenant.lock().gate.leave();
    }
}

/// Tokens taken from a tenant's allowance; what was not used goes back when this is dropped.
pub(crate) struct TokenCharge {
    tenant: Arc<Tenant>,
    /// As it was taken, if there was a limit.
    taken: Option<Spent>,
    unused: u64,
}

impl TokenCharge {
    /// So many were used.
    pub(crate) fn used(&mut self, tokens: u64) {
        self.unused = self.unused.saturating_sub(tokens);
    }
}

impl Drop for TokenCharge {
    fn drop(&mut self) {
        if let Some(taken) = self.taken {
            self.tenant.lock().gate.return_tokens(taken, self.unused);
        }
    }
}

/// What a caller's request runs under. A request of a known tenant takes weight and ceiling from the file.
pub(crate) fn terms(
    caller: &Caller,
    tenant: String,
    weight: Option<f32>,
    priority: i32,
) -> Result<RequestTerms, Outcome> {
    match caller {
        Caller::Anyone => {
            Ok(RequestTerms { tenant, weight: weight.unwrap_or(1.0), priority, bounds: QueueLimits::NONE })
        }
        Caller::Tenant(known) if tenant.is_empty() || *tenant == *known.name => {
            let limits = known.limits();
            Ok(RequestTerms {
                tenant: known.name.to_string(),
                weight: limits.weight.get() as f32,
                priority: priority.min(limits.priority_max),
                bounds: limits.queue,
            })
        }
        Caller::Tenant(known) => Err(Outcome::Denied(format!(
            "the request is for the tenant {tenant:?}, but the caller is {:?}; leave the tenant out",
            known.name
        ))),
    }
}

/// Carries the guard of a request from the layer to whoever serves the call; it is taken out once.
#[derive(Debug, Clone, Default)]
pub(crate) struct AdmissionSlot(Arc<Mutex<Option<AdmissionGuard>>>);

impl AdmissionSlot {
    pub(crate) fn take(&self) -> Option<AdmissionGuard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Counts calls against their tenant's limits before a byte of their messages is read.
#[derive(Clone)]
pub(crate) struct AdmissionLayer {
    pub(crate) admission: Admission,
}

impl<S> Layer<S> for AdmissionLayer {
    type Service = Admit<S>;

    fn layer(&self, inner: S) -> Admit<S> {
        Admit { admission: self.admission.clone(), inner }
    }
}

/// The service that [`AdmissionLayer`] makes.
#[derive(Clone)]
pub(crate) struct Admit<S> {
    admission: Admission,
    inner: S,
}

impl<S> Service<Request<Body>> for Admit<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let caller = request.extensions().get::<Caller>().cloned();
        // Each request of this stream is admitted by itself.
        let counted = caller.filter(|_| request.uri().path() != MODEL_STREAM_INFER);
        let entered = counted.map_or(Ok(None), |caller| self.admission.enter(&caller));
        match entered {
            Ok(entered) => {
                request.extensions_mut().insert(AdmissionSlot(Arc::new(Mutex::new(entered))));
                Box::pin(self.inner.call(request))
            }
            Err(outcome) => {
                metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
                Box::pin(async move { Ok(outcome.into_status().into_http()) })
            }
        }
    }
}
