//! Requests of a simulation.

use inflight_contract::Weight;
use inflight_traces::ServedRequest;
use inflight_worker_core::Time;

/// Request of a simulation, including its output length, which a real scheduler does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Arrival time.
    pub arrival: Time,
    /// Number of the tenant; arbitrary.
    pub tenant: u32,
    /// Fairness weight of the tenant.
    pub weight: Weight,
    /// Priority; higher is more important.
    pub priority: i32,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Output length in tokens, after which the request stops.
    pub output_tokens: u32,
    /// Maximum output length passed to the scheduler.
    pub max_tokens: u32,
}

impl Request {
    /// Creates a request of priority 0 and weight 1 whose `max_tokens` equals its output length.
    pub fn new(arrival: Time, tenant: u32, prompt_tokens: u32, output_tokens: u32) -> Self {
        Self {
            arrival,
            tenant,
            weight: Weight::default(),
            priority: 0,
            prompt_tokens,
            output_tokens,
            max_tokens: output_tokens,
        }
    }

    /// Returns the number of prompt and output tokens; the KV of the last one is never computed.
    pub fn tokens(&self) -> u32 {
        self.prompt_tokens + self.output_tokens
    }
}

/// Converts served requests to requests to be simulated, in order of arrival.
pub fn requests_of(served: &[ServedRequest]) -> Vec<Request> {
    let request = |served: &ServedRequest| {
        let arrival = Time::from_nanos((served.arrival_s.max(0.0) * 1e9).round() as u64);
        // Each request has at least one prompt and one output token.
        Request::new(arrival, served.tenant, served.prompt_tokens.max(1), served.output_tokens.max(1))
    };
    let mut requests: Vec<Request> = served.iter().map(request).collect();
    requests.sort_by_key(|request| request.arrival);
    requests
}
