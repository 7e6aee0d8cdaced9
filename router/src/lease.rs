use std::sync::{Mutex, PoisonError};

/// What a call holds of the router's bounds (permits, slots, its place in the drain) until it has ended, or until
/// its client has not read for too long, whichever comes first. Each thing gives itself back when it is dropped.
#[derive(Default)]
pub(crate) struct Lease(Mutex<Vec<Box<dyn Send>>>);

impl Lease {
    /// Adds something to hold.
    pub(crate) fn with(self, held: impl Send + 'static) -> Self {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(held));
        self
    }

    /// Gives everything back; doing so twice is doing so once.
    pub(crate) fn end(&self) {
        let held = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(held);
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lease")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_held_is_given_back_once_at_the_end_or_the_drop() {
        let permit = Arc::new(());
        let lease = Lease::default().with(permit.clone()).with(permit.clone());
        assert_eq!(Arc::strong_count(&permit), 3);
        lease.end();
        assert_eq!(Arc::strong_count(&permit), 1);
        lease.end();
        drop(Lease::default().with(permit.clone()));
        assert_eq!(Arc::strong_count(&permit), 1);
    }
}
