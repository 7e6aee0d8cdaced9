//! Model of the response path: sessions with workers deliver tokens, and the task of a connection writes them.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use loom::sync::{Mutex, Notify};
use loom::thread;

use super::check;
use crate::handoff::Handoff;
use crate::response_streams::ResponseStreams;
use crate::wakeups::batch_wakeups;

/// Sessions, each of which delivers one token to every stream.
const SESSIONS: u32 = 2;
const STREAMS: usize = 2;

/// The connection's task: a thread that sleeps until it is woken.
#[derive(Default)]
struct ConnectionTask(Notify);

impl Wake for ConnectionTask {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

/// Every stream gets every token exactly once, and the connection's task does not sleep while there is something to write.
///
/// # Panics
/// If not.
pub fn responses() {
    check(2, || {
        let streams: Vec<_> = (0..STREAMS).map(|_| Arc::new(Handoff::new(Vec::new()))).collect();
        let dispatcher = Arc::new(Mutex::new(()));
        let sessions: Vec<_> = (0..SESSIONS)
            .map(|session| {
                let (streams, dispatcher) = (streams.clone(), dispatcher.clone());
                thread::spawn(move || deliver(session, &streams, &dispatcher))
            })
            .collect();
        write(&streams);
        for session in sessions {
            session.join().unwrap_or_else(|_| unreachable!("a panic ends the model"));
        }
    });
}

/// Carries out the commands of one update, as the router's dispatcher does: the streams are woken outside its lock.
fn deliver(session: u32, streams: &[Arc<Handoff<Vec<u32>>>], dispatcher: &Mutex<()>) {
    let mut readers = Vec::new();
    let lock = dispatcher.lock();
    for stream in streams {
        stream.change(&mut readers, |tokens| tokens.push(session));
    }
    drop(lock);
    batch_wakeups(|| readers.into_iter().for_each(Waker::wake));
}

/// Polls the streams' responses until each has its tokens.
fn write(streams: &[Arc<Handoff<Vec<u32>>>]) {
    let unfinished = Arc::new(std::sync::atomic::AtomicUsize::new(streams.len()));
    let mut responses = ResponseStreams::default();
    for stream in streams {
        let (stream, unfinished) = (stream.clone(), unfinished.clone());
        let mut received = Vec::new();
        responses.push(Box::pin(poll_fn(move |context| {
            while let Poll::Ready(mut tokens) = stream.poll_read(context, std::mem::take) {
                received.append(&mut tokens);
            }
            if received.len() < SESSIONS as usize {
                return Poll::Pending;
            }
            received.sort_unstable();
            assert!(received.iter().copied().eq(0..SESSIONS), "tokens {received:?}");
            unfinished.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            Poll::Ready(())
        })));
    }
    let task = Arc::new(ConnectionTask::default());
    let waker = Waker::from(task.clone());
    let context = Context::from_waker(&waker);
    loop {
        responses.poll(&context);
        if unfinished.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            return;
        }
        task.0.wait();
    }
}
