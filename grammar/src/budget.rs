//! Memory budget: bytes of the matchers of one model.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that the live matchers of one model may hold in all, shared between them max-min fairly: over the budget, each
/// may hold as much as lets the larger ones hold the same, which is at least the budget over their number.
#[derive(Debug)]
pub struct MemoryBudget {
    most: usize,
    used: AtomicUsize,
    holders: Mutex<Holders>,
}

#[derive(Debug, Default)]
struct Holders {
    next_id: u64,
    bytes: BTreeMap<u64, usize>,
}

impl MemoryBudget {
    /// Bytes for a worker: 256 sequences of about 1 MiB, which those of usual schemas hold, with a margin.
    pub const DEFAULT_BYTES: usize = 512 << 20;

    /// Creates a budget of `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { most, used: AtomicUsize::new(0), holders: Mutex::default() }
    }

    /// Bytes held.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns what a holder may hold; `None`: any number of bytes, as the budget is not exceeded.
    fn share(&self) -> Option<usize> {
        if self.used() <= self.most {
            return None;
        }
        let mut bytes: Vec<usize> = self.lock().bytes.values().copied().collect();
        bytes.sort_unstable();
        let (mut rest, count) = (self.most, bytes.len());
        for (at, bytes) in bytes.into_iter().enumerate() {
            let share = rest / (count - at);
            if bytes > share {
                return Some(share);
            }
            rest -= bytes;
        }
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Holders> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self::new(Self::DEFAULT_BYTES)
    }
}

/// Bytes of one matcher, held in a budget until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Arc<MemoryBudget>,
    id: u64,
    bytes: usize,
}

impl Lease {
    /// Holds `bytes` of a budget, which this may exceed.
    pub(crate) fn new(budget: &Arc<MemoryBudget>, bytes: usize) -> Self {
        let mut holders = budget.lock();
        let id = holders.next_id;
        holders.next_id += 1;
        holders.bytes.insert(id, bytes);
        budget.used.fetch_add(bytes, Ordering::Relaxed);
        drop(holders);
        Self { budget: Arc::clone(budget), id, bytes }
    }

    /// Holds `bytes` from now on.
    pub(crate) fn set(&mut self, bytes: usize) {
        if bytes == self.bytes {
            return;
        }
        let mut holders = self.budget.lock();
        holders.bytes.insert(self.id, bytes);
        self.budget.used.fetch_add(bytes, Ordering::Relaxed);
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns what may be held; `None`: any number of bytes.
    pub(crate) fn share(&self) -> Option<usize> {
        self.budget.share()
    }

    /// Bytes of the budget.
    pub(crate) fn most(&self) -> usize {
        self.budget.most
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.lock().bytes.remove(&self.id);
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_the_budget_only_holders_of_more_than_their_share_exceed_it() {
        let budget = Arc::new(MemoryBudget::new(100));
        let mut leases: Vec<Lease> = [10, 20, 30].iter().map(|bytes| Lease::new(&budget, *bytes)).collect();
        assert_eq!((budget.used(), budget.share()), (60, None));
        leases[2].set(80);
        // 10 and 20 leave 70 for the third.
        assert_eq!((budget.used(), budget.share()), (110, Some(70)));
        leases[1].set(60);
        assert_eq!(budget.share(), Some(45));
        drop(leases.pop());
        assert_eq!((budget.used(), budget.share()), (70, None));
        drop(leases);
        assert_eq!(budget.used(), 0);
    }
}
