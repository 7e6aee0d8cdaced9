//! Authentication of calls by API key or client certificate.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use inflight_net::{Answer, Middleware, Next, Peer, PoolShare, ReservedBytes, ResponseAccount, SharedPool};
use tonic::body::Body;
use tonic::codegen::http::header::HOST;
use tonic::codegen::http::{HeaderMap, Request, Version};

use crate::layers::admission::reject;
use crate::layers::key_failures::KeyFailures;
use crate::layers::paths::is_open;
use crate::layers::refusal::Refuse;
use crate::layers::sites::{SiteCheck, Sites};
use crate::metrics as names;
use crate::outcome::{Outcome, Overload};
use crate::tenants::{AuthenticationError, Caller, Tenant, Tenants};

/// Authenticates calls and adds their [`Caller`] to the extensions. Without configured tenants every call passes.
#[derive(Debug, Clone)]
pub(crate) struct Authentication {
    pub(crate) tenants: Option<Arc<Tenants>>,
    pub(crate) failures: Arc<KeyFailures>,
    /// Sites whose pages may call without a key.
    pub(crate) sites: Arc<Sites>,
    /// Check of a call without a key against them.
    pub(crate) check_site: SiteCheck,
    /// Connections of the listener, shared between tenants.
    pub(crate) connections: SharedPool,
    pub(crate) refuse: Refuse,
}

impl Authentication {
    /// Checks that a call without a key comes from no page of another site.
    fn check_site(&self, request: &Request<Body>) -> Result<(), Outcome> {
        let address = request.extensions().get::<Peer>().and_then(Peer::address);
        (self.check_site)(&self.sites, request, address)
    }

    /// Checks that a call over HTTP/1.1 names one host, as it must: intermediaries could take it for another one than this router does.
    fn check_host(request: &Request<Body>) -> Result<(), Outcome> {
        let hosts = request.headers().get_all(HOST).iter().count();
        if request.version() != Version::HTTP_11 || hosts == 1 {
            return Ok(());
        }
        Err(Outcome::invalid(format!("the request has {hosts} host headers; HTTP/1.1 requires one")))
    }

    fn caller(&self, request: &Request<Body>) -> Result<Caller, Outcome> {
        let Some(tenants) = &self.tenants else { return Ok(Caller::Anyone) };
        let peer = request.extensions().get::<Peer>();
        let address = peer.and_then(Peer::address).map(|address| address.ip());
        let rejected = |error: AuthenticationError| self.failures.outcome(&error, address);
        let key = api_key(request.headers()).map_err(rejected)?;
        let identity = peer.and_then(Peer::identity);
        let (tenant, credential) =
            tenants.authenticate(key, identity, SystemTime::now()).map_err(rejected)?;
        let caller = Caller::Tenant { tenant: tenant.clone(), credential };
        if let Some(peer) = peer {
            // Connections of callers without a key are evicted first, so they need no share.
            let connections = (!caller.is_anonymous()).then_some(&self.connections);
            hold_connection(peer, &tenant, connections)?;
        }
        Ok(caller)
    }
}

impl Middleware for Authentication {
    fn call<E: Send + 'static>(&self, mut request: Request<Body>, next: Next<'_, E>) -> Answer<E> {
        let authenticated = if let Err(outcome) = Self::check_host(&request) {
            Err(outcome)
        } else if is_open(request.uri().path()) {
            // Open to everyone who can connect, but without keys not to the pages that they visit.
            let checked = if self.tenants.is_none() { self.check_site(&request) } else { Ok(()) };
            checked.map(|()| None)
        } else {
            self.caller(&request).and_then(|caller| {
                if caller.has_no_key() {
                    self.check_site(&request)?;
                }
                Ok(Some(caller))
            })
        };
        match authenticated {
            Ok(None) => next.call(request),
            Ok(Some(caller)) => {
                // Callers of the anonymous tenant have shown no credentials: at a limit, their connections are evicted first.
                if let Some(peer) = request.extensions().get::<Peer>().filter(|_| !caller.is_anonymous()) {
                    peer.set_authenticated();
                }
                // From here on the request counts in the tenant's share of the receive budget, and its response in its share of unread data.
                if let Some(holder) = caller.holder() {
                    if let Some(received) = request.extensions().get::<Arc<ReservedBytes>>() {
                        received.name(holder.clone());
                    }
                    if let Some(response) = request.extensions().get::<ResponseAccount>() {
                        response.name(holder);
                    }
                }
                request.extensions_mut().insert(caller);
                next.call(request)
            }
            Err(outcome) => {
                metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
                tracing::debug!(outcome = outcome.label(), "call refused");
                let response = (self.refuse)(request.uri().path(), outcome);
                Box::pin(async move { Ok(response) })
            }
        }
    }
}

/// Returns the API key in the headers, if any.
fn api_key(headers: &HeaderMap) -> Result<Option<&str>, AuthenticationError> {
    if let Some(value) = headers.get("x-api-key") {
        return value.to_str().map(Some).map_err(|_| AuthenticationError::UnknownKey);
    }
    let Some(value) = headers.get("authorization") else { return Ok(None) };
    let (scheme, key) =
        value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or(AuthenticationError::Malformed)?;
    if scheme.eq_ignore_ascii_case("bearer") {
        Ok(Some(key.trim()))
    } else {
        Err(AuthenticationError::Malformed)
    }
}

/// Counts a connection against its tenant's limit, once, until it closes.
fn hold_connection(
    peer: &Peer,
    tenant: &Arc<Tenant>,
    connections: Option<&SharedPool>,
) -> Result<(), Outcome> {
    peer.hold(&tenant.name, || {
        let share = connections.map(|connections| {
            connections.take(Some(&tenant.holder()), 1).map_err(|_| {
                let most = connections.most();
                let what = format!(
                    "{most} connections are open at most (--connections-max), and the tenant's are as many as its share of what is \
                     left; send more calls over each"
                );
                Outcome::Full(Box::new(Overload::of_router(what, "connections", Duration::from_secs(1))))
            })
        });
        let share = share.transpose()?;
        let mut state = tenant.lock();
        let limits = state.limits;
        state.gate.connect(&limits).map_err(|over| reject(&over, tenant))?;
        drop(state);
        Ok(HeldConnection(tenant.clone(), share))
    })
}

/// Connection of a tenant, and its place among the connections of the listener.
struct HeldConnection(
    Arc<Tenant>,
    #[expect(dead_code, reason = "held until it is dropped")] Option<PoolShare>,
);

impl Drop for HeldConnection {
    fn drop(&mut self) {
        self.0.lock().gate.disconnect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_from_either_header_and_from_no_other() {
        let key = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            api_key(&headers).map(|key| key.map(str::to_owned))
        };
        assert_eq!(key("authorization", "Bearer k-1"), Ok(Some("k-1".to_owned())));
        assert_eq!(key("authorization", "bearer  k-1"), Ok(Some("k-1".to_owned())));
        assert_eq!(key("x-api-key", "k-1"), Ok(Some("k-1".to_owned())));
        assert_eq!(key("other", "k-1"), Ok(None));
        assert_eq!(key("authorization", "Basic abc"), Err(AuthenticationError::Malformed));
        assert_eq!(key("authorization", "k-1"), Err(AuthenticationError::Malformed));
    }
}
