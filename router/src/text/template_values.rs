//! Values as Python writes and reads them: `str` and `repr`, texts of numbers, whitespace and lines.

use std::borrow::Cow;
use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Maximum depth of nested values that are written; those of clients have at most 128.
const DEPTH_MAX: usize = 200;

/// Returns an error with a reason.
pub(super) fn invalid(reason: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Returns the text of a value, as `str` does.
///
/// # Errors
/// The value is nested too deeply.
pub(super) fn text(value: &Value) -> Result<Cow<'_, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => {
            let mut out = String::new();
            // Undefined is empty on its own only.
            if !value.is_undefined() {
                write_repr(&mut out, value, 0)?;
            }
            Ok(Cow::Owned(out))
        }
    }
}

/// Returns a value as `repr` writes it.
///
/// # Errors
/// The value is nested too deeply.
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(&mut out, value, 0).map(|()| out)
}

/// Writes a value as `repr` does.
fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number => write_number(out, value, "nan", "inf"),
        ValueKind::Seq => {
            let brackets = if value.is_tuple() { ["(", ")"] } else { ["[", "]"] };
            out.push_str(brackets[0]);
            let mut count = 0;
            for item in value.try_iter()? {
                out.push_str(if count > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1)?;
                count += 1;
            }
            out.push_str(if count == 1 && value.is_tuple() { "," } else { "" });
            out.push_str(brackets[1]);
        }
        ValueKind::Map => {
            let is_namespace = is_namespace(value);
            out.push_str(if is_namespace { "<Namespace {" } else { "{" });
            for (at, key) in value.try_iter()?.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push_str(if is_namespace { "}>" } else { "}" });
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

/// Whether a value is a namespace, which is no dictionary.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Refuses values that are nested too deeply to be written.
pub(super) fn check_depth(depth: usize) -> Result<(), Error> {
    let reason = || invalid(format!("a value is nested more than {DEPTH_MAX} levels deep"));
    if depth > DEPTH_MAX { Err(reason()) } else { Ok(()) }
}

/// Writes a number, with the texts of what is none and of infinity.
pub(super) fn write_number(out: &mut String, value: &Value, nan: &str, infinity: &str) {
    let number = match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => number,
        _ => {
            out.push_str(&value.to_string());
            return;
        }
    };
    if number.is_nan() {
        out.push_str(nan);
    } else if number.is_infinite() {
        out.push_str(if number < 0.0 { "-" } else { "" });
        out.push_str(infinity);
    } else {
        // Rust writes exponents for the same numbers as Python does, and shorter.
        let text = format!("{number:?}");
        match text.split_once('e') {
            Some((digits, exponent)) => {
                let (sign, exponent) =
                    exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
                out.push_str(&format!("{digits}e{sign}{exponent:0>2}"));
            }
            None => out.push_str(&text),
        }
    }
}

fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => out.push_str(&match u32::from(c) {
                code @ 0..0x100 => format!("\\x{code:02x}"),
                code @ 0x100..0x1_0000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
}

/// Whether `repr` writes a character as it is.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    // Behind another character: at the start of a text, Rust escapes what would combine with a quote before it.
    let pair: String = ['a', c].iter().collect();
    (c.is_alphanumeric() || pair.escape_debug().count() == 2) && !c.is_whitespace()
}

/// Whether a character is whitespace in Python.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Splits a text into lines, as `splitlines` does.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let mut next = end + rest[end..].chars().next().map_or(0, char::len_utf8);
        if rest[end..].starts_with("\r\n") {
            next += 1;
        }
        lines.push(&rest[..if keep_ends { next } else { end }]);
        rest = &rest[next..];
    }
    lines
}

/// Reads an integer in a base, as `int` does; `None` if it is none.
pub(super) fn read_integer(text: &str, base: u32) -> Option<i128> {
    let text = text.trim_matches(is_space).to_ascii_lowercase();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(&text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    if !(2..=36).contains(&base) {
        return None;
    }
    let digits = without_underscores(digits.strip_prefix(prefix).unwrap_or(digits))?;
    let is_plain = digits.starts_with(|c: char| c.is_ascii_alphanumeric());
    let number = i128::from_str_radix(&digits, base).ok().filter(|_| is_plain)?;
    Some(if negative { -number } else { number })
}

/// Reads a number, as `float` does; `None` if it is none.
pub(super) fn read_float(text: &str) -> Option<f64> {
    without_underscores(text.trim_matches(is_space))?.parse().ok()
}

/// Removes underscores between digits; `None` if there are others.
fn without_underscores(text: &str) -> Option<String> {
    let characters: Vec<char> = text.chars().collect();
    let is_digit =
        |at: Option<usize>| at.and_then(|at| characters.get(at)).is_some_and(char::is_ascii_alphanumeric);
    let between = |at: usize| is_digit(at.checked_sub(1)) && is_digit(Some(at + 1));
    let valid = characters.iter().enumerate().all(|(at, c)| *c != '_' || between(at));
    valid.then(|| text.replace('_', ""))
}

/// Pads a text to a width, as the method of a name does.
pub(super) fn pad_to(text: &str, method: &str, width: usize, fill: char) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let (before, sign) = match method {
        "ljust" => (0, 0),
        "center" => (missing / 2 + (missing & width & 1), 0),
        "zfill" => (missing, usize::from(text.starts_with(['-', '+']))),
        _ => (missing, 0),
    };
    let padding = |count| std::iter::repeat_n(fill, count).collect::<String>();
    format!("{}{}{}{}", &text[..sign], padding(before), &text[sign..], padding(missing - before))
}
