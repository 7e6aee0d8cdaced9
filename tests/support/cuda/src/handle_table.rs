//! Table of opaque handles: integers that look like pointers and are never reused, so that destroyed handles
//! are detected.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::lock;

static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// Live handles of one object type.
pub(crate) struct HandleTable<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> HandleTable<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(crate) fn add<H>(&self, object: Arc<T>) -> *mut H {
        let handle = NEXT.fetch_add(16, Ordering::Relaxed);
        lock(&self.0).insert(handle, object);
        std::ptr::without_provenance_mut(handle)
    }

    pub(crate) fn get<H>(&self, handle: *mut H) -> Option<Arc<T>> {
        lock(&self.0).get(&handle.cast::<c_void>().addr()).cloned()
    }

    pub(crate) fn remove<H>(&self, handle: *mut H) -> Option<Arc<T>> {
        lock(&self.0).remove(&handle.cast::<c_void>().addr())
    }
}
