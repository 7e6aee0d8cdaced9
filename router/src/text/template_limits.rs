//! Limits of the filters and methods that take a width or a count, or multiply a text by another: a huge one would make a
//! rendering allocate without bound, at the cost of one instruction.

use minijinja::value::{Kwargs, Rest, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use super::template_methods;

/// Maximum width, precision or count.
const WIDTH_MAX: i64 = 4096;
/// Maximum bytes of a text that a single `join` or `replace` makes: several in a row multiply.
const TEXT_BYTES_MAX: usize = 16 << 20;
/// Filters whose numeric arguments are widths or counts.
const FILTERS: [&str; 3] = ["batch", "indent", "slice"];

/// Replaces the filters by ones that check their arguments, and sets Python's methods.
pub(super) fn apply(environment: &mut Environment<'static>) {
    for name in FILTERS {
        environment.add_filter(name, move |args: Rest<Value>, named: Kwargs| {
            check_arguments(&args)?;
            for argument in named.args() {
                check_number(&named.peek::<Value>(argument)?)?;
            }
            call_filter(name, args, named)
        });
    }
    environment.add_filter("format", |args: Rest<Value>, named: Kwargs| {
        check_format(&args, FormatStyle::Percent)?;
        call_filter("format", args, named)
    });
    environment.add_filter("join", |mut args: Rest<Value>, named: Kwargs| {
        let separators = args.iter().skip(1).cloned();
        let named_values = named.args().map(|name| named.peek::<Value>(name));
        let separators = separators.map(Ok).chain(named_values).collect::<Result<Vec<Value>, Error>>()?;
        let separator = separators.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
        if let Some(values) = args.first_mut() {
            check_join(values, separator)?;
        }
        call_filter("join", args, named)
    });
    environment.add_filter("replace", |args: Rest<Value>, named: Kwargs| {
        if let [text, from, to, ..] = &args[..] {
            check_replace(text, from, to)?;
        }
        call_filter("replace", args, named)
    });
    environment.set_unknown_method_callback(call_method);
}

/// Checks the text of a `join`. Values that are not a text are replaced by a list, because some can be read only once.
fn check_join(values: &mut Value, separator: usize) -> Result<(), Error> {
    let (count, bytes) = if let Some(text) = values.as_str() {
        (text.chars().count(), text.len())
    } else {
        // The engine says what is wrong with a value that is no sequence.
        let Ok(items) = values.try_iter() else { return Ok(()) };
        let items: Vec<Value> = items.collect();
        let bytes = items.iter().filter_map(Value::as_str).map(str::len).fold(0, usize::saturating_add);
        let count = items.len();
        *values = Value::from(items);
        (count, bytes)
    };
    check_text(count.saturating_mul(separator).saturating_add(bytes))
}

fn check_replace(text: &Value, from: &Value, to: &Value) -> Result<(), Error> {
    let [text, from, to] = [text, from, to].map(|value| value.as_str().unwrap_or_default());
    // Without a text to replace, the other one is put before each character and at the end.
    let found = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    check_text(found.saturating_mul(to.len()).saturating_add(text.len()))
}

fn check_text(bytes: usize) -> Result<(), Error> {
    if bytes > TEXT_BYTES_MAX {
        let reason = format!("a text of {bytes} bytes is too large; at most {TEXT_BYTES_MAX} are allowed");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    Ok(())
}

/// Calls the engine's own filter.
fn call_filter(name: &str, mut args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    if named.args().next().is_some() {
        args.push(named.into());
    }
    Environment::new().empty_state().apply_filter(name, &args)
}

fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if method == "format" {
        check_format(&[std::slice::from_ref(value), args].concat(), FormatStyle::Braces)?;
    }
    match (method, args, value.as_str()) {
        ("join", [values], Some(separator)) => {
            let mut values = values.clone();
            check_join(&mut values, separator.len())?;
            return pycompat::unknown_method_callback(state, value, method, &[values]);
        }
        ("replace", [from, to, ..], Some(_)) => check_replace(value, from, to)?,
        _ => {}
    }
    match template_methods::call(value, method, args) {
        Some(called) => called,
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn check_arguments(args: &[Value]) -> Result<(), Error> {
    args.iter().try_for_each(check_number)
}

fn check_number(value: &Value) -> Result<(), Error> {
    if value.is_number() && !i64::try_from(value.clone()).is_ok_and(|number| number <= WIDTH_MAX) {
        return Err(too_large(&value.to_string()));
    }
    Ok(())
}

/// How the fields of a format string are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FormatStyle {
    /// `%(key)d`
    Percent,
    /// `{name[key]:d}`
    Braces,
}

/// Checks the mapping keys and the widths in a format string, and the arguments that give widths.
fn check_format(args: &[Value], style: FormatStyle) -> Result<(), Error> {
    let Some(format) = args.first().and_then(Value::as_str) else { return Ok(()) };
    check_keys(format, style)?;
    let mut numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    if let Some(digits) = numbers.find(|digits| !digits.parse().is_ok_and(|number: i64| number <= WIDTH_MAX))
    {
        return Err(too_large(digits));
    }
    if format.contains('*') || format.contains(":{") { check_arguments(args) } else { Ok(()) }
}

/// Refuses keys that are not ASCII: the engine reads them byte by byte, and panics within a character.
fn check_keys(format: &str, style: FormatStyle) -> Result<(), Error> {
    let (field, open, close) = match style {
        FormatStyle::Percent => ('%', '(', ')'),
        FormatStyle::Braces => ('{', '[', ']'),
    };
    let mut rest = format;
    while let Some((_, text)) = rest.split_once(field) {
        // Doubled, it is text.
        if let Some(text) = text.strip_prefix(field) {
            rest = text;
            continue;
        }
        rest = text;
        let is_next = |c: char| style == FormatStyle::Percent || [open, ':', '}'].contains(&c);
        while let Some(key) = rest.find(is_next).and_then(|at| rest[at..].strip_prefix(open)) {
            let end = key.find(close).unwrap_or(key.len());
            if !key[..end].is_ascii() {
                let reason = format!("the key {:?} of a format string is not ASCII", &key[..end]);
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
            rest = &key[end..];
            if style == FormatStyle::Percent {
                break;
            }
        }
    }
    Ok(())
}

fn too_large(number: &str) -> Error {
    let number: String = number.chars().take(20).collect();
    Error::new(ErrorKind::InvalidOperation, format!("{number} is too large; at most {WIDTH_MAX} is allowed"))
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
    fn widths_and_counts_beyond_the_limit_are_errors() {
        for source in [
            "{{ '%99999999999999999d' | format(3) }}",
            "{{ '%*d' | format(99999999999999, 3) }}",
            "{{ '{:99999999999999}'.format(3) }}",
            "{{ '{:{}}'.format(3, 99999999999999) }}",
            "{{ 'a\\nb' | indent(99999999999999) }}",
            "{{ 'a\\nb' | indent(width=99999999999999) }}",
            "{{ [1] | slice(99999999999999) | list }}",
            "{{ [1] | batch(99999999999999, 0) | list }}",
        ] {
            let refused = render(source).unwrap_err();
            assert!(refused.contains("is too large; at most 4096"), "{source}: {refused}");
        }
        for (source, text) in [
            ("{{ '%5d|%s' | format(3, 'x') }}", "    3|x"),
            ("{{ '%d%%(中) (é)' | format(3) }}", "3%(中) (é)"),
            ("{{ '{:中>3} [é] {{[é}}'.format('a') }}", "中中a [é] {[é}"),
            ("{{ '{} {}'.format('a', 70000) }}", "a 70000"),
            ("{{ 'a\\nb' | indent(2) }}", "a\n  b"),
            ("{{ [1, 2, 3] | batch(2) | list | length }}", "2"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(text), "{source}");
        }
    }

    #[test]
    fn a_text_that_joins_and_replacements_multiply_is_bounded() {
        let long = "s".repeat(4000);
        for one in
            [format!("join('{long}')"), format!("replace('', '{long}')"), format!("replace('s', '{long}')")]
        {
            let filters = format!(" | {one}").repeat(3);
            let refused = render(&format!("{{{{ 'ss'{filters} }}}}")).unwrap_err();
            assert!(refused.contains("bytes is too large; at most 16777216"), "{one}: {refused}");
        }
        for method in [format!("'{long}'.join(TEXT)"), format!("TEXT.replace('s', '{long}')")] {
            let twice =
                method.replace("TEXT", &format!("({})", method.replace("TEXT", &format!("'{long}'"))));
            let refused = render(&format!("{{{{ {twice} }}}}")).unwrap_err();
            assert!(refused.contains("bytes is too large; at most 16777216"), "{refused}");
        }
        for (source, text) in [
            ("{{ [1, 'a', none] | join(', ') }}", "1, a, None"),
            ("{{ 'abc' | join('-') }}", "a-b-c"),
            ("{{ [{'a': 1}, {'a': 2}] | join('|', attribute='a') }}", "1|2"),
            ("{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | join }}", "12"),
            ("{{ 'abab' | replace('b', 'cc') }}", "accacc"),
            ("{{ '-'.join(['a', 'b']) }}{{ 'aXa'.replace('a', 'b', 1) }}", "a-bbXa"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(text), "{source}");
        }
        assert!(render("{{ 3 | join(',') }}").is_err());
    }

    #[test]
    fn keys_of_format_strings_that_are_not_ascii_are_errors() {
        for source in [
            "{{ '%(é)d' | format(3) }}",
            "{{ '%(a中' | format(3) }}",
            "{{ '%%%(%(é)d' | format(3) }}",
            "{{ '{a[é]}'.format(a=3) }}",
            "{{ '{0[{}:][中'.format(3) }}",
            "{{ '{:{0[é]}}'.format(3) }}",
        ] {
            let refused = render(source).unwrap_err();
            assert!(refused.contains("of a format string is not ASCII"), "{source}: {refused}");
        }
    }
}
