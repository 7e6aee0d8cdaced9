//! Resources that a call holds until it ends.

use std::sync::{Mutex, PoisonError};

/// Resources of a call that count against the router's limits (permits, admission, drain token), until its
/// stream has taken the last event or is ended for a stalled client. Each one is released by its drop.
#[derive(Default)]
pub(crate) struct CallGuard(Mutex<Vec<Box<dyn Send>>>);

impl CallGuard {
    /// Adds a resource.
    pub(crate) fn with(self, held: impl Send + 'static) -> Self {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(held));
        self
    }

    /// Releases all resources; idempotent.
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
    fn resources_are_released_once_at_the_end_or_on_drop() {
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
