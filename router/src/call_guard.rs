use std::sync::{Mutex, PoisonError};

/// What a call holds of the router's bounds (permits, slots, its place in the drain) until it has ended, or until
/// its client has not read for too long, whichever comes first. Each thing gives itself back when it is dropped.
#[derive(Default)]
pub(crate) struct CallGuard(Mutex<Vec<Box<dyn Send>>>);

impl CallGuard {
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

impl std::fmt::Debug for CallGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CallGuard")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_held_is_given_back_once_at_the_end_or_the_drop() {
        let permit = Arc::new(());
        let guard = CallGuard::default().with(permit.clone()).with(permit.clone());
        assert_eq!(Arc::strong_count(&permit), 3);
        guard.end();
        assert_eq!(Arc::strong_count(&permit), 1);
        guard.end();
        drop(CallGuard::default().with(permit.clone()));
        assert_eq!(Arc::strong_count(&permit), 1);
    }
}
