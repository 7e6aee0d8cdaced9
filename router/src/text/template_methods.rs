//! Methods of Python's texts and dictionaries that chat templates use and the engine lacks.

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind};

/// Maximum width of the methods that pad text (`ljust`, `rjust`, `zfill`), in characters.
const WIDTH_MAX: usize = 4096;

/// Calls a method; `None` if there is none of this name.
pub(super) fn call(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    match value.as_str() {
        Some(text) if matches!(method, "split" | "rsplit") => Some(split(text, method == "rsplit", args)),
        Some(text) => of_text(text, method, args).transpose(),
        None if value.kind() == ValueKind::Map && method == "copy" => {
            Some(from_args::<()>(args).map(|()| value.clone()))
        }
        None => None,
    }
}

fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "casefold" => {
            let () = from_args(args)?;
            text.to_lowercase().into()
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            let found = text.find(part).map(|at| text[..at].chars().count());
            found.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?.into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(non_empty(separator)?).unwrap_or((text, ""));
            let found = if before.len() < text.len() { separator } else { "" };
            texts([before, found, after])
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.rsplit_once(non_empty(separator)?) {
                Some((before, after)) => texts([before, separator, after]),
                None => texts(["", "", text]),
            }
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let sign = text.len() - text.trim_start_matches(['-', '+']).len();
            let sign = &text[..sign.min(1)];
            format!("{sign}{}{}", padding(text, width, '0')?, &text[sign.len()..]).into()
        }
        "ljust" | "rjust" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let padding = padding(text, width, fill.unwrap_or(' '))?;
            if method == "ljust" { format!("{text}{padding}") } else { format!("{padding}{text}") }.into()
        }
        _ => return Ok(None),
    }))
}

fn texts(parts: [&str; 3]) -> Value {
    Value::from(parts.map(str::to_owned).to_vec())
}

fn non_empty(separator: &str) -> Result<&str, Error> {
    let empty = || Error::new(ErrorKind::InvalidOperation, "empty separator");
    (!separator.is_empty()).then_some(separator).ok_or_else(empty)
}

/// Returns the characters that pad a text to a width.
fn padding(text: &str, width: usize, fill: char) -> Result<String, Error> {
    if width > WIDTH_MAX {
        let reason = format!("a width of {width} is above {WIDTH_MAX}, the maximum");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    Ok(std::iter::repeat_n(fill, width.saturating_sub(text.chars().count())).collect())
}

/// Splits a text; separator and maximum may be given by their names. A negative maximum is none.
fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => named.get::<Option<&str>>("sep")?,
    };
    let most = match most {
        Some(most) => Some(most),
        None => named.get::<Option<i64>>("maxsplit")?,
    };
    named.assert_all_used()?;
    let most = most.and_then(|most| usize::try_from(most).ok());
    if from_end {
        return rsplit(text, separator, most).map(Value::from);
    }
    let most = most.unwrap_or(usize::MAX);
    let parts: Vec<String> = match separator {
        Some(separator) => {
            text.splitn(most.saturating_add(1), non_empty(separator)?).map(str::to_owned).collect()
        }
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_start());
            while parts.len() < most && !rest.is_empty() {
                let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
                parts.push(rest[..end].to_owned());
                rest = rest[end..].trim_start();
            }
            parts.extend((!rest.is_empty()).then(|| rest.to_owned()));
            parts
        }
    };
    Ok(Value::from(parts))
}

/// Splits a text from its end, at most so many times, at a separator or at whitespace.
fn rsplit(text: &str, separator: Option<&str>, most: Option<usize>) -> Result<Vec<String>, Error> {
    let most = most.unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some(separator) => {
            parts.extend(text.rsplitn(most.saturating_add(1), non_empty(separator)?));
        }
        None => {
            let mut rest = text.trim_end();
            while parts.len() < most && !rest.is_empty() {
                let at = rest
                    .rfind(char::is_whitespace)
                    .map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
                parts.push(&rest[at..]);
                rest = rest[..at].trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
        }
    }
    Ok(parts.into_iter().rev().map(str::to_owned).collect())
}
