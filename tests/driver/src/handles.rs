//! What a driver hands out: numbers that look like pointers, never the same twice, so that one which is gone is known.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::locked;

static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// Things of one kind that were handed out.
pub(crate) struct Handles<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(crate) fn add<H>(&self, thing: Arc<T>) -> *mut H {
        let handle = NEXT.fetch_add(16, Ordering::Relaxed);
        locked(&self.0).insert(handle, thing);
        std::ptr::without_provenance_mut(handle)
    }

    pub(crate) fn get<H>(&self, handle: *mut H) -> Option<Arc<T>> {
        locked(&self.0).get(&handle.cast::<c_void>().addr()).cloned()
    }

    pub(crate) fn remove<H>(&self, handle: *mut H) -> Option<Arc<T>> {
        locked(&self.0).remove(&handle.cast::<c_void>().addr())
    }
}
