//! Line of the usage log.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Line of the usage log: one admitted request, written when its call has ended. Times are in RFC 3339, UTC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRecord {
    /// Unique id of the line, `LOG-NUMBER`: a random id of the log's process, and the number of the line in
    /// it. A line that was written twice, after a failed sync, has the same id.
    #[serde(default)]
    pub id: String,
    /// Tenant; empty if the request named none.
    pub tenant: String,
    /// Name of the API key or, without one, the head of its digest; name of the client certificate; empty for
    /// callers without either.
    pub key: String,
    /// Request id.
    pub request: String,
    /// Id of the stream, of requests whose streams can be resumed. A stream that was resumed has a line for each
    /// call; each counts all tokens since the first call, so that only the longest one is billed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<String>,
    /// Output tokens that the client had received in earlier calls; `None` of the first call of a stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_tokens: Option<u64>,
    /// Model name.
    pub model: String,
    /// Numerics fingerprint of the last worker; empty if the request was sent to none.
    pub fingerprint: String,
    /// Prompt tokens; 0 if the request was sent to no worker.
    pub prompt_tokens: u64,
    /// Prompt tokens found in a prefix cache.
    pub cached_prompt_tokens: u64,
    /// Tokens delivered to the client, of all choices; each counts once, however many workers the request
    /// ran on.
    pub completion_tokens: u64,
    /// Time of arrival.
    pub arrived: String,
    /// Time of the first dispatch to a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatched: Option<String>,
    /// Time of the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token: Option<String>,
    /// Time of the end of the call.
    pub ended: String,
    /// Outcome, as in the metric `inflight_router_requests_total`.
    pub outcome: String,
}

/// Formats a time since the Unix epoch, in microseconds.
pub(crate) fn timestamp(since_epoch: Duration) -> String {
    let micros = Duration::from_micros(u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX));
    let time = OffsetDateTime::UNIX_EPOCH.checked_add(micros.try_into().unwrap_or(time::Duration::MAX));
    // Fails only for years beyond 9999.
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc_in_rfc_3339() {
        assert_eq!(timestamp(Duration::from_millis(951_782_400_250)), "2000-02-29T00:00:00.25Z");
        assert_eq!(timestamp(Duration::ZERO), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(Duration::MAX), "");
    }
}
