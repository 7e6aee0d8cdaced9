//! What a request holds of the router's limits until it is queued; the guard of its call holds from then on what its stream needs.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_net::{PoolShare, ReservedBytes};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::call_guard::CallGuard;
use crate::layers::admission::AdmissionGuard;
use crate::layers::arrival::CallArrival;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::request::context::RequestContext;
use crate::request::draft::Draft;
use crate::request::resources::Resources;
use crate::tenants::{Caller, TokenCharge};
use crate::usage::log::{UsageLog, UsageSlot};

/// Bytes that a request may keep without a reservation.
const KEPT_FREE: usize = 16 << 10;

/// Resources of a request that count against the router's limits. Its place among the open streams is released last: a call that
/// takes it finds the rest released, too.
pub(super) struct Held {
    /// Receive budget of what it keeps of its message until it ends.
    kept: Option<ReservedBytes>,
    /// Permit of a request that waited for a cold start.
    cold_start: Option<OwnedSemaphorePermit>,
    /// Receive budget of JSON values that its message has many of, until it is admitted.
    decoded: Option<ReservedBytes>,
    /// Receive budget of its message, until it is admitted.
    received: Option<Arc<ReservedBytes>>,
    /// Whether an earlier request of the call has the same message.
    shares_message: bool,
    admission_guard: Option<AdmissionGuard>,
    usage: Option<UsageSlot>,
    open: TaskTrackerToken,
    permit: PoolShare,
}

/// Counts an open stream.
struct OpenStream;

impl OpenStream {
    fn new() -> Self {
        metrics::gauge!(names::STREAMS).increment(1.0);
        Self
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        metrics::gauge!(names::STREAMS).decrement(1.0);
    }
}

impl Held {
    /// Reserves a place among the open streams and a line of the usage log.
    pub(super) fn new(context: RequestContext, resources: &Resources) -> Result<Self, Outcome> {
        let RequestContext { caller, admission_guard, received, shares_message, .. } = context;
        let permit = resources.streams.take(&caller)?;
        let open = resources.open.token();
        let usage = resources.usage.as_ref().map(UsageLog::admit).transpose()?;
        let (decoded, kept, cold_start) = (None, None, None);
        Ok(Self { permit, open, admission_guard, usage, received, shares_message, decoded, kept, cold_start })
    }

    /// Reserves the receive budget of JSON values while the request is checked and tokenized.
    pub(super) fn reserve_decoded(&mut self, bytes: usize, options: &Options) -> Result<(), Outcome> {
        self.decoded = self.reserve(bytes, options)?;
        Ok(())
    }

    /// Waits until the model of a draft is served, if it is expected.
    pub(super) async fn wait_for_model(
        &mut self,
        draft: &Draft,
        caller: &Caller,
        arrival: CallArrival,
        resources: &Resources,
    ) -> Result<(), Outcome> {
        let received = self.received.as_ref().filter(|_| !self.shares_message);
        let bytes = received.map_or(0, |received| received.bytes());
        let (holder, served) = (caller.holder(), resources.dispatch.served());
        let waited = resources.cold_start.served(draft, holder.as_ref(), bytes, arrival, served);
        self.cold_start = waited.await?;
        Ok(())
    }

    /// Reserves the receive budget of what a request keeps until it ends beside its prompt, which the queue counts.
    pub(super) fn keep(
        &mut self,
        sampling: &SamplingParams,
        stop: &[String],
        options: &Options,
    ) -> Result<(), Outcome> {
        let stops: usize = stop.iter().map(String::len).sum();
        self.kept = self.reserve(sampling.list_bytes(!self.shares_message) + stops, options)?;
        Ok(())
    }

    /// Releases the receive budget of the message; what the request keeps of it has a reservation of its own.
    pub(super) fn end_reception(&mut self) {
        (self.received, self.decoded) = (None, None);
    }

    /// Charges the tenant for tokens that were computed and dropped.
    pub(super) fn charge_dropped(&self, tokens: u64) -> Result<(), Outcome> {
        if tokens > 0
            && let Some(mut charge) = self.charge(tokens)?
        {
            charge.used(tokens);
        }
        Ok(())
    }

    /// Charges the tenant for up to `tokens`.
    pub(super) fn charge(&self, tokens: u64) -> Result<Option<TokenCharge>, Outcome> {
        self.admission_guard.as_ref().map(|guard| guard.take_tokens(tokens)).transpose()
    }

    /// Returns the guard of the call of a request that is queued, its place in the usage log, and the permit of a cold start, to be
    /// dropped once the request is queued.
    pub(super) fn into_guard(self) -> (CallGuard, Option<UsageSlot>, Option<OwnedSemaphorePermit>) {
        let Self { permit, open, admission_guard, usage, kept, cold_start, .. } = self;
        let guard = CallGuard::default()
            .with(permit)
            .with(open)
            .with(OpenStream::new())
            .with(admission_guard)
            .with(kept);
        (guard, usage, cold_start)
    }

    /// Reserves `bytes` of the receive budget beyond those of the message; none up to [`KEPT_FREE`].
    fn reserve(&self, bytes: usize, options: &Options) -> Result<Option<ReservedBytes>, Outcome> {
        let Some(received) = self.received.as_ref().filter(|_| bytes > KEPT_FREE) else { return Ok(None) };
        received.another(bytes as u64).map(Some).map_err(|status| {
            let what = status.message().to_owned();
            Outcome::Full(Box::new(Overload::of_router(what, "receive_bytes", options.retry_delay)))
        })
    }
}
