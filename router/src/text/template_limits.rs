//! Limits of the filters and methods that take a width or a count: a huge one would make a rendering allocate without bound,
//! at the cost of one instruction.

use minijinja::value::{Kwargs, Rest, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Maximum width, precision or count.
const WIDTH_MAX: i64 = 4096;
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
    environment.set_unknown_method_callback(call_method);
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
    pycompat::unknown_method_callback(state, value, method, args)
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
        template.render(&[], &[]).map_err(|error| error.to_string())
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
