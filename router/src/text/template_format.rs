//! Texts with fields: the operator `%`, the filter `format` and the method `format`. The engine formats single values.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind};

use super::template_limits::width;
use super::template_values::{invalid, pad_to, repr, text};

/// Maximum depth of fields in the formats of other fields.
const DEPTH_MAX: usize = 2;

/// Fills in the fields of a text that begin with `%`: with the items of a tuple, those of a dictionary, or one value.
pub(super) fn percent(pattern: &str, values: &Value) -> Result<String, Error> {
    let mut given =
        if values.is_tuple() { values.try_iter()?.collect() } else { vec![values.clone()] }.into_iter();
    let mut next = || given.next().ok_or_else(|| invalid("there are fewer values than fields"));
    let (mut out, mut rest) = (String::with_capacity(pattern.len()), pattern);
    while let Some((before, behind)) = rest.split_once('%') {
        out.push_str(before);
        rest = behind;
        let keyed = match rest.strip_prefix('(') {
            Some(behind) => {
                let (key, behind) = behind.split_once(')').ok_or_else(incomplete)?;
                rest = behind;
                Some(values.get_item(&key.into())?)
            }
            None => None,
        };
        let flags = take(&mut rest, |c| "-+ #0".contains(c));
        let columns = count(&mut rest, &mut next)?;
        let precision = match rest.strip_prefix('.') {
            Some(behind) => {
                rest = behind;
                Some(count(&mut rest, &mut next)?)
            }
            None => None,
        };
        // Lengths of C's types have no meaning.
        take(&mut rest, |c| "hlL".contains(c));
        let kind = rest.chars().next().ok_or_else(incomplete)?;
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = keyed.map_or_else(&mut next, Ok)?;
        out.push_str(&percent_field(flags, &columns, precision.as_deref(), kind, &value)?);
    }
    // Lists and dictionaries may have other items than those that are written.
    let is_whole = matches!(values.kind(), ValueKind::Map | ValueKind::Seq) && !values.is_tuple();
    if !is_whole && given.next().is_some() {
        return Err(invalid("there are more values than fields"));
    }
    Ok(out + rest)
}

fn incomplete() -> Error {
    invalid("a field of a format is incomplete")
}

/// Removes the characters of a kind from the start of a text and returns them.
fn take<'a>(rest: &mut &'a str, is_taken: impl Fn(char) -> bool) -> &'a str {
    let (taken, behind) = rest.split_at(rest.find(|c| !is_taken(c)).unwrap_or(rest.len()));
    *rest = behind;
    taken
}

/// Reads a width or a precision, which `*` takes from the values.
fn count(rest: &mut &str, next: &mut impl FnMut() -> Result<Value, Error>) -> Result<String, Error> {
    if let Some(behind) = rest.strip_prefix('*') {
        *rest = behind;
        return Ok(width(i64::try_from(next()?)?)?.to_string());
    }
    let digits = take(rest, |c| c.is_ascii_digit());
    check_numbers(digits)?;
    Ok(digits.to_owned())
}

/// Refuses numbers that are too large for a width or a precision.
fn check_numbers(spec: &str) -> Result<(), Error> {
    let mut numbers = spec.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.try_for_each(|digits| width(digits.parse().unwrap_or(i64::MAX)).map(drop))
}

fn percent_field(
    flags: &str,
    columns: &str,
    precision: Option<&str>,
    kind: char,
    value: &Value,
) -> Result<String, Error> {
    let (kind, value) = match kind {
        's' | 'r' => {
            let text = if kind == 's' { text(value)?.into_owned() } else { repr(value)? };
            let text = match precision {
                Some(most) => text.chars().take(most.parse().unwrap_or(0)).collect(),
                None => text,
            };
            let method = if flags.contains('-') { "ljust" } else { "rjust" };
            return Ok(pad_to(&text, method, columns.parse().unwrap_or(0), ' '));
        }
        'd' | 'i' | 'u' => ('d', integer(value)?),
        'c' | 'o' | 'x' | 'X' => (kind, value.clone()),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' if value.as_str().is_none() => {
            (kind, f64::try_from(value.clone())?.into())
        }
        _ => {
            return Err(invalid(format!("the format %{kind} does not fit a value of type {}", value.kind())));
        }
    };
    let point = if precision.is_some() { "." } else { "" };
    let field = format!("%{flags}{columns}{point}{}{kind}", precision.unwrap_or_default());
    format(FormatStyle::Printf, &field, &[value])
}

/// Returns a number without its fraction.
fn integer(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => Ok((f64::try_from(value.clone())? as i128).into()),
        ValueKind::Number | ValueKind::Bool => Ok(value.clone()),
        kind => Err(invalid(format!("the format %d needs a number, not a value of type {kind}"))),
    }
}

/// Fills in the fields of a text that are in braces.
pub(super) fn braces(pattern: &str, args: &[Value]) -> Result<String, Error> {
    let (positional, named): (&[Value], Kwargs) = from_args(args)?;
    Braces { positional, named: &named, used: 0 }.fill(pattern, 0)
}

struct Braces<'a> {
    positional: &'a [Value],
    named: &'a Kwargs,
    /// Fields without a name so far.
    used: usize,
}

impl Braces<'_> {
    fn fill(&mut self, pattern: &str, depth: usize) -> Result<String, Error> {
        if depth >= DEPTH_MAX {
            return Err(invalid("fields of a format are nested too deeply"));
        }
        let (mut out, mut rest) = (String::with_capacity(pattern.len()), pattern);
        while let Some(at) = rest.find(['{', '}']) {
            let (before, found) = rest.split_at(at);
            out.push_str(before);
            let doubled = found.strip_prefix("{{").or_else(|| found.strip_prefix("}}"));
            if let Some(behind) = doubled {
                out.push_str(&found[..1]);
                rest = behind;
                continue;
            }
            let inner = found.strip_prefix('{').ok_or_else(incomplete)?;
            let end = end_of_field(inner).ok_or_else(incomplete)?;
            out.push_str(&self.field(&inner[..end], depth)?);
            rest = &inner[end + 1..];
        }
        Ok(out + rest)
    }

    /// Writes a field: the name of a value, a conversion behind `!`, and a format behind `:`.
    fn field(&mut self, field: &str, depth: usize) -> Result<String, Error> {
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = name.split_once('!').map_or((name, None), |(name, kind)| (name, Some(kind)));
        let value = self.value(name)?;
        let value = match conversion {
            None => value,
            Some("s") => text(&value)?.into(),
            Some("r") => repr(&value)?.into(),
            Some(other) => {
                return Err(invalid(format!("a format has the conversion {other:?}; s and r are known")));
            }
        };
        let spec = if spec.contains('{') { self.fill(spec, depth + 1)? } else { spec.to_owned() };
        check_numbers(&spec)?;
        match (spec.chars().last(), value.kind()) {
            (None, _) => Ok(text(&value)?.into_owned()),
            (Some('%'), ValueKind::Number) => {
                let percentage = Value::from(f64::try_from(value)? * 100.0);
                let spec = format!("{{:{}f}}", spec.trim_end_matches('%'));
                format(FormatStyle::StrFormat, &spec, &[percentage]).map(|text| text + "%")
            }
            (Some('n'), ValueKind::Number) => {
                let kind = if value.is_integer() { 'd' } else { 'g' };
                let spec = format!("{{:{}{kind}}}", spec.trim_end_matches('n'));
                format(FormatStyle::StrFormat, &spec, &[value])
            }
            (_, ValueKind::String) => braces_text(&spec, &text(&value)?),
            (_, ValueKind::Number | ValueKind::Bool) => {
                format(FormatStyle::StrFormat, &format!("{{:{spec}}}"), &[value])
            }
            (_, kind) => Err(invalid(format!("a value of type {kind} has no format {spec:?}"))),
        }
    }

    /// Returns the value that a field names: by position or by name, and by attributes and items of it.
    fn value(&mut self, name: &str) -> Result<Value, Error> {
        let (first, mut path) = name.split_at(name.find(['.', '[']).unwrap_or(name.len()));
        let missing =
            || Error::new(ErrorKind::MissingArgument, format!("the format's field {name:?} has no value"));
        let position = match first {
            "" => {
                self.used += 1;
                Ok(self.used - 1)
            }
            _ => first.parse(),
        };
        let mut value = match position {
            Ok(at) => self.positional.get(at).cloned().ok_or_else(missing)?,
            Err(_) if self.named.has(first) => self.named.peek(first)?,
            Err(_) => return Err(missing()),
        };
        while !path.is_empty() {
            if let Some(behind) = path.strip_prefix('[') {
                let (key, behind) = behind.split_once(']').ok_or_else(incomplete)?;
                let key = key.parse::<i64>().map_or_else(|_| Value::from(key), Value::from);
                value = value.get_item(&key)?;
                path = behind;
            } else {
                let behind = path.strip_prefix('.').ok_or_else(incomplete)?;
                let (attribute, behind) = behind.split_at(behind.find(['.', '[']).unwrap_or(behind.len()));
                value = value.get_attr(attribute)?;
                path = behind;
            }
        }
        Ok(value)
    }
}

/// Writes a text in a format: a fill character and an alignment, a width, and behind a point the most characters.
fn braces_text(spec: &str, text: &str) -> Result<String, Error> {
    let refused = || invalid(format!("the format {spec:?} does not fit a text"));
    let mut rest = spec.strip_suffix('s').unwrap_or(spec);
    let alignment = |c: Option<char>| match c {
        Some('<') => Some("ljust"),
        Some('>') => Some("rjust"),
        Some('^') => Some("center"),
        _ => None,
    };
    let mut characters = rest.chars();
    let (first, second) = (characters.next(), characters.next());
    let (mut fill, mut method) = (' ', "ljust");
    if let (Some(character), Some(found)) = (first, alignment(second)) {
        (fill, method, rest) = (character, found, characters.as_str());
    } else if let Some(found) = alignment(first) {
        (method, rest) = (found, &rest[1..]);
    }
    if let Some(behind) = rest.strip_prefix('0') {
        (fill, rest) = (if fill == ' ' { '0' } else { fill }, behind);
    }
    let columns = take(&mut rest, |c| c.is_ascii_digit());
    let precision = match rest.strip_prefix('.') {
        Some(digits) => digits.parse().map_err(|_| refused())?,
        None if rest.is_empty() => usize::MAX,
        None => return Err(refused()),
    };
    let kept: String = text.chars().take(precision).collect();
    let columns = columns.parse().unwrap_or(0);
    // An odd space more comes behind a text, where the method puts it before.
    let missing = usize::saturating_sub(columns, kept.chars().count());
    let kept = if method == "center" {
        pad_to(&kept, "rjust", kept.chars().count() + missing / 2, fill)
    } else {
        kept
    };
    Ok(pad_to(&kept, if method == "center" { "ljust" } else { method }, columns, fill))
}

/// Returns the length of a field up to its closing brace.
fn end_of_field(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::ChatTemplate;

    fn render(source: &str) -> Result<String, String> {
        let template = ChatTemplate::new(source, "", "").map_err(|error| error.to_string())?;
        template
            .render(&crate::text::Conversation::default(), time::OffsetDateTime::UNIX_EPOCH)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn fields_that_are_no_fields_are_errors_and_keys_may_be_any_text() {
        for source in [
            "{{ '%' % 1 }}",
            "{{ '%(a' % {'a': 1} }}",
            "{{ '%5' % 1 }}",
            "{{ '%y' % 1 }}",
            "{{ '%d' % 'a' }}",
            "{{ '%*d' % ('a', 1) }}",
            "{{ '{'.format(1) }}",
            "{{ '{0[}'.format(1) }}",
            "{{ '{0[a'.format({'a': 1}) }}",
            "{{ '{:{:{}}}'.format(1, 2, 3) }}",
            "{{ '{!x}'.format(1) }}",
            "{{ '{0]}'.format(1) }}",
            "{{ '{é}'.format(1) }}",
        ] {
            assert!(render(source).is_err(), "{source}");
        }
        for (source, text) in [
            ("{{ '%(é)d%(中)s' % {'é': 3, '中': 'b'} }}", "3b"),
            ("{{ '{a[é]}{a.中}{:中>3}'.format('x', a={'é': 1, '中': 2}) }}", "12中中x"),
            ("{{ '%ld%s' | format(3, 'x') }}", "3x"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(text), "{source}");
        }
    }
}
