//! When a broken call is resumed.

use std::time::Duration;

use tonic::{Code, Status};

/// Policy of resuming broken calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumePolicy {
    /// Time without a message after a failure, after which the failure is returned.
    pub patience: Duration,
    /// Pause after the first failure; it doubles with each further one.
    pub backoff_min: Duration,
    /// Maximum pause.
    pub backoff_max: Duration,
}

impl Default for ResumePolicy {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(30),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_secs(1),
        }
    }
}

impl ResumePolicy {
    /// Returns the pause after this many failures in a row.
    pub(crate) fn backoff(&self, failures: u32) -> Duration {
        let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.backoff_min.saturating_mul(factor).min(self.backoff_max)
    }

    /// Whether another router, or the same one later, may continue a call that ended with this status;
    /// `begun` if the stream has begun.
    pub(crate) fn retries(status: &Status, begun: bool) -> bool {
        match status.code() {
            Code::Unavailable => true,
            // A limit holds a new request back; a stream that has begun waits for it.
            Code::ResourceExhausted => begun,
            // Errors of the connection, which no router has sent, have a cause.
            Code::Unknown | Code::Internal | Code::Cancelled => std::error::Error::source(status).is_some(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum() {
        let policy = ResumePolicy {
            patience: Duration::MAX,
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(100),
        };
        let pauses = [1, 2, 3, 4, 40, u32::MAX].map(|failures| policy.backoff(failures).as_millis());
        assert_eq!(pauses, [20, 40, 80, 100, 100, 100]);
    }

    #[test]
    fn statuses_of_routers_are_final_but_unavailability_and_limits_of_a_begun_stream() {
        let retried = |code, begun| ResumePolicy::retries(&Status::new(code, ""), begun);
        assert!(retried(Code::Unavailable, false) && retried(Code::ResourceExhausted, true));
        for code in [Code::ResourceExhausted, Code::InvalidArgument, Code::Internal, Code::Cancelled] {
            assert!(!retried(code, false), "{code:?}");
        }
        assert!(!retried(Code::FailedPrecondition, true), "no worker can continue the stream");
        let broken = Status::from_error(std::io::Error::other("reset").into());
        assert!(ResumePolicy::retries(&broken, true), "{broken:?}");
    }
}
