//! Date that chat templates write into prompts.

use std::fmt;
use std::str::FromStr;

use time::{Date, Month, OffsetDateTime};

/// Date that `strftime_now` returns in chat templates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TemplateDate {
    /// The UTC date at which the stream starts.
    #[default]
    Today,
    /// A fixed date, so that equal conversations have equal prompts on every day.
    Day(Date),
}

impl TemplateDate {
    /// Returns the time that templates see in a stream that started at this time, in seconds since the Unix epoch.
    pub(crate) fn time(self, started_at: u32) -> OffsetDateTime {
        match self {
            Self::Today => {
                OffsetDateTime::from_unix_timestamp(started_at.into()).unwrap_or(OffsetDateTime::UNIX_EPOCH)
            }
            Self::Day(day) => day.midnight().assume_utc(),
        }
    }
}

impl FromStr for TemplateDate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let day = || {
            let mut parts = text.splitn(3, '-');
            let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
            let month = Month::try_from(month.parse::<u8>().ok()?).ok()?;
            Date::from_calendar_date(year.parse().ok()?, month, day.parse().ok()?).ok()
        };
        match text {
            "today" => Ok(Self::Today),
            _ => day().map(Self::Day).ok_or_else(|| "neither today nor a date such as 2026-01-31".to_owned()),
        }
    }
}

impl fmt::Display for TemplateDate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Today => out.write_str("today"),
            Self::Day(day) => day.fmt(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_that_of_the_stream_or_a_fixed_one() {
        for text in ["today", "2026-01-31"] {
            assert_eq!(text.parse::<TemplateDate>().unwrap().to_string(), text);
        }
        for wrong in ["", "yesterday", "2026-02-30", "2026-1", "31.1.2026"] {
            assert!(wrong.parse::<TemplateDate>().is_err(), "{wrong}");
        }
        assert_eq!(TemplateDate::Today.time(86_400).to_string(), "1970-01-02 0:00:00.0 +00:00:00");
    }
}
