//! Bound on how often one thing is logged.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Minimum interval of log lines about what any client can cause.
const INTERVAL: Duration = Duration::from_secs(60);

/// Allows a log line once in [`INTERVAL`].
#[derive(Debug, Default)]
pub(crate) struct NoticeInterval(Mutex<Option<Instant>>);

impl NoticeInterval {
    /// Returns whether to log now; the next line is then due after the interval.
    pub(crate) fn is_due(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due = last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL);
        if due {
            *last = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_is_due_once_a_minute() {
        let notices = NoticeInterval::default();
        assert!(notices.is_due() && !notices.is_due());
        tokio::time::advance(INTERVAL - Duration::from_millis(1)).await;
        assert!(!notices.is_due());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(notices.is_due() && !notices.is_due());
    }
}
