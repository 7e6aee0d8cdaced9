//! Text for a terminal: names made harmless, fitted to a width, and numbers written short.

use std::time::Duration;

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Stands for a character that a terminal would obey or hide.
const REPLACEMENT: char = '\u{fffd}';
/// Maximum characters of a name that are looked at: more fit in no terminal.
const CHARACTERS_MAX: usize = 512;
/// Maximum combining marks on one character.
const MARKS_MAX: usize = 2;

/// Returns a name without characters that move the cursor, change the order of the text, or cannot be seen. Names come
/// from clients.
pub fn harmless(name: &str) -> String {
    let mut text = String::with_capacity(name.len().min(CHARACTERS_MAX));
    let mut marks = MARKS_MAX; // a mark at the start would join the text before
    for character in name.chars().take(CHARACTERS_MAX) {
        if is_harmful(character) {
            text.push(REPLACEMENT);
            marks = 0;
        } else if character.width().unwrap_or(0) > 0 {
            text.push(character);
            marks = 0;
        } else if marks < MARKS_MAX {
            text.push(character);
            marks += 1;
        }
    }
    text
}

/// Whether a terminal obeys a character (controls, bidirectional formatting), breaks the line at it, or does not show it
/// (joiners, fillers, tags, variation selectors).
fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}'
                | '\u{34f}'
                | '\u{600}'..='\u{605}'
                | '\u{61c}'
                | '\u{6dd}'
                | '\u{70f}'
                | '\u{115f}'
                | '\u{1160}'
                | '\u{17b4}'
                | '\u{17b5}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{2800}'
                | '\u{3164}'
                | '\u{fe00}'..='\u{fe0f}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

/// Returns the columns that a text takes.
pub fn width(text: &str) -> usize {
    text.width()
}

/// Returns the text, cut with `…` if it takes more than `columns`.
pub fn fit(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut cut = String::new();
    for character in text.chars() {
        cut.push(character);
        if width(&cut) + 1 > columns {
            cut.pop();
            break;
        }
    }
    if columns > 0 {
        cut.push('…');
    }
    cut
}

/// Returns the text, cut or filled with spaces to exactly `columns`.
pub fn pad(text: &str, columns: usize, right: bool) -> String {
    let text = fit(text, columns);
    let space = " ".repeat(columns.saturating_sub(width(&text)));
    if right { space + &text } else { text + &space }
}

/// Breaks a text into lines of at most `columns`, at spaces where there are any.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(1);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let mut rest = word;
        if let Some(line) = lines.last_mut()
            && width(line) + 1 + width(word) <= columns
        {
            line.push(' ');
            line.push_str(word);
            continue;
        }
        while width(rest) > columns {
            let mut end = 0;
            for (at, character) in rest.char_indices() {
                let next = at + character.len_utf8();
                if end > 0 && width(&rest[..next]) > columns {
                    break;
                }
                end = next;
            }
            lines.push(rest[..end].to_owned());
            rest = &rest[end..];
        }
        if !rest.is_empty() || word.is_empty() {
            lines.push(rest.to_owned());
        }
    }
    lines
}

/// Writes a count in at most five characters: `9999`, `12.3k`, `123k`, `4.5M`.
pub fn count(value: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    let unit = UNITS.into_iter().find(|(unit, _)| value >= 10_000 && value >= *unit);
    let Some((unit, name)) = unit else { return value.to_string() };
    let (whole, tenth) = (value / unit, value % unit * 10 / unit);
    if whole < 100 { format!("{whole}.{tenth}{name}") } else { format!("{whole}{name}") }
}

/// Writes a rate in few characters: `0.5`, `12.3`, `1234`, `56.7k`.
pub fn rate(value: f64) -> String {
    if !value.is_finite() || value < 0.0 {
        return "-".to_owned();
    }
    if value < 99.95 { format!("{value:.1}") } else { count(value.round() as u64) }
}

/// Writes milliseconds of a percentile without their unit: `0.4`, `12`, `3.4k`.
pub fn millis(value: f64) -> String {
    if value.is_finite() && value >= 9.95 { count(value.round() as u64) } else { rate(value) }
}

/// Writes a time span in at most five characters: `0.4s`, `59s`, `3m05s`, `2h07m`, `12d`.
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0..10 => format!("{:.1}s", (span.as_secs_f64() * 10.0).floor() / 10.0),
        10..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Writes a share in [0, 1] as a percentage.
pub fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.0}%", (share * 100.0).clamp(0.0, 999.0)) } else { "-".to_owned() }
}

/// Returns a bar of `columns` columns: `parts` are shares in [0, 1] with their symbols, in order.
pub fn bar(parts: &[(f64, char)], rest: char, columns: usize) -> String {
    let mut text = String::new();
    let (mut share, mut filled) = (0.0f64, 0);
    for (part, symbol) in parts {
        share += if part.is_finite() { part.max(0.0) } else { 0.0 };
        let mut end = ((share * columns as f64).round() as usize).clamp(filled, columns);
        // Something is not nothing.
        if *part > 0.0 && end == filled && filled < columns {
            end += 1;
        }
        text.extend(std::iter::repeat_n(*symbol, end - filled));
        filled = end;
    }
    text.extend(std::iter::repeat_n(rest, columns - filled));
    text
}

/// Returns a size with two or three digits: `512M`, `1.2G`, `141G`.
pub fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut units = ["", "K", "M", "G", "T", "P", "E"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    for next in units {
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if value < 9.95 && !unit.is_empty() { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_lose_what_a_terminal_obeys_or_hides() {
        assert_eq!(harmless("a\u{1b}[31mb\r\n\u{9b}c\u{7f}"), "a�[31mb���c�");
        assert_eq!(harmless("\u{202e}evil\u{2066}\u{200b}\u{feff}x\u{e0041}"), "�evil���x�");
        assert_eq!(harmless("Zoë e\u{301} 東京 \u{915}\u{93f}"), "Zoë e\u{301} 東京 \u{915}\u{93f}");
        let stacked = format!("\u{301}z{}", "\u{301}".repeat(400));
        assert_eq!(harmless(&stacked), "z\u{301}\u{301}");
        assert_eq!(harmless(&"x".repeat(100_000)).len(), CHARACTERS_MAX);
        assert!(harmless("\u{fffd}") == "\u{fffd}");
    }

    #[test]
    fn texts_are_cut_padded_and_wrapped_by_their_width() {
        assert_eq!(fit("東京都", 6), "東京都");
        assert_eq!(fit("東京都", 5), "東京…");
        assert_eq!(fit("東京都", 4), "東…");
        assert_eq!(fit("abc", 0), "");
        assert_eq!(fit("abc", 1), "…");
        assert_eq!((pad("東", 4, false).as_str(), pad("12", 4, true).as_str()), ("東  ", "  12"));
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("unbreakable", 4), ["unbr", "eaka", "ble"]);
        assert_eq!(wrap("東京都", 1), ["東", "京", "都"]);
        for columns in 0..8 {
            assert!(wrap("a 東京都 b", columns).iter().all(|line| width(line) <= columns.max(2)));
            assert_eq!(width(&pad("a 東京都 b", columns, false)), columns);
        }
    }

    #[test]
    fn numbers_are_short() {
        let sizes = [0, 999, 1 << 20, 5 << 29, 141 << 30, u64::MAX].map(bytes);
        assert_eq!(sizes, ["0", "999", "1.0M", "2.5G", "141G", "16E"]);
        let counts = [0, 9_999, 10_000, 99_999, 100_000, 1_234_567, 123_456_789, u64::MAX];
        assert_eq!(counts.map(count), ["0", "9999", "10.0k", "99.9k", "100k", "1.2M", "123M", "18446744T"]);
        assert_eq!(
            [0.0, 99.94, 99.96, 12345.6, f64::NAN, -1.0].map(rate),
            ["0.0", "99.9", "100", "12.3k", "-", "-"]
        );
        assert_eq!([0.44, 9.94, 12.4].map(millis), ["0.4", "9.9", "12"]);
        let spans = [0, 940, 9_999, 10_000, 185_000, 7_620_000, 90_000_000].map(Duration::from_millis);
        assert_eq!(spans.map(span), ["0.0s", "0.9s", "9.9s", "10s", "3m05s", "2h07m", "1d"]);
        assert_eq!([0.0, 0.426, 1.0, f64::INFINITY, 1e300].map(percent), ["0%", "43%", "100%", "-", "999%"]);
        assert_eq!(bar(&[(0.5, '#'), (0.01, '='), (2.0, '+')], '.', 8), "####=+++");
        assert_eq!(bar(&[(f64::NAN, '#'), (0.25, '=')], '.', 4), "=...");
        assert_eq!(bar(&[(0.5, '#')], '.', 0), "");
    }
}
