//! Bound on open ModelStreamInfer calls, which hold a task and buffers also while they carry no request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::metrics as names;

/// Open ModelStreamInfer calls of a router. A tenant may hold as many as are free (dynamic thresholds, Choudhury and Hahne 1998):
/// one alone at most half of them, so that others always find some.
#[derive(Debug, Clone)]
pub(super) struct StreamCalls {
    most: usize,
    open: Arc<Mutex<OpenCalls>>,
}

#[derive(Debug, Default)]
struct OpenCalls {
    total: usize,
    /// Without entries of 0.
    by_tenant: BTreeMap<Arc<str>, usize>,
}

/// One open call, until it is dropped.
#[derive(Debug)]
pub(super) struct StreamCall {
    calls: StreamCalls,
    tenant: Arc<str>,
}

impl StreamCalls {
    /// Bounds the open calls to `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { most, open: Arc::default() }
    }

    /// Counts a call of a tenant; `None` if it holds as many as are free.
    pub(super) fn enter(&self, tenant: Arc<str>) -> Option<StreamCall> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.most.saturating_sub(open.total);
        let own = open.by_tenant.get(&tenant).copied().unwrap_or(0);
        if own >= free {
            return None;
        }
        open.total += 1;
        open.by_tenant.insert(tenant.clone(), own + 1);
        metrics::gauge!(names::KSERVE_STREAMS).set(open.total as f64);
        drop(open);
        Some(StreamCall { calls: self.clone(), tenant })
    }
}

impl Drop for StreamCall {
    fn drop(&mut self) {
        let mut open = self.calls.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.total -= 1;
        if let Some(own) = open.by_tenant.get_mut(&self.tenant) {
            *own -= 1;
            if *own == 0 {
                open.by_tenant.remove(&self.tenant);
            }
        }
        metrics::gauge!(names::KSERVE_STREAMS).set(open.total as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_holds_at_most_as_many_calls_as_are_free_and_others_always_find_some() {
        let calls = StreamCalls::new(100);
        let fill = |tenant: &str| -> Vec<StreamCall> {
            std::iter::from_fn(|| calls.enter(Arc::from(tenant))).collect()
        };
        let first = fill("a");
        let second = fill("b");
        let third = fill("c");
        assert_eq!([first.len(), second.len(), third.len()], [50, 25, 13]);
        drop(first);
        assert_eq!(fill("b").len(), 19, "44 beside 13 of another leave 43");
        drop((second, third));
        assert_eq!(fill("d").len(), 50);
        let open = calls.open.lock().unwrap();
        assert_eq!((open.total, open.by_tenant.len()), (0, 0));
    }
}
