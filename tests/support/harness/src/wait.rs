//! Waiting for a condition, with a deadline.

use std::future::Future;
use std::time::Duration;

use anyhow::{Result, bail};

/// Timeout of every wait of this crate; generous, so that no test fails on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Polls `attempt` every 10 ms until it succeeds, and returns its value.
///
/// # Errors
/// No attempt succeeded within [`DEADLINE`]; the error contains `what` and the last attempt's error.
pub async fn eventually<T, F>(what: &str, mut attempt: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        let error = match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        if tokio::time::Instant::now() >= deadline {
            bail!("{what}: not within {DEADLINE:?}; last: {error:#}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
