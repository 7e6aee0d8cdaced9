//! Byte budget of the request messages of all calls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metrics::Gauge;
use tonic::Status;

use crate::receive::ReceiveError;
use crate::shared_pool::{Holder, PoolShare, SharedPool};

/// Byte budget of all messages in reception or received and not yet processed. Cheap to clone.
#[derive(Clone)]
pub struct ReceiveBudget(pub(crate) Arc<ReceiveBudgetState>);

pub(crate) struct ReceiveBudgetState {
    pub(crate) pool: SharedPool,
    gauge: Gauge,
    exhausted: Box<dyn Fn() -> Status + Send + Sync>,
}

impl ReceiveBudget {
    /// Creates a budget of `max` bytes, exported as `gauge`. Calls beyond it, or beyond what it leaves their holder
    /// ([`SharedPool`]), fail with the status of `exhausted`.
    pub fn new(max: u64, gauge: Gauge, exhausted: impl Fn() -> Status + Send + Sync + 'static) -> Self {
        gauge.set(0.0);
        let exhausted = Box::new(exhausted);
        Self(Arc::new(ReceiveBudgetState { pool: SharedPool::new(max), gauge, exhausted }))
    }

    /// Starts the accounting of one call.
    pub(crate) fn start_call(&self) -> Arc<ReservedBytes> {
        // Nothing always fits.
        let share = self.0.pool.take(None, 0).ok();
        Arc::new(ReservedBytes { budget: self.clone(), share: Mutex::new(share) })
    }

    fn spent(&self) -> Status {
        let mut status = (self.0.exhausted)();
        status.set_source(Arc::new(ReceiveError::Exhausted));
        status
    }
}

/// Bytes of the budget reserved by one call; the drop releases them. Every request has it as an [`Arc`] in
/// its extensions, for handlers that hold a message after it is decoded.
pub struct ReservedBytes {
    budget: ReceiveBudget,
    share: Mutex<Option<PoolShare>>,
}

impl ReservedBytes {
    fn share(&self) -> MutexGuard<'_, Option<PoolShare>> {
        self.share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes that are reserved now.
    pub fn bytes(&self) -> u64 {
        self.share().as_ref().map_or(0, PoolShare::amount)
    }

    /// Names the tenant whose message it is, which then has a share of the budget.
    pub fn name(&self, holder: Holder) {
        if let Some(share) = self.share().as_mut() {
            share.name(holder);
        }
    }

    /// Reserves more bytes.
    ///
    /// # Errors
    /// The status of a spent budget.
    pub fn reserve(&self, bytes: u64) -> Result<(), Status> {
        let reserved = self.share().as_mut().is_some_and(|share| share.take_more(bytes).is_ok());
        if !reserved {
            return Err(self.budget.spent());
        }
        self.budget.0.gauge.increment(bytes as f64);
        Ok(())
    }

    /// Reserves bytes of the same budget for something that outlives the message.
    ///
    /// # Errors
    /// The status of a spent budget.
    pub fn another(&self, bytes: u64) -> Result<Self, Status> {
        let share = self.share().as_ref().and_then(|share| share.another(bytes).ok());
        let share = share.ok_or_else(|| self.budget.spent())?;
        self.budget.0.gauge.increment(bytes as f64);
        Ok(Self { budget: self.budget.clone(), share: Mutex::new(Some(share)) })
    }

    pub(crate) fn release(&self) {
        if let Some(share) = self.share().as_mut() {
            self.budget.0.gauge.decrement(share.amount() as f64);
            share.keep(0);
        }
    }

    /// Moves the reserved bytes to a new reservation, for one of several requests in a call.
    #[must_use]
    pub fn split(&self) -> Self {
        let share = self.share().as_mut().map(PoolShare::split);
        Self { budget: self.budget.clone(), share: Mutex::new(share) }
    }
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.release();
    }
}
