//! Permits of a bound that all sessions share, with a gauge of those in use.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Semaphore whose permits in use are exported as a gauge.
#[derive(Debug, Clone)]
pub(crate) struct MeteredSemaphore {
    permits: Arc<Semaphore>,
    /// Adds a change of the permits in use to the gauge.
    publish: fn(f64),
}

/// Permits in use, returned when this is dropped.
#[derive(Debug)]
pub(crate) struct MeteredPermits {
    permits: OwnedSemaphorePermit,
    publish: fn(f64),
}

impl MeteredSemaphore {
    pub(crate) fn new(permits: usize, publish: fn(f64)) -> Self {
        Self { permits: Arc::new(Semaphore::new(permits)), publish }
    }

    /// Waits until `count` permits are free; at most as many as there are.
    pub(crate) async fn acquire(&self, count: u32) -> MeteredPermits {
        let permits = Arc::clone(&self.permits).acquire_many_owned(count).await;
        // It fails for a closed semaphore only, and nothing closes this one.
        let permits = permits.expect("the semaphore is open");
        (self.publish)(f64::from(count));
        MeteredPermits { permits, publish: self.publish }
    }
}

impl MeteredPermits {
    /// Releases the permits beyond `count`.
    pub(crate) fn keep(&mut self, count: u32) {
        let surplus = self.permits.num_permits().saturating_sub(count as usize);
        // `surplus` never exceeds the permits held, so `split` succeeds.
        drop(self.permits.split(surplus));
        (self.publish)(-(surplus as f64));
    }
}

impl Drop for MeteredPermits {
    fn drop(&mut self) {
        (self.publish)(-(self.permits.num_permits() as f64));
    }
}
