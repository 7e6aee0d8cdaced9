//! Response futures of one connection, polled by the connection's own task: a `FuturesUnordered` that polls
//! every woken future before it yields.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Wake, Waker};

use crate::sync::{AtomicBool, Mutex, MutexGuard};
use crate::wakeups;

/// Future that writes one response to its HTTP/2 stream.
pub(crate) type ResponseStream = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Response futures of a connection. A poll runs all that were woken, and no others.
///
/// `FuturesUnordered` yields to other tasks after the second future that wakes itself. A response does so
/// whenever it sends, because h2 reports the capacity just requested: one socket write per two responses.
#[derive(Default)]
pub(crate) struct ResponseStreams {
    slots: Vec<StreamSlot>,
    /// Indices of slots without a response.
    free: Vec<usize>,
    woken: Arc<WakeQueue>,
    /// Slot indices of the current round; a field to reuse its allocation.
    batch: Vec<usize>,
}

struct StreamSlot {
    response: Option<ResponseStream>,
    stream_waker: Arc<StreamWaker>,
    /// `stream_waker` as a `Waker`. A late wake-up by a finished response only polls the slot's next one.
    waker: Waker,
}

/// Slots to poll, shared by the wakers of all streams of a connection.
#[derive(Default)]
struct WakeQueue(Mutex<WakeQueueState>);

#[derive(Default)]
struct WakeQueueState {
    slots: Vec<usize>,
    /// Waker of the connection's task while the task waits.
    task: Option<Waker>,
}

impl WakeQueue {
    fn lock(&self) -> MutexGuard<'_, WakeQueueState> {
        // Only a failed allocation can panic while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waker of one slot: queues the slot and wakes the connection's task.
struct StreamWaker {
    slot: usize,
    /// Whether the slot is already in the queue.
    queued: AtomicBool,
    woken: Arc<WakeQueue>,
}

impl Wake for StreamWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut queue = self.woken.lock();
        queue.slots.push(self.slot);
        let task = queue.task.take();
        drop(queue);
        if let Some(task) = task {
            wakeups::wake(task);
        }
    }
}

impl ResponseStreams {
    /// Polling rounds before the task yields; a response that wakes itself is usually done in the second.
    const ROUNDS: u32 = 4;

    /// Adds a response; the next round polls it.
    pub(crate) fn push(&mut self, response: ResponseStream) {
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = self.slots.len();
            let stream_waker =
                Arc::new(StreamWaker { slot, queued: AtomicBool::new(false), woken: self.woken.clone() });
            self.slots.push(StreamSlot {
                response: None,
                waker: Waker::from(stream_waker.clone()),
                stream_waker,
            });
            slot
        });
        self.slots[slot].response = Some(response);
        self.slots[slot].waker.wake_by_ref();
    }

    /// Polls all woken responses and registers the task for the next wake-up.
    pub(crate) fn poll(&mut self, context: &Context<'_>) {
        for _ in 0..Self::ROUNDS {
            let mut queue = self.woken.lock();
            if queue.slots.is_empty() {
                match &mut queue.task {
                    Some(task) => task.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                return;
            }
            std::mem::swap(&mut queue.slots, &mut self.batch);
            drop(queue);
            for slot in self.batch.drain(..) {
                let StreamSlot { response, stream_waker, waker } = &mut self.slots[slot];
                // Cleared before the poll, so that no later wake-up is lost. A swap, not a store: it acquires
                // the writes made before a wake-up that found the flag set, and orders the poll's reads after.
                stream_waker.queued.swap(false, Ordering::AcqRel);
                let Some(polled) = response else { continue };
                // A panic in a poll or in a drop must not end the other responses.
                let mut context = Context::from_waker(waker);
                let poll = || polled.as_mut().poll(&mut context).is_ready();
                if catch_unwind(AssertUnwindSafe(poll)).unwrap_or(true) {
                    let finished = response.take();
                    // The panic hook has logged the message.
                    let _ = catch_unwind(AssertUnwindSafe(|| drop(finished)));
                    self.free.push(slot);
                }
            }
        }
        context.waker().wake_by_ref();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::task::Poll;
    use tokio::sync::mpsc;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn wakeups_from_other_threads_are_not_lost_and_slots_are_reused() {
        const RESPONSES: u32 = 64;
        const MESSAGES: u32 = 500;
        let received = Arc::new(AtomicU32::new(0));
        let mut responses = ResponseStreams::default();
        for generation in 1..=2 {
            let mut senders = Vec::new();
            for _ in 0..RESPONSES {
                let (sender, mut receiver) = mpsc::unbounded_channel::<()>();
                let received = received.clone();
                responses.push(Box::pin(async move {
                    while receiver.recv().await.is_some() {
                        received.fetch_add(1, Ordering::Relaxed);
                        // Wakes itself, as a response that sends does.
                        tokio::task::yield_now().await;
                    }
                }));
                senders.push(sender);
            }
            let sending = tokio::spawn(async move {
                for nth in 0..MESSAGES {
                    wakeups::batch_wakeups(|| senders.iter().for_each(|sender| sender.send(()).unwrap()));
                    if nth % 16 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            });
            std::future::poll_fn(|context| {
                responses.poll(context);
                let all = responses.slots.iter().all(|slot| slot.response.is_none());
                if all { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            sending.await.unwrap();
            assert_eq!(received.load(Ordering::Relaxed), generation * RESPONSES * MESSAGES);
            assert_eq!(
                (responses.slots.len(), responses.free.len()),
                (RESPONSES as usize, RESPONSES as usize)
            );
        }
    }

    #[test]
    fn a_panic_in_a_poll_or_a_drop_ends_no_other_response() {
        struct PanicOnDrop;
        impl Drop for PanicOnDrop {
            fn drop(&mut self) {
                panic!("as it is dropped");
            }
        }
        let mut responses = ResponseStreams::default();
        responses.push(Box::pin(async { panic!("as it runs") }));
        // Dropped at the end of the future, and with the future.
        let (inner, outer) = (PanicOnDrop, Some(PanicOnDrop));
        responses.push(Box::pin(async move { drop(inner) }));
        responses.push(Box::pin(std::future::poll_fn(move |_| {
            if outer.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })));
        responses.push(Box::pin(async {}));
        responses.poll(&Context::from_waker(Waker::noop()));
        assert_eq!(responses.free.len(), 4);
    }

    #[test]
    fn only_woken_responses_are_polled_and_a_self_waking_one_yields() {
        struct WakeCounter(AtomicU32);
        impl Wake for WakeCounter {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let woken = Arc::new(WakeCounter(AtomicU32::new(0)));
        let waker = Waker::from(woken.clone());
        let context = Context::from_waker(&waker);
        let polls = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let counted = |index: usize, self_waking: bool| -> ResponseStream {
            let polls = polls.clone();
            Box::pin(std::future::poll_fn(move |context| {
                polls[index].fetch_add(1, Ordering::Relaxed);
                if self_waking {
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            }))
        };
        let mut responses = ResponseStreams::default();
        responses.push(counted(0, false));
        responses.poll(&context);
        responses.push(counted(1, true));
        responses.poll(&context);
        let polls_of = |index: usize| polls[index].load(Ordering::Relaxed);
        assert_eq!((polls_of(0), polls_of(1)), (1, ResponseStreams::ROUNDS));
        assert_eq!(woken.0.load(Ordering::Relaxed), 2, "at the push, and to continue after the last round");
    }
}
