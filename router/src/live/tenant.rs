//! A tenant in the live view: its weight and the service that this router's requests of it have got.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Service of a generated token, in computed prompt tokens.
const GENERATED_TOKEN: u64 = 2;

/// Tenant with requests at this router.
#[derive(Debug)]
pub(crate) struct LiveTenant {
    pub(super) name: Arc<str>,
    /// Bits of the weight of its latest request.
    weight: AtomicU64,
    service: AtomicU64,
}

impl LiveTenant {
    pub(super) fn new(name: &str) -> Self {
        Self { name: Arc::from(name), weight: AtomicU64::new(1.0f64.to_bits()), service: AtomicU64::new(0) }
    }

    pub(super) fn set_weight(&self, weight: f64) {
        self.weight.store(weight.to_bits(), Ordering::Relaxed);
    }

    pub(super) fn weight(&self) -> f64 {
        f64::from_bits(self.weight.load(Ordering::Relaxed))
    }

    /// Counts generated tokens.
    pub(super) fn count_generated(&self, tokens: u64) {
        self.service.fetch_add(GENERATED_TOKEN * tokens, Ordering::Relaxed);
    }

    /// Counts computed prompt tokens.
    pub(super) fn count_computed(&self, tokens: u64) {
        self.service.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Returns its service since the router knows it: computed prompt tokens once, generated ones twice.
    pub(super) fn service(&self) -> u64 {
        self.service.load(Ordering::Relaxed)
    }
}
