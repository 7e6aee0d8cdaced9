//! Cold start of models: requests for an expected model without workers are held until one serves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::api::arrival::CallArrival;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};

/// Requests held for expected models, whose pools of workers may be scaled to zero.
///
/// A model's tokenizer comes from its workers, so a request is held before it is tokenized. Its message counts towards
/// the receive budget meanwhile.
pub(crate) struct ColdStart {
    /// Held requests by expected model.
    held: BTreeMap<String, Arc<AtomicUsize>>,
    /// Maximum held requests of all models.
    requests_max: usize,
    timeout: Duration,
    retry_delay: Duration,
}

/// A held request, counted until it is dropped.
struct Held<'a> {
    model: &'a str,
    count: &'a AtomicUsize,
}

impl Held<'_> {
    fn publish(&self, count: usize) {
        metrics::gauge!(names::COLD_START_REQUESTS, "model" => self.model.to_owned()).set(count as f64);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.publish(self.count.fetch_sub(1, Ordering::Relaxed) - 1);
    }
}

impl ColdStart {
    pub(crate) fn new(options: &Options) -> Self {
        let held = options.expected_models.iter().map(|model| (model.clone(), Arc::default()));
        Self {
            held: held.collect(),
            requests_max: options.queue_requests_max,
            timeout: options.cold_start_timeout,
            retry_delay: options.retry_delay,
        }
    }

    /// Waits until a worker serves the model `asked` for, if it is an expected one; an empty name means the only one.
    ///
    /// # Errors
    /// No worker has served it within the timeout or the request's deadline, or too many requests are held.
    pub(crate) async fn served(
        &self,
        asked: &str,
        arrival: CallArrival,
        mut served: watch::Receiver<BTreeSet<String>>,
    ) -> Result<(), Outcome> {
        let Some((model, count)) = self.expected(asked, &served.borrow()) else { return Ok(()) };
        if served.borrow_and_update().contains(model) {
            return Ok(());
        }
        let held = self.hold(model, count)?;
        let limit = arrival.at.checked_add(self.timeout);
        let limit = [limit, arrival.deadline].into_iter().flatten().min();
        let limit =
            limit.map_or_else(|| tokio::time::Instant::now() + self.timeout, tokio::time::Instant::from_std);
        let woken = tokio::time::timeout_at(limit, served.wait_for(|served| served.contains(model))).await;
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
        found.map(|(model, count)| (model.as_str(), &**count))
    }

    /// Counts a request that is held.
    fn hold<'a>(&self, model: &'a str, count: &'a AtomicUsize) -> Result<Held<'a>, Outcome> {
        let all: usize = self.held.values().map(|count| count.load(Ordering::Relaxed)).sum();
        if all >= self.requests_max {
            let what = format!(
                "{all} requests wait for models without workers, the limit of --queue-requests-max; try again later"
            );
            return Err(Outcome::Full(Box::new(Overload::of_router(what, "cold_start", self.retry_delay))));
        }
        let held = Held { model, count };
        held.publish(count.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(held)
    }
}
