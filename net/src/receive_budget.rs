//! Byte budget of the request messages of all calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::Gauge;
use tonic::Status;

use crate::receive::ReceiveError;

/// Byte budget of all messages in reception or received and not yet processed. Cheap to clone.
#[derive(Clone)]
pub struct ReceiveBudget(pub(crate) Arc<ReceiveBudgetState>);

pub(crate) struct ReceiveBudgetState {
    bytes_max: u64,
    pub(crate) used: AtomicU64,
    gauge: Gauge,
    exhausted: Box<dyn Fn() -> Status + Send + Sync>,
}

impl ReceiveBudget {
    /// Creates a budget of `max` bytes, exported as `gauge`. Calls beyond it fail with the status of `exhausted`.
    pub fn new(max: u64, gauge: Gauge, exhausted: impl Fn() -> Status + Send + Sync + 'static) -> Self {
        gauge.set(0.0);
        let used = AtomicU64::new(0);
        Self(Arc::new(ReceiveBudgetState { bytes_max: max, used, gauge, exhausted: Box::new(exhausted) }))
    }

    /// Starts the accounting of one call.
    pub(crate) fn start_call(&self) -> Arc<ReservedBytes> {
        Arc::new(ReservedBytes { budget: self.clone(), held: AtomicU64::new(0) })
    }

    /// Reserves `bytes`; returns false, without effect, if they exceed the budget.
    fn reserve(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.0.bytes_max);
        let reserved = self.0.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        if reserved {
            self.0.gauge.increment(bytes as f64);
        }
        reserved
    }

    fn release(&self, bytes: u64) {
        if bytes > 0 {
            self.0.used.fetch_sub(bytes, Ordering::AcqRel);
            self.0.gauge.decrement(bytes as f64);
        }
    }
}

/// Bytes of the budget reserved by one call; the drop releases them. Every request has it as an [`Arc`] in
/// its extensions, for handlers that hold a message after it is decoded.
pub struct ReservedBytes {
    budget: ReceiveBudget,
    held: AtomicU64,
}

impl ReservedBytes {
    /// Returns the bytes that are reserved now.
    pub fn bytes(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), Status> {
        if !self.budget.reserve(bytes) {
            let mut status = (self.budget.0.exhausted)();
            status.set_source(Arc::new(ReceiveError::Exhausted));
            return Err(status);
        }
        self.held.fetch_add(bytes, Ordering::AcqRel);
        Ok(())
    }

    pub(crate) fn release(&self) {
        self.budget.release(self.held.swap(0, Ordering::AcqRel));
    }

    /// Moves the reserved bytes to a new reservation, for one of several requests in a call.
    #[must_use]
    pub fn split(&self) -> Self {
        let held = self.held.swap(0, Ordering::AcqRel);
        Self { budget: self.budget.clone(), held: AtomicU64::new(held) }
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.release();
    }
}
