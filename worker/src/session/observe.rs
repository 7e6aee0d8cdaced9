//! `Observe`: the response stream of an observer.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use inflight_proto::v1;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tonic::Status;

use super::engine_thread::Message;
use super::observation::Feed;

/// Maximum observers of a worker: one for each router.
pub(crate) const OBSERVERS_MAX: usize = 16;
/// Maximum responses a second, and those without a wish.
const RATE_MAX: u32 = 10;

/// Observer's place, until its response stream is dropped.
struct ObserverGuard {
    feed: Arc<Feed>,
    engine: mpsc::Sender<Message>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ObserverGuard {
    fn drop(&mut self) {
        self.feed.close();
        crate::metrics::observers(-1.0);
        // The engine's thread finds the closed feed by itself as well, at its next state.
        let _ = self.engine.try_send(Message::Unobserve);
    }
}

/// Adds an observer to the engine. Returns its response stream.
///
/// # Errors
/// A wrong rate, or a worker that stops.
pub(super) async fn observe(
    request: v1::ObserveRequest,
    engine: mpsc::Sender<Message>,
    permit: OwnedSemaphorePermit,
) -> Result<impl Stream<Item = Result<v1::ObserveResponse, Status>> + Send, Status> {
    let rate = match request.responses_per_second {
        0 => RATE_MAX,
        rate if rate <= RATE_MAX => rate,
        rate => {
            let reason = format!("responses_per_second is {rate}; it must be at most {RATE_MAX}");
            return Err(Status::invalid_argument(reason));
        }
    };
    let feed = Arc::new(Feed::new());
    crate::metrics::observers(1.0);
    let guard = ObserverGuard { feed: feed.clone(), engine: engine.clone(), _permit: permit };
    let stopping = |_| Status::unavailable("the worker is stopping");
    engine.send(Message::Observe(feed)).await.map_err(stopping)?;
    let interval = Duration::from_secs(1) / rate;
    let start = (guard, Instant::now());
    Ok(futures::stream::unfold(start, move |(guard, due)| async move {
        guard.feed.changed().await;
        tokio::time::sleep_until(due).await;
        let response = guard.feed.take()?;
        Some((Ok(response), (guard, Instant::now() + interval)))
    }))
}
