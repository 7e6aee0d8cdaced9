//! Functions, filters and tests of chat templates, as in Hugging Face transformers.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use serde::Serialize;
use time::OffsetDateTime;

/// Name of the variable with the time in seconds since the Unix epoch.
pub(super) const TIME: &str = "_inflight_time";
/// Maximum bytes of an indentation of JSON.
const INDENT_MAX: usize = 16;

/// Adds what transformers adds to Jinja, and what Jinja has beside the engine's own.
pub(super) fn apply(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_filter("tojson", tojson);
    environment.add_filter("truncate", truncate);
    // As in Jinja: `int` and `float` take a default for values that are no numbers, and `length` of an undefined value is 0.
    environment.add_filter("int", |value: Value, args: Rest<Value>, named: Kwargs| {
        number("int", value, args, named)
    });
    environment.add_filter("float", |value: Value, args: Rest<Value>, named: Kwargs| {
        number("float", value, args, named)
    });
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => value.len().ok_or_else(|| {
                let reason = format!("cannot calculate length of value of type {}", value.kind());
                Error::new(ErrorKind::InvalidOperation, reason)
            }),
        });
    }
    environment.add_filter("wordcount", minijinja_contrib::filters::wordcount);
    // Python's None is not iterable, and templates tell absent tools from a list by that.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    // In Python this would render as `None`, which no prompt should contain.
    environment.set_formatter(|out, state, value| match value.is_none() {
        true => Ok(()),
        false => minijinja::escape_formatter(out, state, value),
    });
}

/// Removes the tags with which templates mark the text of the assistant for training; what they enclose is rendered. Whitespace is
/// stripped as they say.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = ["{%", "{#"].into_iter().filter_map(|open| rest.find(open)).min() {
        let (before, tag) = rest.split_at(at);
        let is_comment = tag.starts_with("{#");
        let close = if is_comment { "#}" } else { "%}" };
        let Some(end) = tag[2..].find(close).map(|end| end + 4) else { break };
        let (tag, after) = tag.split_at(end);
        out.push_str(before);
        if is_comment {
            out.push_str(tag);
            rest = after;
            continue;
        }
        let inner = &tag[2..tag.len() - 2];
        let name = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(other) => out.push_str(&tag.replacen(name, other, 1)),
            None => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

/// Converts a value to a number; one that is none becomes the default, by default 0.
fn number(filter: &str, value: Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = match args.0.into_iter().next() {
        Some(default) => Some(default),
        None => named.get::<Option<Value>>("default")?,
    };
    let default = || default.unwrap_or_else(|| Value::from(0)).clone();
    let converted = Environment::new().empty_state().apply_filter(filter, &[value]);
    Ok(converted.ok().filter(|number| number.is_number()).unwrap_or_else(default))
}

/// Shortens a text; takes its options by position, too.
fn truncate(
    state: &mut State<'_, '_>,
    value: Value,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let options = ["length", "killwords", "end", "leeway"].into_iter().zip(args.0);
    let mut options: Vec<(String, Value)> = options.map(|(name, value)| (name.to_owned(), value)).collect();
    for name in named.args() {
        options.push((name.to_owned(), named.peek(name)?));
    }
    minijinja_contrib::filters::truncate(state, &value, options.into_iter().collect())
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Formats the time at which the stream started, in UTC, by a format of C's `strftime`.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let seconds = state.lookup(TIME).and_then(|seconds| i64::try_from(seconds).ok()).unwrap_or_default();
    let failed = |reason: String| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {reason}"))
    };
    let time = OffsetDateTime::from_unix_timestamp(seconds).map_err(|error| failed(error.to_string()))?;
    let items = time::format_description::parse_strftime_owned(format);
    let items = items.map_err(|error| failed(error.to_string()))?;
    time.format(&items).map_err(|error| failed(error.to_string()))
}

/// Serializes like Python's `json.dumps`, with transformers' defaults: without HTML escapes and without escapes of other characters
/// than ASCII.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let invalid = |reason: String| {
        Error::new(ErrorKind::InvalidOperation, format!("cannot serialise to JSON: {reason}"))
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match (indent.as_str(), usize::try_from(indent.clone())) {
            (Some(text), _) if text.len() <= INDENT_MAX => text.to_owned(),
            (None, Ok(width)) => " ".repeat(width.min(INDENT_MAX)),
            _ => return Err(invalid(format!("indent is {indent}, not a small number or a short text"))),
        }),
    };
    let separators = match options.get::<Option<Value>>("separators")? {
        Some(given) if !given.is_none() => {
            let parts: Vec<Value> = given.try_iter()?.collect();
            match &parts[..] {
                [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
                    (item.to_string(), key.to_string())
                }
                _ => return Err(invalid("separators are not two texts".to_owned())),
            }
        }
        _ if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        _ => (", ".to_owned(), ": ".to_owned()),
    };
    options.assert_all_used()?;
    let formatter = PythonFormatter { indent, separators, depth: 0, has_value: false, ensure_ascii };
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
    let failed = |error: serde_json::Error| invalid(error.to_string());
    if sort_keys {
        let mut json = serde_json::to_value(value).map_err(failed)?;
        json.sort_all_objects();
        json.serialize(&mut serializer).map_err(failed)?;
    } else {
        value.serialize(&mut serializer).map_err(failed)?;
    }
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out).into_owned()))
}

/// JSON formatter with the options of Python's `json.dumps`.
struct PythonFormatter {
    indent: Option<String>,
    /// Between items, and behind keys.
    separators: (String, String),
    depth: usize,
    /// Whether the container has a value.
    has_value: bool,
    ensure_ascii: bool,
}

impl PythonFormatter {
    fn break_line<W: ?Sized + std::io::Write>(&self, w: &mut W) -> std::io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        w.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| w.write_all(indent.as_bytes()))
    }

    fn begin<W: ?Sized + std::io::Write>(&mut self, w: &mut W, open: &[u8]) -> std::io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        w.write_all(open)
    }

    fn end<W: ?Sized + std::io::Write>(&mut self, w: &mut W, close: &[u8]) -> std::io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.break_line(w)?;
        }
        self.has_value = true;
        w.write_all(close)
    }

    fn item<W: ?Sized + std::io::Write>(&mut self, w: &mut W, first: bool) -> std::io::Result<()> {
        if !first {
            w.write_all(self.separators.0.as_bytes())?;
        }
        self.break_line(w)
    }
}

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        self.begin(w, b"[")
    }

    fn end_array<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        self.end(w, b"]")
    }

    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.item(w, first)
    }

    fn end_array_value<W: ?Sized + std::io::Write>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        self.begin(w, b"{")
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        self.end(w, b"}")
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.item(w, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        w.write_all(self.separators.1.as_bytes())
    }

    fn end_object_value<W: ?Sized + std::io::Write>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        if !self.ensure_ascii {
            return w.write_all(fragment.as_bytes());
        }
        let mut units = [0; 2];
        for c in fragment.chars() {
            match c.is_ascii() {
                true => w.write_all(&[c as u8])?,
                false => c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(w, "\\u{unit:04x}"))?,
            }
        }
        Ok(())
    }
}
