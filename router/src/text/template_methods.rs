//! Methods of Python's texts, sequences and dictionaries.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use super::template_format::braces;
use super::template_limits::{self, check_replace, check_text, join_characters, width};
use super::template_source::UNCALLED;
use super::template_values::{self, invalid, is_namespace, is_printable, is_space, pad_to};

/// Sets the methods.
pub(super) fn apply(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(call);
}

fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(name) = method.strip_prefix(UNCALLED) {
        return uncalled(value, name);
    }
    let called = match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(text, method, args)?,
        (None, ValueKind::Seq) => of_sequence(value, method, args)?,
        (None, ValueKind::Map) if method == "copy" => from_args::<()>(args).map(|()| Some(value.clone()))?,
        (None, ValueKind::Map) => return pycompat::unknown_method_callback(state, value, method, args),
        _ => None,
    };
    called.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))
}

/// Returns a method that is not called: of a dictionary, whatever its keys are.
fn uncalled(value: &Value, name: &str) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map || is_namespace(value) {
        return value.get_attr(name);
    }
    Ok(Value::from_function(|_: Rest<Value>| {
        Err::<Value, Error>(invalid("a method is called by its name only"))
    }))
}

fn of_sequence(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let mut items = value.try_iter()?;
    Ok(Some(match method {
        "copy" if !value.is_tuple() => from_args::<()>(args).map(|()| value.clone())?,
        "count" => {
            let (wanted,): (&Value,) = from_args(args)?;
            Value::from(items.filter(|item| item == wanted).count())
        }
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = items.position(|item| item == *wanted);
            at.ok_or_else(|| invalid("the value is not in the list"))?.into()
        }
        _ => return Ok(None),
    }))
}

fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let strip = |start: bool, end: bool| {
        let (characters,): (Option<&str>,) = from_args(args)?;
        let is_stripped =
            |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
        let text = if start { text.trim_start_matches(is_stripped) } else { text };
        Ok::<_, Error>(if end { text.trim_end_matches(is_stripped) } else { text }.into())
    };
    Ok(Some(match method {
        "strip" => strip(true, true)?,
        "lstrip" => strip(true, false)?,
        "rstrip" => strip(false, true)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "startswith" | "endswith" => has_affix(text, method == "startswith", args)?.into(),
        "find" | "rfind" | "index" | "rindex" => find(text, method, args)?,
        "count" => {
            let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            range(text, start, end).map_or(0, |(_, text)| text.matches(part).count()).into()
        }
        "split" | "rsplit" => split(text, method == "rsplit", args)?,
        "splitlines" => {
            let (keep_ends, named): (Option<bool>, Kwargs) = from_args(args)?;
            let keep_ends = match keep_ends {
                Some(keep) => Some(keep),
                None => named.get::<Option<bool>>("keepends")?,
            };
            named.assert_all_used()?;
            template_values::lines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let found = match method {
                "partition" => text.split_once(non_empty(separator)?),
                _ => text.rsplit_once(non_empty(separator)?),
            };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Tuple::from(parts.map(Value::from)).into()
        }
        "join" => {
            let (values,): (&Value,) = from_args(args)?;
            join(text, values)?.into()
        }
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(text, from, to, count)?.into()
        }
        "format" => braces(text, args)?.into(),
        "format_map" => {
            let (values,): (&Value,) = from_args(args)?;
            braces(text, &[named(values)?.into()])?.into()
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(text, method, args)?.into(),
        "expandtabs" => {
            let (size,): (Option<i64>,) = from_args(args)?;
            expand_tabs(text, size)?.into()
        }
        _ => return of_characters(text, method, args),
    }))
}

/// Methods whose result depends on the kinds of the characters.
fn of_characters(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let all = |is: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(is));
    let result = match method {
        "upper" => text.to_uppercase().into(),
        "lower" => text.to_lowercase().into(),
        "casefold" => text.chars().flat_map(fold).collect::<String>().into(),
        "capitalize" => capitalize(text).into(),
        "title" => title(text).into(),
        "swapcase" => text.chars().map(swap_case).collect::<String>().into(),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isdigit" | "isdecimal" => all(|c| c.is_ascii_digit() || !c.is_ascii() && c.is_numeric()),
        "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "isascii" => text.is_ascii().into(),
        "isprintable" => text.chars().all(is_printable).into(),
        "isidentifier" => {
            let is_word = |c: char| c == '_' || c.is_alphanumeric();
            (text.starts_with(|c: char| c == '_' || c.is_alphabetic()) && text.chars().all(is_word)).into()
        }
        "islower" => (text.contains(char::is_lowercase) && !text.contains(char::is_uppercase)).into(),
        "isupper" => (text.contains(char::is_uppercase) && !text.contains(char::is_lowercase)).into(),
        "istitle" => (text.contains(is_cased) && title(text) == text).into(),
        _ => return Ok(None),
    };
    from_args::<()>(args).map(|()| Some(result))
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

/// Case folding of Unicode: the lower case of the upper case, but for the dotless i and the letters of Cherokee.
fn fold(c: char) -> Vec<char> {
    match c {
        'ı' => vec![c],
        '\u{13a0}'..='\u{13fd}' | '\u{ab70}'..='\u{abbf}' => c.to_uppercase().collect(),
        _ => c.to_lowercase().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect(),
    }
}

/// Returns a character as the first one of a word: in upper case, of which the others of a ligature are in lower case.
fn initial(c: char) -> String {
    let mut upper = c.to_uppercase();
    upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect()
}

/// Returns a text with its first character in upper case and the others in lower case.
pub(super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(initial).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

fn title(text: &str) -> String {
    let (mut out, mut within) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        match within {
            true => out.extend(c.to_lowercase()),
            false => out.push_str(&initial(c)),
        }
        within = is_cased(c);
    }
    out
}

fn swap_case(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// Returns the offset in bytes of a character; the end of the text if there are fewer.
fn offset(text: &str, character: usize) -> usize {
    text.char_indices().nth(character).map_or(text.len(), |(at, _)| at)
}

/// Returns the part of a text between two characters, with its first one's number; `None` if the text ends before. Negative numbers
/// count from the end.
fn range(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    let count = if start.or(end).is_some() { text.chars().count() } else { 0 };
    let place = |at: i64| match usize::try_from(at) {
        Ok(at) => at,
        Err(_) => count.saturating_sub(usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX)),
    };
    let start = place(start.unwrap_or(0));
    let end = end.map_or(text.len(), |end| offset(text, place(end)));
    (start <= count).then_some(())?;
    Some((start, text.get(offset(text, start)..end)?))
}

fn has_affix(text: &str, at_start: bool, args: &[Value]) -> Result<bool, Error> {
    let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let affixes: Vec<Value> =
        if affix.is_tuple() { affix.try_iter()?.collect() } else { vec![affix.clone()] };
    let mut has = false;
    for affix in &affixes {
        let affix =
            affix.as_str().ok_or_else(|| invalid("a prefix or suffix is no text, nor a tuple of texts"))?;
        let text = range(text, start, end).map(|(_, text)| text);
        has |=
            text.is_some_and(|text| if at_start { text.starts_with(affix) } else { text.ends_with(affix) });
    }
    Ok(has)
}

fn find(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let found = range(text, start, end).and_then(|(first, text)| {
        let at = if method.starts_with('r') { text.rfind(part) } else { text.find(part) }?;
        Some(first + text[..at].chars().count())
    });
    match found {
        Some(at) => Ok(at.into()),
        None if method.ends_with("find") => Ok((-1).into()),
        None => Err(invalid("substring not found")),
    }
}

fn non_empty(separator: &str) -> Result<&str, Error> {
    if separator.is_empty() { Err(invalid("empty separator")) } else { Ok(separator) }
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
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match separator {
        Some(separator) if from_end => text.rsplitn(most.saturating_add(1), non_empty(separator)?).collect(),
        Some(separator) => text.splitn(most.saturating_add(1), non_empty(separator)?).collect(),
        None => at_spaces(text, from_end, most),
    };
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Splits a text at whitespace, at most so many times; from its end, with the last part first.
fn at_spaces(text: &str, from_end: bool, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let trim = |text: &'_ str| -> usize {
        if from_end {
            text.trim_end_matches(is_space).len()
        } else {
            text.len() - text.trim_start_matches(is_space).len()
        }
    };
    let mut rest = text;
    loop {
        let at = trim(rest);
        rest = if from_end { &rest[..at] } else { &rest[at..] };
        if rest.is_empty() {
            return parts;
        }
        if parts.len() == most {
            parts.push(rest);
            return parts;
        }
        let (part, next) = if from_end {
            let start =
                rest.char_indices().rfind(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
            (&rest[start..], &rest[..start])
        } else {
            rest.split_at(rest.find(is_space).unwrap_or(rest.len()))
        };
        parts.push(part);
        rest = next;
    }
}

fn join(separator: &str, values: &Value) -> Result<String, Error> {
    if let Some(text) = values.as_str() {
        return join_characters(text, separator);
    }
    if values.is_none() {
        return Err(invalid("None cannot be joined"));
    }
    let text = |item: Value| match item.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(invalid("what is joined must be texts")),
    };
    let texts = values.try_iter()?.map(text).collect::<Result<Vec<String>, Error>>()?;
    template_limits::join(&texts, separator)
}

/// Replaces a part of a text, at most so often; a negative count is none.
pub(super) fn replace(text: &str, from: &str, to: &str, count: Option<i64>) -> Result<String, Error> {
    check_replace(text, from, to)?;
    Ok(match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(from, to, count),
        None => text.replace(from, to),
    })
}

/// Returns the items of a dictionary as named arguments.
fn named(values: &Value) -> Result<Kwargs, Error> {
    let entry = |key: Value| Ok((key.to_string(), values.get_item(&key)?));
    values.try_iter()?.map(entry).collect::<Result<Vec<(String, Value)>, Error>>().map(Kwargs::from_iter)
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let (wanted, fill): (i64, Option<char>) = from_args(args)?;
    let fill = match (method, fill) {
        ("zfill", Some(_)) => return Err(Error::from(ErrorKind::TooManyArguments)),
        ("zfill", None) => '0',
        (_, fill) => fill.unwrap_or(' '),
    };
    Ok(pad_to(text, method, width(wanted)?, fill))
}

fn expand_tabs(text: &str, size: Option<i64>) -> Result<String, Error> {
    let size = width(size.unwrap_or(8))?;
    check_text(text.matches('\t').count().saturating_mul(size).saturating_add(text.len()))?;
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = size.saturating_sub(column % size.max(1));
                (0..spaces).for_each(|_| out.push(' '));
                column += spaces;
            }
            _ => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}
