//! Filters of chat templates, as Jinja has them.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::template_format::percent;
use super::template_json::tojson;
use super::template_limits::{self, FILTERS, call_checked, call_filter, check_text, join_characters, width};
use super::template_methods::replace;
use super::template_options::options;
use super::template_values::{invalid, is_space, lines, pad_to, read_float, read_integer, text};

/// Characters that are escaped in a name or a value of a URL, and in other parts of one.
const ESCAPED: AsciiSet = NON_ALPHANUMERIC.remove(b'_').remove(b'.').remove(b'-').remove(b'~');
const ESCAPED_IN_PATHS: AsciiSet = ESCAPED.remove(b'/');
/// Filters of the engine that Jinja does not have, or that write otherwise.
const REMOVED: [&str; 6] = ["bool", "chain", "lines", "pprint", "split", "zip"];
/// Filters whose result is a generator in Jinja: it can be read once, is true, and has neither a length nor JSON.
const GENERATORS: [&str; 5] = ["batch", "items", "reverse", "slice", "unique"];

/// Sets the filters.
pub(super) fn apply(environment: &mut Environment<'static>) {
    REMOVED.iter().for_each(|name| environment.remove_filter(name));
    environment
        .add_filter("tojson", |value: &Value, args: Rest<Value>, named: Kwargs| tojson(value, args, named));
    texts(environment);
    numbers(environment);
    sequences(environment);
    generators(environment);
}

fn texts(environment: &mut Environment<'static>) {
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => text(value).map(Value::from),
    });
    environment.add_filter("trim", |value: &Value, characters: Option<String>| {
        let is_stripped =
            |c: char| characters.as_ref().map_or_else(|| is_space(c), |characters| characters.contains(c));
        Ok::<_, Error>(text(value)?.trim_matches(is_stripped).to_owned())
    });
    environment.add_filter("indent", indent);
    environment.add_filter("truncate", truncate);
    environment.add_filter("replace", |value: &Value, from: &Value, to: &Value, count: Option<i64>| {
        replace(&text(value)?, &text(from)?, &text(to)?, count)
    });
    environment.add_filter("wordcount", minijinja_contrib::filters::wordcount);
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("center", |value: &Value, columns: Option<i64>| {
        Ok::<_, Error>(pad_to(&text(value)?, "center", width(columns.unwrap_or(80))?, ' '))
    });
    for name in ["e", "escape", "forceescape"] {
        environment.add_filter(name, |value: &Value| escaped(value).map(Value::from_safe_string));
    }
    environment.add_filter("join", join);
    environment.add_filter("format", |pattern: &Value, args: Rest<Value>, named: Kwargs| {
        let is_named = named.args().next().is_some();
        let values = if is_named { Value::from(named) } else { Tuple::from(args.0).into() };
        percent(&text(pattern)?, &values)
    });
}

fn numbers(environment: &mut Environment<'static>) {
    environment.add_filter("int", |value: &Value, args: Rest<Value>, named: Kwargs| {
        let [default, base] = options("int", ["default", "base"], &args, &named)?;
        let base = if base.is_undefined() { 10 } else { u32::try_from(base)? };
        let found = match value.as_str() {
            Some(text) => read_integer(text, base).or_else(|| truncated(read_float(text)?)),
            None if value.is_integer() => return Ok(value.clone()),
            None if value.kind() == ValueKind::Bool => Some(i128::from(value.is_true())),
            None => number(value)?.and_then(truncated),
        };
        Ok(found
            .map(Value::from)
            .unwrap_or_else(|| if default.is_undefined() { Value::from(0) } else { default }))
    });
    environment.add_filter("float", |value: &Value, args: Rest<Value>, named: Kwargs| {
        let [default] = options("float", ["default"], &args, &named)?;
        let found = match value.as_str() {
            Some(text) => read_float(text),
            None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
            None => number(value)?,
        };
        Ok::<_, Error>(
            found
                .map(Value::from)
                .unwrap_or_else(|| if default.is_undefined() { Value::from(0.0) } else { default }),
        )
    });
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => value
                .len()
                .ok_or_else(|| invalid(format!("cannot calculate length of value of type {}", value.kind()))),
        });
    }
}

/// Returns a number that is no text.
fn number(value: &Value) -> Result<Option<f64>, Error> {
    if value.is_undefined() {
        return Err(invalid("an undefined value is no number"));
    }
    Ok(f64::try_from(value.clone()).ok().filter(|_| value.is_number()))
}

fn truncated(number: f64) -> Option<i128> {
    // As large as the engine's integers are.
    (number.abs() < 1e38).then_some(number as i128)
}

fn sequences(environment: &mut Environment<'static>) {
    environment.add_filter("first", |value: &Value| match value.is_undefined() {
        true => Ok(Value::UNDEFINED),
        false => filters::first(value),
    });
    environment.add_filter("last", |value: Value| match value.kind() {
        ValueKind::Map => Ok(value.try_iter()?.last().unwrap_or_default()),
        ValueKind::Undefined => Ok(value),
        ValueKind::Iterable if value.len().is_none() => {
            Err(invalid("last: a generator has no end to begin with"))
        }
        _ => filters::last(value),
    });
    environment.add_filter("list", |state: &State, value: Value| match value.is_none() {
        true => Err(invalid("None is no list")),
        false => filters::list(state, value),
    });
    environment.add_filter("sort", |value: &Value, args: Rest<Value>, named: Kwargs| {
        let options = options("sort", ["reverse", "case_sensitive", "attribute"], &args, &named)?;
        let items: Vec<Value> =
            if value.is_none() { vec![Value::from(())] } else { value.try_iter()?.collect() };
        let has_order =
            |item: &Value| !matches!(item.kind(), ValueKind::Map | ValueKind::None | ValueKind::Undefined);
        let same = |item: &Value| has_order(item) && is_text(item) == is_text(&items[0]);
        if value.is_none() || options[2].is_undefined() && items.len() > 1 && !items.iter().all(same) {
            return Err(invalid("sort: the values have no order"));
        }
        named_call("sort", Value::from(items), ["reverse", "case_sensitive", "attribute"], options)
    });
    environment.add_filter("dictsort", |value: Value, args: Rest<Value>, named: Kwargs| {
        let names = ["case_sensitive", "by", "reverse"];
        named_call("dictsort", value, names, options("dictsort", names, &args, &named)?)
    });
    environment.add_filter("attr", |value: &Value, name: &Value| match value.kind() {
        // Keys of dictionaries are no attributes.
        ValueKind::Map => Ok(Value::UNDEFINED),
        _ => filters::attr(value, name),
    });
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some()
}

/// Calls the engine's own filter with its options by their names.
fn named_call<const COUNT: usize>(
    name: &str,
    value: Value,
    names: [&str; COUNT],
    options: [Value; COUNT],
) -> Result<Value, Error> {
    let given = names.into_iter().zip(options).filter(|(_, option)| !option.is_undefined());
    call_filter(name, Rest(vec![value]), given.collect())
}

fn generators(environment: &mut Environment<'static>) {
    // Those that call other filters and tests, for each item of a value that is true.
    environment.add_filter("map", |state: &mut State, value: Value, args: Rest<ValueOrKwargs>| {
        match value.is_true() {
            true => filters::map(state, value, args).map(once),
            false => Ok(once(Vec::new())),
        }
    });
    for (name, is_kept) in [("select", true), ("reject", false)] {
        environment.add_filter(
            name,
            move |state: &mut State, value: Value, test: Option<String>, args: Rest<ValueOrKwargs>| {
                let select = if is_kept { filters::select } else { filters::reject };
                let items = value.is_true().then(|| select(state, value, test.map(Into::into), args));
                items.unwrap_or_else(|| Ok(Vec::new())).map(once)
            },
        );
    }
    for (name, is_kept) in [("selectattr", true), ("rejectattr", false)] {
        environment.add_filter(
            name,
            move |state: &mut State,
                  value: Value,
                  attribute: String,
                  test: Option<String>,
                  args: Rest<ValueOrKwargs>| {
                let select = if is_kept { filters::selectattr } else { filters::rejectattr };
                let items = value
                    .is_true()
                    .then(|| select(state, value, attribute.into(), test.map(Into::into), args));
                items.unwrap_or_else(|| Ok(Vec::new())).map(once)
            },
        );
    }
    for name in GENERATORS {
        let checked = FILTERS.contains(&name);
        environment.add_filter(name, move |value: Value, args: Rest<Value>, named: Kwargs| {
            if name == "items" && value.is_undefined() {
                return Ok(once(Vec::new()));
            }
            // A text is reversed to a text, a dictionary to its keys.
            let is_reversed_text = name == "reverse" && is_text(&value);
            let value = match value.kind() {
                ValueKind::Map if name == "reverse" => value.try_iter()?.collect(),
                _ => iterable(value)?,
            };
            let mut all = vec![value];
            all.extend(args.0);
            let result = if checked {
                call_checked(name, Rest(all), named)?
            } else {
                call_filter(name, Rest(all), named)?
            };
            Ok(if is_reversed_text { result } else { once(result.try_iter()?.collect()) })
        });
    }
}

/// Returns a value that can be read once.
fn once(items: Vec<Value>) -> Value {
    Value::make_one_shot_iterator(items.into_iter())
}

/// Returns a value that a filter iterates over.
///
/// # Errors
/// It is none, which is not iterable in Python.
pub(super) fn iterable(value: Value) -> Result<Value, Error> {
    if value.is_none() { Err(invalid("None is not iterable")) } else { Ok(value) }
}

/// Indents the lines of a text.
fn indent(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let [columns, first, blank] = options("indent", ["width", "first", "blank"], &args, &named)?;
    let indention = match columns.as_str() {
        Some(text) => text.to_owned(),
        None if columns.is_undefined() => " ".repeat(4),
        None => " ".repeat(width(i64::try_from(columns)?)?),
    };
    let value = value.as_str().ok_or_else(|| invalid("indent needs a text"))?.to_owned() + "\n";
    let lines = lines(&value, false);
    check_text(lines.len().saturating_mul(indention.len()).saturating_add(value.len()))?;
    let mut out = if first.is_true() { indention.clone() } else { String::new() };
    for (at, line) in lines.into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
            out.push_str(if blank.is_true() || !line.is_empty() { &indention } else { "" });
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Shortens a text.
fn truncate(state: &mut State, value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let names = ["length", "killwords", "end", "leeway"];
    let given = names.into_iter().zip(options("truncate", names, &args, &named)?);
    let options = given.filter(|(_, option)| !option.is_undefined()).collect();
    minijinja_contrib::filters::truncate(state, value, options)
}

/// Returns a text with the escapes of HTML, unless it is marked as escaped.
pub(super) fn escaped(value: &Value) -> Result<String, Error> {
    let mut out = text(value)?.into_owned();
    if value.is_safe() {
        return Ok(out);
    }
    for (from, to) in [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\"", "&#34;"), ("'", "&#39;")] {
        out = replace(&out, from, to, None)?;
    }
    Ok(out)
}

/// Escapes a text, or pairs of names and values, for a URL.
fn urlencode(value: &Value) -> Result<String, Error> {
    let part = |value: &Value| {
        Ok::<_, Error>(utf8_percent_encode(&text(value)?, &ESCAPED).to_string().replace("%20", "+"))
    };
    let pairs: Vec<[Value; 2]> = match value.kind() {
        ValueKind::Map => value
            .try_iter()?
            .map(|key| Ok([key.clone(), value.get_item(&key)?]))
            .collect::<Result<_, Error>>()?,
        ValueKind::Seq => {
            let pair = |item: Value| {
                let pair: Vec<Value> = item.try_iter()?.collect();
                <[Value; 2]>::try_from(pair).map_err(|_| invalid("urlencode: an item is no pair"))
            };
            value.try_iter()?.map(pair).collect::<Result<_, Error>>()?
        }
        _ => return Ok(utf8_percent_encode(&text(value)?, &ESCAPED_IN_PATHS).to_string()),
    };
    let fields = pairs.iter().map(|[name, value]| Ok(format!("{}={}", part(name)?, part(value)?)));
    Ok(fields.collect::<Result<Vec<String>, Error>>()?.join("&"))
}

/// Joins the texts of values, or of an attribute of each.
fn join(state: &mut State, value: Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [separator, attribute] = options("join", ["d", "attribute"], &args, &named)?;
    let value = match attribute.is_undefined() {
        true => iterable(value)?,
        false => {
            let attribute: Kwargs = [("attribute", attribute)].into_iter().collect();
            state.apply_filter("map", &[value, attribute.into()])?
        }
    };
    // Undefined is empty.
    let separator = text(&separator)?;
    if let Some(text) = value.as_str() {
        return join_characters(text, &separator).map(Value::from);
    }
    let texts = value.try_iter()?.map(|item| text(&item).map(|text| text.into_owned()));
    let texts = texts.collect::<Result<Vec<String>, Error>>()?;
    template_limits::join(&texts, &separator).map(Value::from)
}
