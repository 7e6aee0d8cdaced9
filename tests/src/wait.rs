use std::future::Future;
use std::time::Duration;

use anyhow::{Result, bail};

/// How long anything here may take. Far beyond what is needed, so that a busy machine fails no test.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Asks again and again until there is an answer.
///
/// # Errors
/// None came within [`DEADLINE`]; the error says what was waited for and the last refusal.
pub async fn eventually<T, F>(what: &str, mut ask: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        let refusal = match ask().await {
            Ok(answer) => return Ok(answer),
            Err(refusal) => refusal,
        };
        if tokio::time::Instant::now() >= deadline {
            bail!("{what}: not within {DEADLINE:?}; last: {refusal:#}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
