//! Hand-off from the dispatcher to a stream: state under a lock, and the waker of the stream that waits for it to change.

use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, MutexGuard};

/// State that the dispatcher changes and a stream reads.
#[derive(Debug)]
pub(crate) struct Handoff<T>(Mutex<HandoffState<T>>);

#[derive(Debug)]
struct HandoffState<T> {
    value: T,
    /// Whether the stream has something to read.
    has_unread: bool,
    /// Waker of the stream, while it waits.
    reader: Option<Waker>,
}

impl<T> Handoff<T> {
    /// Creates a hand-off whose first read is immediate.
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(HandoffState { value, has_unread: true, reader: None }))
    }

    fn lock(&self) -> MutexGuard<'_, HandoffState<T>> {
        // The state is consistent at every call that could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `access` with the state; the stream is not told of a change.
    pub(crate) fn access<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        access(&mut self.lock().value)
    }

    /// Changes the state. A waiting stream is added to `readers`, to be woken after all commands of the event, so that
    /// streams of one connection write all their tokens at once.
    pub(crate) fn change<R>(&self, readers: &mut Vec<Waker>, change: impl FnOnce(&mut T) -> R) -> R {
        let mut state = self.lock();
        state.has_unread = true;
        readers.extend(state.reader.take());
        change(&mut state.value)
    }

    /// Calls `read` if the state has changed since the last read; registers the waker otherwise.
    pub(crate) fn poll_read<R>(&self, context: &Context<'_>, read: impl FnOnce(&mut T) -> R) -> Poll<R> {
        let mut state = self.lock();
        if std::mem::take(&mut state.has_unread) {
            return Poll::Ready(read(&mut state.value));
        }
        match &mut state.reader {
            Some(reader) => reader.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}
