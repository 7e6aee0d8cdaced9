//! Format of the tenants' file.

use std::collections::BTreeMap;

use inflight_contract::{Priority, Weight};
use inflight_router_core::{QueueLimits, TenantLimits};
use serde::Deserialize;

/// Tenants' file: TOML, or JSON by its extension.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantsFile {
    /// Tenant of callers without key and certificate; without it they are rejected.
    pub(super) anonymous: Option<String>,
    /// Default limits of tenants.
    #[serde(default)]
    pub(super) defaults: LimitsEntry,
    #[serde(default)]
    pub(super) tenants: BTreeMap<String, TenantEntry>,
}

impl TenantsFile {
    /// Parses a file. Errors have the line, but not its text, which may have a key in the place of its digest.
    pub(super) fn parse(text: &str, json: bool) -> Result<Self, String> {
        if json {
            return serde_json::from_str(text).map_err(|error| without_values(&error.to_string()));
        }
        toml::from_str(text).map_err(|error: toml::de::Error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let line = before.map(|before| format!("line {}: ", 1 + before.matches('\n').count()));
            line.unwrap_or_default() + &without_values(error.message())
        })
    }
}

/// Returns the error of a parser without the text that it quotes (`invalid type: string "…"`).
fn without_values(error: &str) -> String {
    match (error.find("string \""), error.rfind('"')) {
        (Some(begin), Some(end)) => format!("{}string{}", &error[..begin], &error[end + 1..]),
        _ => error.to_owned(),
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitsEntry {
    pub(super) weight: Option<f32>,
    pub(super) priority_max: Option<i32>,
    pub(super) requests_per_minute: Option<u64>,
    pub(super) tokens_per_minute: Option<u64>,
    pub(super) tokens_per_day: Option<u64>,
    pub(super) concurrent_requests: Option<u32>,
    pub(super) connections: Option<u32>,
    pub(super) queue_requests: Option<usize>,
    pub(super) queue_tokens: Option<u64>,
}

// serde's `deny_unknown_fields` does not work with `flatten`, so the limits are a table of their own.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantEntry {
    #[serde(default)]
    pub(super) limits: LimitsEntry,
    #[serde(default)]
    pub(super) keys: Vec<KeyEntry>,
    /// Whether callers of the tenant may use the Admin service.
    #[serde(default)]
    pub(super) admin: bool,
    /// Names in client certificates, or `sha256:` and a certificate's digest.
    #[serde(default)]
    pub(super) certificates: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeyEntry {
    /// Display name of the key.
    #[serde(default)]
    pub(super) name: String,
    /// SHA-256 of the key, in hex.
    pub(super) sha256: String,
    /// Expiry in RFC 3339.
    pub(super) expires: Option<String>,
}

impl LimitsEntry {
    /// Returns these limits over default ones.
    pub(super) fn over(&self, defaults: &Self) -> Self {
        Self {
            weight: self.weight.or(defaults.weight),
            priority_max: self.priority_max.or(defaults.priority_max),
            requests_per_minute: self.requests_per_minute.or(defaults.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(defaults.tokens_per_minute),
            tokens_per_day: self.tokens_per_day.or(defaults.tokens_per_day),
            concurrent_requests: self.concurrent_requests.or(defaults.concurrent_requests),
            connections: self.connections.or(defaults.connections),
            queue_requests: self.queue_requests.or(defaults.queue_requests),
            queue_tokens: self.queue_tokens.or(defaults.queue_tokens),
        }
    }

    /// Returns the limits, if they are valid.
    pub(super) fn check(&self) -> Result<TenantLimits, String> {
        let zero = [
            ("requests_per_minute", self.requests_per_minute == Some(0)),
            ("tokens_per_minute", self.tokens_per_minute == Some(0)),
            ("tokens_per_day", self.tokens_per_day == Some(0)),
            ("concurrent_requests", self.concurrent_requests == Some(0)),
            ("connections", self.connections == Some(0)),
            ("queue_requests", self.queue_requests == Some(0)),
            ("queue_tokens", self.queue_tokens == Some(0)),
        ];
        if let Some((name, _)) = zero.into_iter().find(|(_, zero)| *zero) {
            return Err(format!("{name} is 0; leave it out for no limit, or take the tenant's keys away"));
        }
        let weight = self.weight.map_or(Ok(Weight::default()), Weight::try_from);
        Ok(TenantLimits {
            weight: weight.map_err(|error| error.to_string())?,
            // A tenant may place its requests after those of others, but before them only with the operator's permission.
            priority_max: self.priority_max.map_or(Priority::default(), Priority::clamped),
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            tokens_per_day: self.tokens_per_day,
            concurrent_requests: self.concurrent_requests,
            connections: self.connections,
            queue: QueueLimits {
                requests: self.queue_requests.unwrap_or(usize::MAX),
                tokens: self.queue_tokens.unwrap_or(u64::MAX),
            },
        })
    }
}
