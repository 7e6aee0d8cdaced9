//! Limits of the filters and methods that take a width or a count, or multiply a text by another: a huge one would make a
//! rendering allocate without bound, at the cost of one instruction.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, Value};
use minijinja::{Environment, Error};

use super::template_values::invalid;

/// Maximum width, precision or count.
pub(super) const WIDTH_MAX: i64 = 4096;
/// Maximum bytes of a text that a single `join` or `replace` makes: several in a row multiply.
const TEXT_BYTES_MAX: usize = 16 << 20;
/// Filters of the engine whose numeric arguments are widths or counts.
pub(super) const FILTERS: [&str; 2] = ["batch", "slice"];
/// Environment with the engine's own filters.
static ENGINE: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);

/// Calls the engine's own filter; one that needs no other filter.
pub(super) fn call_filter(name: &str, mut args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    if named.args().next().is_some() {
        args.push(named.into());
    }
    ENGINE.empty_state().apply_filter(name, &args)
}

/// Adds two values, as the engine's own operator does.
pub(super) fn add(left: Value, right: Value) -> Result<Value, Error> {
    ENGINE.compile_expression("left + right")?.eval(Value::from_pairs([("left", left), ("right", right)]))
}

/// Calls the engine's own filter if its numbers are no huge widths or counts.
pub(super) fn call_checked(name: &str, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    args.iter().try_for_each(check_number)?;
    for argument in named.args() {
        check_number(&named.peek::<Value>(argument)?)?;
    }
    call_filter(name, args, named)
}

/// Joins texts.
///
/// # Errors
/// The result is too large.
pub(super) fn join(texts: &[String], separator: &str) -> Result<String, Error> {
    let bytes = texts.iter().map(String::len).fold(0, usize::saturating_add);
    check_text(texts.len().saturating_mul(separator.len()).saturating_add(bytes))?;
    Ok(texts.join(separator))
}

/// Joins the characters of a text.
///
/// # Errors
/// The result is too large.
pub(super) fn join_characters(text: &str, separator: &str) -> Result<String, Error> {
    check_text(text.chars().count().saturating_mul(separator.len()).saturating_add(text.len()))?;
    let mut out = String::new();
    for (at, c) in text.chars().enumerate() {
        out.push_str(if at > 0 { separator } else { "" });
        out.push(c);
    }
    Ok(out)
}

/// Checks a replacement.
pub(super) fn check_replace(text: &str, from: &str, to: &str) -> Result<(), Error> {
    // Without a text to replace, the other one is put before each character and at the end.
    let found = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    check_text(found.saturating_mul(to.len()).saturating_add(text.len()))
}

/// Checks the bytes of a text that is made of others.
pub(super) fn check_text(bytes: usize) -> Result<(), Error> {
    if bytes > TEXT_BYTES_MAX {
        let reason = format!("a text of {bytes} bytes is too large; at most {TEXT_BYTES_MAX} are allowed");
        return Err(invalid(reason));
    }
    Ok(())
}

/// Returns a width; a negative one is 0.
pub(super) fn width(wanted: i64) -> Result<usize, Error> {
    if wanted > WIDTH_MAX {
        Err(too_large(&wanted.to_string()))
    } else {
        Ok(usize::try_from(wanted).unwrap_or(0))
    }
}

fn check_number(value: &Value) -> Result<(), Error> {
    if value.is_number() && !i64::try_from(value.clone()).is_ok_and(|number| number <= WIDTH_MAX) {
        return Err(too_large(&value.to_string()));
    }
    Ok(())
}

fn too_large(number: &str) -> Error {
    let number: String = number.chars().take(20).collect();
    invalid(format!("{number} is too large; at most {WIDTH_MAX} is allowed"))
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
}
