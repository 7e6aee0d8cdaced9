//! Parsing and formatting of quantities in flags: byte sizes, durations, optional listen addresses.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// Size in bytes, written `1073741824`, `1GiB` or `500MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const BYTE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim();
        let factor = match unit {
            "" => Some(1),
            _ => {
                BYTE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor)
            }
        };
        let number: Option<u64> = number.parse().ok();
        number
            .zip(factor)
            .and_then(|(number, factor)| number.checked_mul(factor))
            .map(Self)
            .ok_or_else(|| "not a number of bytes; write it like 1073741824, 512MiB or 4GB".to_owned())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match BYTE_UNITS[..4].iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(out, "{}{unit}", self.0 / factor),
            None => write!(out, "{}", self.0),
        }
    }
}

/// Duration of at most 366 days, written `250ms`, `1.5s`, `2m` or `1h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let seconds = match unit.trim() {
            "us" => Some(1e-6),
            "ms" => Some(1e-3),
            "s" => Some(1.0),
            "m" => Some(60.0),
            "h" => Some(3600.0),
            _ => None,
        };
        let number: Option<f64> = number.parse().ok();
        number
            .zip(seconds)
            .and_then(|(number, seconds)| Duration::try_from_secs_f64(number * seconds).ok())
            // Longer durations could overflow when added to an `Instant`.
            .filter(|span| *span <= Duration::from_secs(366 * 86_400))
            .map(Self)
            .ok_or_else(|| {
                "not a duration of at most a year; write it with its unit, like 250ms, 30s or 5m".to_owned()
            })
    }
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

/// Listen address of an optional endpoint, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenAt {
    /// Disabled.
    Off,
    /// Listen address; port 0 picks a free port.
    Address(SocketAddr),
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
        for (text, bytes) in
            [("0", 0), ("17", 17), ("512MiB", 512 << 20), ("4gb", 4_000_000_000), ("3 KiB", 3072)]
        {
            let parsed: ByteSize = text.parse().unwrap();
            assert_eq!(parsed.0, bytes, "{text}");
            assert_eq!(parsed.to_string().parse::<ByteSize>().unwrap(), parsed, "{text}");
        }
        for (text, micros) in
            [("250ms", 250_000), ("1.5s", 1_500_000), ("2m", 120_000_000), ("7us", 7), ("0s", 0)]
        {
            let parsed: Span = text.parse().unwrap();
            assert_eq!(parsed.0.as_micros(), micros, "{text}");
            assert_eq!(parsed.to_string().parse::<Span>().unwrap(), parsed, "{text}");
        }
    }

    #[test]
    fn text_that_is_no_quantity_is_rejected() {
        for text in ["", "GiB", "-1", "1.5GiB", "99999999999TiB", "12 parsecs"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for text in ["", "5", "-5s", "1e400s", "NaNs", "s"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
        assert!("localhost".parse::<ListenAt>().is_err());
        assert_eq!("off".parse(), Ok(OptionalPort::Off));
        assert_eq!("8640".parse(), Ok(OptionalPort::Port(8640)));
        assert!("70000".parse::<OptionalPort>().is_err());
    }
}
