//! End of validity of X.509 certificates, read from their DER encoding.

use time::{Date, Month, PrimitiveDateTime, Time};
use tokio_rustls::rustls::pki_types::CertificateDer;

const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// Tag of the explicit version, `[0]`.
const VERSION: u8 = 0xa0;

/// Returns the earliest end of validity of certificates, in seconds since the Unix epoch; `None` without one that can be read.
pub(crate) fn earliest_expiry(certificates: &[CertificateDer<'_>]) -> Option<i64> {
    certificates.iter().filter_map(|certificate| not_after(certificate)).min()
}

/// Returns `notAfter` of a certificate, in seconds since the Unix epoch.
fn not_after(certificate: &[u8]) -> Option<i64> {
    let (certificate, _) = content(SEQUENCE, certificate)?;
    let (mut fields, _) = content(SEQUENCE, certificate)?;
    if let Some((_, rest)) = content(VERSION, fields) {
        fields = rest;
    }
    // Serial number, signature algorithm, issuer.
    for tag in [INTEGER, SEQUENCE, SEQUENCE] {
        (_, fields) = content(tag, fields)?;
    }
    let (validity, _) = content(SEQUENCE, fields)?;
    let (_, _, rest) = split(validity)?;
    let (tag, text, _) = split(rest)?;
    timestamp(tag, text)
}

/// Returns the content of a value with this tag, and what follows the value.
fn content(tag: u8, der: &[u8]) -> Option<(&[u8], &[u8])> {
    split(der).filter(|(found, ..)| *found == tag).map(|(_, content, rest)| (content, rest))
}

/// Splits off a value: its tag, its content, and what follows it.
fn split(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&len, rest) = rest.split_first()?;
    let (len, rest) = match len {
        0..=0x7f => (usize::from(len), rest),
        // The length follows in 1 to 4 bytes.
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(len & 0x7f))?;
            (bytes.iter().fold(0, |len, byte| len << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    Some((tag, content, rest))
}

/// Reads a time: `YYMMDDhhmmssZ`, of 1950 to 2049, or `YYYYMMDDhhmmssZ` (RFC 5280, 4.1.2.5).
fn timestamp(tag: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |digits: &[u8]| -> Option<u16> { std::str::from_utf8(digits).ok()?.parse().ok() };
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = digits.split_at_checked(2)?;
            let year = number(year)?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = digits.split_at_checked(4)?;
            (number(year)?, rest)
        }
        _ => return None,
    };
    let pairs: Vec<u8> = rest.chunks(2).map(|pair| number(pair)?.try_into().ok()).collect::<Option<_>>()?;
    let [month, day, hour, minute, second] = pairs[..] else { return None };
    let date = Date::from_calendar_date(year.into(), Month::try_from(month).ok()?, day).ok()?;
    let time = Time::from_hms(hour, minute, second).ok()?;
    Some(PrimitiveDateTime::new(date, time).assume_utc().unix_timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};

    fn certificate(year: i32, month: u8, day: u8, authority: bool) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["inflight.test".to_owned()]).unwrap();
        if authority {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params.not_after = date_time_ymd(year, month, day);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_earliest_end_of_validity_is_that_of_the_certificates() {
        // Both encodings: UTCTime until 2049, GeneralizedTime from 2050.
        let days = [(1975, 1, 1), (2026, 12, 31), (2049, 12, 31), (2050, 1, 1), (2124, 2, 29), (4096, 1, 1)];
        for (year, month, day) in days {
            for authority in [false, true] {
                let expected = date_time_ymd(year, month, day).unix_timestamp();
                assert_eq!(not_after(&certificate(year, month, day, authority)), Some(expected), "{year}");
            }
        }
        let several =
            [certificate(2040, 1, 1, false), certificate(2031, 1, 1, true), certificate(2050, 1, 1, true)];
        assert_eq!(earliest_expiry(&several), Some(date_time_ymd(2031, 1, 1).unix_timestamp()));
        assert_eq!(earliest_expiry(&[CertificateDer::from(vec![SEQUENCE, 0])]), None);
    }

    #[test]
    fn malformed_times_and_lengths_are_no_expiry() {
        for (tag, text) in [
            (UTC_TIME, "2612312359Z"),
            (UTC_TIME, "261231235959"),
            (UTC_TIME, "261331235959Z"),
            (UTC_TIME, "260230000000Z"),
            (UTC_TIME, "26123123595\u{e9}Z"),
            (UTC_TIME, "20261231235959Z"),
            (GENERALIZED_TIME, "261231235959Z"),
            (0x0c, "261231235959Z"),
            (UTC_TIME, ""),
        ] {
            assert_eq!(timestamp(tag, text.as_bytes()), None, "{tag} {text}");
        }
        for der in
            [&[0x30][..], &[0x30, 0x80], &[0x30, 0x85, 0, 0, 0, 0, 0], &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]]
        {
            assert_eq!(split(der), None, "{der:?}");
        }
    }

    proptest! {
        #[test]
        fn changed_certificates_never_panic(at in any::<prop::sample::Index>(), byte in any::<u8>(), len in any::<prop::sample::Index>()) {
            static CERTIFICATE: std::sync::LazyLock<CertificateDer<'static>> =
                std::sync::LazyLock::new(|| certificate(2040, 1, 1, true));
            let mut der = CERTIFICATE.to_vec();
            let at = at.index(der.len());
            der[at] = byte;
            der.truncate(len.index(der.len() + 1));
            let _ = not_after(&der);
        }
    }
}
