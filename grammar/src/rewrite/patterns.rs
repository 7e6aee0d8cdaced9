//! Classes of characters in patterns of strings.
//!
//! The compiler writes the characters of a class as JSON does, with escapes. Of a class that has every control character, it takes every
//! escape, also that of a quote or a backslash which the class excludes. Without one control character, each is looked at by itself: such a
//! class loses U+0000.

use regex_syntax::hir::{Class, HirKind};
use serde_json::{Map, Value};

/// Guards the patterns of a schema and of its property names.
pub(super) fn patterns(object: &mut Map<String, Value>) {
    if let Some(Value::String(pattern)) = object.get_mut("pattern") {
        *pattern = guarded(pattern);
    }
    if let Some(Value::Object(properties)) = object.get_mut("patternProperties") {
        let given = std::mem::take(properties);
        properties.extend(given.into_iter().map(|(pattern, schema)| (guarded(&pattern), schema)));
    }
}

/// Returns a pattern whose negated classes do not take the escapes of what they exclude.
fn guarded(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        if c == '[' {
            let class = &rest[..class_len(rest)];
            match class.strip_prefix("[^") {
                Some(inner) if takes_other_escapes(class) => {
                    out.push_str("[^\\x00");
                    out.push_str(inner);
                }
                _ => out.push_str(class),
            }
            rest = &rest[class.len()..];
            continue;
        }
        let taken =
            c.len_utf8() + if c == '\\' { rest[1..].chars().next().map_or(0, char::len_utf8) } else { 0 };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

/// Returns the length of the class with which a text begins, in bytes.
fn class_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            // In these expressions, one at the beginning is the end, too.
            ']' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Whether a class has the control characters and lacks a quote or a backslash; also if it is not understood.
fn takes_other_escapes(class: &str) -> bool {
    let Ok(parsed) = regex_syntax::parse(class) else { return true };
    let HirKind::Class(Class::Unicode(set)) = parsed.kind() else { return false };
    let has = |c: char| set.iter().any(|range| range.start() <= c && c <= range.end());
    let controls = ('\0'..' ').filter(|c| *c != '\n').all(has);
    controls && !(has('"') && has('\\'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negated_classes_without_a_quote_or_a_backslash_lose_one_control_character() {
        for (pattern, expected) in [
            (r#"^[^"]*$"#, r#"^[^\x00"]*$"#),
            (r"^[^\\]*$", r"^[^\x00\\]*$"),
            (r#"[^"\\]+[^\n"]"#, r#"[^\x00"\\]+[^\x00\n"]"#),
            ("[^!-/]", "[^\\x00!-/]"),
            (r"[^\x22]", r"[^\x00\x22]"),
        ] {
            assert_eq!(guarded(pattern), expected);
        }
        for pattern in [r"^[^a]*$", r#"["\\]"#, "\\[^\"]*", "[^\\t\"]", r"\w+\\[a-z]", "a\\"] {
            assert_eq!(guarded(pattern), pattern);
        }
    }
}
