//! Cold start of models: requests for an expected model without workers are held until one serves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::api::arrival::CallArrival;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};

/// Requests held for expected models, whose pools of workers may be scaled to zero.
///
/// A model's tokenizer comes from its workers, so a request is held before it is tokenized. What is held leaves room for
/// requests that can be served: at most half of the open calls and a quarter of the receive budget.
pub(crate) struct ColdStart {
    /// Held requests by expected model.
    held: BTreeMap<String, AtomicUsize>,
    /// Bytes of their messages.
    bytes: AtomicU64,
    requests_max: usize,
    bytes_max: u64,
    timeout: Duration,
    retry_delay: Duration,
    /// The router drains: what is held cannot be served here.
    drain: CancellationToken,
}

/// A held request, counted until it is dropped.
struct Held<'a> {
    model: &'a str,
    count: &'a AtomicUsize,
    all_bytes: &'a AtomicU64,
    bytes: u64,
}

impl Held<'_> {
    fn publish(&self, count: usize) {
        metrics::gauge!(names::COLD_START_REQUESTS, "model" => self.model.to_owned()).set(count as f64);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.all_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.publish(self.count.fetch_sub(1, Ordering::Relaxed) - 1);
    }
}

impl ColdStart {
    pub(crate) fn new(options: &Options, drain: CancellationToken) -> Self {
        let held = options.expected_models.iter().map(|model| (model.clone(), AtomicUsize::default()));
        Self {
            held: held.collect(),
            bytes: AtomicU64::default(),
            requests_max: options.queue_requests_max.min(options.streams_max.div_ceil(2)),
            bytes_max: options.receive_bytes_max as u64 / 4,
            timeout: options.cold_start_timeout,
            retry_delay: options.retry_delay,
            drain,
        }
    }

    /// Waits until a worker serves the model `asked` for, if it is an expected one; an empty name means the only one. `bytes`:
    /// size of the request's message.
    ///
    /// # Errors
    /// No worker has served it within the timeout or the request's deadline, too many requests are held, or the router drains.
    pub(crate) async fn served(
        &self,
        asked: &str,
        bytes: u64,
        arrival: CallArrival,
        mut served: watch::Receiver<BTreeSet<String>>,
    ) -> Result<(), Outcome> {
        let Some((model, count)) = self.expected(asked, &served.borrow()) else { return Ok(()) };
        if served.borrow_and_update().contains(model) {
            return Ok(());
        }
        let held = self.hold(model, count, bytes)?;
        let limit = arrival.at.checked_add(self.timeout);
        let limit = [limit, arrival.deadline].into_iter().flatten().min();
        let limit =
            limit.map_or_else(|| tokio::time::Instant::now() + self.timeout, tokio::time::Instant::from_std);
        let woken = tokio::select! {
            woken = tokio::time::timeout_at(limit, served.wait_for(|served| served.contains(model))) => woken,
            () = self.drain.cancelled() => return Err(Outcome::Draining),
        };
        drop(held);
        match woken {
            // An error: the router ends.
            Ok(_) => Ok(()),
            Err(_) if arrival.deadline.is_some_and(|deadline| deadline <= crate::clock::now()) => {
                Err(Outcome::DeadlineExceeded)
            }
            Err(_) => Err(Outcome::Unserved { model: model.to_owned(), waited: self.timeout }),
        }
    }

    /// Returns the expected model of a name.
    fn expected(&self, asked: &str, served: &BTreeSet<String>) -> Option<(&str, &AtomicUsize)> {
        let found = if asked.is_empty() {
            let only = self.held.len() == 1 && served.iter().all(|served| self.held.contains_key(served));
            self.held.first_key_value().filter(|_| only)
        } else {
            self.held.get_key_value(asked)
        };
        found.map(|(model, count)| (model.as_str(), count))
    }

    /// Counts a request that is held.
    fn hold<'a>(&'a self, model: &'a str, count: &'a AtomicUsize, bytes: u64) -> Result<Held<'a>, Outcome> {
        let requests: usize = self.held.values().map(|count| count.load(Ordering::Relaxed)).sum();
        let limit = if requests >= self.requests_max {
            Some("--queue-requests-max, or half of --streams-max")
        } else if self.bytes.load(Ordering::Relaxed) + bytes > self.bytes_max {
            Some("a quarter of --receive-bytes-max")
        } else {
            None
        };
        if let Some(limit) = limit {
            let what = format!(
                "{requests} requests wait for models without workers, and more would exceed {limit}; try again later"
            );
            return Err(Outcome::Full(Box::new(Overload::of_router(what, "cold_start", self.retry_delay))));
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let held = Held { model, count, all_bytes: &self.bytes, bytes };
        held.publish(count.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(held)
    }
}
