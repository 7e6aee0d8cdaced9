use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

use crate::together;

/// What is written to one stream.
pub(crate) type Answer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The answers of a connection, polled by its task: all of those that were woken, and no others.
///
/// `FuturesUnordered` stops when the second of its futures wakes itself, to be fair to other tasks. An answer does so
/// whenever it sends, as HTTP/2 tells it of the room that it has just asked for; then there would be a write to the socket
/// for every two of them.
#[derive(Default)]
pub(crate) struct Answers {
    places: Vec<Place>,
    /// Places without an answer.
    free: Vec<usize>,
    woken: Arc<Woken>,
    /// Those polled now, kept for its memory.
    batch: Vec<usize>,
}

struct Place {
    answer: Option<Answer>,
    bell: Arc<Bell>,
    /// Rings the bell. A late one of an answer that is over rings for the next in its place, which does no harm.
    waker: Waker,
}

#[derive(Default)]
struct Woken(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    places: Vec<usize>,
    /// The connection's task, while it waits.
    task: Option<Waker>,
}

impl Woken {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing can panic while it is held but an allocation that fails.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Bell {
    place: usize,
    /// It is in the queue.
    rung: AtomicBool,
    woken: Arc<Woken>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.rung.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut queue = self.woken.lock();
        queue.places.push(self.place);
        let task = queue.task.take();
        drop(queue);
        if let Some(task) = task {
            together::wake(task);
        }
    }
}

impl Answers {
    /// Rounds in which what was woken is polled, before other tasks have their turn: what an answer wakes by itself is
    /// done with in the second.
    const ROUNDS: u32 = 4;

    /// Takes an answer in; it is polled in the next round.
    pub(crate) fn push(&mut self, answer: Answer) {
        let place = self.free.pop().unwrap_or_else(|| {
            let place = self.places.len();
            let bell = Arc::new(Bell { place, rung: AtomicBool::new(false), woken: self.woken.clone() });
            self.places.push(Place { answer: None, waker: Waker::from(bell.clone()), bell });
            place
        });
        self.places[place].answer = Some(answer);
        self.places[place].waker.wake_by_ref();
    }

    /// Polls what was woken, and sees to it that the task is woken with the next.
    pub(crate) fn poll(&mut self, context: &Context<'_>) {
        for _ in 0..Self::ROUNDS {
            let mut queue = self.woken.lock();
            if queue.places.is_empty() {
                match &mut queue.task {
                    Some(task) => task.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                return;
            }
            std::mem::swap(&mut queue.places, &mut self.batch);
            drop(queue);
            for place in self.batch.drain(..) {
                let Place { answer, bell, waker } = &mut self.places[place];
                // Before the poll, so that what wakes it from now on is not lost. A swap: it orders the poll's reads behind it, and
                // what a ring that found the bell rung has published before them.
                bell.rung.swap(false, Ordering::AcqRel);
                let Some(polled) = answer else { continue };
                // A panic in one, or in what is dropped at its end, must not end the others.
                let mut context = Context::from_waker(waker);
                let poll = || polled.as_mut().poll(&mut context).is_ready();
                if catch_unwind(AssertUnwindSafe(poll)).unwrap_or(true) {
                    let over = answer.take();
                    // What it said of that is in the log.
                    let _ = catch_unwind(AssertUnwindSafe(|| drop(over)));
                    self.free.push(place);
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
    async fn whatever_wakes_an_answer_from_wherever_is_seen_and_places_are_used_again() {
        const ANSWERS: u32 = 64;
        const MESSAGES: u32 = 500;
        let seen = Arc::new(AtomicU32::new(0));
        let mut answers = Answers::default();
        for generation in 1..=2 {
            let mut senders = Vec::new();
            for _ in 0..ANSWERS {
                let (sender, mut receiver) = mpsc::unbounded_channel::<()>();
                let seen = seen.clone();
                answers.push(Box::pin(async move {
                    while receiver.recv().await.is_some() {
                        seen.fetch_add(1, Ordering::Relaxed);
                        // As an answer does that sends.
                        tokio::task::yield_now().await;
                    }
                }));
                senders.push(sender);
            }
            let sending = tokio::spawn(async move {
                for nth in 0..MESSAGES {
                    together::together(|| senders.iter().for_each(|sender| sender.send(()).unwrap()));
                    if nth % 16 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            });
            std::future::poll_fn(|context| {
                answers.poll(context);
                let all = answers.places.iter().all(|place| place.answer.is_none());
                if all { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            sending.await.unwrap();
            assert_eq!(seen.load(Ordering::Relaxed), generation * ANSWERS * MESSAGES);
            assert_eq!((answers.places.len(), answers.free.len()), (ANSWERS as usize, ANSWERS as usize));
        }
    }

    #[test]
    fn an_answer_that_panics_as_it_runs_or_as_it_is_dropped_ends_no_other() {
        struct Grenade;
        impl Drop for Grenade {
            fn drop(&mut self) {
                panic!("as it is dropped");
            }
        }
        let mut answers = Answers::default();
        answers.push(Box::pin(async { panic!("as it runs") }));
        // Dropped at the end of the future, and with the future.
        let (inner, outer) = (Grenade, Some(Grenade));
        answers.push(Box::pin(async move { drop(inner) }));
        answers.push(Box::pin(std::future::poll_fn(move |_| {
            if outer.is_some() { Poll::Ready(()) } else { Poll::Pending }
        })));
        answers.push(Box::pin(async {}));
        answers.poll(&Context::from_waker(Waker::noop()));
        assert_eq!(answers.free.len(), 4);
    }

    #[test]
    fn only_what_was_woken_is_polled_and_one_that_wakes_itself_for_ever_lets_others_go_on() {
        struct Count(AtomicU32);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let woken = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(woken.clone());
        let context = Context::from_waker(&waker);
        let polls = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let counted = |which: usize, restless: bool| -> Answer {
            let polls = polls.clone();
            Box::pin(std::future::poll_fn(move |context| {
                polls[which].fetch_add(1, Ordering::Relaxed);
                if restless {
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            }))
        };
        let mut answers = Answers::default();
        answers.push(counted(0, false));
        answers.poll(&context);
        answers.push(counted(1, true));
        answers.poll(&context);
        let of = |which: usize| polls[which].load(Ordering::Relaxed);
        assert_eq!((of(0), of(1)), (1, Answers::ROUNDS));
        assert_eq!(woken.0.load(Ordering::Relaxed), 2, "at the push, and to go on");
    }
}
