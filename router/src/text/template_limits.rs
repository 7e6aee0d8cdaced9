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
        check_format(&args)?;
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
        check_format(&[std::slice::from_ref(value), args].concat())?;
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

/// Checks the numbers in a format string and, where it takes widths from arguments, those.
fn check_format(args: &[Value]) -> Result<(), Error> {
    let Some(format) = args.first().and_then(Value::as_str) else { return Ok(()) };
    let mut numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    if let Some(digits) = numbers.find(|digits| !digits.parse().is_ok_and(|number: i64| number <= WIDTH_MAX))
    {
        return Err(too_large(digits));
    }
    if format.contains('*') || format.contains(":{") { check_arguments(args) } else { Ok(()) }
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
            ("{{ '{} {}'.format('a', 70000) }}", "a 70000"),
            ("{{ 'a\\nb' | indent(2) }}", "a\n  b"),
            ("{{ [1, 2, 3] | batch(2) | list | length }}", "2"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(text), "{source}");
        }
    }
}
