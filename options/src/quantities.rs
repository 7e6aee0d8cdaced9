//! Parsing and formatting of quantities in options: byte sizes, durations, optional listen addresses.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use fundu::{CustomDurationParserBuilder, CustomTimeUnit, TimeUnit};

/// Size in bytes, written `1073741824`, `1GiB` or `500MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let whole = || (!text.contains('.')).then(|| text.parse::<bytesize::ByteSize>().ok()).flatten();
        // The parser saturates.
        let fits = |bytes: &u64| *bytes < u64::MAX || text.parse() == Ok(u64::MAX);
        whole()
            .map(|size| size.as_u64())
            .filter(fits)
            .map(Self)
            .ok_or_else(|| "not a number of bytes; write it like 1073741824, 512MiB or 4GB".to_owned())
    }
}

/// Parses a [`ByteSize`] as a number of bytes, for clap.
///
/// # Errors
/// The text is no size, or one too large for the type.
pub fn bytes<N: TryFrom<u64>>(text: &str) -> Result<N, String> {
    let ByteSize(bytes) = text.parse()?;
    N::try_from(bytes).map_err(|_| format!("{bytes} bytes are more than this option can be"))
}

impl fmt::Display for ByteSize {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units =
            [("TiB", bytesize::TIB), ("GiB", bytesize::GIB), ("MiB", bytesize::MIB), ("KiB", bytesize::KIB)];
        match units.into_iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(out, "{}{unit}", self.0 / factor),
            None => write!(out, "{}", self.0),
        }
    }
}

/// Duration of at most 366 days, written `250ms`, `1.5s`, `2m` or `1h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

const SPAN_UNITS: [CustomTimeUnit<'static>; 5] = [
    CustomTimeUnit::with_default(TimeUnit::MicroSecond, &["us"]),
    CustomTimeUnit::with_default(TimeUnit::MilliSecond, &["ms"]),
    CustomTimeUnit::with_default(TimeUnit::Second, &["s"]),
    CustomTimeUnit::with_default(TimeUnit::Minute, &["m"]),
    CustomTimeUnit::with_default(TimeUnit::Hour, &["h"]),
];

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let parser = CustomDurationParserBuilder::new()
            .time_units(&SPAN_UNITS)
            .allow_time_unit_delimiter()
            .disable_exponent()
            .disable_infinity()
            .build();
        // A number without a unit would be seconds.
        text.ends_with(|last: char| last.is_ascii_alphabetic())
            .then(|| parser.parse(text).ok())
            .flatten()
            .and_then(|span| Duration::try_from(span).ok())
            // Longer durations could overflow when added to an `Instant`.
            .filter(|span| *span <= Duration::from_secs(366 * 86_400))
            .map(Self)
            .ok_or_else(|| {
                "not a duration of at most a year; write it with its unit, like 250ms, 30s or 5m".to_owned()
            })
    }
}

/// Parses a [`Span`] as a duration, for clap.
///
/// # Errors
/// The text is no duration of at most a year.
pub fn duration(text: &str) -> Result<Duration, String> {
    text.parse().map(|Span(duration)| duration)
}

impl fmt::Display for Span {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        match micros {
            0 => out.write_str("0s"),
            _ if micros.is_multiple_of(60_000_000) => write!(out, "{}m", micros / 60_000_000),
            _ if micros.is_multiple_of(1_000_000) => write!(out, "{}s", micros / 1_000_000),
            _ if micros.is_multiple_of(1_000) => write!(out, "{}ms", micros / 1_000),
            _ => write!(out, "{micros}us"),
        }
    }
}

/// Duration, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanOrOff(pub Option<Span>);

impl FromStr for SpanOrOff {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "off" => Ok(Self(None)),
            span => span
                .parse()
                .map(|span| Self(Some(span)))
                .map_err(|error: String| format!("{error}, or `off`")),
        }
    }
}

impl fmt::Display for SpanOrOff {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(span) => span.fmt(out),
            None => out.write_str("off"),
        }
    }
}

/// Listen address of an optional endpoint, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenAt {
    /// Disabled.
    Off,
    /// Listen address; port 0 picks a free port.
    Address(SocketAddr),
}

impl ListenAt {
    /// Returns the address; `None` if it is off.
    pub fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Off => None,
            Self::Address(address) => Some(address),
        }
    }
}

impl FromStr for ListenAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            _ => text
                .parse()
                .map(Self::Address)
                .map_err(|_| "neither an address such as 127.0.0.1:8651 nor `off`".to_owned()),
        }
    }
}

impl fmt::Display for ListenAt {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => out.write_str("off"),
            Self::Address(address) => address.fmt(out),
        }
    }
}

/// Port of an optional endpoint, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionalPort {
    /// Disabled.
    Off,
    /// Port; 0 picks a free one.
    Port(u16),
}

impl FromStr for OptionalPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            _ => text.parse().map(Self::Port).map_err(|_| "neither a port nor `off`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_parse_and_round_trip_through_their_text() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            (" 17 ", 17),
            ("18446744073709551615", u64::MAX),
            ("18014398509481983B", (1 << 54) - 1),
            ("7b", 7),
            ("5KB", 5_000),
            ("6Mb", 6_000_000),
            ("4gb", 4_000_000_000),
            ("2TB", 2_000_000_000_000),
            ("3 KiB", 3 << 10),
            ("512MiB", 512 << 20),
            ("1GiB", 1 << 30),
            ("16777215TiB", 16_777_215 << 40),
        ] {
            let parsed: ByteSize = text.parse().unwrap();
            assert_eq!(parsed.0, bytes, "{text}");
            assert_eq!(parsed.to_string().parse::<ByteSize>().unwrap(), parsed, "{text}");
        }
        for (text, micros) in [
            ("250ms", 250_000),
            ("250 ms", 250_000),
            ("1.5s", 1_500_000),
            ("0.25ms", 250),
            (".5s", 500_000),
            ("5.s", 5_000_000),
            ("2m", 120_000_000),
            ("1.5m", 90_000_000),
            (" 1h ", 3_600_000_000),
            ("8784h", 31_622_400_000_000),
            ("7us", 7),
            ("0s", 0),
        ] {
            let parsed: Span = text.parse().unwrap();
            assert_eq!(parsed.0.as_micros(), micros, "{text}");
            assert_eq!(parsed.to_string().parse::<Span>().unwrap(), parsed, "{text}");
        }
    }

    #[test]
    fn text_that_is_no_quantity_is_rejected() {
        for text in
            ["", "GiB", "-1", "1.5GiB", "99999999999TiB", "16777216TiB", "12 parsecs", "1 2", "5 0 MB"]
        {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for text in
            ["", "5", "-5s", "1e400s", "1e2s", "NaNs", "infs", "s", "1.2.3s", "5d", "1s 2ms", "5S", "8785h"]
        {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
        assert!("localhost".parse::<ListenAt>().is_err());
        assert_eq!("off".parse(), Ok(OptionalPort::Off));
        assert_eq!("8640".parse(), Ok(OptionalPort::Port(8640)));
        assert!("70000".parse::<OptionalPort>().is_err());
    }
}
