//! The function `strftime_now`: times in the formats of C's `strftime`, in its locale "C", as Python writes them on Linux.

use minijinja::{Error, State};
use time::OffsetDateTime;

use super::template_values::invalid;

/// Name of the variable with the time in seconds since the Unix epoch.
pub(super) const TIME: &str = "_inflight_time";
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats the time at which the stream started, in UTC.
pub(super) fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let seconds = state.lookup(TIME).and_then(|seconds| i64::try_from(seconds).ok()).unwrap_or_default();
    let time = OffsetDateTime::from_unix_timestamp(seconds);
    Ok(strftime(format, time.map_err(|error| invalid(format!("strftime_now: {error}")))?))
}

fn strftime(format: &str, time: OffsetDateTime) -> String {
    let (mut out, mut rest) = (String::new(), format);
    while let Some((before, behind)) = rest.split_once('%') {
        out.push_str(before);
        let flagged = behind.strip_prefix(['-', '_', '0', '^']).unwrap_or(behind);
        let flag = behind.strip_suffix(flagged).and_then(|flag| flag.chars().next());
        let Some(directive) = flagged.chars().next() else {
            rest = &rest[before.len()..];
            break;
        };
        rest = &flagged[directive.len_utf8()..];
        match field(directive, flag, time) {
            Some(text) if flag == Some('^') => out.push_str(&text.to_uppercase()),
            Some(text) => out.push_str(&text),
            // One that is not known is text.
            None => out.push_str(&behind_percent(flag, directive)),
        }
    }
    out + rest
}

fn behind_percent(flag: Option<char>, directive: char) -> String {
    ['%'].into_iter().chain(flag).chain([directive]).collect()
}

/// Returns the text of a directive; `None` if there is none.
fn field(directive: char, flag: Option<char>, time: OffsetDateTime) -> Option<String> {
    let number = |value: i64, width: usize, pad: char| match flag.unwrap_or(pad) {
        '-' => value.to_string(),
        '_' | ' ' => format!("{value:>width$}"),
        _ => format!("{value:0width$}"),
    };
    let month = usize::from(u8::from(time.month()) - 1);
    let sunday = i64::from(time.weekday().number_days_from_sunday());
    let monday = i64::from(time.weekday().number_days_from_monday());
    let (year, day_of_year) = (i64::from(time.year()), i64::from(time.ordinal()));
    let (hour, minute, second) = (i64::from(time.hour()), i64::from(time.minute()), i64::from(time.second()));
    let hour_of_12 = (hour + 11) % 12 + 1;
    let (iso_year, iso_week, _) = time.to_iso_week_date();
    Some(match directive {
        'a' => DAYS[sunday as usize][..3].to_owned(),
        'A' => DAYS[sunday as usize].to_owned(),
        'b' | 'h' => MONTHS[month][..3].to_owned(),
        'B' => MONTHS[month].to_owned(),
        'c' => strftime("%a %b %e %H:%M:%S %Y", time),
        'C' => number(year / 100, 2, '0'),
        'd' => number(time.day().into(), 2, '0'),
        'D' | 'x' => strftime("%m/%d/%y", time),
        'e' => number(time.day().into(), 2, ' '),
        'f' => "000000".to_owned(),
        'F' => strftime("%Y-%m-%d", time),
        'g' => number(i64::from(iso_year) % 100, 2, '0'),
        'G' => number(iso_year.into(), 4, '0'),
        'H' => number(hour, 2, '0'),
        'I' => number(hour_of_12, 2, '0'),
        'j' => number(day_of_year, 3, '0'),
        'k' => number(hour, 2, ' '),
        'l' => number(hour_of_12, 2, ' '),
        'm' => number(month as i64 + 1, 2, '0'),
        'M' => number(minute, 2, '0'),
        'n' => "\n".to_owned(),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'P' => if hour < 12 { "am" } else { "pm" }.to_owned(),
        'r' => strftime("%I:%M:%S %p", time),
        'R' => strftime("%H:%M", time),
        's' => time.unix_timestamp().to_string(),
        'S' => number(second, 2, '0'),
        't' => "\t".to_owned(),
        'T' | 'X' => strftime("%H:%M:%S", time),
        'u' => number((sunday + 6) % 7 + 1, 1, '0'),
        'U' => number((day_of_year + 6 - sunday) / 7, 2, '0'),
        'V' => number(iso_week.into(), 2, '0'),
        'w' => number(sunday, 1, '0'),
        'W' => number((day_of_year + 6 - monday) / 7, 2, '0'),
        'y' => number(year % 100, 2, '0'),
        'Y' => number(year, 4, '0'),
        // A time without a zone.
        'z' | 'Z' => String::new(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}
