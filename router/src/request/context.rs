//! What comes with a request beside its message.

use std::sync::Arc;

use inflight_net::ReservedBytes;
use tonic::codegen::http::{Extensions, HeaderMap};

use crate::clock;
use crate::layers::admission::{Admission, AdmissionGuard, AdmissionSlot};
use crate::layers::arrival::CallArrival;
use crate::outcome::Outcome;
use crate::tenants::Caller;
use crate::trace;

/// Metadata of a request beside its message.
pub(crate) struct RequestContext {
    pub(crate) arrival: CallArrival,
    pub(crate) context: opentelemetry::Context,
    pub(crate) caller: Caller,
    /// Admission guard, if the layer has admitted the request.
    pub(crate) admission_guard: Option<AdmissionGuard>,
    /// Receive budget of the message, until all of its requests are tokenized.
    pub(crate) received: Option<Arc<ReservedBytes>>,
    /// Whether an earlier request of the call has the same message.
    pub(crate) shares_message: bool,
}

impl RequestContext {
    /// Returns the context of a call.
    ///
    /// # Errors
    /// The call has not passed the authentication layer.
    pub(crate) fn new(extensions: &Extensions, headers: &HeaderMap) -> Result<Self, Outcome> {
        let unknown = || Outcome::Unauthenticated("the caller is not known".to_owned());
        Ok(Self {
            arrival: extensions.get::<CallArrival>().copied().unwrap_or_else(CallArrival::now),
            context: trace::extract(headers),
            caller: extensions.get::<Caller>().cloned().ok_or_else(unknown)?,
            admission_guard: extensions.get::<AdmissionSlot>().and_then(AdmissionSlot::take),
            received: extensions.get::<Arc<ReservedBytes>>().cloned(),
            shares_message: false,
        })
    }

    /// Returns the context of the request in the next message of the call, admitted on its own. It takes over what that
    /// message has reserved of the receive budget.
    pub(crate) fn for_next_message(&self, admission: &Admission) -> Result<Self, Outcome> {
        let received = self.received.as_ref().map(|received| Arc::new(received.split()));
        Ok(Self { received, shares_message: false, ..self.for_next_request(admission)? })
    }

    /// Returns the context of another request in the same message, admitted on its own.
    pub(crate) fn for_next_request(&self, admission: &Admission) -> Result<Self, Outcome> {
        let admission_guard = admission.enter(&self.caller)?;
        let arrival = CallArrival { at: clock::now(), ..self.arrival };
        let (context, caller) = (self.context.clone(), self.caller.clone());
        let received = self.received.clone();
        Ok(Self { arrival, context, caller, admission_guard, received, shares_message: true })
    }
}
