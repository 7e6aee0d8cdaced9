//! Admission of requests by the limits of their tenant.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use inflight_contract::{Priority, Weight};
use inflight_net::{Answer, Middleware, Next};
use inflight_router_core::{OverLimit, QueueLimits};
use tonic::body::Body;
use tonic::codegen::http::Request;

use crate::clock;
use crate::dispatcher::SharedDispatcher;
use crate::layers::paths::MODEL_STREAM_INFER;
use crate::layers::refusal::Refuse;
use crate::metrics as names;
use crate::outcome::{Outcome, Overload};
use crate::tenants::{Caller, Tenant, TokenCharge};

/// Tenant, fair-share terms and queue bounds of a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RequestTerms {
    pub(crate) tenant: String,
    pub(crate) weight: Weight,
    pub(crate) priority: Priority,
    /// Bounds on the waiting requests of the tenant.
    pub(crate) bounds: QueueLimits,
}

/// Admission control by the tenants' limits at this router.
#[derive(Clone)]
pub(crate) struct Admission {
    dispatch: Arc<SharedDispatcher>,
    epoch: Instant,
}

impl Admission {
    pub(crate) fn new(dispatch: Arc<SharedDispatcher>) -> Self {
        Self { dispatch, epoch: clock::now() }
    }

    /// Admits a request, until the guard is dropped.
    pub(crate) fn enter(&self, caller: &Caller) -> Result<Option<AdmissionGuard>, Outcome> {
        let Caller::Tenant { tenant, .. } = caller else { return Ok(None) };
        let now = clock::now().saturating_duration_since(self.epoch);
        let routers = self.dispatch.routers();
        let mut state = tenant.lock();
        let limits = state.limits;
        let entered = state.gate.enter(&limits, routers, now);
        drop(state);
        entered.map_err(|over| reject(&over, tenant))?;
        Ok(Some(AdmissionGuard { tenant: tenant.clone(), admission: self.clone() }))
    }
}

/// Counts a rejection by a tenant's limit and returns its outcome.
pub(crate) fn reject(over: &OverLimit, tenant: &Tenant) -> Outcome {
    metrics::counter!(names::TENANT_REJECTIONS, "tenant" => tenant.name.to_string(), "quota" => over.quota())
        .increment(1);
    Outcome::Limited(Box::new(Overload::of_tenant(over, &tenant.name)))
}

/// Admitted request of a tenant; leaves the gate when dropped.
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
    /// Charges the maximum tokens of the request to the tenant's rate and reserves them of its daily budget.
    pub(crate) fn take_tokens(&self, tokens: u64) -> Result<TokenCharge, Outcome> {
        let now = clock::now().saturating_duration_since(self.admission.epoch);
        let routers = self.admission.dispatch.routers();
        TokenCharge::take(&self.tenant, tokens, routers, now).map_err(|over| reject(&over, &self.tenant))
    }
}

impl Drop for AdmissionGuard {
    fn drop(&mut self) {
        self.tenant.lock().gate.leave();
    }
}

/// Returns the terms of a caller's request. Weight and maximum priority of a configured tenant come from the
/// tenants' file. Those that a caller without a key gives count only with `anonymous_weights`: with them, one
/// caller could starve all others.
pub(crate) fn terms(
    caller: &Caller,
    tenant: String,
    weight: Weight,
    priority: Priority,
    anonymous_weights: bool,
) -> Result<RequestTerms, Outcome> {
    match caller {
        Caller::Anyone if !anonymous_weights => {
            let terms = RequestTerms {
                tenant,
                weight: Weight::default(),
                priority: Priority::default(),
                bounds: QueueLimits::NONE,
            };
            if (weight, priority) != (terms.weight, terms.priority) {
                metrics::counter!(names::IGNORED_WEIGHTS).increment(1);
            }
            Ok(terms)
        }
        Caller::Anyone => Ok(RequestTerms { tenant, weight, priority, bounds: QueueLimits::NONE }),
        Caller::Tenant { tenant: known, .. } if tenant.is_empty() || *tenant == *known.name => {
            let limits = known.limits();
            Ok(RequestTerms {
                tenant: known.name.to_string(),
                weight: limits.weight,
                priority: priority.min(limits.priority_max),
                bounds: limits.queue,
            })
        }
        Caller::Tenant { tenant: known, .. } => Err(Outcome::Denied(format!(
            "the request is for the tenant {tenant:?}, but the caller is {:?}; leave the tenant out",
            known.name
        ))),
    }
}

/// Carries an admission guard in the extensions from the layer to the service, which takes it once.
#[derive(Debug, Clone, Default)]
pub(crate) struct AdmissionSlot(Arc<Mutex<Option<AdmissionGuard>>>);

impl AdmissionSlot {
    pub(crate) fn take(&self) -> Option<AdmissionGuard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Counts calls against their tenant's limits before their messages are read.
#[derive(Clone)]
pub(crate) struct AdmissionControl {
    pub(crate) admission: Admission,
    pub(crate) refuse: Refuse,
}

impl Middleware for AdmissionControl {
    fn call<E: Send + 'static>(&self, mut request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let caller = request.extensions().get::<Caller>().cloned();
        // Each request of this stream is admitted on its own.
        let counted = caller.filter(|_| request.uri().path() != MODEL_STREAM_INFER);
        let entered = counted.map_or(Ok(None), |caller| self.admission.enter(&caller));
        match entered {
            Ok(entered) => {
                request.extensions_mut().insert(AdmissionSlot(Arc::new(Mutex::new(entered))));
                next.call(request)
            }
            Err(outcome) => {
                metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
                let response = (self.refuse)(request.uri().path(), outcome);
                Box::pin(async move { Ok(response) })
            }
        }
    }
}
