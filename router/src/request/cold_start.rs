//! Cold start: requests for a model of `--expect-models` that no worker serves are held until a worker serves it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use inflight_net::{Holder, PoolFull, PoolShare, SharedPool};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::layers::arrival::CallArrival;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::request::draft::{Draft, Input};

/// Maximum number of held requests that are tokenized and queued at the same time after a worker has connected. Without this limit
/// they would overflow the tokenize queue.
const RELEASED_AT_ONCE: usize = 32;

/// Requests held for expected models, whose pools of workers may be scaled to zero.
///
/// A model's tokenizer comes from its workers, so a request is held before it is tokenized. Held requests leave room for
/// those that can be served: they are at most `queue_requests_max`, half of `streams_max` and half of
/// `connection_streams_max`, and their bytes are at most a quarter of `receive_bytes_max`. Tenants share both.
pub(crate) struct ColdStart {
    models: BTreeSet<String>,
    requests: SharedPool,
    bytes: SharedPool,
    timeout: Duration,
    retry_delay: Duration,
    released: Arc<Semaphore>,
    /// Cancelled when the router drains: held requests then fail, so that clients retry at another router.
    drain: CancellationToken,
}

/// A held request, counted until it is dropped.
struct Held {
    _request: PoolShare,
    _bytes: PoolShare,
    gauge: metrics::Gauge,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}

/// Returns the approximate size of a request in bytes, decoded: more than one may come in a message, and numbers in JSON may have fewer
/// bytes than in memory.
fn decoded_bytes(request: &Draft) -> u64 {
    let prompt = match &request.input {
        Input::Text(text) | Input::RawText(text) => text.len(),
        Input::TokenIds(ids) => size_of_val(&ids[..]),
        // The message is counted, and has only one request.
        Input::Chat(_) => 0,
    };
    (prompt + request.sampling.list_bytes(true)) as u64
}

impl ColdStart {
    pub(crate) fn new(options: &Options, drain: CancellationToken) -> Self {
        let calls = options.streams_max.min(options.connection_streams_max as usize).div_ceil(2);
        Self {
            models: options.expected_models.iter().cloned().collect(),
            requests: SharedPool::new(options.dispatcher.queue.limits.requests.min(calls) as u64),
            bytes: SharedPool::new(options.receive_bytes_max / 4),
            timeout: options.cold_start_timeout,
            retry_delay: options.retry_delay,
            released: Arc::new(Semaphore::new(RELEASED_AT_ONCE)),
            drain,
        }
    }

    /// Waits until a worker serves the requested model, if it is an expected one; an empty name means the only one.
    /// `message_bytes`: size of the request's message, if it is counted. A request that has waited gets a permit, to be kept
    /// until it is queued.
    ///
    /// # Errors
    /// No worker has served it within the timeout or the request's deadline, too many requests are held, or the router drains.
    pub(crate) async fn served(
        &self,
        request: &Draft,
        tenant: Option<&Holder>,
        message_bytes: u64,
        arrival: CallArrival,
        mut served: watch::Receiver<BTreeSet<String>>,
    ) -> Result<Option<OwnedSemaphorePermit>, Outcome> {
        let Some(model) = self.expected(&request.model, &served.borrow_and_update()) else { return Ok(None) };
        let held = self.hold(
            model,
            tenant,
            message_bytes.max(decoded_bytes(request)) + request.decoded_json_bytes() as u64,
        )?;
        let limit = arrival.at.checked_add(self.timeout);
        let limit = [limit, arrival.deadline].into_iter().flatten().min();
        let limit =
            limit.map_or_else(|| tokio::time::Instant::now() + self.timeout, tokio::time::Instant::from_std);
        let woken = async {
            // An error: the router ends.
            let _ = served.wait_for(|served| served.contains(model)).await;
            // In the order in which they wait.
            self.released.clone().acquire_owned().await.ok()
        };
        let woken = tokio::select! {
            biased;
            woken = tokio::time::timeout_at(limit, woken) => woken,
            () = self.drain.cancelled() => return Err(Outcome::Draining),
        };
        drop(held);
        woken.map_err(|_| {
            if arrival.deadline.is_some_and(|deadline| deadline <= crate::clock::now()) {
                Outcome::DeadlineExceeded
            } else {
                Outcome::Unserved { model: model.to_owned(), waited: self.timeout }
            }
        })
    }

    /// Returns the expected model of a name, unless a worker serves it.
    fn expected(&self, asked: &str, served: &BTreeSet<String>) -> Option<&str> {
        let model = if asked.is_empty() {
            let only = self.models.len() == 1 && served.is_empty();
            self.models.first().filter(|_| only)
        } else {
            self.models.get(asked)
        };
        model.map(String::as_str).filter(|model| !served.contains(*model))
    }

    /// Adds a request to the held ones, unless a limit is reached.
    fn hold(&self, model: &str, tenant: Option<&Holder>, bytes: u64) -> Result<Held, Outcome> {
        let requests = self.requests.held();
        let refused = |full, what: &str, limit: &str| {
            let whose = match full {
                PoolFull::Pool => "would exceed",
                PoolFull::Share => "would exceed this tenant's share of",
            };
            let what = format!(
                "{requests} requests wait for models without workers; more {what} {whose} {limit}; try again later"
            );
            Outcome::Full(Box::new(Overload::of_router(what, "cold_start", self.retry_delay)))
        };
        let count = "--queue-requests-max, or half of --streams-max or --connection-streams-max";
        let request = self.requests.take(tenant, 1).map_err(|full| refused(full, "requests", count))?;
        let bytes = self.bytes.take(tenant, bytes);
        let bytes =
            bytes.map_err(|full| refused(full, "bytes of requests", "a quarter of --receive-bytes-max"))?;
        let gauge = metrics::gauge!(names::COLD_START_REQUESTS, "model" => model.to_owned());
        gauge.increment(1.0);
        Ok(Held { _request: request, _bytes: bytes, gauge })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_requests_are_bounded_for_all_and_for_each_tenant_and_their_counts_return_to_zero() {
        let mut options =
            Options { expected_models: vec!["m".to_owned()], receive_bytes_max: 4000, ..Options::default() };
        options.dispatcher.queue.limits.requests = 8;
        let cold_start = ColdStart::new(&options, CancellationToken::new());
        let tenant = |name: &str| Holder { name: name.into(), weight: 1.0 };
        let hold = |name: &str, bytes| cold_start.hold("m", Some(&tenant(name)), bytes);
        let refused = |name: &str, bytes| match hold(name, bytes) {
            Err(outcome) => outcome.into_status().message().to_owned(),
            Ok(_) => panic!("held"),
        };
        // Three quarters of eight requests, and of a quarter of the bytes.
        let mut held: Vec<_> = (0..6).map(|_| hold("a", 100).unwrap()).collect();
        assert!(refused("a", 10).contains("this tenant's share of --queue-requests-max"));
        held.truncate(3);
        assert!(refused("a", 451).contains("this tenant's share of a quarter of --receive-bytes-max"));
        assert!(refused("b", 701).contains("would exceed a quarter of --receive-bytes-max"));
        held.extend((0..3).map(|_| hold("b", 100).unwrap()));
        held.push(hold("c", 100).unwrap());
        held.push(hold("d", 0).unwrap());
        assert!(refused("e", 0).contains("would exceed --queue-requests-max"));
        drop(held);
        assert_eq!((cold_start.requests.held(), cold_start.bytes.held()), (0, 0));
    }

    #[test]
    fn an_empty_name_means_the_only_expected_model_while_nothing_is_served() {
        let of = |models: &[&str]| {
            let expected_models = models.iter().map(|model| (*model).to_owned()).collect();
            ColdStart::new(&Options { expected_models, ..Options::default() }, CancellationToken::new())
        };
        let served =
            |models: &[&str]| models.iter().map(|model| (*model).to_owned()).collect::<BTreeSet<_>>();
        let one = of(&["m"]);
        assert_eq!(one.expected("", &served(&[])), Some("m"));
        assert_eq!(one.expected("", &served(&["other"])), None, "it means what is served");
        assert_eq!(one.expected("m", &served(&["other"])), Some("m"));
        assert_eq!(one.expected("m", &served(&["m"])), None);
        assert_eq!(one.expected("other", &served(&[])), None);
        assert_eq!(of(&["m", "n"]).expected("", &served(&[])), None);
        assert_eq!(decoded_bytes(&Draft::new(String::new(), Input::TokenIds(vec![1; 10]))), 40);
    }
}
