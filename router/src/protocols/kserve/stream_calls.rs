//! Open ModelStreamInfer calls, which hold a task and buffers also while they carry no request.

use std::sync::Arc;

use inflight_net::{Holder, PoolShare, SharedPool};

use crate::metrics as names;

/// Open ModelStreamInfer calls of a router, shared between tenants.
#[derive(Debug, Clone)]
pub(crate) struct StreamCalls(SharedPool);

/// One open call, until it is dropped.
#[derive(Debug)]
pub(crate) struct StreamCall {
    _share: PoolShare,
}

impl StreamCalls {
    /// Bounds the open calls to `most`.
    pub(crate) fn new(most: usize) -> Self {
        Self(SharedPool::new(most as u64))
    }

    /// Counts a call of a tenant; `None` if it has its share of them.
    pub(crate) fn enter(&self, tenant: Arc<str>) -> Option<StreamCall> {
        let share = self.0.take(Some(&Holder { name: tenant, weight: 1.0 }), 1).ok()?;
        metrics::gauge!(names::KSERVE_STREAMS).increment(1.0);
        Some(StreamCall { _share: share })
    }
}

impl Drop for StreamCall {
    fn drop(&mut self) {
        metrics::gauge!(names::KSERVE_STREAMS).decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_leaves_calls_to_others() {
        let calls = StreamCalls::new(100);
        let fill = |tenant: &str| -> Vec<StreamCall> {
            std::iter::from_fn(|| calls.enter(Arc::from(tenant))).collect()
        };
        let (first, second) = (fill("a"), fill("b"));
        assert_eq!([first.len(), second.len()], [75, 18]);
        drop((first, second));
        assert_eq!(fill("b").len(), 75);
        assert_eq!(calls.0.held(), 0);
    }
}
