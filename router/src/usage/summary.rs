//! Sums of usage lines.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::UsageRecord;

/// Attribute by which usage is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageGroup {
    /// Tenant.
    Tenant,
    /// Model name.
    Model,
    /// UTC day on which the call ended.
    Day,
}

/// Unknown name of a [`UsageGroup`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not tenant, model or day")]
pub struct UnknownUsageGroup(String);

impl UsageGroup {
    /// Returns the name of the attribute.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Model => "model",
            Self::Day => "day",
        }
    }

    fn key(self, record: &UsageRecord) -> &str {
        match self {
            Self::Tenant => &record.tenant,
            Self::Model => &record.model,
            Self::Day => record.ended.split('T').next().unwrap_or_default(),
        }
    }
}

impl FromStr for UsageGroup {
    type Err = UnknownUsageGroup;

    fn from_str(name: &str) -> Result<Self, UnknownUsageGroup> {
        let groups = [Self::Tenant, Self::Model, Self::Day];
        let found = groups.into_iter().find(|group| group.name() == name);
        found.ok_or_else(|| UnknownUsageGroup(name.to_owned()))
    }
}

/// Start of a period, inclusive: a UTC day `2026-01-31` or a time `2026-01-31T12:00:00Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageSince(OffsetDateTime);

impl UsageSince {
    /// Whether a call ended in the period. An unparsable time counts as in the period.
    pub fn includes(self, record: &UsageRecord) -> bool {
        OffsetDateTime::parse(&record.ended, &Rfc3339).map_or(true, |ended| ended >= self.0)
    }

    /// Returns the start.
    pub fn time(self) -> std::time::SystemTime {
        self.0.into()
    }
}

impl FromStr for UsageSince {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let time = if text.contains('T') { text.to_owned() } else { format!("{text}T00:00:00Z") };
        let time = OffsetDateTime::parse(&time, &Rfc3339);
        time.map(Self)
            .map_err(|_| "not a day such as 2026-01-31 or a time such as 2026-01-31T12:00:00Z".into())
    }
}

/// Sums of usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct UsageTotals {
    /// Requests.
    pub requests: u64,
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: u64,
    /// Prompt tokens found in a prefix cache.
    pub cached_prompt_tokens: u64,
    /// Tokens delivered to clients.
    pub completion_tokens: u64,
}

impl UsageTotals {
    /// Adds a request.
    pub fn add(&mut self, record: &UsageRecord) {
        self.requests += 1;
        self.prompt_tokens = self.prompt_tokens.saturating_add(record.prompt_tokens);
        self.cached_prompt_tokens = self.cached_prompt_tokens.saturating_add(record.cached_prompt_tokens);
        self.completion_tokens = self.completion_tokens.saturating_add(record.completion_tokens);
    }
}

/// Sums of usage by group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageSummary {
    group: UsageGroup,
    /// Sums by tenant, model or day.
    pub groups: BTreeMap<String, UsageTotals>,
    /// Sums over all groups.
    pub total: UsageTotals,
}

impl UsageSummary {
    /// Creates an empty summary.
    pub fn new(group: UsageGroup) -> Self {
        Self { group, groups: BTreeMap::new(), total: UsageTotals::default() }
    }

    /// Adds a request.
    pub fn add(&mut self, record: &UsageRecord) {
        let key = self.group.key(record);
        match self.groups.get_mut(key) {
            Some(totals) => totals.add(record),
            None => self.groups.entry(key.to_owned()).or_default().add(record),
        }
        self.total.add(record);
    }
}

/// Numbers of lines seen, as ranges, by log.
#[derive(Debug, Default)]
pub(super) struct SeenLines(BTreeMap<String, BTreeMap<u64, u64>>);

impl SeenLines {
    /// Adds the id of a line; returns false if it was seen before. Ids of another form are never duplicates.
    pub(super) fn insert(&mut self, id: &str) -> bool {
        let Some((log, number)) = id.rsplit_once('-') else { return true };
        let Ok(number) = number.parse::<u64>() else { return true };
        if !self.0.contains_key(log) {
            self.0.insert(log.to_owned(), BTreeMap::new());
        }
        let Some(ranges) = self.0.get_mut(log) else { return true };
        let before = ranges.range(..=number).next_back().map(|(first, last)| (*first, *last));
        if before.is_some_and(|(_, last)| last >= number) {
            return false;
        }
        let first = match before {
            Some((first, last)) if last + 1 == number => first,
            _ => number,
        };
        let after = number.checked_add(1).and_then(|next| ranges.remove(&next));
        ranges.insert(first, after.unwrap_or(number));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    proptest::proptest! {
        #[test]
        fn a_line_is_a_duplicate_exactly_if_its_id_was_seen(ids in proptest::collection::vec((0u8..2, 0u64..40), 0..80)) {
            let (mut seen, mut oracle) = (SeenLines::default(), BTreeSet::new());
            for (log, number) in ids {
                let id = format!("log-{log}-{number}");
                proptest::prop_assert_eq!(seen.insert(&id), oracle.insert(id.clone()), "{}", id);
            }
        }
    }

    #[test]
    fn a_period_starts_at_a_day_or_a_time() {
        let record = UsageRecord { ended: "2026-01-31T12:00:00.5Z".to_owned(), ..UsageRecord::default() };
        for (since, included) in [
            ("2026-01-31", true),
            ("2026-02-01", false),
            ("2026-01-31T12:00:00Z", true),
            ("2026-01-31T12:00:01Z", false),
            ("2026-01-31T12:00:00+01:00", true),
        ] {
            assert_eq!(since.parse::<UsageSince>().unwrap().includes(&record), included, "{since}");
        }
        assert!("yesterday".parse::<UsageSince>().is_err());
    }
}
