//! Failed API keys, throttled by the address of the client.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use inflight_net::AddressKey;
use inflight_router_core::{FailureLimits, FailureThrottle};

use crate::clock;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::tenants::AuthenticationError;

/// Counts failed API keys of all listeners. Only failures are throttled: a valid key passes at any time, so that
/// no client can lock out others behind the same address.
#[derive(Debug)]
pub(crate) struct KeyFailures {
    throttle: Mutex<FailureThrottle<AddressKey>>,
    epoch: Instant,
    per_minute: u64,
}

impl KeyFailures {
    pub(crate) fn new(options: &Options) -> Self {
        let limits = FailureLimits {
            per_minute: options.key_failures_per_minute,
            sources_max: options.key_failure_addresses_max,
        };
        Self {
            throttle: Mutex::new(FailureThrottle::new(limits)),
            epoch: clock::now(),
            per_minute: limits.per_minute,
        }
    }

    /// Returns the outcome of a failed authentication. Calls that show no key are no failed keys.
    pub(crate) fn outcome(&self, error: &AuthenticationError, address: Option<IpAddr>) -> Outcome {
        let unauthenticated = || Outcome::Unauthenticated(error.to_string());
        match (error, address) {
            (AuthenticationError::NoKey | AuthenticationError::Certificate, _) | (_, None) => {
                unauthenticated()
            }
            (_, Some(address)) => self.fail(address).err().unwrap_or_else(unauthenticated),
        }
    }

    fn fail(&self, address: IpAddr) -> Result<(), Outcome> {
        let now = clock::now().saturating_duration_since(self.epoch);
        let mut throttle = self.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = throttle.fail(AddressKey::of(address), now);
        metrics::gauge!(names::KEY_FAILURE_ADDRESSES).set(throttle.len() as f64);
        drop(throttle);
        counted.map_err(|wait| {
            metrics::counter!(names::THROTTLED_KEY_FAILURES).increment(1);
            let what = format!(
                "more than {} API keys a minute from this address were not valid (--key-failures-per-minute); try \
                 again in {:.1} s with a valid key",
                self.per_minute,
                wait.as_secs_f64()
            );
            Outcome::Limited(Box::new(Overload::of_address(what, "key_failures", wait)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failed_keys_are_throttled_by_address_and_missing_keys_are_not() {
        let options = Options { key_failures_per_minute: 6, ..Options::default() };
        let failures = KeyFailures::new(&options);
        let wrong = |address: &str| {
            failures.outcome(&AuthenticationError::UnknownKey, Some(address.parse().unwrap())).label()
        };
        assert_eq!([wrong("192.0.2.1"), wrong("192.0.2.1")], ["unauthenticated", "limited"]);
        assert_eq!([wrong("2001:db8::1"), wrong("2001:db8::2")], ["unauthenticated", "limited"], "one /64");
        assert_eq!([wrong("192.0.2.2"), wrong("2001:db8:0:1::1")], ["unauthenticated"; 2]);
        let limited = failures.outcome(&AuthenticationError::Malformed, "192.0.2.1".parse().ok());
        assert!(limited.message().contains("--key-failures-per-minute"), "{}", limited.message());
        assert_eq!((limited.http().status, limited.code()), (429, tonic::Code::ResourceExhausted));
        assert_eq!(limited.retry_after(), Some(Duration::from_secs(10)));
        let missing = failures.outcome(&AuthenticationError::NoKey, "192.0.2.1".parse().ok());
        assert_eq!(missing.label(), "unauthenticated");
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!([wrong("192.0.2.1"), wrong("192.0.2.1")], ["unauthenticated", "limited"]);
    }
}
